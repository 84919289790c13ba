//! Calls and thoughts of a model that would write a given text, over HTTP: what a grammar changes, and what it leaves.

use std::time::Duration;

use crate::common::Server;
use engine::{EngineConfig, ModelSource};
use serde_json::{Map, Value, json};
use server::ServerOptions;
use tempfile::TempDir;
use text::{ReasoningFormat, ToolFormat};

/// Longest text of the model, in tokens.
const POSITIONS: usize = 376;
const HIDDEN: usize = 384;

/// A model whose most likely tokens are a script, whatever it has written before: token `n` of its answer is token `n` of the script.
/// Where a grammar refuses that, the tokens of [`PREFERRED`] are the most likely ones, in this order.
///
/// The weights are those of a GPT-2 without attention, in which a hidden state is the embedding of its position: one element for
/// each position, and one that is the same for all.
struct Scripted {
    folder: TempDir,
    special: Vec<String>,
}

const PREFERRED: &str = "}])\"'1";

impl Scripted {
    /// Writes the checkpoint. Every byte is a token; `special` are special tokens. The chat template is `prompt`.
    fn new(prompt: &str, script: &str, special: &[&str]) -> Scripted {
        Scripted::with(prompt, &tokens(script, special), special)
    }

    /// The same with the tokens of the script.
    fn with(prompt: &str, script: &[usize], special: &[&str]) -> Scripted {
        let special: Vec<String> = special.iter().map(|text| text.to_string()).collect();
        let model = Scripted { folder: TempDir::new().unwrap(), special };
        let vocabulary = 257 + model.special.len();
        let special: Vec<&str> = model.special.iter().map(String::as_str).collect();
        let first = tokens(prompt, &special).len() - 1;
        assert!(first + script.len() < POSITIONS, "{}", script.len());

        let mut head = vec![0.0f32; vocabulary * HIDDEN];
        for at in first..POSITIONS {
            // The script ends with the end of the text.
            let token = script.get(at - first).copied().unwrap_or(0);
            head[token * HIDDEN + at] = 1.0;
        }
        let rank = |token: usize| match token {
            0 => vocabulary,
            1..=128 => PREFERRED.bytes().position(|byte| usize::from(byte) + 1 == token).unwrap_or(200 - token),
            129..=256 => 200,
            // The last marker closes the calls.
            _ => 300 + 257 - token,
        };
        (0..vocabulary).for_each(|token| head[token * HIDDEN + POSITIONS] = -1e-3 * rank(token) as f32);
        let mut positions = vec![0.0f32; POSITIONS * HIDDEN];
        for at in 0..POSITIONS {
            (positions[at * HIDDEN + at], positions[at * HIDDEN + POSITIONS]) = (1.0, 1.0);
        }
        // The last norm subtracts the mean; its bias adds it again.
        let mean = 2.0 / HIDDEN as f32;
        let bias = mean / (mean - mean * mean + 1e-5).sqrt();
        let layer = |name: &str| format!("transformer.h.0.{name}");
        let zeros = |name: &str, shape: &[usize]| (layer(name), shape.to_vec(), vec![0.0; shape.iter().product()]);
        model.write_tensors(vec![
            ("transformer.wte.weight".to_string(), vec![vocabulary, HIDDEN], vec![0.0; vocabulary * HIDDEN]),
            ("transformer.wpe.weight".to_string(), vec![POSITIONS, HIDDEN], positions),
            zeros("ln_1.weight", &[HIDDEN]),
            zeros("ln_1.bias", &[HIDDEN]),
            zeros("attn.c_attn.weight", &[HIDDEN, 3 * HIDDEN]),
            zeros("attn.c_attn.bias", &[3 * HIDDEN]),
            zeros("attn.c_proj.weight", &[HIDDEN, HIDDEN]),
            zeros("attn.c_proj.bias", &[HIDDEN]),
            zeros("ln_2.weight", &[HIDDEN]),
            zeros("ln_2.bias", &[HIDDEN]),
            zeros("mlp.c_fc.weight", &[HIDDEN, 64]),
            zeros("mlp.c_fc.bias", &[64]),
            zeros("mlp.c_proj.weight", &[64, HIDDEN]),
            zeros("mlp.c_proj.bias", &[HIDDEN]),
            ("transformer.ln_f.weight".to_string(), vec![HIDDEN], vec![1.0; HIDDEN]),
            ("transformer.ln_f.bias".to_string(), vec![HIDDEN], vec![bias; HIDDEN]),
            ("lm_head.weight".to_string(), vec![vocabulary, HIDDEN], head),
        ]);
        model.write("config.json", &json!({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "torch_dtype": "float32",
            "n_embd": HIDDEN, "n_inner": 64, "n_layer": 1, "n_head": 6, "n_positions": POSITIONS, "vocab_size": vocabulary,
            "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": false, "eos_token_id": 0}));
        model.write("tokenizer.json", &model.tokenizer());
        model.write("tokenizer_config.json", &json!({"chat_template": prompt, "eos_token": "<|endoftext|>"}));
        model
    }

