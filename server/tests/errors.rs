//! Invalid requests get a fitting status, the error object and the name of the field.

use std::sync::LazyLock;

use crate::common::Server;
use serde_json::{Value, json};

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// A valid request with these fields replaced.
fn request(path: &str, fields: &Value) -> Value {
    let mut body = match path {
        CHAT => json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        _ => json!({"prompt": "a", "max_tokens": 2}),
    };
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn assert_names(path: &str, fields: Value, param: &str) {
    let reply = SERVER.post(path, &request(path, &fields));
    assert_eq!(reply.status, 400, "{fields}: {}", reply.body);
    let error = reply.error();
    assert_eq!(error["param"], param, "{fields}: {error}");
    assert!(error["message"].as_str().unwrap().contains(param), "{fields}: {error}");
}

#[test]
fn a_field_out_of_range_or_of_the_wrong_type_is_named() {
    for path in [COMPLETIONS, CHAT] {
        for (param, bad) in [
            ("temperature", json!([-0.1, 2.1, 1e9, "hot", [1]])),
            ("user", json!([true, [1], 0.5, "é".repeat(1000)])),
            ("request_id", json!(["", "a b", "x".repeat(129), 5])),
            ("n_predict", json!([-2, "many"])),
            ("documents", json!(["a", 5])),
            ("top_p", json!([0, -0.5, 1.5, "x"])),
            ("top_k", json!([-2, 1.5, 9_007_199_254_740_993u64])),
            ("min_p", json!([-0.1, 1.1])),
            ("presence_penalty", json!([2.5, -2.5])),
            ("frequency_penalty", json!([3, -3])),
            ("repetition_penalty", json!([0, -1, 1e-320, 1e308])),
            ("n", json!([0, -1, "two", 1_000_000_000])),
            ("max_tokens", json!([-1, "many", 1.5])),
            ("min_tokens", json!([-1, 3])),
            ("seed", json!(["abc", 1e30])),
            ("stop", json!([[""], 5, {"a": 1}, vec!["a"; 17]])),
            ("stop_token_ids", json!([["a"], [-1], [1_000_000]])),
            ("logit_bias", json!([{"abc": 1}, {"1": "x"}, {"1": 101}, {"99999999": 1}, [1]])),
            ("allowed_token_ids", json!([[], [-1], "a"])),
            ("bad_words", json!([[""], 5])),
            ("stream", json!(["yes", 1])),
            ("stream_options", json!([{"include_usage": true}, 1])),
            ("prompt_logprobs", json!([-2, 100])),
            ("priority", json!(["high", 1e12])),
            ("truncate_prompt_tokens", json!([0, -2])),
        ] {
            for value in bad.as_array().unwrap() {
                assert_names(path, json!({param: value}), param);
            }
        }
    }
}

#[test]
fn unsupported_fields_are_refused_by_name_and_never_ignored() {
    for (path, param, value) in [
        (COMPLETIONS, "suffix", json!("the end")),
        (CHAT, "tool_choice", json!("required")),
        (CHAT, "chat_template", json!("{{ x }}")),
        (CHAT, "echo", json!(true)),
        (COMPLETIONS, "reasoning", json!({"effort": "low"})),
        (COMPLETIONS, "documents", json!([{"title": "a"}])),
    ] {
        assert_names(path, json!({param: value}), param);
    }
    // What would change the answer on another server is refused with each of its names.
    let foreign = json!({"mirostat": 2, "xtc_probability": 0.5, "dry_multiplier": 0.8, "dynatemp_range": 0.2, "top_n_sigma": 1.0,
        "repeat_penalty": 1.1, "stop_regex": "a+", "mm_processor_kwargs": {"x": 1}, "samplers": ["top_k"], "n_probs": 3,
        "enable_thinking": false, "thinking": {"type": "disabled"}, "separate_reasoning": false, "truncation_side": "right",
        "options": {"num_ctx": 5}, "format": "json", "lora_path": "a", "no_stop_trim": true, "do_sample": false,
        "return_tokens_as_token_ids": true, "logits_processors": ["x"], "web_search_options": {}, "modalities": ["audio"],
        "prompt_embeds": "x", "function_call": "auto", "no_repeat_ngram_size": 3, "thinking_token_budget": 0});
    for path in [COMPLETIONS, CHAT] {
        for (name, value) in foreign.as_object().unwrap() {
            assert_names(path, json!({name.as_str(): value}), name);
        }
    }
    for (path, body) in [
        ("/v1/embeddings", json!({"input": "a", "normalize": false})),
        ("/v1/embeddings", json!({"input": "a", "truncation_side": "middle"})),
        ("/v1/embeddings", json!({"input": "a", "use_activation": false})),
        ("/pooling", json!({"input": "a", "dimensions": 3})),
        ("/score", json!({"text_1": "a", "text_2": "b", "instruction": "judge"})),
        ("/score", json!({"text_1": "a", "text_2": "b", "raw_scores": true})),
        ("/rerank", json!({"query": "a", "documents": ["b"], "texts": ["b"]})),
        ("/v1/responses", json!({"input": "a", "logprobs": true})),
        ("/v1/responses", json!({"input": "a", "reasoning_effort": "low"})),
    ] {
        let reply = SERVER.post(path, &body);
        assert!(
            reply.status == 400 && body.get(reply.error()["param"].as_str().unwrap()).is_some(),
            "{body}: {}",
            reply.body
        );
    }
    // Neutral values are accepted, and what changes no answer.
    let neutral = json!({"suffix": null, "best_of": 1, "use_beam_search": false, "length_penalty": 1.0,
        "early_stopping": false, "response_format": {"type": "text"}, "stop": [], "mirostat": 0, "mirostat_tau": 5.0,
        "xtc_probability": 0.0, "xtc_threshold": 0.1, "dry_multiplier": 0, "dry_base": 1.75, "repeat_penalty": 1.0,
        "repeat_last_n": 64, "top_n_sigma": -1.0, "samplers": [], "grammar": "", "modalities": ["text"], "tools": [],
        "separate_reasoning": true, "truncation_side": "left", "n_probs": 0, "cache_prompt": true, "store": true, "user": 5,
        "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k", "unheard_of": {"a": 1}});
    let text = |mut more: Value| {
        more["temperature"] = json!(0);
        SERVER.ok(COMPLETIONS, request(COMPLETIONS, &more))["choices"].clone()
    };
    assert_eq!(text(neutral), text(json!({})));
}

#[test]
fn names_of_other_servers_for_the_same_field_have_its_effect() {
    let tokens = |path: &str, more: Value| {
        let mut body = request(path, &json!({"ignore_eos": true, "temperature": 0}));
        body.as_object_mut().unwrap().remove("max_tokens");
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        SERVER.ok(path, body)["usage"]["completion_tokens"].as_u64().unwrap()
    };
    for path in [COMPLETIONS, CHAT] {
        for name in ["max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict"] {
            assert_eq!(tokens(path, json!({name: 3})), 3, "{name}");
        }
    }
    assert_eq!(tokens(COMPLETIONS, json!({})), 16);
    assert!(tokens(COMPLETIONS, json!({"n_predict": -1})) > 900);
    let ended = json!({"ignore_eos": false, "max_tokens": 9, "stop_token_ids": (0..250).collect::<Vec<u32>>()});
    let early = tokens(COMPLETIONS, ended.clone());
    let mut held = ended;
    held["min_new_tokens"] = json!(early + 1);
    assert!(early < 9 && tokens(COMPLETIONS, held) > early);
    let named = SERVER.ok(CHAT, request(CHAT, &json!({"request_id": "mine"})));
    assert_eq!(named["id"], "chatcmpl-mine");
}

/// C10 of public reports.
#[test]
fn lists_that_leave_no_token_are_refused_or_end_their_request() {
    let id = SERVER.ok("/tokenize", json!({"prompt": "P", "add_special_tokens": false}))["tokens"][0].clone();
    let eos = SERVER.ok("/tokenize", json!({"prompt": "", "add_special_tokens": true}))["tokens"].clone();
    for (fields, param) in [
        (json!({"allowed_token_ids": [id], "bad_words": ["P"]}), "bad_words"),
        // The second one would be banned.
        (json!({"allowed_token_ids": [id], "bad_words": ["PP"]}), "bad_words"),
        (json!({"allowed_token_ids": [id], "stop_token_ids": [id], "min_tokens": 1}), "min_tokens"),
    ] {
        for path in [COMPLETIONS, CHAT] {
            assert_names(path, fields.clone(), param);
        }
    }
    let allowed = json!({"allowed_token_ids": [id], "bad_words": ["Pq"], "max_tokens": 2});
    assert_eq!(SERVER.ok(COMPLETIONS, request(COMPLETIONS, &allowed))["choices"][0]["text"], "PP", "{eos}");
    for fields in [
        json!({"allowed_token_ids": [id], "structured_outputs": {"regex": "[0-9]{3}"}}),
        json!({"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]}),
        json!({"structured_outputs": {"choice": ["Pa"]}, "bad_words": ["a"], "temperature": 0}),
    ] {
        let reply = SERVER.post(COMPLETIONS, &request(COMPLETIONS, &fields));
        let message = reply.error()["message"].as_str().unwrap().to_string();
        assert!(reply.status == 400 && message.contains("left by allowed_token_ids and bad_words"), "{}", reply.body);
    }
    // Where a text is complete, it ends.
    let complete = json!({"structured_outputs": {"regex": "Pa?"}, "bad_words": ["a"], "max_tokens": 5});
    assert_eq!(SERVER.ok(COMPLETIONS, request(COMPLETIONS, &complete))["choices"][0]["text"], "P");
}

#[test]
fn routes_of_llama_server_have_no_version() {
    let models = |path: &str| SERVER.get(path).json()["data"][0]["id"].clone();
    assert_eq!(models("/models"), models("/v1/models"));
    let text = |path: &str| SERVER.ok(path, request(CHAT, &json!({"temperature": 0})))["choices"].clone();
    assert_eq!(text("/chat/completions"), text(CHAT));
    assert_eq!(
        SERVER.ok("/embeddings", json!({"input": "a"}))["data"],
        SERVER.ok("/v1/embeddings", json!({"input": "a"}))["data"]
    );
    assert_eq!(SERVER.post("/responses", &json!({"input": "a", "max_output_tokens": 1})).status, 200);
}

#[test]
fn invalid_searches_are_refused_by_field() {
    for path in [COMPLETIONS, CHAT] {
        for (fields, param) in [
            (json!({"best_of": 0}), "best_of"),
            (json!({"best_of": "two"}), "best_of"),
            (json!({"best_of": 129}), "best_of"),
            (json!({"n": 3, "best_of": 2}), "best_of"),
            (json!({"best_of": 2, "stream": true}), "best_of"),
            (json!({"use_beam_search": 1}), "use_beam_search"),
            (json!({"use_beam_search": true, "n": 3, "best_of": 2}), "best_of"),
            (json!({"use_beam_search": true, "best_of": 4, "beam_width": 4}), "best_of"),
            (json!({"use_beam_search": true, "beam_width": 0}), "beam_width"),
            (json!({"use_beam_search": true, "n": 3, "beam_width": 2}), "beam_width"),
            (json!({"use_beam_search": true, "length_penalty": "long"}), "length_penalty"),
            (json!({"use_beam_search": true, "length_penalty": 1e39}), "length_penalty"),
            (json!({"use_beam_search": true, "early_stopping": "never"}), "early_stopping"),
            (json!({"use_beam_search": true, "stop": ["a"]}), "stop"),
            // Without a search these would have no effect.
            (json!({"beam_width": 2}), "beam_width"),
            (json!({"length_penalty": 0.5}), "length_penalty"),
            (json!({"use_beam_search": false, "early_stopping": true}), "early_stopping"),
        ] {
            assert_names(path, fields, param);
        }
    }
    // The limit of the engine: beams run at once, other sequences wait.
    let config = engine::EngineConfig { max_num_seqs: 4, ..crate::common::config() };
    let server = Server::with(config, Default::default(), std::time::Duration::ZERO);
    let beams = json!({"use_beam_search": true, "beam_width": 5});
    let reply = server.post(COMPLETIONS, &request(COMPLETIONS, &beams));
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("beam_width")));
    assert!(reply.body.contains("--max-num-seqs"), "{}", reply.body);
}

#[test]
fn a_message_says_what_was_found_and_expected_and_what_to_do() {
    let long = "é".repeat(5000);
    for (path, fields, message) in [
        (COMPLETIONS, json!({"top_p": 1.5}), "top_p: found 1.5, expected a number above 0 and at most 1"),
        (COMPLETIONS, json!({"n": 0}), "n: found 0, expected an integer from 1 to 128"),
        (COMPLETIONS, json!({"seed": "x"}), "seed: found \"x\", expected a 64-bit integer"),
        (COMPLETIONS, json!({"min_tokens": -1}), "min_tokens: found -1, expected an integer of at least 0"),
        (COMPLETIONS, json!({"echo": vec![0; 100]}), "echo: found a list of 100 items, expected true or false"),
        (
            COMPLETIONS,
            json!({"top_k": long}),
            &format!("top_k: found \"{}…, expected an integer from -1 to 4294967295", &long[..2 * 59]),
        ),
        (
            COMPLETIONS,
            json!({"stop": vec!["a"; 17]}),
            "stop: found a list of 17 items, expected a string or a list of up to 16 strings, each non-empty and at most \
             1024 bytes long",
        ),
        (
            COMPLETIONS,
            json!({"stop_token_ids": vec![5; 1025]}),
            "stop_token_ids: found 1025 items, expected at most 1024; send fewer or raise --max-stop-token-ids",
        ),
        (
            COMPLETIONS,
            json!({"stream": true, "prompt_logprobs": 1}),
            "prompt_logprobs: found together with stream: true, expected only one of the two; remove one",
        ),
        (
            COMPLETIONS,
            json!({"beam_width": 2}),
            "beam_width: found without use_beam_search: true, expected both or neither; add or remove one",
        ),
        (
            COMPLETIONS,
            json!({"suffix": "x"}),
            "suffix: not supported by this server; remove it: this model does not support fill-in-the-middle",
        ),
        (
            COMPLETIONS,
            json!({"prompt": vec![5; 1029]}),
            "prompt: this model's maximum context length is 1024 tokens, found a prompt of 1029 tokens, expected at most \
             1023; shorten the prompt",
        ),
        (CHAT, json!({"messages": []}), "messages: found an empty list, expected at least one message"),
        (CHAT, json!({"messages": null}), "messages: found null, expected a list of at least one message"),
    ] {
        let error = SERVER.post(path, &request(path, &fields)).error();
        assert_eq!(error["message"], message);
        assert_eq!(error["type"], "invalid_request_error");
    }
}

#[test]
fn a_wrong_message_is_named_by_its_place() {
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    for (messages, param) in [
        (json!("hi"), "messages"),
        (json!(["hi"]), "messages[0]"),
        (json!([{"content": "hi"}]), "messages[0].role"),
        (user(json!(5)), "messages[0].content"),
        (user(json!(["hi"])), "messages[0].content[0]"),
        (user(json!([{"type": "text"}])), "messages[0].content[0].text"),
        (user(json!([{"type": "text", "text": "a"}, {"type": "image_url"}])), "messages[0].content[1].type"),
    ] {
        assert_names(CHAT, json!({"messages": messages}), param);
    }
}

#[test]
fn an_integer_may_be_written_with_a_point() {
    let body = |n: &str, id: &str| {
        let body = format!(r#"{{"prompt": [{id}, 6], "n": {n}, "max_tokens": 1}}"#);
        SERVER.send("POST", COMPLETIONS, &[("Content-Type", "application/json")], body.as_bytes())
    };
    assert_eq!(body("2.0", "5.0").json()["choices"].as_array().unwrap().len(), 2);
    for (n, id, param) in [("2.5", "5", "n"), ("1e300", "5", "n"), ("1", "5.5", "prompt"), ("1", "1e300", "prompt")] {
        assert_eq!(body(n, id).error()["param"], param, "{n} {id}");
    }
}

#[test]
fn the_last_of_equal_names_counts_and_nesting_is_bounded() {
    let send = |body: &str| SERVER.send("POST", COMPLETIONS, &[("Content-Type", "application/json")], body.as_bytes());
    let twice = r#"{"prompt": "a", "max_tokens": "x", "max\u005ftokens": 2, "ignore_eos": true}"#;
    assert_eq!(send(twice).json()["usage"]["completion_tokens"], 2);
    let nested = |depth: usize| {
        send(&format!("{{\"prompt\": \"a\", \"max_tokens\": 1, \"x\": {}{}}}", "[".repeat(depth), "]".repeat(depth)))
    };
    assert_eq!(nested(126).status, 200);
    let reply = nested(127);
    assert!(reply.status == 400 && reply.body.contains("expected at most 127"), "{}", reply.body);
}

#[test]
fn a_prompt_has_one_of_four_forms() {
    let bad = json!([null, 5, true, {"a": 1}, [], [[]], ["a", 1], [1, "a"], [-1], [1.5], [99_999_999], ""]);
    for prompt in bad.as_array().unwrap() {
        let reply = SERVER.post(COMPLETIONS, &json!({"prompt": prompt, "add_special_tokens": false, "max_tokens": 1}));
        assert_eq!(reply.status, 400, "{prompt}: {}", reply.body);
        assert_eq!(reply.error()["param"], "prompt");
    }
}

#[test]
fn a_request_over_the_context_is_refused_with_the_numbers() {
    let context = 1024;
    let error = SERVER.post(COMPLETIONS, &json!({"prompt": vec![5; context + 5], "max_tokens": 1})).error();
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("1024") && message.contains("1029"), "{message}");
    // A limit beyond the rest of the context is cut to it: clients send one fixed limit with every prompt.
    for limit in [25, 32_000, 1_000_000_000_000_000_000_usize] {
        let body = json!({"prompt": vec![5; 1000], "max_tokens": limit, "ignore_eos": true, "logprobs": 0});
        let answer = SERVER.ok(COMPLETIONS, body);
        assert_eq!(
            (&answer["usage"]["completion_tokens"], &answer["choices"][0]["finish_reason"]),
            (&json!(24), &json!("length"))
        );
    }
    let chat =
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 200_000, "temperature": 0});
    assert_eq!(SERVER.ok(CHAT, chat)["choices"][0]["finish_reason"], "stop");
    let error = SERVER.post(COMPLETIONS, &json!({"prompt": vec![5; 1000], "max_tokens": 25, "min_tokens": 25})).error();
    assert_eq!((&error["param"], error["message"].as_str().unwrap().contains("24")), (&json!("min_tokens"), true));
    // If the token limit leaves no space for a prompt, the error names the limit.
    let error = SERVER.post(COMPLETIONS, &json!({"prompt": "a", "truncate_prompt_tokens": -1, "max_tokens": 5000}));
    let error = error.error();
    assert_eq!((&error["param"], &error["code"]), (&json!("max_tokens"), &json!("context_length_exceeded")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("1024") && message.contains("5000"), "{message}");
    // A request that exactly fits is served.
    let whole = SERVER.ok(COMPLETIONS, json!({"prompt": vec![5; 1000], "max_tokens": 24, "ignore_eos": true}));
    assert_eq!(whole["usage"]["total_tokens"], context);
}

