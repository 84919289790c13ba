//! The reference checkpoints as they stand: configuration, weights, tokenizer and chat template.

use std::collections::BTreeSet;

use crate::common::{CASES, Summary, expected, files, folder, ids, list, summary, text};
use device::Dtype;
use models::decoder::{Heads, Rope, RopeScaling};
use models::{ChatInput, ChatTemplate, GenerationDefaults, ModelConfig, ModelFiles, Tokenizer, Weights};
use serde_json::{Map, Value};

fn rope(theta: f64, dims: usize, scaling: RopeScaling) -> Rope {
    Rope { theta, dims, interleaved: false, scaling }
}

#[test]
fn every_configuration_reads_as_it_is_meant() {
    let llama = Summary {
        architecture: "LlamaForCausalLM",
        vocab_size: 560,
        hidden_size: 64,
        intermediate_size: 128,
        heads: Heads { num_heads: 4, num_kv_heads: 2, head_dim: 32 },
        max_position_embeddings: 512,
        eps: 1e-5,
        rope: rope(10_000.0, 32, RopeScaling::None),
        tied: false,
        biases: [false; 3],
        head_norms: false,
        windows: vec![None; 3],
        eos_token_ids: vec![2],
    };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64.0,
    };
    let cases = [
        ("llama", llama.clone()),
        (
            "llama31-rope",
            Summary {
                vocab_size: 600,
                hidden_size: 128,
                intermediate_size: 192,
                rope: rope(500_000.0, 32, llama3),
                windows: vec![None; 2],
                eos_token_ids: vec![593, 597, 598],
                ..llama.clone()
            },
        ),
        (
            "mistral-sliding",
            Summary {
                architecture: "MistralForCausalLM",
                vocab_size: 576,
                intermediate_size: 144,
                heads: Heads { num_kv_heads: 1, ..llama.heads },
                windows: vec![Some(32); 3],
                ..llama.clone()
            },
        ),
        (
            "qwen2",
            Summary {
                architecture: "Qwen2ForCausalLM",
                vocab_size: 608,
                hidden_size: 96,
                heads: Heads { num_heads: 3, num_kv_heads: 1, head_dim: 32 },
                eps: 1e-6,
                rope: rope(1_000_000.0, 32, RopeScaling::None),
                tied: true,
                biases: [true, false, false],
                eos_token_ids: vec![587],
                ..llama.clone()
            },
        ),
        (
            "qwen3",
            Summary {
                architecture: "Qwen3ForCausalLM",
                vocab_size: 590,
                heads: Heads { num_heads: 2, num_kv_heads: 1, head_dim: 64 },
                eps: 1e-6,
                rope: rope(1_000_000.0, 64, RopeScaling::None),
                tied: true,
                head_norms: true,
                eos_token_ids: vec![585],
                ..llama
            },
        ),
    ];
    for (case, want) in cases {
        assert_eq!(summary(&ModelConfig::load(&files(case)).unwrap()), want, "{case}");
    }
}

#[test]
fn end_tokens_come_from_the_generation_config() {
    for case in CASES {
        let files = files(case);
        let defaults = GenerationDefaults::load(&files, &ModelConfig::load(&files).unwrap().eos_token_ids).unwrap();
        assert_eq!(defaults.eos_token_ids, ids(&expected(case)["eos_token_ids"]), "{case}");
    }
}

#[test]
fn sampling_defaults_are_those_of_the_generation_config() {
    let files = files("qwen2");
    let defaults = GenerationDefaults::load(&files, &ModelConfig::load(&files).unwrap().eos_token_ids).unwrap();
    let stated: Value = files.read_json("generation_config.json").unwrap();
    assert_eq!(defaults.repetition_penalty, Some(1.05));
    assert_eq!(defaults.temperature, Some(0.7));
    assert_eq!(defaults.top_p.map(f64::from).map(|p| (p * 1e6).round() / 1e6), stated["top_p"].as_f64());
    assert_eq!(defaults.top_k.map(u64::from), stated["top_k"].as_u64());
    assert_eq!((defaults.min_p, defaults.max_new_tokens), (None, None));
}