    fn tokenizer(&self) -> Value {
        let mut others = 0x100u32..;
        let mut letter = |byte: u32| match byte {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => byte,
            _ => others.next().unwrap(),
        };
        let letters = (0..256).map(|byte| char::from_u32(letter(byte)).unwrap().to_string());
        let names = std::iter::once("<|endoftext|>".to_string()).chain(letters).chain(self.special.iter().cloned());
        let vocab: Map<String, Value> = names.zip(0..).map(|(name, id): (_, u32)| (name, id.into())).collect();
        let added = |name: &str| {
            json!({"id": vocab[name], "content": name, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false})
        };
        let added: Vec<Value> =
            std::iter::once("<|endoftext|>").chain(self.special.iter().map(String::as_str)).map(added).collect();
        let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": []}})
    }

    fn write_tensors(&self, tensors: Vec<(String, Vec<usize>, Vec<f32>)>) {
        let (mut head, mut data) = (Map::new(), Vec::new());
        for (name, shape, values) in tensors {
            let begin = data.len();
            data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            head.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
        }
        let mut head = Value::Object(head).to_string().into_bytes();
        head.resize(head.len().next_multiple_of(8), b' ');
        let file = [&(head.len() as u64).to_le_bytes()[..], &head, &data].concat();
        std::fs::write(self.folder.path().join("model.safetensors"), file).unwrap();
    }

    fn write(&self, name: &str, value: &Value) {
        std::fs::write(self.folder.path().join(name), value.to_string()).unwrap();
    }

    fn serve(&self, tool_call_parser: ToolFormat, reasoning_parser: ReasoningFormat) -> Server {
        let config = EngineConfig {
            model: ModelSource::Folder(self.folder.path().to_path_buf()),
            kv_cache_memory_bytes: Some(16 << 20),
            threads: Some(1),
            ..EngineConfig::default()
        };
        let (tool_call_parser, reasoning_parser) = (Some(tool_call_parser), Some(reasoning_parser));
        let options = ServerOptions { tool_call_parser, reasoning_parser, ..ServerOptions::default() };
        Server::with(config, options, Duration::ZERO)
    }
}

/// The tokens of a text: special tokens where it spells one, else bytes.
fn tokens(text: &str, special: &[&str]) -> Vec<usize> {
    let (mut tokens, mut at) = (Vec::new(), 0);
    while let Some(&byte) = text.as_bytes().get(at) {
        let rest = text.get(at..).unwrap_or_default();
        match special.iter().position(|marker| rest.starts_with(marker)) {
            Some(which) => tokens.push(257 + which),
            None => tokens.push(1 + usize::from(byte)),
        }
        at += tokens.last().filter(|token| **token > 256).map_or(1, |token| special[token - 257].len());
    }
    tokens
}

/// A message: its reasoning, its text, the arguments of its calls, and why it ended.
type Message = (String, String, Vec<String>, String);

fn request(fields: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "?"}], "temperature": 0});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_string()
}

/// The answer to a request.
fn whole_answer(server: &Server, fields: &Value) -> Message {
    let whole = server.ok("/v1/chat/completions", request(fields));
    let (choice, message) = (&whole["choices"][0], &whole["choices"][0]["message"]);
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    let calls: Vec<String> = calls.iter().map(|call| text(&call["function"]["arguments"])).collect();
    (text(&message["reasoning"]), text(&message["content"]), calls, text(&choice["finish_reason"]))
}

/// The answer to a request, which is the same whole and streamed.
fn answer(server: &Server, fields: &Value) -> Message {
    let whole = whole_answer(server, fields);
    let mut streamed = Message::default();
    for chunk in server.stream("/v1/chat/completions", request(fields)) {
        let delta = &chunk["choices"][0]["delta"];
        streamed.0 += &text(&delta["reasoning_content"]);
        streamed.1 += &text(&delta["content"]);
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            streamed.2.resize(streamed.2.len().max(index + 1), String::new());
            streamed.2[index] += &text(&call["function"]["arguments"]);
        }
        streamed.3 += &text(&chunk["choices"][0]["finish_reason"]);
    }
    assert_eq!(streamed, whole);
    whole
}

