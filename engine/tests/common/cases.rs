//! The reference checkpoints, and the continuations of their prompts by transformers.

use std::path::PathBuf;

use serde_json::Value;

/// Names of the folders.
pub const CASES: [&str; 5] = ["llama", "llama31-rope", "mistral-sliding", "qwen2", "qwen3"];

/// Of one of them.
pub fn folder(case: &str) -> PathBuf {
    testkit::workspace::root().join("models/tests/reference").join(case)
}

/// A prompt and its greedy continuation, with the log-probability of each token.
pub struct Prompt {
    pub ids: Vec<u32>,
    pub greedy: Vec<u32>,
    pub logprobs: Vec<f64>,
    /// By how much the likeliest token's logit exceeds the next one's.
    pub margins: Vec<f64>,
}

/// All prompts of a case.
pub fn prompts(case: &str) -> Vec<Prompt> {
    let expected: Value = serde_json::from_slice(&std::fs::read(folder(case).join("expected.json")).unwrap()).unwrap();
    let ids = |v: &Value| serde_json::from_value::<Vec<u32>>(v.clone()).unwrap();
    let numbers = |v: &Value| serde_json::from_value::<Vec<f64>>(v.clone()).unwrap();
    let read = |p: &Value| Prompt {
        ids: ids(&p["ids"]),
        greedy: ids(&p["greedy"]["ids"]),
        logprobs: numbers(&p["greedy"]["logprobs"]),
        margins: numbers(&p["greedy"]["margins"]),
    };
    expected["prompts"].as_array().unwrap().iter().map(read).collect()
}
