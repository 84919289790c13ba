//! Trained checkpoints over HTTP, with real text: conversations, tools, a schema, many requests on a small pool, speculation, LoRA,
//! embeddings.
//! `cargo xtask real-models` fetches them; `engine/tests/real_models.rs` compares their numbers.

use std::time::Duration;

use engine::{EngineConfig, LoraConfig, ModelSource, RoundActivations};
use serde_json::{Value, json};
use server::ServerOptions;
use testkit::adapters::simple;
use testkit::real_models::{DECODERS, expected, file_for_tests};

use crate::common::{Reply, Server, config};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// The checkpoint of most tests.
const SMALL: &str = "smollm2";
/// Bytes of a block of 16 tokens of it: keys and values, 30 layers, 3 heads of 64, float32.
const BLOCK: u64 = 16 * 2 * 30 * 3 * 64 * 4;

/// A configuration for a checkpoint, in float32; `None` if this machine does not have it.
fn real(name: &str) -> Option<EngineConfig> {
    let model = ModelSource::Folder(file_for_tests(name)?);
    let kv_cache_memory_bytes = Some(128 * BLOCK);
    Some(EngineConfig {
        model,
        kv_cache_memory_bytes,
        activations: RoundActivations::Never,
        max_model_len: Some(512),
        ..config()
    })
}

fn serve(config: EngineConfig) -> Server {
    Server::with(config, ServerOptions::default(), Duration::ZERO)
}

fn ask(question: &str) -> Value {
    json!({"messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0})
}

fn message(answer: &Value) -> &Value {
    &answer["choices"][0]["message"]
}

#[test]
fn conversations_have_the_token_ids_of_the_published_templates() {
    for name in DECODERS {
        let Some(mut config) = real(name) else { continue };
        let expected = expected(name);
        let template = &expected["chat_template"];
        let folder = tempfile::tempdir().unwrap();
        // The file of a base model has none; the expected ids are those of the tuned model's.
        if let Some(text) = template["template"].as_str() {
            let path = folder.path().join("chat_template.jinja");
            std::fs::write(&path, text).unwrap();
            config.chat_template = Some(path);
        }
        let server = serve(config);
        let cases = template["cases"].as_array().unwrap();
        assert!(cases.len() >= 3, "{name}");
        for case in cases {
            let mut body = case.clone();
            body.as_object_mut()
                .unwrap()
                .retain(|key, _| ["messages", "tools", "add_generation_prompt"].contains(&&**key));
            let found = server.ok("/tokenize", body);
            assert_eq!(found["tokens"], case["ids"], "{name}, {}", case["name"]);
        }
    }
}

#[test]
fn a_question_gets_its_answer_whole_and_streamed() {
    let Some(config) = real(SMALL) else { return };
    let server = serve(config);
    let body = ask("What is the capital of France?");
    let answer = server.ok(CHAT, body.clone());
    assert_eq!(message(&answer)["content"], "The capital of France is Paris.");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let chunks = server.stream(CHAT, body);
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "The capital of France is Paris.");
}

fn tools() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}},
        "required": ["city"], "additionalProperties": false});
    let function = json!({"name": "get_weather", "description": "The weather of a city now", "parameters": city});
    json!([{"type": "function", "function": function}])
}

/// Requires a call, of any tool and of one, and asks a question under `auto`.
fn check_tools(name: &str) {
    let Some(config) = real(name) else { return };
    let server = serve(config);
    let mut body = ask("What is the weather in Paris?");
    body["tools"] = tools();
    body["parallel_tool_calls"] = json!(false);
    // The small model puts white space into the call.
    body["max_tokens"] = json!(128);
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "get_weather"}})] {
        body["tool_choice"] = choice;
        let answer = server.ok(CHAT, body.clone());
        let calls = message(&answer)["tool_calls"].as_array().unwrap();
        assert!(calls.len() == 1 && calls[0]["function"]["name"] == "get_weather", "{name}: {answer}");
        let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"city": "Paris"}), "{name}: {answer}");
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{name}: {answer}");
    }
    body["tool_choice"] = json!("auto");
    if name == SMALL {
        // Its template does not show tools to the model.
        body["messages"][0]["content"] = json!("What is 2 + 2? Answer with the number.");
        let answer = server.ok(CHAT, body);
        assert_eq!(message(&answer)["content"], "2 + 2 = 4");
        assert!(message(&answer).get("tool_calls").is_none(), "{answer}");
    } else {
        let answer = server.ok(CHAT, body);
        // The model writes the call without the markers of its own format, so it may arrive as text.
        let text = message(&answer).to_string();
        assert!(text.contains("get_weather") && text.contains("Paris"), "{answer}");
    }
}

#[test]
fn a_required_call_has_the_city_of_the_question_and_under_auto_the_model_decides() {
    check_tools(SMALL);
    if testkit::everything() {
        check_tools("qwen2.5-coder");
    }
}

#[test]
fn an_answer_follows_its_json_schema() {
    let Some(config) = real(SMALL) else { return };
    let server = serve(config);
    let schema = json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 20},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe"]}, "capital": {"type": "boolean"}},
        "required": ["city", "continent", "capital"], "additionalProperties": false});
    let mut body = ask("Describe the city of Paris as JSON.");
    body["response_format"] =
        json!({"type": "json_schema", "json_schema": {"name": "city", "strict": true, "schema": schema}});
    let answer = server.ok(CHAT, body);
    let found: Value = serde_json::from_str(message(&answer)["content"].as_str().unwrap()).unwrap();
    let continents = [json!("Africa"), json!("America"), json!("Asia"), json!("Europe")];
    assert!(found["city"] == "Paris" && continents.contains(&found["continent"]), "{answer}");
    assert!(found["capital"].is_boolean() && found.as_object().unwrap().len() == 3, "{answer}");
}