/// What the architecture reads, by name and shape.
fn tensors_of(of: &Summary) -> Vec<(String, Vec<usize>)> {
    let Summary { vocab_size, hidden_size, intermediate_size, heads, .. } = *of;
    let (q, kv) = (heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_string(), vec![vocab_size, hidden_size]),
        ("model.norm.weight".to_string(), vec![hidden_size]),
    ];
    if !of.tied {
        tensors.push(("lm_head.weight".to_string(), vec![vocab_size, hidden_size]));
    }
    for layer in 0..of.windows.len() {
        let mut add =
            |name: &str, shape: &[usize]| tensors.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        add("input_layernorm.weight", &[hidden_size]);
        add("post_attention_layernorm.weight", &[hidden_size]);
        for (name, rows) in [("q", q), ("k", kv), ("v", kv)] {
            add(&format!("self_attn.{name}_proj.weight"), &[rows, hidden_size]);
            if of.biases[0] {
                add(&format!("self_attn.{name}_proj.bias"), &[rows]);
            }
        }
        add("self_attn.o_proj.weight", &[hidden_size, q]);
        add("mlp.gate_proj.weight", &[intermediate_size, hidden_size]);
        add("mlp.up_proj.weight", &[intermediate_size, hidden_size]);
        add("mlp.down_proj.weight", &[hidden_size, intermediate_size]);
        if of.head_norms {
            add("self_attn.q_norm.weight", &[heads.head_dim]);
            add("self_attn.k_norm.weight", &[heads.head_dim]);
        }
    }
    tensors
}

#[test]
fn the_configuration_accounts_for_every_tensor_of_the_checkpoint() {
    for case in CASES {
        let files = files(case);
        let weights = Weights::open(&files).unwrap();
        let config = ModelConfig::load(&files).unwrap();
        // Parts of one tensor name it several times.
        let declared: BTreeSet<_> = config.decoder.tensors().collect();
        if ["llama", "llama31-rope", "mistral-sliding", "qwen2", "qwen3"].contains(&case) {
            assert_eq!(declared, tensors_of(&summary(&config)).into_iter().collect(), "{case}");
        }
        let stored = match text(&expected(case)["stored_dtype"]) {
            "float32" => Dtype::F32,
            "float16" => Dtype::F16,
            _ => Dtype::Bf16,
        };
        let (mut elements, mut read) = (0, BTreeSet::new());
        for (name, shape) in &declared {
            let view = weights.expect(name, shape).unwrap();
            assert_eq!(view.dtype, stored, "{case}");
            let values = view.to_f32();
            assert_eq!(values.len(), shape.iter().product::<usize>(), "{case} {name}");
            assert!(
                values.iter().all(|value| value.is_finite()) && values.iter().any(|value| *value != 0.0),
                "{case} {name}"
            );
            elements += values.len() as u64;
            assert!(read.insert(view.name), "{case} {name} is declared twice");
        }
        assert_eq!(config.decoder.num_parameters(), elements, "{case}");
        // What is left are the buffers that the reference put there to be ignored.
        for unused in weights.names().filter(|name| !read.contains(*name)) {
            assert!(unused.ends_with("bias") || unused.ends_with("inv_freq"), "{case}: {unused}");
        }
    }
}

#[test]
fn the_kept_logits_are_one_row_per_prompt() {
    for case in CASES {
        let bytes = std::fs::read(folder(case).join("expected.safetensors")).unwrap();
        let logits = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let vocab_size = ModelConfig::load(&files(case)).unwrap().decoder.vocab_size();
        for prompt in list(&expected(case)["prompts"]) {
            assert_eq!(logits.tensor(text(&prompt["logits"])).unwrap().shape(), [1, vocab_size], "{case}");
        }
    }
}

