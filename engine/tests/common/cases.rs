//! The reference checkpoints, and the continuations of their prompts by transformers.

use serde_json::Value;
pub use testkit::reference::folder;

/// A prompt and its greedy continuation, with the log-probability of each token.
pub struct Prompt {
    pub ids: Vec<u32>,
    pub greedy: Vec<u32>,
    pub logprobs: Vec<f64>,
    /// By how much the likeliest token's logit exceeds the next one's.
    pub margins: Vec<f64>,
}

/// What the reference states about a case.
pub fn expected(case: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder(case).join("expected.json")).unwrap()).unwrap()
}

/// All prompts of a case.
pub fn prompts(case: &str) -> Vec<Prompt> {
    let expected = expected(case);
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
