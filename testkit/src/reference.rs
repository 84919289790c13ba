//! The reference checkpoints in `models/tests/reference` and `models/tests/recent`.

use std::path::PathBuf;

/// Names of the cases: one folder each.
pub const CASES: [&str; 18] = [
    "llama",
    "llama31-rope",
    "mistral-sliding",
    "qwen2",
    "qwen3",
    "bloom",
    "deepseek-v2-lite",
    "gemma2",
    "gemma3-text",
    "gpt-neox",
    "gpt-oss",
    "gpt2",
    "mixtral",
    "phi3-longrope",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3-next",
    "smollm3",
];

/// Names of the cases in `models/tests/recent`, on which only the tests of the forward pass run.
pub const RECENT: [&str; 7] =
    ["gemma3n", "deepseek-v32", "llama4", "lfm2-moe", "granite4-hybrid", "nemotron-h", "jamba"];

/// Names of all cases.
pub const ALL: [&str; CASES.len() + RECENT.len()] = {
    let mut all = [""; CASES.len() + RECENT.len()];
    let mut at = 0;
    while at < all.len() {
        all[at] = if at < CASES.len() { CASES[at] } else { RECENT[at - CASES.len()] };
        at += 1;
    }
    all
};

/// The cases that tests with many settings run: the usual layers, biased, tied and windowed.
pub const FIRST: &[&str] = CASES.split_at(5).0;

/// Returns the folder of a case.
pub fn folder(case: &str) -> PathBuf {
    let set = match case {
        _ if RECENT.contains(&case) => "recent",
        _ if ENCODERS.contains(&case) => "encoders",
        _ => "reference",
    };
    crate::workspace::root().join("models/tests").join(set).join(case)
}

/// Names of the cases in `models/tests/encoders`: encoders and classifiers.
pub const ENCODERS: [&str; 3] = ["bert-embed", "qwen3-seqcls", "xlm-roberta-rerank"];

/// Returns the folders of the cases of encoders and classifiers: those in the tree, and those in the folder `QUIRE_REFERENCE_ENCODERS`.
pub fn encoders() -> Vec<PathBuf> {
    let tree = crate::workspace::root().join("models/tests/encoders");
    let mut folders: Vec<PathBuf> = ENCODERS.iter().map(|case| tree.join(case)).collect();
    let more = std::env::var_os("QUIRE_REFERENCE_ENCODERS").and_then(|folder| std::fs::read_dir(folder).ok());
    let states_task = |folder: &PathBuf| {
        let text = std::fs::read_to_string(folder.join("expected.json")).unwrap_or_default();
        text.contains("\"task\"")
    };
    folders.extend(more.into_iter().flatten().flatten().map(|entry| entry.path()).filter(states_task));
    folders
}

/// Returns the folder of the reference checkpoints in other formats, which are not in the tree: `QUIRE_REFERENCE_FORMATS`.
pub fn formats() -> Option<PathBuf> {
    std::env::var_os("QUIRE_REFERENCE_FORMATS").map(PathBuf::from)
}

/// Returns a block size for a case, larger than `wanted` if its blocks hold the states of recurrent layers.
pub fn block_size(case: &str, wanted: usize) -> usize {
    if case == "qwen3-next" { 16 * wanted } else { wanted }
}

/// Returns the context length for which a case's expected results of a prompt hold, where they depend on it: transformers chooses the
/// factors of LongRoPE by the length of each sequence, an engine once by the greatest length that it serves.
pub fn context(case: &str, prompt_len: usize) -> Option<usize> {
    const ORIGINAL: usize = 96;
    (case == "phi3-longrope").then_some(if prompt_len > ORIGINAL { 512 } else { ORIGINAL })
}
