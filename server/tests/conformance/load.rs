//! Many requests at a time, more than the cache holds, malformed ones, and the metrics about them.

use std::time::Duration;

use engine::EngineConfig;
use serde_json::{Value, json};
use server::ServerOptions;

use super::client::*;
use crate::common::{Server, config, slow};

/// LOD-001: many streams all end with their tokens. SRV-006: the server stays healthy meanwhile.
#[test]
fn many_streams_at_once_are_all_complete() {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..48)
            .map(|i| {
                scope.spawn(move || {
                    let more = json!({"prompt": format!("Number {i}:"), "max_tokens": 20, "ignore_eos": true,
                        "stream_options": {"include_usage": true}});
                    let chunks = stream(COMPLETIONS, &with(&completion(), &more));
                    chunks.last().unwrap()["usage"]["completion_tokens"].clone()
                })
            })
            .collect();
        assert_eq!(get("/health").status, 200);
        for thread in threads {
            assert_eq!(thread.join().unwrap(), 20);
        }
    });
}

/// LOD-006.
#[test]
fn one_connection_carries_many_requests() {
    for i in 0..30 {
        assert_eq!(get("/v1/models").status, 200);
        ask(COMPLETIONS, &with(&completion(), &json!({"max_tokens": 1 + i % 3})));
    }
}

/// LOD-007: many more requests than the cache holds. LIF-008: the flag sets the context length.
#[test]
fn requests_beyond_the_cache_are_queued() {
    let config = EngineConfig { kv_cache_memory_bytes: Some(2 << 20), max_model_len: Some(128), ..config() };
    let server = Server::with(config, ServerOptions::default(), Duration::ZERO);
    assert_eq!(server.get("/v1/models").json()["data"][0]["max_model_len"], 128);
    let body = |i: usize| json!({"prompt": format!("{i} is"), "max_tokens": 100, "temperature": 0, "ignore_eos": true});
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..24)
            .map(|i| {
                (
                    i,
                    scope.spawn({
                        let server = &server;
                        move || ask_at(server, COMPLETIONS, &body(i))
                    }),
                )
            })
            .collect();
        for (i, thread) in threads {
            let found = thread.join().unwrap();
            assert_eq!(found["usage"]["completion_tokens"], 100);
            assert_eq!(texts(&found), texts(&ask(COMPLETIONS, &body(i))), "the same as in a large pool");
        }
    });
    let refused = server.post(COMPLETIONS, &json!({"prompt": vec![5; 200], "max_tokens": 1}));
    assert_eq!(refused.status, 400);
}

/// LOD-008.
#[test]
fn a_short_request_ends_while_a_long_one_runs() {
    let server = Server::with(slow(config()), ServerOptions::default(), Duration::ZERO);
    let body = with(&completion(), &json!({"max_tokens": 900, "ignore_eos": true})).to_string();
    let long = server.open("POST", COMPLETIONS, &[("Content-Type", "application/json")], body.as_bytes());
    server.until("the long one runs", |s| s.metric("vllm:generation_tokens_total") > 0.0);
    for _ in 0..3 {
        ask_at(&server, COMPLETIONS, &with(&completion(), &json!({"max_tokens": 2})));
    }
    // Three short requests took less time than nine hundred tokens.
    assert_eq!(server.metric("vllm:num_requests_running"), 1.0);
    drop(long);
}

/// FUZ-001 FUZ-002: a valid request, changed pseudo-randomly in many ways. Always a response, never a 500.
#[test]
fn broken_requests_are_answered_and_leave_nothing_behind() {
    let before = texts(&ask(COMPLETIONS, &completion()));
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let wild = [
        json!(null),
        json!(-1),
        json!(1e300),
        json!("x"),
        json!([[]]),
        json!({"a": {}}),
        json!(true),
        json!(0.5),
        json!(u64::MAX),
        json!("\u{0}"),
    ];
    let names = [
        "prompt",
        "messages",
        "input",
        "max_tokens",
        "temperature",
        "stop",
        "n",
        "logit_bias",
        "tools",
        "tool_choice",
        "response_format",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "seed",
        "guided_json",
        "structured_outputs",
        "model",
        "text",
        "dimensions",
        "encoding_format",
        "tokens",
        "chat_template_kwargs",
        "best_of",
        "use_beam_search",
    ];
    let bases = [
        (COMPLETIONS, with(&completion(), &json!({"max_tokens": 2}))),
        (CHAT, with(&chat(), &json!({"max_tokens": 2}))),
        ("/v1/responses", json!({"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 2})),
        ("/v1/embeddings", json!({"input": ["hi"]})),
        ("/tokenize", json!({"prompt": "hi"})),
        ("/detokenize", json!({"tokens": [5]})),
    ];
    let mut refused = 0;
    for round in 0..600 {
        let (path, base) = &bases[round % bases.len()];
        let mut body = base.clone();
        body[names[next(names.len())]] = wild[next(wild.len())].clone();
        let mut bytes = body.to_string().into_bytes();
        if round % 3 == 0 {
            let place = next(bytes.len());
            bytes[place] = next(256) as u8;
        }
        let answer = send(path, &bytes);
        assert!([200, 400, 404].contains(&answer.status), "{}: {}", String::from_utf8_lossy(&bytes), answer.body);
        if answer.status != 200 {
            refused += 1;
            let error: Value = serde_json::from_str(&answer.body).unwrap();
            assert!(error["error"]["message"].is_string() && error["error"].as_object().unwrap().len() == 4);
        }
    }
    assert!((100..600).contains(&refused), "{refused}");
    assert_eq!((get("/health").status, texts(&ask(COMPLETIONS, &completion()))), (200, before));
}

/// MET-001 MET-002 MET-003 MET-005 MET-006 MET-009 MET-010.
#[test]
fn the_metrics_have_the_names_that_dashboards_ask_for() {
    ask(COMPLETIONS, &with(&completion(), &json!({"max_tokens": 3, "ignore_eos": true})));
    let page = get("/metrics");
    assert!(page.media_type.starts_with("text/plain"));
    for (name, kind) in [
        ("num_requests_running", "gauge"),
        ("num_requests_waiting", "gauge"),
        ("kv_cache_usage_perc", "gauge"),
        ("prefix_cache_queries_total", "counter"),
        ("prefix_cache_hits_total", "counter"),
        ("prompt_tokens_total", "counter"),
        ("generation_tokens_total", "counter"),
        ("num_preemptions_total", "counter"),
        ("request_success_total", "counter"),
        ("time_to_first_token_seconds", "histogram"),
        ("inter_token_latency_seconds", "histogram"),
        ("e2e_request_latency_seconds", "histogram"),
    ] {
        assert!(page.body.contains(&format!("# TYPE vllm:{name} {kind}")), "{name}");
        let sample = if kind == "histogram" { format!("vllm:{name}_count{{") } else { format!("vllm:{name}{{") };
        assert!(page.body.contains(&sample), "{name}: no sample with labels");
    }
    assert!(page.body.contains(r#"model_name="quire-demo""#) && page.body.contains(r#"finished_reason="length""#));
    // Each histogram ends in +Inf, which is its count.
    let value = |start: &str, has: &str| -> f64 {
        let line = page.body.lines().find(|line| line.starts_with(start) && line.contains(has)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    for name in ["vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"] {
        assert_eq!(value(&format!("{name}_bucket"), "+Inf"), value(&format!("{name}_count"), ""));
    }
}