#[test]
fn texts_encode_to_the_reference_ids() {
    for case in CASES {
        let tokenizer = Tokenizer::load(&files(case)).unwrap();
        let expected = expected(case);
        let prompts = list(&expected["prompts"]).iter();
        for entry in prompts.chain(list(&expected["encode"])) {
            let text = text(&entry["text"]);
            let encoded = tokenizer.encode(text, entry["add_special_tokens"].as_bool().unwrap()).unwrap();
            assert_eq!(encoded, ids(&entry["ids"]), "{case}: {text:?}");
        }
    }
}

#[test]
fn a_long_text_has_the_same_ids_in_pieces_as_whole() {
    let demo = ModelFiles::open(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("demo")).unwrap();
    for (name, files) in CASES.map(|case| (case, files(case))).into_iter().chain([("demo", demo)]) {
        let tokenizer = Tokenizer::load(&files).unwrap();
        let whole = tokenizers::Tokenizer::from_bytes(&*files.bytes("tokenizer.json").unwrap()).unwrap();
        let parts = [
            "The",
            " quick",
            "brown ",
            "\n",
            "\r\n\n",
            "   ",
            " ",
            "\t",
            "it's",
            "1234567",
            " 42",
            "é",
            "e\u{301}",
            "世界",
            "🦀",
            "<|im_start|>",
            "<|endoftext|>",
            "<s>",
            "!?",
            "…",
            "don't",
            "\u{a0}",
            "{\"a\": [1, 2]}",
        ];
        for seed in 0..if testkit::everything() { 3 } else { 1_u64 } {
            let mut state = seed;
            let mut text = String::new();
            // Cut twice.
            while text.len() < 70_000 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let draw = (state >> 33) as usize;
                // Now and then a run that is longer than any margin.
                let times = if draw.is_multiple_of(97) { 400 } else { 1 };
                text += &parts[draw / 97 % parts.len()].repeat(times);
            }
            for special in [false, true] {
                let expected = whole.encode_fast(text.as_str(), special).unwrap();
                assert!(tokenizer.encode(&text, special).unwrap() == expected.get_ids(), "{name}, seed {seed}");
            }
            assert!(
                tokenizer.least_tokens(text.len()) <= whole.encode_fast(text.as_str(), false).unwrap().len(),
                "{name}"
            );
        }
        let ascii = "The quick brown fox, 42 times. ".repeat(4000);
        let mut asked = 0;
        let stopped = tokenizer.encode_while(&ascii, true, usize::MAX, |_| {
            asked += 1;
            false
        });
        // One kind of tokenizer is taken to pieces, the other is not.
        let in_pieces = matches!(whole.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_)));
        assert_eq!((stopped.is_err(), asked), (in_pieces, usize::from(in_pieces)), "{name}");
        assert!(tokenizer.least_tokens(ascii.len()) > 1000 || !in_pieces, "{name}");
    }
}

#[test]
fn ids_decode_to_the_reference_texts() {
    for case in CASES {
        let tokenizer = Tokenizer::load(&files(case)).unwrap();
        for entry in list(&expected(case)["detok"]) {
            let ids = ids(&entry["ids"]);
            assert_eq!(
                tokenizer.decode(&ids, true).unwrap(),
                text(&entry["skip_special_tokens"]),
                "{case} {}",
                entry["name"]
            );
            assert_eq!(
                tokenizer.decode(&ids, false).unwrap(),
                text(&entry["keep_special_tokens"]),
                "{case} {}",
                entry["name"]
            );
        }
    }
}