#[test]
fn the_body_is_a_json_object_of_a_bounded_size() {
    let json_type = [("Content-Type", "application/json")];
    let many = format!("{{{}\"prompt\": \"a\"}}", "\"a\": 1,".repeat(1024));
    for body in [
        &b""[..],
        b"{",
        b"[]",
        b"null",
        b"42",
        b"{\"a\":1,}",
        many.as_bytes(),
        b"\xff\xfe",
        b"{\"prompt\": \"\xff\"}",
        b"{\"prompt\": \"a\", \"top_p\": NaN}",
    ] {
        let reply = SERVER.send("POST", COMPLETIONS, &json_type, body);
        assert_eq!(reply.status, 400);
        reply.error();
    }
    let reply = SERVER.send("POST", COMPLETIONS, &json_type, &vec![b' '; 20 << 20]);
    assert_eq!(reply.status, 413);
    reply.error();
    let reply = SERVER.send("POST", COMPLETIONS, &[("Content-Type", "text/plain")], b"{}");
    assert_eq!(reply.status, 415);
    reply.error();
}

#[test]
fn a_large_body_is_read_like_a_small_one() {
    let pad = " ".repeat(1 << 20);
    let send = |body: &str| SERVER.send("POST", COMPLETIONS, &[("Content-Type", "application/json")], body.as_bytes());
    let body = r#""prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}"#;
    let (small, large) = (send(&format!("{{{body}")), send(&format!("{{{pad}{body}")));
    assert_eq!((small.status, large.status), (200, 200));
    assert_eq!(small.json()["choices"], large.json()["choices"]);
    let reply = send(&format!("{{{pad}\"prompt\": [{}[]]}}", "[],".repeat(1 << 20)));
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("prompt")));
}