fn tools(strict: bool) -> Value {
    let parameters = json!({"type": "object", "properties": {"i": {"type": "integer"}}, "required": ["i"],
        "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}});
    json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]})
}

/// A call of `f` with the argument `i`, and the markers in it. The first marker begins the call.
fn call(format: ToolFormat, i: &str) -> (String, Vec<&'static str>) {
    let object = format!("{{\"i\":{i}}}");
    match format {
        ToolFormat::Hermes => (
            format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {object}}}\n</tool_call>"),
            vec!["<tool_call>", "</tool_call>"],
        ),
        ToolFormat::Mistral => {
            (format!("[TOOL_CALLS][{{\"name\": \"f\", \"arguments\": {object}}}]"), vec!["[TOOL_CALLS]"])
        }
        ToolFormat::KimiK2 => (
            format!(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{object}\
                 <|tool_call_end|><|tool_calls_section_end|>"
            ),
            vec![
                "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                "<|tool_calls_section_end|>",
            ],
        ),
        ToolFormat::DeepseekV31 => (
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{object}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
            vec![
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
            ],
        ),
        ToolFormat::Qwen3Coder => (
            format!("<tool_call>\n<function=f>\n<parameter=i>\n{i}\n</parameter>\n</function>\n</tool_call>"),
            vec!["<tool_call>", "</tool_call>"],
        ),
        ToolFormat::Glm45 => (
            format!("<tool_call>f\n<arg_key>i</arg_key>\n<arg_value>{i}</arg_value>\n</tool_call>"),
            vec!["<tool_call>", "</tool_call>"],
        ),
        ToolFormat::Gemma4 => (
            format!("<|tool_call>call:f{{i:<|\"|>{i}<|\"|>}}<tool_call|>"),
            vec!["<|tool_call>", "<tool_call|>", "<|\"|>"],
        ),
        ToolFormat::Llama4Pythonic => {
            (format!("<|python_start|>[f(i={i})]<|python_end|>"), vec!["<|python_start|>", "<|python_end|>"])
        }
        _ => (
            format!("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{object}<|call|>"),
            vec!["<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>", "<|start|>", "<|return|>"],
        ),
    }
}

fn fits(arguments: &str) -> bool {
    let value: Value = serde_json::from_str(arguments).unwrap_or_default();
    value.as_object().is_some_and(|fields| fields.len() == 1 && fields["i"].is_i64())
}

#[test]
fn a_strict_call_obeys_its_schema_and_the_text_before_its_marker_is_free() {
    for format in [
        ToolFormat::Hermes,
        ToolFormat::Mistral,
        ToolFormat::KimiK2,
        ToolFormat::DeepseekV31,
        ToolFormat::Qwen3Coder,
        ToolFormat::Glm45,
        ToolFormat::Gemma4,
        ToolFormat::Llama4Pythonic,
    ] {
        let (call, markers) = call(format, "\"x\"");
        let marker = markers[0];
        let (half, most) = marker.split_at(marker.char_indices().nth(5).unwrap().0);
        let near = &marker[..marker.len() - marker.chars().last().unwrap().len_utf8()];
        let text = format!("A 世 {near} {{\"i\": [\"x\"] {most}{half}");
        let script = format!("{text}{call}");
        // Markers as text, markers as special tokens, and markers that are special tokens but spelled with others.
        for (special, ids, is_call) in [
            (&[][..], tokens(&script, &[]), true),
            (&markers, tokens(&script, &markers), true),
            (&markers, tokens(&script, &[]), false),
        ] {
            let model = Scripted::with("P", &ids, special);
            let server = model.serve(format, ReasoningFormat::Off);
            // The same text without a grammar, once.
            if special.is_empty() {
                let (_, content, calls, finish) = answer(&server, &tools(false));
                assert_eq!((content.as_str(), finish.as_str()), (text.as_str(), "tool_calls"), "{format:?}");
                assert!(calls.len() == 1 && !fits(&calls[0]), "{format:?}: the script breaks the schema: {calls:?}");
            }
            let answered = if is_call { answer } else { whole_answer };
            let (_, content, calls, finish) = answered(&server, &tools(true));
            assert!(content.starts_with(&text), "{format:?}: text is free: {content}");
            assert!(calls.iter().all(|call| fits(call)), "{format:?}: {content}: {calls:?}");
            if is_call {
                assert_eq!((calls.len(), finish.as_str()), (1, "tool_calls"), "{format:?}: {content}");
            }
        }
    }
}

