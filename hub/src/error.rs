//! Why a model cannot be fetched. Each message is one line; text from the network is shortened and freed of control characters.

use std::io;
use std::path::PathBuf;

/// Reason why a model cannot be fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum HubError {
    #[error(
        "found the model {found:?}, expected a hub id such as Qwen/Qwen3-0.6B, or ORG/NAME:FILE.gguf for a GGUF file"
    )]
    Id { found: String },
    #[error("--revision: found {found:?}, expected a branch, a tag or a commit")]
    Revision { found: String },
    /// An environment variable or a flag has an invalid value, which is not shown if it is secret.
    #[error("{name}: {problem}")]
    Setting { name: &'static str, problem: String },
    #[error(
        "{repo}: found no such model at {endpoint}; check the id, or {} if the model is private",
        token_advice(*has_token)
    )]
    RepoNotFound { repo: String, endpoint: String, has_token: bool },
    #[error("{repo} is gated: accept its terms at {endpoint}/{repo}, then {}", token_advice(*has_token))]
    Gated { repo: String, endpoint: String, has_token: bool },
    #[error("{repo}: {endpoint} refused access ({status}{message}); {}", token_advice(*has_token))]
    Unauthorized { repo: String, endpoint: String, status: u16, message: String, has_token: bool },
    #[error("{repo} has no revision {revision:?}; expected one of its branches, tags or commits (--revision)")]
    RevisionNotFound { repo: String, revision: String },
    #[error("{repo} has no file {file} at commit {commit}")]
    EntryNotFound { repo: String, file: String, commit: String },
    #[error(
        "{host} answers that there were too many requests; try again {}, or pass a token with --hf-token or HF_TOKEN",
        wait.map_or("later".to_string(), |seconds| format!("in {seconds} s"))
    )]
    TooManyRequests { host: String, wait: Option<u64> },
    #[error("{host} answered with status {status}{message}")]
    Status { host: String, status: u16, message: String },
    /// No answer came, or its transfer broke.
    #[error("{host} cannot be reached: {problem}; check the network, HTTPS_PROXY and HF_ENDPOINT")]
    Network { host: String, problem: String },
    /// The answer is not one that a hub gives.
    #[error("{host}: found {found}, expected {expected}")]
    Answer { host: String, found: String, expected: &'static str },
    #[error("{file}: found a hash of {found}, expected {expected}; the download was deleted, try again")]
    Hash { file: String, found: String, expected: String },
    #[error("{folder}: found {} free, expected {} for the download; free some space, or choose another folder with --download-dir",
        gib(*free), gib(*needed), folder = folder.display())]
    Space { folder: PathBuf, free: u64, needed: u64 },
    #[error(
        "{repo}: found {found}, expected model.safetensors, model.safetensors.index.json or a .gguf file (pickles such as \
         pytorch_model.bin are never loaded)"
    )]
    NoWeights { repo: String, found: String },
    #[error("{repo} has several GGUF files, choose one of them: {choices}")]
    SeveralGguf { repo: String, choices: String },
    #[error("{repo} has no GGUF file {wanted:?}; it has {choices}")]
    NoGguf { repo: String, wanted: String, choices: String },
    #[error(
        "{repo}: found {missing} in {cache}, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids downloads; unset it, or \
         download the model first",
        cache = cache.display()
    )]
    Offline { repo: String, missing: String, cache: PathBuf },
    /// The header of a file of weights is damaged, or cannot be used.
    #[error("{0}")]
    Header(String),
    /// Another process keeps the lock of a file and makes no progress.
    #[error(
        "{file}: found {lock} held by another process, which has not written anything for {seconds} s; end that process, or delete {held} \
         if there is none",
        lock = lock.display(),
        held = held.display()
    )]
    Locked { file: String, lock: PathBuf, held: PathBuf, seconds: u64 },
    /// A file of the cache is damaged.
    #[error("{path}: {problem}; delete this file to download it again", path = path.display())]
    Cache { path: PathBuf, problem: String },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl HubError {
    /// Whether the hub gave no usable answer, so that a cached snapshot may stand in.
    pub(crate) fn is_outage(&self) -> bool {
        match self {
            HubError::Network { .. } | HubError::TooManyRequests { .. } => true,
            HubError::Status { status, .. } => *status >= 500,
            _ => false,
        }
    }
}

/// Attaches a path to an error of input or output.
pub(crate) fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> HubError {
    move |source| HubError::Io { path: path.into(), source }
}

fn token_advice(has_token: bool) -> &'static str {
    if has_token {
        "pass a token that may read it with --hf-token or HF_TOKEN (the present one may not)"
    } else {
        "pass a token with --hf-token or HF_TOKEN"
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

/// Text of others in one line of bounded length.
pub(crate) fn shown(text: &str) -> String {
    const MAX: usize = 160;
    let mut line: String = text.chars().take(MAX).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(MAX).is_some() {
        line.push('…');
    }
    line
}
