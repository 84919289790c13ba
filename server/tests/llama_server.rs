//! llama-server's native API: an answer is that of our completion, and the events of a stream add up to it.

use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Reply, Server, config};
use serde_json::{Value, json};
use server::ServerOptions;

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const COMPLETION: &str = "/completion";
const PROMPT: &str = "The capital of France is";

/// The events of a stream, which has no `[DONE]`.
fn events(path: &str, mut body: Value) -> Vec<Value> {
    body["stream"] = json!(true);
    let reply = SERVER.post(path, &body);
    assert_eq!((reply.status, reply.header("content-type")), (200, "text/event-stream"), "{}", reply.body);
    let blocks = reply.body.split_terminator("\n\n");
    blocks.map(|block| serde_json::from_str(block.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

/// An answer without times, after checking them.
fn stripped(mut answer: Value) -> Value {
    let timings = answer["timings"].take();
    let number = |name: &str| timings[name].as_f64().unwrap_or_else(|| panic!("{name}"));
    assert_eq!(number("predicted_n"), answer["tokens_predicted"].as_f64().unwrap());
    assert!(number("prompt_n") + number("cache_n") >= answer["tokens_evaluated"].as_f64().unwrap());
    assert!(number("prompt_ms") >= 0.0 && number("predicted_per_second") >= 0.0);
    answer["generation_settings"]["stream"].take();
    answer
}

/// Runs the request whole and as a stream, compares the two and returns the whole answer.
fn both(body: Value) -> Value {
    let whole = SERVER.ok(COMPLETION, body.clone());
    let events = events(COMPLETION, body);
    let (last, others) = events.split_last().unwrap();
    assert!(others.iter().all(|event| event["stop"] == false && event.get("timings").is_none()));
    let mut sum = last.clone();
    let joined = |name: &str| {
        others.iter().flat_map(|event| event[name].as_array().cloned().unwrap_or_default()).collect::<Vec<_>>()
    };
    assert_eq!((&last["content"], &last["tokens"]), (&json!(""), &json!([])));
    sum["content"] = others.iter().map(|event| event["content"].as_str().unwrap()).collect::<String>().into();
    assert_eq!(joined("tokens").len(), last["tokens_predicted"].as_u64().unwrap() as usize);
    if whole["tokens"] != json!([]) {
        sum["tokens"] = joined("tokens").into();
    }
    if whole.get("completion_probabilities").is_some() {
        sum["completion_probabilities"] = joined("completion_probabilities").into();
    }
    assert_eq!(stripped(sum), stripped(whole.clone()));
    whole
}

fn error(reply: &Reply) -> (u16, String, String) {
    let error = reply.json()["error"].clone();
    assert_eq!(error["code"], reply.status, "{error}");
    (reply.status, error["type"].as_str().unwrap().into(), error["message"].as_str().unwrap().into())
}

#[test]
fn an_answer_is_that_of_the_completion_whole_and_streamed() {
    let body = json!({"prompt": PROMPT, "temperature": 0, "n_predict": 8, "n_probs": 2, "return_tokens": true, "cache_prompt": true,
        "id_slot": -1, "samplers": [], "mirostat": 0, "repeat_penalty": 1.0, "seed": -1, "lora": []});
    let answer = both(body);
    let body = json!({"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "return_token_ids": true, "logprobs": 2});
    let completion = SERVER.ok("/v1/completions", body);
    let choice = &completion["choices"][0];
    assert_eq!((&answer["content"], &answer["tokens"]), (&choice["text"], &choice["token_ids"]));
    assert_eq!(answer["tokens_evaluated"], completion["usage"]["prompt_tokens"]);
    assert_eq!(answer["tokens_predicted"], completion["usage"]["completion_tokens"]);
    assert_eq!(
        (&answer["prompt"], &answer["stop_type"], &answer["truncated"]),
        (&json!(PROMPT), &json!("limit"), &json!(false))
    );
    let entries = answer["completion_probabilities"].as_array().unwrap();
    for (index, entry) in entries.iter().enumerate() {
        assert_eq!(
            (&entry["id"], &entry["logprob"]),
            (&answer["tokens"][index], &choice["logprobs"]["token_logprobs"][index])
        );
        assert_eq!(entry["token"], choice["logprobs"]["tokens"][index]);
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
    }
    // Drawn tokens with a seed, biases by id and by text, and a stop string.
    let biased = json!({"prompt": PROMPT, "seed": 5, "temperature": 1.2, "n_predict": 12, "logit_bias": [[40, 3], ["Paris", false]]});
    let ids = SERVER.ok("/tokenize", json!({"prompt": "Paris", "add_special_tokens": false}))["tokens"].clone();
    let mut map = json!({"40": 3});
    ids.as_array().unwrap().iter().for_each(|id| map[id.to_string()] = json!(-100));
    let ours = json!({"prompt": PROMPT, "seed": 5, "temperature": 1.2, "max_tokens": 12, "logit_bias": map});
    let text = SERVER.ok("/v1/completions", ours)["choices"][0]["text"].clone();
    assert_eq!(both(biased.clone())["content"], text);
    let text = text.as_str().unwrap();
    let stop: String = text.chars().skip(4).take(2).collect();
    let mut stopped = biased;
    stopped["stop"] = json!([stop]);
    let answer = both(stopped);
    assert_eq!((&answer["stop_type"], &answer["stopping_word"]), (&json!("word"), &json!(stop)));
    assert_eq!(answer["content"], text[..text.find(&stop).unwrap()]);
}

#[test]
fn without_a_limit_an_answer_ends_with_the_text_or_the_context() {
    for limit in [json!(null), json!(-1), json!(100_000)] {
        let answer = SERVER.ok(COMPLETION, json!({"prompt": PROMPT, "n_predict": limit, "seed": 1}));
        let full = answer["tokens_cached"] == 1024;
        assert!(full && answer["stop_type"] == "limit" || answer["stop_type"] == "eos", "{answer}");
    }
    let filled = SERVER.ok(COMPLETION, json!({"prompt": PROMPT, "n_predict": 0}));
    assert_eq!((&filled["tokens_predicted"], &filled["content"]), (&json!(0), &json!("")));
    let constrained = json!({"prompt": PROMPT, "json_schema": {"const": 5}, "grammar": "", "n_predict": 20});
    assert_eq!(SERVER.ok(COMPLETION, constrained)["content"], "5");
    let grammar =
        json!({"prompt": PROMPT, "grammar": "root ::= \"yes\"", "json_schema": {"const": 5}, "n_predict": 20});
    assert_eq!(SERVER.ok(COMPLETION, grammar)["content"], "yes");
}

#[test]
fn prompts_are_texts_ids_both_or_lists_of_these() {
    let ids = |text: &str, special: bool| {
        let body = json!({"prompt": text, "add_special_tokens": special});
        SERVER.ok("/tokenize", body)["tokens"].as_array().unwrap().clone()
    };
    let ask = |prompt: Value| SERVER.ok(COMPLETION, json!({"prompt": prompt, "temperature": 0, "n_predict": 4}));
    let text = ask(json!(PROMPT));
    assert_eq!(ask(json!(ids(PROMPT, true)))["content"], text["content"]);
    // The first text has the special tokens.
    let mixed = [vec![json!("The capital")], ids(" of France is", false)].concat();
    let same = [ids("The capital", true), ids(" of France is", false)].concat();
    assert_eq!(ask(json!(mixed))["content"], ask(json!(same))["content"]);
    assert_eq!(ask(json!(mixed))["tokens_evaluated"], same.len());
    let list = ask(json!([PROMPT, "Hello"]));
    assert_eq!((&list[0]["content"], &list[1]["content"]), (&text["content"], &ask(json!("Hello"))["content"]));
    assert_eq!((list[1]["index"].as_u64(), list.as_array().unwrap().len()), (Some(1), 2));
    assert_eq!(ask(json!([PROMPT])).as_array().unwrap().len(), 1);
    let streamed = events(COMPLETION, json!({"prompt": [PROMPT, "Hello"], "temperature": 0, "n_predict": 4}));
    for (prompt, whole) in list.as_array().unwrap().iter().enumerate() {
        let of = streamed.iter().filter(|event| event["index"] == prompt);
        assert_eq!(of.filter_map(|event| event["content"].as_str()).collect::<String>(), whole["content"]);
    }
    let chosen = json!({"prompt": PROMPT, "n_predict": 1, "response_fields": ["content", "generation_settings/n_predict", "nothing"]});
    let answer = SERVER.ok(COMPLETION, chosen);
    assert_eq!(answer.as_object().unwrap().keys().collect::<Vec<_>>(), ["content", "n_predict"]);
    assert_eq!(answer["n_predict"], 1);
}

#[test]
fn the_server_describes_itself_and_renders_and_embeds() {
    let props = SERVER.get("/props").json();
    assert_eq!(
        (&props["default_generation_settings"]["n_ctx"], &props["model_alias"]),
        (&json!(1024), &json!("quire-demo"))
    );
    assert!(props["chat_template"].as_str().unwrap().contains("messages"), "{props}");
    assert!(props["default_generation_settings"]["params"]["temperature"].is_number());
    assert_eq!(SERVER.get("/slots").status, 200);
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let prompt = SERVER.ok("/apply-template", json!({"messages": messages}))["prompt"].clone();
    let rendered = SERVER.ok("/v1/chat/completions/render", json!({"messages": messages}));
    let tokens = SERVER.ok("/tokenize", json!({"prompt": prompt, "add_special_tokens": false}))["tokens"].clone();
    assert_eq!(tokens, rendered["token_ids"]);
    let ours = SERVER.ok("/v1/embeddings", json!({"input": ["a", "b"], "use_activation": true}));
    for body in [json!({"content": ["a", "b"]}), json!({"input": ["a", "b"], "embd_normalize": 2})] {
        let vectors = SERVER.ok("/embedding", body);
        for (index, one) in vectors.as_array().unwrap().iter().enumerate() {
            assert_eq!((&one["index"], &one["embedding"][0]), (&json!(index), &ours["data"][index]["embedding"]));
        }
    }
    let raw = SERVER.ok("/embedding", json!({"content": "a", "embd_normalize": -1}));
    assert_eq!(raw[0]["embedding"][0], SERVER.ok("/v1/embeddings", json!({"input": "a"}))["data"][0]["embedding"]);
}

#[test]
fn errors_have_the_form_of_the_api() {
    let options = ServerOptions { api_keys: vec!["k".into()], ..ServerOptions::default() };
    let keyed = Server::with(config(), options, Duration::ZERO);
    assert_eq!(error(&keyed.post(COMPLETION, &json!({"prompt": "a"}))).1, "authentication_error");
    assert_eq!(error(&SERVER.post(COMPLETION, &json!({"prompt": "a", "model": "other"}))).1, "not_found_error");
    assert_eq!(error(&SERVER.get(COMPLETION)).0, 405);
    let reply = SERVER.post(COMPLETION, &json!({"prompt": vec![5; 2000]}));
    assert_eq!(error(&reply).1, "exceed_context_size_error");
    let body = reply.json();
    assert_eq!((&body["error"]["n_prompt_tokens"], &body["error"]["n_ctx"]), (&json!(2000), &json!(1024)));
    // As in `curl -d`.
    assert_eq!(SERVER.send("POST", COMPLETION, &[], b"{\"prompt\": \"a\", \"n_predict\": 1}").status, 200);
    for (path, fields, param) in [
        (COMPLETION, json!({"prompt": null}), "prompt"),
        (COMPLETION, json!({"prompt": []}), "prompt"),
        (COMPLETION, json!({"prompt": ["a", 99_999_999]}), "prompt"),
        (COMPLETION, json!({"prompt": ["a", {"b": 1}]}), "prompt"),
        (COMPLETION, json!({"n_predict": "x"}), "n_predict"),
        (COMPLETION, json!({"n_probs": 1000}), "n_probs"),
        (COMPLETION, json!({"temperature": -1}), "temperature"),
        (COMPLETION, json!({"repeat_penalty": 1.3}), "repeat_penalty"),
        (COMPLETION, json!({"repeat_penalty": "x", "repeat_last_n": -1}), "repeat_penalty"),
        (COMPLETION, json!({"mirostat": 2}), "mirostat"),
        (COMPLETION, json!({"dry_multiplier": 0.8}), "dry_multiplier"),
        (COMPLETION, json!({"samplers": ["temperature", "top_k"]}), "samplers"),
        (COMPLETION, json!({"lora": [{"id": 0, "scale": 1}]}), "lora"),
        (COMPLETION, json!({"logit_bias": [[40]]}), "logit_bias"),
        (COMPLETION, json!({"logit_bias": [[40, 1000]]}), "logit_bias"),
        (COMPLETION, json!({"logit_bias": 5}), "logit_bias"),
        (COMPLETION, json!({"response_fields": 5}), "response_fields"),
        ("/infill", json!({"input_prefix": "a"}), "input_prefix"),
        ("/infill", json!({"input_prefix": 5}), "input_prefix"),
        ("/infill", json!({"input_extra": [{"filename": "x"}]}), "input_extra[0].text"),
        ("/apply-template", json!({"messages": []}), "messages"),
        ("/embedding", json!({"content": []}), "content"),
        ("/embedding", json!({"content": "word ".repeat(3000)}), "content"),
        ("/embedding", json!({"content": "a", "embd_normalize": 1}), "embd_normalize"),
    ] {
        let mut body = match path {
            COMPLETION => json!({"prompt": "a", "n_predict": 1}),
            _ => json!({}),
        };
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (status, kind, message) = error(&SERVER.post(path, &body));
        assert_eq!(status, 400, "{fields}: {message}");
        assert!(["invalid_request_error", "exceed_context_size_error"].contains(&kind.as_str()), "{kind}");
        assert!(message.starts_with(&format!("{param}: ")), "{fields}: {message}");
    }
}

#[test]
fn tokens_of_a_text_have_the_fields_of_llama_server() {
    let text = "Paris, Äpfel 🙂";
    let ours = SERVER.ok("/tokenize", json!({"prompt": text, "add_special_tokens": false}))["tokens"].clone();
    assert_eq!(SERVER.ok("/tokenize", json!({"content": text})), json!({"tokens": ours}));
    let pieces = SERVER.ok("/tokenize", json!({"content": text, "with_pieces": true}))["tokens"].clone();
    let (mut ids, mut bytes) = (Vec::new(), Vec::new());
    for token in pieces.as_array().unwrap() {
        ids.push(token["id"].clone());
        match token["piece"].as_str() {
            Some(piece) => bytes.extend_from_slice(piece.as_bytes()),
            None => bytes.extend(token["piece"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8)),
        }
    }
    assert_eq!((json!(ids), String::from_utf8(bytes).unwrap().as_str()), (ours.clone(), text));
    assert!(
        pieces.as_array().unwrap().iter().any(|token| token["piece"].is_array()),
        "a part of a character: {pieces}"
    );
    let special = |flag: bool| SERVER.ok("/tokenize", json!({"content": text, "add_special": flag}))["tokens"].clone();
    let with = SERVER.ok("/tokenize", json!({"prompt": text}))["tokens"].clone();
    assert_eq!((special(false), special(true)), (ours.clone(), with));
    assert_eq!(SERVER.ok("/detokenize", json!({"tokens": ours})), json!({"prompt": text, "content": text}));
    let reply = SERVER.post("/tokenize", &json!({"content": text, "parse_special": false}));
    assert_eq!((reply.status, reply.error()["param"].as_str()), (400, Some("parse_special")), "{}", reply.body);
}