/// Thoughts, and how a format writes them in front of an answer after a prompt.
fn thoughts() -> Vec<(ReasoningFormat, &'static str, &'static str, &'static str, Vec<&'static str>)> {
    let think = vec!["<think>", "</think>"];
    let harmony = vec!["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>"];
    let end = "<|end|><|start|>assistant";
    vec![
        (ReasoningFormat::Qwen3, "P", "<think>\n", "</think>\n\n", think.clone()),
        (ReasoningFormat::Qwen3, "P<think>", "\n", "\n</think>\n\n", think.clone()),
        (ReasoningFormat::DeepseekR1, "P", "", "</think>", think),
        (ReasoningFormat::Gemma4, "P", "<|channel>thought\n", "<channel|>", vec!["<|channel>", "<channel|>"]),
        (ReasoningFormat::GptOss, "P<|start|>assistant", "<|channel|>analysis<|message|>", end, harmony),
    ]
}

/// Text in thoughts that looks like a call, an answer or a marker.
const THOUGHT: &str =
    "Say <tool_call>\n{\"name\": \"f\", \"arguments\": {\"i\":\"x\"}}\n</tool_call> or {\"colour\": 5} </thin <|chann";

#[test]
fn an_answer_obeys_its_schema_after_thoughts_that_are_free() {
    let schema = json!({"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"],
        "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}});
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}});
    for (reasoning, prompt, open, close, markers) in thoughts() {
        let head = if reasoning == ReasoningFormat::GptOss { "<|channel|>final<|message|>" } else { "" };
        let script = format!("{open}{THOUGHT}{close}{head}{{\"colour\": 5}} and more");
        for special in [&[][..], &markers] {
            let server = Scripted::new(prompt, &script, special).serve(ToolFormat::Hermes, reasoning);
            if special.is_empty() {
                let (thought, content, ..) = answer(&server, &json!({}));
                let whole = (THOUGHT.to_string(), "{\"colour\": 5} and more".to_string());
                assert_eq!((thought, content), whole, "{reasoning:?}: the script breaks the schema");
            }
            let (thought, content, _, finish) = answer(&server, &format);
            assert_eq!((thought.as_str(), finish.as_str()), (THOUGHT, "stop"), "{reasoning:?}: thoughts are free");
            assert_eq!(serde_json::from_str::<Value>(&content).unwrap(), json!({"colour": "red"}), "{reasoning:?}");
        }
    }
}

#[test]
fn a_strict_call_obeys_its_schema_after_thoughts_that_are_free() {
    for (reasoning, prompt, open, close, markers) in thoughts() {
        let format = if reasoning == ReasoningFormat::GptOss { ToolFormat::Harmony } else { ToolFormat::Hermes };
        let (call, of_call) = call(format, "\"x\"");
        let script = format!("{open}{THOUGHT}{close}{call}");
        let more = of_call.into_iter().filter(|marker| !markers.contains(marker));
        let markers: Vec<&str> = markers.iter().copied().chain(more).collect();
        for special in [&[][..], &markers[..2], &markers] {
            // Thoughts of a model with special tokens do not have them.
            let ids =
                [tokens(open, special), tokens(THOUGHT, &[]), tokens(close, special), tokens(&call, special)].concat();
            let server = Scripted::with(prompt, &ids, special).serve(format, reasoning);
            if special.is_empty() {
                let (thought, _, calls, finish) = answer(&server, &tools(false));
                assert_eq!((thought.as_str(), finish.as_str()), (THOUGHT, "tool_calls"), "{reasoning:?}");
                assert!(calls.len() == 1 && !fits(&calls[0]), "{reasoning:?}: the script breaks the schema: {calls:?}");
            }
            let answered = if special.len() == 2 { whole_answer } else { answer };
            let (thought, content, calls, finish) = answered(&server, &tools(true));
            assert_eq!(thought, THOUGHT, "{reasoning:?}: thoughts are free: {content}");
            assert!(!calls.is_empty() && calls.iter().all(|call| fits(call)), "{reasoning:?}: {calls:?}");
            assert_eq!(finish, "tool_calls", "{reasoning:?}");
        }
        // The whole script is spelled with bytes, so nothing of it is a marker. The parser reads text, and text may not be a call.
        let server = Scripted::with(prompt, &tokens(&script, &[]), &markers).serve(format, reasoning);
        let (.., calls, _) = whole_answer(&server, &tools(true));
        assert!(calls.iter().all(|call| fits(call)), "{reasoning:?}: {calls:?}");
    }
}
