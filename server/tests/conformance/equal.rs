//! Pairs of requests with equal or different responses, and requests that other requests must not affect.

use serde_json::{Value, json};

use super::client::*;

/// Cases, the fields of one request and of the other.
type Pair = (&'static str, Value, Value);

fn long_sampled() -> Value {
    json!({"temperature": 1, "seed": 5, "max_tokens": 24})
}

fn pairs_for_both() -> Vec<Pair> {
    let sampled = |more: Value| with(&long_sampled(), &more);
    vec![
        ("SMP-001 CHT-014", sampled(json!({})), sampled(json!({}))),
        ("SMP-005", json!({}), sampled(json!({"top_k": 1, "max_tokens": 16}))),
        ("SMP-006", json!({}), sampled(json!({"top_p": 1e-6, "max_tokens": 16}))),
        ("SMP-007", json!({}), sampled(json!({"min_p": 1, "max_tokens": 16}))),
        ("SMP-008", sampled(json!({"top_k": 0})), sampled(json!({"top_k": -1}))),
        (
            "SMP-017",
            sampled(json!({})),
            sampled(json!({"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1})),
        ),
        ("SMP-021", json!({}), json!({"top_k": 7, "top_p": 0.4, "min_p": 0.2, "seed": 9})),
        ("SMP-022", json!({}), json!({"temperature": 1e-4, "seed": 3})),
        ("DET-001", json!({}), json!({})),
        ("CMP-025", json!({}), json!({"user": "me", "no_such_field": {"deep": [1]}})),
        (
            "CMP-026",
            json!({}),
            json!({"top_p": null, "n": null, "stop": null, "seed": null, "logit_bias": null, "stream": null,
            "min_tokens": null, "user": null, "presence_penalty": null, "best_of": null, "response_format": null}),
        ),
        ("STR-003", json!({}), json!({"response_format": {"type": "text"}})),
        ("whole numbers with a point", json!({}), json!({"max_tokens": 16.0, "n": 1.0, "top_k": -0.0})),
    ]
}

fn pairs_of_completions() -> Vec<Pair> {
    vec![
        ("CMP-002", json!({}), json!({"max_tokens": null})),
        ("CMP-005", json!({"add_special_tokens": false}), json!({"prompt": ids("The red fox")})),
        ("CMP-006", json!({"add_special_tokens": false}), json!({"prompt": [ids("The red fox")]})),
        ("LPB-006", json!({}), json!({"logprobs": 5})),
        ("STP-009", json!({}), json!({"stop": ["red fox"]})),
        ("UTF-007", json!({"prompt": "日本 🙂 é"}), json!({"prompt": "\u{65e5}\u{672c} \u{1f642} \u{e9}"})),
    ]
}

fn pairs_of_chats() -> Vec<Pair> {
    let content = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let parts = json!([{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}]);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    vec![
        ("CHT-009", json!({}), json!({"max_tokens": null, "max_completion_tokens": 16})),
        ("CHT-015", content(json!("Tell me\na story.")), content(parts)),
        (
            "CHT-028",
            json!({"tools": tools, "tool_choice": "none"}),
            json!({"tools": tools, "tool_choice": "none", "parallel_tool_calls": false}),
        ),
        ("LPB-013", json!({}), json!({"logprobs": true, "top_logprobs": 0})),
        ("CHT-019", json!({}), json!({"chat_template_kwargs": {"no_such_variable": 1}, "reasoning_effort": "low"})),
    ]
}

#[test]
fn requests_that_mean_the_same_have_the_same_answer() {
    for (path, base, pairs) in [
        (COMPLETIONS, completion(), [pairs_for_both(), pairs_of_completions()].concat()),
        (CHAT, chat(), [pairs_for_both(), pairs_of_chats()].concat()),
    ] {
        for (case, a, b) in pairs {
            assert_eq!(texts(&ask(path, &with(&base, &a))), texts(&ask(path, &with(&base, &b))), "{case} at {path}");
        }
    }
    // UTF-007 on the wire: escapes and raw bytes.
    let raw = send(COMPLETIONS, r#"{"prompt": "日 🙂", "temperature": 0, "max_tokens": 4}"#.as_bytes());
    let escaped = send(COMPLETIONS, br#"{"prompt": "\u65e5 \ud83d\ude42", "temperature": 0, "max_tokens": 4}"#);
    let choices = |answer: &Answer| serde_json::from_str::<Value>(&answer.body).unwrap()["choices"].clone();
    assert_eq!(choices(&raw), choices(&escaped));
}

#[test]
fn requests_that_mean_something_else_have_another_answer() {
    let sampled = |more: Value| with(&json!({"temperature": 1, "top_p": 1, "max_tokens": 24}), &more);
    for (case, a, b) in [
        ("SMP-002", sampled(json!({"seed": 1})), sampled(json!({"seed": 2}))),
        ("SMP-003", sampled(json!({})), sampled(json!({}))),
        ("SMP-016", json!({"max_tokens": 40}), json!({"max_tokens": 40, "repetition_penalty": 2})),
        ("cache_salt changes nothing, so the prompt does", json!({}), json!({"prompt": "A blue whale"})),
    ] {
        assert_ne!(text(COMPLETIONS, &with(&completion(), &a)), text(COMPLETIONS, &with(&completion(), &b)), "{case}");
    }
    // SMP-004: the sequences of one request differ, and are repeated with the seed.
    let body = with(&completion(), &sampled(json!({"n": 3, "seed": 11})));
    let (first, second) = (texts(&ask(COMPLETIONS, &body)), texts(&ask(COMPLETIONS, &body)));
    assert_eq!(first, second);
    assert!(first[0] != first[1] && first[1] != first[2], "{first:?}");
}

/// DET-002 DET-003 DET-004 DET-005 DET-007 DET-008 LOD-002 LOD-003 STR-012.
#[test]
fn batch_order_and_cache_do_not_change_the_output() {
    let a = ids("a")[0];
    let long = "The quick brown fox jumps over the lazy dog. ".repeat(12);
    let bodies: Vec<Value> = [
        json!({}),
        json!({"prompt": "One two three"}),
        json!({"prompt": long, "max_tokens": 8}),
        json!({"temperature": 1, "seed": 3}),
        json!({"temperature": 0.7, "seed": 4, "top_p": 0.9, "n": 2}),
        json!({"frequency_penalty": 1.5, "presence_penalty": 0.5}),
        json!({"logit_bias": {a.to_string(): 3}}),
        json!({"guided_regex": "(red|blue) [a-z]{4}"}),
        json!({"prompt": "Where", "echo": true, "max_tokens": 4}),
        json!({"stop": [" "], "max_tokens": 20}),
    ]
    .iter()
    .map(|more| with(&completion(), more))
    .collect();
    let alone: Vec<_> = bodies.iter().map(|body| texts(&ask(COMPLETIONS, body))).collect();
    for round in 0..3 {
        std::thread::scope(|scope| {
            let threads: Vec<_> = bodies.iter().map(|body| scope.spawn(|| texts(&ask(COMPLETIONS, body)))).collect();
            for ((thread, expected), body) in threads.into_iter().zip(&alone).zip(&bodies) {
                assert_eq!(&thread.join().unwrap(), expected, "round {round}: {body}");
            }
        });
    }
    // As one list, in either order.
    let prompts = ["One", "Two three", long.as_str(), "Four"];
    let listed = |prompts: &[&str]| texts(&ask(COMPLETIONS, &with(&completion(), &json!({"prompt": prompts}))));
    let mut reversed = listed(&prompts.iter().rev().copied().collect::<Vec<_>>());
    reversed.reverse();
    assert_eq!(listed(&prompts), reversed);
}
