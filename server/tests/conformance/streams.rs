//! Any stream adds up to the whole response, in chunks of one form.

use serde_json::{Value, json};

use super::client::*;

/// Requests to stream, with the cases that they cover.
fn requests() -> Vec<(&'static str, &'static str, Value)> {
    let sampled = json!({"temperature": 1, "seed": 7, "max_tokens": 30});
    let text = text(COMPLETIONS, &with(&completion(), &json!({"max_tokens": 40})));
    let cut = |from: usize, to: usize| text.chars().skip(from).take(to - from).collect::<String>();
    let schema = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["日本語🙂é"]}}});
    vec![
        ("CMP-017 SSE-002 SSE-003 SSE-004 SSE-005", COMPLETIONS, json!({})),
        ("CMP-020", COMPLETIONS, json!({"prompt": ["One", "Two", "Three"]})),
        ("CMP-021", COMPLETIONS, with(&sampled, &json!({"n": 3}))),
        ("CMP-022 UTF-003", COMPLETIONS, json!({"prompt": "日本 🙂 é", "echo": true})),
        (
            "DET-006 UTF-001 UTF-006",
            COMPLETIONS,
            with(&sampled, &json!({"prompt": "日本語 🙂", "max_tokens": 60, "temperature": 1.8})),
        ),
        ("UTF-005", COMPLETIONS, with(&sampled, &json!({"prompt": "🙂🙂🙂🙂", "max_tokens": 7}))),
        ("STP-006", COMPLETIONS, json!({"max_tokens": 40, "stop": [cut(3, 4), cut(6, 9)]})),
        ("STP-006", COMPLETIONS, json!({"max_tokens": 40, "stop": [cut(8, 20)]})),
        (
            "STP-007 STP-008",
            COMPLETIONS,
            json!({"max_tokens": 40, "stop": [format!("{}\u{7}", cut(5, 12)), format!("{}\u{7}", cut(30, 40))]}),
        ),
        ("SSE-007 SSE-008", COMPLETIONS, json!({"stream_options": null, "stop": [cut(10, 12)], "max_tokens": 40})),
        ("LPB-009", COMPLETIONS, json!({"logprobs": 2})),
        ("CHT-003 CHT-004 CHT-005 SSE-001", CHAT, json!({})),
        ("CHT-012", CHAT, with(&sampled, &json!({"n": 3}))),
        (
            "UTF-002",
            CHAT,
            json!({"messages": [{"role": "user", "content": "日本語で 🙂"}], "temperature": 1.5, "seed": 2, "max_tokens": 40}),
        ),
        ("UTF-004 STR-004", CHAT, json!({"response_format": schema, "max_tokens": 60})),
        ("LPB-014", CHAT, json!({"logprobs": true, "top_logprobs": 2})),
        ("CHT-013", CHAT, json!({"stop": [" "], "max_tokens": 30})),
    ]
}

#[test]
fn a_stream_adds_up_to_the_whole_answer_whatever_is_asked_for() {
    for (case, path, more) in requests() {
        let body = with(&if path == CHAT { chat() } else { completion() }, &more);
        let whole = ask(path, &body);
        let chunks = stream(path, &body);
        assert!(chunks.len() > 4 || !case.contains("SSE-005"), "{case}: tokens come one by one");
        for chunk in &chunks {
            for name in ["id", "created", "model"] {
                assert_eq!(chunk[name], chunks[0][name], "{case}");
            }
            let object = if path == CHAT { "chat.completion.chunk" } else { "text_completion" };
            assert!(chunk["object"] == object && chunk.get("usage").is_none(), "{case}: {chunk}");
        }
        for choice in whole["choices"].as_array().unwrap() {
            let pieces = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
            let pieces: Vec<&Value> = pieces.filter(|piece| piece["index"] == choice["index"]).collect();
            let piece = |piece: &Value| {
                piece["text"].as_str().or(piece["delta"]["content"].as_str()).unwrap_or_default().to_string()
            };
            let joined: String = pieces.iter().map(|&one| piece(one)).collect();
            let expected = choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap();
            assert_eq!(joined, expected, "{case}");
            let ends: Vec<&Value> =
                pieces.iter().map(|piece| &piece["finish_reason"]).filter(|end| !end.is_null()).collect();
            assert_eq!(ends, [&choice["finish_reason"]], "{case}");
            assert_eq!(pieces.last().unwrap()["stop_reason"], choice["stop_reason"], "{case}");
            let roles = pieces.iter().filter(|piece| !piece["delta"]["role"].is_null()).count();
            assert_eq!(roles, usize::from(path == CHAT), "{case}");
            let list = |of: &Value| {
                of["logprobs"]["token_logprobs"]
                    .as_array()
                    .or(of["logprobs"]["content"].as_array())
                    .cloned()
                    .unwrap_or_default()
            };
            assert_eq!(pieces.iter().flat_map(|&piece| list(piece)).collect::<Vec<_>>(), list(choice), "{case}");
        }
    }
}

/// SSE-006: a refusal is a status, not an event.
#[test]
fn a_stream_that_is_refused_never_begins() {
    for path in [COMPLETIONS, CHAT, "/v1/responses"] {
        let answer = send(path, br#"{"prompt": "a", "input": "a", "messages": [{"role": "user", "content": "a"}], "stream": true, "top_p": 7}"#);
        assert_eq!((answer.status, answer.media_type.as_str()), (400, "application/json"), "{path}");
    }
}
