//! `best_of` and beam search over HTTP: the results are the best ones, in order, and only returned sequences are counted.

use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Server, config};
use engine::EngineConfig;
use serde_json::{Value, json};
use server::{Limits, ServerOptions};

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn samples() -> Value {
    json!({"prompt": "One day", "temperature": 1.5, "top_p": 1, "seed": 7, "max_tokens": 12, "logprobs": 0})
}

fn sum_of_logprobs(choice: &Value) -> f64 {
    choice["logprobs"]["token_logprobs"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).sum()
}

fn tokens(choice: &Value) -> usize {
    choice["logprobs"]["token_logprobs"].as_array().unwrap().len()
}

fn choices(answer: &Value) -> Vec<Value> {
    let choices = answer["choices"].as_array().unwrap().clone();
    assert!(choices.iter().zip(0..).all(|(choice, index)| choice["index"] == index), "{answer}");
    choices
}

/// The choices of a stream. Each must be one chunk.
fn streamed(path: &str, body: Value) -> Vec<Value> {
    let chunks = SERVER.stream(path, body);
    let finished = chunks.iter().filter(|chunk| !chunk["choices"][0]["finish_reason"].is_null());
    finished.map(|chunk| chunk["choices"][0].clone()).collect()
}

#[test]
fn best_of_returns_the_likeliest_samples_per_token_and_counts_what_it_returns() {
    let mut all = choices(&SERVER.ok(COMPLETIONS, with(samples(), json!({"n": 6}))));
    let mean = |choice: &Value| sum_of_logprobs(choice) / tokens(choice) as f64;
    all.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
    let answer = SERVER.ok(COMPLETIONS, with(samples(), json!({"n": 2, "best_of": 6})));
    let best = choices(&answer);
    let parts = |choice: &Value| (choice["text"].clone(), choice["logprobs"].clone(), choice["finish_reason"].clone());
    assert_eq!(best.iter().map(parts).collect::<Vec<_>>(), all[..2].iter().map(parts).collect::<Vec<_>>());
    assert_eq!(answer["usage"]["completion_tokens"], best.iter().map(tokens).sum::<usize>());
    // Log probabilities are not returned unless requested.
    let plain = SERVER.ok(COMPLETIONS, with(samples(), json!({"n": 2, "best_of": 6, "logprobs": null})));
    assert_eq!(plain["choices"][0]["text"], best[0]["text"]);
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
    // If all candidates are returned, they can be streamed.
    let all = choices(&SERVER.ok(COMPLETIONS, with(samples(), json!({"n": 2}))));
    let chunks = SERVER.stream(COMPLETIONS, with(samples(), json!({"n": 2, "best_of": 2})));
    let text: String = chunks
        .iter()
        .filter(|c| c["choices"][0]["index"] == 1)
        .map(|c| c["choices"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, all[1]["text"]);
}

#[test]
fn a_beam_search_returns_its_results_in_order_whole_or_in_a_stream() {
    let body = json!({"prompt": "The capital of France is", "use_beam_search": true, "n": 3, "best_of": 5,
        "max_tokens": 8, "ignore_eos": true, "repetition_penalty": 1, "logprobs": 2});
    let answer = SERVER.ok(COMPLETIONS, body.clone());
    let found = choices(&answer);
    assert_eq!(found.len(), 3);
    // All have the same length, so that they are ordered by their sums.
    let sums: Vec<f64> = found.iter().map(sum_of_logprobs).collect();
    assert!(sums.is_sorted_by(|a, b| a > b), "{sums:?}");
    assert_eq!(answer["usage"]["completion_tokens"], 3 * 8);
    // Not guaranteed, but expected of a search.
    let greedy = json!({"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8, "ignore_eos": true,
        "repetition_penalty": 1, "logprobs": 0});
    let greedy = sum_of_logprobs(&SERVER.ok(COMPLETIONS, greedy)["choices"][0]);
    assert!(sums[0] >= greedy - 1e-4, "{sums:?} {greedy}");
    // `beam_width` is the other name of the width; temperature and seed have no effect.
    let mut named = with(body.clone(), json!({"beam_width": 5, "temperature": 2, "seed": 4, "top_k": 1}));
    named["best_of"] = Value::Null;
    assert_eq!(choices(&SERVER.ok(COMPLETIONS, named)), found);
    assert_eq!(streamed(COMPLETIONS, body), found);
}

#[test]
fn a_chat_can_be_searched_too_and_the_length_penalty_decides() {
    let body = |length_penalty: f64| {
        json!({"messages": [{"role": "user", "content": "What is the capital of France?"}], "use_beam_search": true,
            "beam_width": 4, "n": 2, "max_tokens": 24, "length_penalty": length_penalty})
    };
    let answer = SERVER.ok(CHAT, body(1.0));
    let found = choices(&answer);
    assert!(found[0]["message"]["content"].as_str().unwrap().contains("Paris"), "{answer}");
    assert_ne!(found[0]["message"], found[1]["message"]);
    let content: Vec<Value> = streamed(CHAT, body(1.0)).into_iter().map(|c| c["delta"]["content"].clone()).collect();
    assert_eq!(content, found.iter().map(|c| c["message"]["content"].clone()).collect::<Vec<_>>());
    let tokens = |penalty| SERVER.ok(CHAT, body(penalty))["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(tokens(-2.0) < tokens(5.0));
    let early = SERVER.ok(CHAT, with(body(5.0), json!({"early_stopping": true})));
    assert!(early["usage"]["completion_tokens"].as_u64().unwrap() < tokens(5.0));
    SERVER.until("all blocks are free", |server| server.metric("vllm:num_requests_running") == 0.0);
}

#[test]
fn echo_and_logprobs_work_with_a_search() {
    let body = json!({"prompt": "The capital of", "echo": true, "logprobs": 1, "max_tokens": 3, "use_beam_search": true, "n": 2});
    let found = choices(&SERVER.ok(COMPLETIONS, body.clone()));
    let scored = SERVER.ok(COMPLETIONS, with(body, json!({"max_tokens": 0})));
    for choice in &found {
        let prompt = scored["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!(choice["logprobs"]["token_logprobs"].as_array().unwrap()[..prompt.len()], prompt[..]);
        assert!(choice["text"].as_str().unwrap().starts_with("The capital of"));
    }
}

/// A server that runs this many sequences at once, and whose requests have this many bytes.
fn narrow(max_num_seqs: usize, max_inflight_bytes: usize) -> Server {
    let limits = Limits { max_inflight_bytes, ..Limits::default() };
    let options = ServerOptions { limits, ..ServerOptions::default() };
    Server::with(EngineConfig { max_num_seqs, ..config() }, options, Duration::ZERO)
}

#[test]
fn more_sequences_than_run_at_once_are_served_with_the_same_choices() {
    let server = narrow(3, Limits::default().max_inflight_bytes);
    for fields in [json!({"n": 8}), json!({"n": 3, "best_of": 8})] {
        let body = with(samples(), fields);
        assert_eq!(choices(&server.ok(COMPLETIONS, body.clone())), choices(&SERVER.ok(COMPLETIONS, body)));
    }
    let wide = with(samples(), json!({"use_beam_search": true, "n": 4, "temperature": 0, "logprobs": null}));
    let refused = server.post(COMPLETIONS, &wide);
    assert!(refused.status == 400 && refused.body.contains("--max-num-seqs"), "{}", refused.body);
}

#[test]
fn the_copies_of_a_prompt_that_later_sequences_hold_are_counted() {
    let prompt = vec![300; 800];
    let body = json!({"prompt": prompt, "n": 8, "max_tokens": 1, "stream": true});
    let [all_at_once, few] = [8, 4].map(|max_num_seqs| narrow(max_num_seqs, 72 << 10).post(COMPLETIONS, &body).status);
    assert_eq!((all_at_once, few), (200, 400));
}
