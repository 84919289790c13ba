//! Whole responses and streams: the same text, the right counts, and everything that was requested.

use std::sync::LazyLock;
use std::time::Duration;

use crate::common::Server;
use engine::{EngineConfig, ModelSource};
use serde_json::{Value, json};
use server::ServerOptions;

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn question() -> Value {
    json!([{"role": "user", "content": "What is the capital of France?"}])
}

/// The concatenated pieces of one choice.
fn joined(chunks: &[Value], index: usize, piece: impl Fn(&Value) -> Option<&str>) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    choices.filter(|choice| choice["index"] == index).filter_map(piece).collect()
}

fn finish_reasons(chunks: &[Value], index: usize) -> Vec<&str> {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    choices.filter(|choice| choice["index"] == index).filter_map(|choice| choice["finish_reason"].as_str()).collect()
}

fn text(choice: &Value) -> Option<&str> {
    choice["text"].as_str()
}

#[test]
fn the_demo_model_knows_the_capital_of_france() {
    let answer = SERVER.ok(CHAT, json!({"messages": question(), "temperature": 0, "max_tokens": 32}));
    assert!(answer["choices"][0]["message"]["content"].as_str().unwrap().contains("Paris"), "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["object"], "chat.completion");
}

#[test]
fn a_stream_adds_up_to_the_whole_answer() {
    let body = json!({"prompt": "The capital of France", "temperature": 0, "max_tokens": 24});
    let whole = SERVER.ok(COMPLETIONS, body.clone());
    let chunks = SERVER.stream(COMPLETIONS, body);
    assert_eq!(joined(&chunks, 0, text), whole["choices"][0]["text"]);
    assert_eq!(finish_reasons(&chunks, 0), [whole["choices"][0]["finish_reason"].as_str().unwrap()]);

    let body = json!({"messages": question(), "temperature": 0, "max_tokens": 24});
    let whole = SERVER.ok(CHAT, body.clone());
    let chunks = SERVER.stream(CHAT, body);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(joined(&chunks, 0, |c| c["delta"]["content"].as_str()), whole["choices"][0]["message"]["content"]);
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["object"] == "chat.completion.chunk"));
}

#[test]
fn choices_are_numbered_by_prompt_and_then_by_sequence() {
    let prompts = ["One", "Two", "The capital of"];
    let body = json!({"prompt": prompts, "n": 2, "temperature": 1, "seed": 3, "max_tokens": 5, "ignore_eos": true});
    let whole = SERVER.ok(COMPLETIONS, body.clone());
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|c| c["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(whole["usage"]["completion_tokens"], 30);
    // The same samples for one prompt at a time and in a stream.
    for (i, prompt) in prompts.iter().enumerate() {
        let mut alone = body.clone();
        alone["prompt"] = json!(prompt);
        let alone = SERVER.ok(COMPLETIONS, alone);
        assert_eq!(
            [&alone["choices"][0]["text"], &alone["choices"][1]["text"]],
            [&choices[2 * i]["text"], &choices[2 * i + 1]["text"]]
        );
    }
    let chunks = SERVER.stream(COMPLETIONS, body);
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(joined(&chunks, i, text), choice["text"]);
        assert_eq!(finish_reasons(&chunks, i), ["length"]);
    }
}

#[test]
fn the_usage_comes_last_or_in_every_chunk_as_asked() {
    let body = |options: Value| json!({"prompt": "One", "max_tokens": 6, "ignore_eos": true, "temperature": 0, "stream_options": options});
    let chunks = SERVER.stream(COMPLETIONS, body(json!({"include_usage": true})));
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 6);
    assert!(before.iter().all(|chunk| chunk["usage"].is_null()));

    let both = json!({"include_usage": true, "continuous_usage_stats": true});
    let chunks = SERVER.stream(COMPLETIONS, body(both));
    let counts: Vec<u64> = chunks.iter().map(|c| c["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts.len() > 2 && counts.last() == Some(&6), "{counts:?}");

    let chunks = SERVER.stream(COMPLETIONS, body(Value::Null));
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none() && chunk["choices"] != json!([])));
}