#[test]
fn unknown_paths_methods_and_models_are_told_apart() {
    for (reply, status) in [
        (SERVER.get("/v1/no/such/path"), 404),
        (SERVER.get(COMPLETIONS), 405),
        (SERVER.send("DELETE", "/health", &[], b""), 405),
        (SERVER.post("/v1/models", &json!({})), 405),
        (SERVER.post(COMPLETIONS, &json!({"model": "gpt-9", "prompt": "a"})), 404),
        (SERVER.get("/v1/models/some/other"), 404),
        (SERVER.get("/v1/models/%00%ff"), 400),
    ] {
        assert_eq!(reply.status, status, "{}", reply.body);
        reply.error();
    }
    assert!(SERVER.post(COMPLETIONS, &json!({"model": "gpt-9", "prompt": "a"})).body.contains("gpt-9"));
    let long = SERVER.get(&format!("/{}", "x".repeat(5000)));
    assert!(long.status == 404 && long.body.len() < 400, "{}", long.body);
}

#[test]
fn a_refusal_comes_before_a_stream_begins() {
    let reply = SERVER.post(CHAT, &request(CHAT, &json!({"temperature": -1, "stream": true})));
    assert_eq!(reply.status, 400);
    assert_eq!(reply.error()["param"], "temperature");
}

#[test]
fn a_role_that_the_template_rejects_is_refused_with_its_message() {
    let reply = SERVER.post(CHAT, &json!({"messages": [{"role": "wizard", "content": "hi"}]}));
    assert_eq!(reply.status, 400);
    assert!(reply.error()["message"].as_str().unwrap().contains("wizard"));
}