/// Posts a request that waits for others on a machine that may be busy.
fn patient(server: &Server, body: &Value) -> Value {
    let stream = server.open("POST", CHAT, &[("Content-Type", "application/json")], body.to_string().as_bytes());
    stream.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    let reply = Reply::read(stream);
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()
}

const TOPICS: [&str; 8] = ["rivers", "Rust", "the sea", "bread", "chess", "the Moon", "music", "trains"];

#[test]
fn twenty_four_requests_at_once_on_a_small_pool_get_the_answers_they_get_alone() {
    let Some(config) = real(SMALL) else { return };
    // The prompts of about ten fit at a time, and what they grow by does not.
    let server =
        serve(EngineConfig { kv_cache_memory_bytes: Some(32 * BLOCK), enable_prefix_caching: false, ..config });
    let bodies: Vec<Value> = (0..24)
        .map(|i| {
            let mut body = ask(&format!("Write {} sentences about {}.", 2 + i / 8, TOPICS[i % 8]));
            body["max_tokens"] = json!(24);
            body["logprobs"] = json!(true);
            body
        })
        .collect();
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let running: Vec<_> = bodies.iter().map(|body| scope.spawn(|| patient(&server, body))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(server.metric("vllm:num_preemptions_total") > 0.0, "the pool held them all");
    for (body, answer) in bodies.into_iter().zip(answers).step_by(if testkit::everything() { 1 } else { 4 }) {
        assert_eq!(server.ok(CHAT, body)["choices"], answer["choices"]);
    }
}

#[test]
fn speculation_from_the_prompt_changes_no_token_and_its_drafts_are_accepted() {
    let Some(config) = real(SMALL) else { return };
    let text = "def area_of_circle(radius):\n    return 3.14159 * radius * radius\n\n\
        def area_of_square(side):\n    return side * side\n\ndef area_of_rectangle(";
    let body = json!({"prompt": text, "max_tokens": 64, "temperature": 0, "return_token_ids": true});
    let want = serve(config.clone()).ok(COMPLETIONS, body.clone());
    let ngram = r#"{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}"#;
    let server = serve(EngineConfig { speculative: Some(ngram.parse().unwrap()), ..config });
    assert_eq!(server.ok(COMPLETIONS, body)["choices"], want["choices"]);
    let accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total");
    assert!(accepted >= 10.0, "{accepted} accepted drafts");
}

#[test]
fn an_adapter_changes_its_own_requests_and_no_other() {
    let Some(config) = real(SMALL) else { return };
    let config = EngineConfig { lora: Some(LoraConfig::default()), ..config };
    let folder = tempfile::tempdir().unwrap();
    let decoder = engine::declare(&config).unwrap().decoder;
    let linears = decoder.linears().filter(|linear| linear.adapters);
    let parts =
        linears.flat_map(|linear| linear.parts.iter().map(|part| (part.name.clone(), linear.inputs, part.rows)));
    simple(folder.path(), &parts.collect::<Vec<_>>(), 8, 1);
    let server = serve(config);
    let mut body = ask("What is the capital of France?");
    let base = server.ok(CHAT, body.clone());
    let loaded = json!({"lora_name": "noise", "lora_path": folder.path()});
    assert_eq!(server.post("/v1/load_lora_adapter", &loaded).status, 200);
    body["model"] = json!("noise");
    let alone = server.ok(CHAT, body.clone());
    assert_ne!(message(&alone)["content"], message(&base)["content"]);
    let (with, without) = std::thread::scope(|scope| {
        let with = scope.spawn(|| server.ok(CHAT, body.clone()));
        let without = server.ok(CHAT, ask("What is the capital of France?"));
        (with.join().unwrap(), without)
    });
    assert_eq!((&with["choices"], &without["choices"]), (&alone["choices"], &base["choices"]));
}

#[test]
fn embeddings_of_a_trained_encoder_are_the_published_ones_and_long_texts_are_refused_or_cut() {
    let Some(file) = file_for_tests("minilm") else { return };
    let model = ModelSource::Folder(file.parent().unwrap().to_owned());
    let server = serve(EngineConfig { model, activations: RoundActivations::Never, ..config() });
    let expected = expected("minilm");
    let rows = expected["rows"].as_array().unwrap();
    let texts: Vec<&Value> = rows.iter().map(|row| &row["text"]).collect();
    let found = server.ok("/v1/embeddings", json!({"input": texts}));
    let numbers = |list: &Value| list.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    let close = |found: &Value, want: &Value, text: &Value| {
        let (found, want) = (numbers(found), numbers(want));
        let is_close = found.iter().zip(&want).all(|(a, b)| (a - b).abs() < 2e-4);
        assert!(found.len() == want.len() && is_close, "{text}");
    };
    for (row, found) in rows.iter().zip(found["data"].as_array().unwrap()) {
        close(&found["embedding"], &row["embedding"], &row["text"]);
    }
    let long = &expected["too_long"];
    let refused = server.post("/v1/embeddings", &json!({"input": long["text"]}));
    assert!(refused.status == 400 && refused.body.contains("256"), "{}", refused.body);
    let cut = server.ok("/v1/embeddings", json!({"input": long["text"], "truncate_prompt_tokens": -1}));
    close(&cut["data"][0]["embedding"], &long["embedding_truncated"], &long["text"]);
}