#[test]
fn echo_puts_the_prompt_before_the_text_and_scores_it() {
    let body = |echo: bool, max_tokens: u64| json!({"prompt": "The capital of", "echo": echo, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2});
    let (plain, echoed) = (SERVER.ok(COMPLETIONS, body(false, 4)), SERVER.ok(COMPLETIONS, body(true, 4)));
    let (plain, echoed) = (&plain["choices"][0], &echoed["choices"][0]);
    assert_eq!(echoed["text"], format!("The capital of{}", plain["text"].as_str().unwrap()));
    let list = |choice: &Value, name: &str| choice["logprobs"][name].as_array().unwrap().clone();
    let prompt = list(echoed, "tokens").len() - list(plain, "tokens").len();
    assert!(prompt > 1);
    assert_eq!(list(echoed, "token_logprobs")[0], Value::Null);
    assert_eq!(list(echoed, "token_logprobs")[prompt..], list(plain, "token_logprobs"));
    assert_eq!(list(echoed, "text_offset")[prompt], "The capital of".len());
    assert!(list(echoed, "top_logprobs")[prompt..].iter().all(|top| top.as_object().unwrap().len() <= 3));
    // Only the prompt.
    let scored = SERVER.ok(COMPLETIONS, body(true, 0));
    assert_eq!(scored["choices"][0]["text"], "The capital of");
    assert_eq!(scored["usage"]["completion_tokens"], 0);
    assert_eq!(list(&scored["choices"][0], "tokens").len(), prompt);
    // As a stream.
    let chunks = SERVER.stream(COMPLETIONS, body(true, 4));
    assert_eq!(joined(&chunks, 0, text), echoed["text"]);
    let streamed: Vec<Value> = chunks.iter().flat_map(|chunk| list(&chunk["choices"][0], "text_offset")).collect();
    assert_eq!(streamed, list(echoed, "text_offset"));
}

#[test]
fn prompt_logprobs_are_those_of_an_echo() {
    let prompt = "The capital of France is";
    let ids = SERVER.ok("/tokenize", json!({"prompt": prompt}))["tokens"].clone();
    let scored = SERVER.ok(COMPLETIONS, json!({"prompt": ids, "prompt_logprobs": 1, "max_tokens": 1}));
    let echoed = SERVER.ok(COMPLETIONS, json!({"prompt": ids, "echo": true, "logprobs": 0, "max_tokens": 1}));
    let scored = scored["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!(scored.len(), ids.as_array().unwrap().len());
    assert_eq!(scored[0], Value::Null);
    for (i, id) in ids.as_array().unwrap().iter().enumerate().skip(1) {
        let own = &scored[i][id.to_string()];
        assert!(own["rank"].as_u64().unwrap() >= 1 && own["decoded_token"].is_string());
        assert_eq!(own["logprob"], echoed["choices"][0]["logprobs"]["token_logprobs"][i]);
    }
}

#[test]
fn chat_logprobs_carry_the_bytes_of_the_answer() {
    let body = json!({"messages": question(), "temperature": 0, "max_tokens": 16, "logprobs": true, "top_logprobs": 3});
    let answer = SERVER.ok(CHAT, body.clone());
    let choice = &answer["choices"][0];
    let content = choice["logprobs"]["content"].as_array().unwrap();
    let bytes: Vec<u8> = content
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().unwrap())
        .map(|byte| byte.as_u64().unwrap() as u8)
        .collect();
    assert!(String::from_utf8(bytes).unwrap().starts_with(choice["message"]["content"].as_str().unwrap()));
    assert!(content.iter().all(|entry| entry["top_logprobs"].as_array().unwrap().len() == 3));
    assert!(content.iter().all(|entry| entry["top_logprobs"][0]["logprob"] == entry["logprob"]), "greedy");
    let streamed: Vec<Value> = SERVER
        .stream(CHAT, body)
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(&streamed, content);
}