#[test]
fn the_bytes_of_the_tokens_add_up_to_the_decoded_text() {
    for case in CASES {
        let tokenizer = Tokenizer::load(&files(case)).unwrap();
        let expected = expected(case);
        let mut whole = 0;
        for entry in list(&expected["detok"]).iter().chain(list(&expected["encode"])) {
            let ids = ids(&entry["ids"]);
            let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).collect();
            // Broken sequences decode by rules of their own.
            let Ok(text) = String::from_utf8(bytes) else {
                continue;
            };
            let decoded = tokenizer.decode(&ids, false).unwrap();
            // SentencePiece decoders drop the space that the tokenizer put before the text.
            assert!(
                decoded == text || Some(decoded.as_str()) == text.strip_prefix(' '),
                "{case}: {decoded:?} {text:?}"
            );
            whole += 1;
        }
        assert!(whole > 30, "{case}: only {whole} sequences were whole");
    }
}

#[test]
fn conversations_render_to_the_reference_texts_and_ids() {
    for case in CASES {
        let files = files(case);
        let tokenizer = Tokenizer::load(&files).unwrap();
        let template = ChatTemplate::load(&files).unwrap().unwrap();
        for entry in list(&expected(case)["chat"]) {
            let kwargs = entry["template_kwargs"].as_object().cloned().unwrap_or_default();
            let rendered = template.render(&ChatInput {
                messages: list(&entry["messages"]),
                tools: Some(&entry["tools"]).filter(|tools| !tools.is_null()),
                add_generation_prompt: entry["add_generation_prompt"].as_bool().unwrap(),
                continue_final_message: false,
                kwargs: &kwargs,
            });
            if let Some(error) = entry.get("error") {
                let message = rendered.unwrap_err().to_string();
                let words = text(error).split_once(": ").unwrap().1;
                assert!(message.contains(words), "{case}: {message}");
                continue;
            }
            let rendered = rendered.unwrap();
            assert_eq!(rendered, text(&entry["text"]), "{case} {}", entry["name"]);
            assert_eq!(tokenizer.encode(&rendered, false).unwrap(), ids(&entry["ids"]), "{case} {}", entry["name"]);
        }
    }
}

#[test]
fn a_continued_message_ends_the_prompt_in_every_template() {
    let messages = [
        serde_json::json!({"role": "user", "content": "Where is the river stone?"}),
        serde_json::json!({"role": "assistant", "content": "Under the old"}),
    ];
    for case in CASES {
        let template = ChatTemplate::load(&files(case)).unwrap().unwrap();
        let prompt = template.render(&ChatInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: false,
            continue_final_message: true,
            kwargs: &Map::new(),
        });
        let prompt = prompt.unwrap();
        assert!(prompt.ends_with("Under the old"), "{case}: {prompt:?}");
        assert!(prompt.contains("Where is the river stone?"), "{case}: {prompt:?}");
    }
}

#[test]
fn the_tokenizer_fits_its_model_and_knows_its_special_tokens() {
    for case in CASES {
        let files = files(case);
        let config = ModelConfig::load(&files).unwrap();
        let tokenizer = Tokenizer::load(&files).unwrap();
        tokenizer.check(config.decoder.vocab_size()).unwrap();
        assert!(tokenizer.vocab_size() <= config.decoder.vocab_size(), "{case}");

        let eos = config.eos_token_ids[0];
        assert!(tokenizer.is_special(eos), "{case}");
        let spelled = tokenizer.id_to_token(eos).unwrap();
        assert_eq!(tokenizer.token_to_id(&spelled), Some(eos), "{case}");
        assert_eq!(tokenizer.token_bytes(eos), spelled.as_bytes(), "{case}");
        assert_eq!(tokenizer.decode(&[eos], true).unwrap(), "", "{case}");

        let beyond = tokenizer.vocab_size() as u32;
        assert_eq!((tokenizer.id_to_token(beyond), tokenizer.token_bytes(beyond)), (None, Vec::new()), "{case}");
    }
    // An added token that is not special stays in the text.
    let tokenizer = Tokenizer::load(&files("qwen3")).unwrap();
    let think = tokenizer.token_to_id("<think>").unwrap();
    assert!(!tokenizer.is_special(think));
    assert_eq!(tokenizer.decode(&[think], true).unwrap(), "<think>");
}
