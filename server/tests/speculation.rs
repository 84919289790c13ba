//! Speculative decoding through HTTP: the same answers, their usage, and the metrics.

use std::time::Duration;

use engine::EngineConfig;
use serde_json::{Value, json};
use server::ServerOptions;

use crate::common::{Server, config};

const JSON: &str =
    r#"{"name": "a", "size": 1}, {"name": "b", "size": 2}, {"name": "a", "size": 1}, {"name": "b", "size": 2}, "#;

fn server(speculative: Option<&str>) -> Server {
    let speculative = speculative.map(|text| text.parse().unwrap());
    Server::with(EngineConfig { speculative, ..config() }, ServerOptions::default(), Duration::ZERO)
}

/// Requests whose texts repeat, with everything that looks at the tokens of a step. The demo model copies no prompt by itself, so a
/// grammar or a list of tokens makes it.
fn bodies() -> Vec<Value> {
    let grammar = json!({"regex": "(\\{\"name\": \"[ab]\", \"size\": [12]\\}, ){4,9}"});
    let bodies = [
        json!({"temperature": 0, "max_tokens": 90}),
        json!({"temperature": 0.7, "seed": 5, "n": 2, "max_tokens": 90, "logprobs": 3, "structured_outputs": grammar}),
        json!({"temperature": 0, "max_tokens": 90, "stop": ["size"], "structured_outputs": grammar}),
        json!({"temperature": 0, "max_tokens": 41, "repetition_penalty": 1.1, "logprobs": 1, "structured_outputs": grammar}),
        json!({"temperature": 0.8, "seed": 1, "max_tokens": 60, "allowed_token_ids": [40, 41, 42], "ignore_eos": true}),
        json!({"temperature": 0.5, "max_tokens": 30, "best_of": 3, "n": 1, "seed": 4, "structured_outputs": grammar}),
    ];
    let with_prompt = |mut body: Value| {
        body["prompt"] = JSON.into();
        body
    };
    bodies.into_iter().map(with_prompt).collect()
}

fn choices(server: &Server, body: &Value) -> (Value, Value) {
    let mut answer = server.ok("/v1/completions", body.clone());
    (answer["choices"].take(), answer["usage"].take())
}

#[test]
fn answers_are_equal_and_usage_adds_up_to_the_metrics() {
    let without = server(None);
    let want: Vec<(Value, Value)> = bodies().iter().map(|body| choices(&without, body)).collect();
    let page = without.get("/metrics").body;
    assert!(page.contains("vllm:spec_decode_num_drafts_total{model_name=\"quire-demo\"} 0"), "{page}");
    for method in [
        r#"{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}"#,
        r#"{"method": "suffix"}"#,
    ] {
        let server = server(Some(method));
        let (mut accepted, mut rejected) = (0, 0);
        for (body, (want, plain)) in bodies().iter().zip(&want) {
            let (got, mut usage) = choices(&server, body);
            assert_eq!(got, *want, "{method} {body}");
            let details = usage.as_object_mut().unwrap().remove("completion_tokens_details");
            // The second time some of the prompt is cached.
            assert_eq!(usage["completion_tokens"], plain["completion_tokens"], "{method} {body}");
            let count = |name: &str| details.as_ref().map_or(0, |details| details[name].as_u64().unwrap_or(0));
            accepted += count("accepted_prediction_tokens");
            rejected += count("rejected_prediction_tokens");
        }
        assert!(accepted > 50, "{method}: {accepted} of {} drafts accepted", accepted + rejected);
        let metric = |name: &str| server.metric(&format!("vllm:spec_decode_num_{name}_total")) as u64;
        // Tokens behind a stop string are drafts that were accepted, but no output of the request.
        assert!(metric("accepted_tokens") >= accepted && metric("draft_tokens") >= accepted + rejected);
        assert!(metric("drafts") > 0 && metric("draft_tokens") >= metric("accepted_tokens"));
        let state: Value = serde_json::from_str(&server.get("/quire/state").body).unwrap();
        let shown = &state["stats"]["spec_decode"];
        for name in ["drafts", "draft_tokens", "accepted_tokens"] {
            assert_eq!(shown[format!("num_{name}")], metric(name), "{shown}");
        }
        let by_position = shown["accepted_per_pos"].as_array().unwrap();
        assert_eq!(by_position.iter().filter_map(Value::as_u64).sum::<u64>(), metric("accepted_tokens"), "{shown}");
        assert!(by_position.last().is_some_and(|last| *last != 0), "{shown}");
        let before = metric("drafts");
        for mut body in bodies() {
            body["speculative"] = false.into();
            let (_, usage) = choices(&server, &body);
            assert_eq!(usage["completion_tokens_details"], json!({"reasoning_tokens": 0}), "{usage}");
        }
        assert_eq!(metric("drafts"), before, "a request can refuse drafts");
    }
}

#[test]
fn a_stream_has_the_same_text_and_the_usage_of_drafts() {
    let body = json!({"prompt": JSON, "temperature": 0, "max_tokens": 60, "allowed_token_ids": [40, 41], "ignore_eos": true, "stream_options": {"include_usage": true}});
    let text = |chunks: &[Value]| -> String {
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect()
    };
    let want = text(&server(None).stream("/v1/completions", body.clone()));
    let server = server(Some(r#"{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3}"#));
    let chunks = server.stream("/v1/completions", body);
    assert_eq!(text(&chunks), want);
    let usage = chunks.iter().rfind(|chunk| chunk["usage"].is_object()).unwrap();
    assert!(
        usage["usage"]["completion_tokens_details"]["accepted_prediction_tokens"].as_u64().unwrap() > 10,
        "{usage}"
    );
    let schema = json!({"type": "array", "minItems": 8, "maxItems": 8, "items": {"const": {"name": "a", "size": 1}}});
    let format = json!({"type": "json_schema", "name": "records", "schema": schema});
    let body = json!({"input": JSON, "temperature": 0, "max_output_tokens": 120, "text": {"format": format}});
    let answer = server.ok("/v1/responses", body);
    let details = &answer["usage"]["output_tokens_details"];
    assert!(details["accepted_prediction_tokens"].as_u64().unwrap() > 10, "{answer}");
}