#[test]
fn token_ids_are_returned_when_asked_for() {
    let body =
        json!({"prompt": "One", "max_tokens": 3, "ignore_eos": true, "return_token_ids": true, "temperature": 0});
    let whole = SERVER.ok(COMPLETIONS, body.clone());
    let ids = &whole["choices"][0]["token_ids"];
    assert_eq!(ids.as_array().unwrap().len(), 3);
    assert_eq!(whole["choices"][0]["prompt_token_ids"], SERVER.ok("/tokenize", json!({"prompt": "One"}))["tokens"]);
    let chunks = SERVER.stream(COMPLETIONS, body);
    let streamed: Vec<Value> =
        chunks.iter().flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().unwrap().clone()).collect();
    assert_eq!(&json!(streamed), ids);
    let chat = SERVER.ok(CHAT, json!({"messages": question(), "max_tokens": 2, "return_token_ids": true}));
    assert_eq!(chat["prompt_token_ids"], SERVER.ok("/tokenize", json!({"messages": question()}))["tokens"]);
}

#[test]
fn a_stop_string_ends_the_text_right_before_it() {
    let body = json!({"messages": question(), "temperature": 0, "max_tokens": 32, "stop": ["aris"]});
    let choice = &SERVER.ok(CHAT, body.clone())["choices"][0];
    assert!(choice["message"]["content"].as_str().unwrap().ends_with('P'), "{choice}");
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!("aris")));
    let streamed = joined(&SERVER.stream(CHAT, body), 0, |c| c["delta"]["content"].as_str());
    assert_eq!(streamed, choice["message"]["content"]);
}

#[test]
fn a_chat_is_the_completion_of_its_template() {
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]);
    let ids = SERVER.ok("/tokenize", json!({"messages": messages}))["tokens"].clone();
    let chat = SERVER.ok(CHAT, json!({"messages": messages, "temperature": 0, "max_tokens": 12}));
    let completion = SERVER.ok(COMPLETIONS, json!({"prompt": ids, "temperature": 0, "max_tokens": 12}));
    assert_eq!(chat["choices"][0]["message"]["content"], completion["choices"][0]["text"]);
    assert_eq!(chat["usage"]["prompt_tokens"], ids.as_array().unwrap().len());
}

#[test]
fn a_final_message_can_be_continued() {
    let mut messages = question();
    messages.as_array_mut().unwrap().push(json!({"role": "assistant", "content": "The capital of France is"}));
    let body = json!({"messages": messages, "continue_final_message": true, "temperature": 0, "max_tokens": 8});
    let answer = SERVER.ok(CHAT, body);
    assert!(answer["choices"][0]["message"]["content"].as_str().unwrap().contains("Paris"), "{answer}");
}

#[test]
fn tokens_become_text_again() {
    for text in ["hello world", "  two  spaces ", "日本語🙂é", "line\nbreak\ttab"] {
        let reply =
            SERVER.ok("/tokenize", json!({"prompt": text, "add_special_tokens": false, "return_token_strs": true}));
        assert_eq!(reply["token_strs"].as_array().unwrap().len() as u64, reply["count"].as_u64().unwrap());
        assert_eq!(SERVER.ok("/detokenize", json!({"tokens": reply["tokens"]}))["prompt"], text);
    }
}

#[test]
fn the_server_describes_its_model() {
    let models = SERVER.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "quire-demo");
    assert_eq!(models["data"][0]["max_model_len"], 1024);
    assert_eq!(SERVER.get("/v1/models/quire-demo").json(), models["data"][0]);
    assert_eq!(SERVER.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(SERVER.get("/health").status, 200);
}

#[test]
fn defaults_come_from_the_checkpoint() {
    // generation_config.json of the demo model: temperature 0.6, top_p 0.95.
    let body = |extra: Value| {
        let mut body = json!({"prompt": "One day", "seed": 11, "max_tokens": 24, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        SERVER.ok(COMPLETIONS, body)["choices"][0]["text"].clone()
    };
    let by_default = body(json!({}));
    assert_eq!(by_default, body(json!({"temperature": 0.6, "top_p": 0.95})));
    assert_ne!(by_default, body(json!({"temperature": 2, "top_p": 1})));
}

#[test]
fn a_prompt_is_truncated_from_the_left() {
    let body = |prompt: Value, keep: Value| json!({"prompt": prompt, "truncate_prompt_tokens": keep, "echo": true, "max_tokens": 4, "temperature": 0});
    let cut = SERVER.ok(COMPLETIONS, body(json!([9, 8, 40, 41, 42]), json!(3)));
    assert_eq!(cut["usage"]["prompt_tokens"], 3);
    let short = SERVER.ok(COMPLETIONS, body(json!([40, 41, 42]), Value::Null));
    assert_eq!(cut["choices"][0]["text"], short["choices"][0]["text"]);
    // The echo of a text is what is left of it.
    let words = SERVER.ok(COMPLETIONS, body(json!("The capital of France"), json!(2)));
    let ids = SERVER.ok("/tokenize", json!({"prompt": "The capital of France"}))["tokens"].as_array().unwrap().clone();
    let last = SERVER.ok(COMPLETIONS, body(json!(ids[ids.len() - 2..]), Value::Null));
    assert_eq!(words["choices"][0]["text"], last["choices"][0]["text"]);
    // -1 leaves space for the output.
    let fitted = SERVER.ok(COMPLETIONS, body(json!(vec![40; 2000]), json!(-1)));
    assert_eq!(fitted["usage"]["prompt_tokens"], 1020);
}

#[test]
fn banned_words_are_not_generated() {
    let body = |banned: Value| {
        let body = json!({"messages": question(), "temperature": 0, "max_tokens": 16, "bad_words": banned});
        SERVER.ok(CHAT, body)["choices"][0]["message"]["content"].as_str().unwrap().to_string()
    };
    assert!(body(json!([])).contains("Paris"));
    assert!(!body(json!(["Paris"])).contains("Paris"));
}

#[test]
fn the_offset_of_a_token_is_the_position_of_its_text() {
    // A SentencePiece tokenizer: its first token has a space that the text does not have, and rare characters are one token per
    // byte.
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/reference/llama");
    let config = EngineConfig { model: ModelSource::Folder(folder), ..crate::common::config() };
    let server = Server::with(config, ServerOptions::default(), Duration::ZERO);
    for prompt in ["Hello", "Hello world, this is a prompt", "a 日本語 🙂é b"] {
        let body = json!({"prompt": prompt, "echo": true, "logprobs": 1, "max_tokens": 2, "temperature": 0});
        let choice = &server.ok(COMPLETIONS, body)["choices"][0];
        let list = |name: &str| choice["logprobs"][name].as_array().unwrap().clone();
        let offsets: Vec<usize> = list("text_offset").iter().map(|offset| offset.as_u64().unwrap() as usize).collect();
        assert!(offsets.is_sorted() && offsets[0] == 0, "{offsets:?}");
        assert_eq!(offsets[offsets.len() - 2], prompt.chars().count(), "the output begins where the prompt ends");
        for (token, &offset) in list("tokens").iter().zip(&offsets).filter(|(_, offset)| **offset > 0) {
            let (token, rest) = (token.as_str().unwrap(), choice["text"].as_str().unwrap().chars().skip(offset));
            assert!(
                token.starts_with("bytes:") || rest.collect::<String>().starts_with(token),
                "{token:?} at {offset}"
            );
        }
    }
}
