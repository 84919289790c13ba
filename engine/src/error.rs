//! Error types.

use std::fmt;

/// Why an engine could not start. Displays as one line that names the file or the flag.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A checkpoint file is missing, broken or not understood.
    #[error(transparent)]
    Load(#[from] models::LoadError),
    /// The tokenizer or the chat template cannot be used.
    #[error(transparent)]
    Text(#[from] text::LoadError),
    /// The device cannot be opened, or has too little memory.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The weights cannot be stored in the form that was chosen.
    #[error(transparent)]
    Matrix(#[from] linear::LinearError),
    /// The device's sampler could not be set up.
    #[error(transparent)]
    Sample(#[from] sampling::device::SampleError),
    /// Buffers could not be set up.
    #[error(transparent)]
    Kernel(#[from] attention_kernels::KernelError),
    /// `[kernels]` names a variant that cannot serve the model here.
    #[error(transparent)]
    Select(#[from] attention_kernels::SelectError),
    /// The scheduler's sizes contradict each other.
    #[error(transparent)]
    Scheduler(#[from] sched::ConfigError),
    /// KV events cannot be published.
    #[error("--kv-events-config: {0}")]
    KvEvents(#[from] kvevents::StartError),
    /// The ranks of a group cannot compute together.
    #[error(transparent)]
    Ranks(#[from] collective::CollectiveError),
    /// This rank cannot read an adapter that another one has.
    #[error(transparent)]
    Adapter(#[from] models::lora::AdapterError),
    /// Another rank of the group failed.
    #[error("rank {rank}: {message}")]
    Rank {
        /// The rank.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// A setting cannot be used.
    #[error("{flag}: found {found}, expected {expected}")]
    Config {
        /// The flag as typed on the command line, for example `--block-size`.
        flag: &'static str,
        /// What was given.
        found: String,
        /// Allowed values, and what to do.
        expected: String,
    },
}

/// An invariant of the engine that does not hold; see [`Engine::audit`](crate::Engine::audit).
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The block pool and the block tables contradict each other.
    #[error(transparent)]
    Pool(#[from] kvblock::AuditError),
    /// State is left although no work is.
    #[error("no work is left, but {count} {what} are: expected none; this is a bug of the engine")]
    Leftover {
        /// What is left, in plural.
        what: &'static str,
        /// Number of them.
        count: usize,
    },
}

/// Returns the error for a setting that cannot be used.
pub(crate) fn bad(flag: &'static str, found: impl fmt::Display, expected: impl Into<String>) -> EngineError {
    EngineError::Config { flag, found: found.to_string(), expected: expected.into() }
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// A field is out of range; `param` is its API name. Maps to HTTP 400.
    #[error("{message}")]
    Invalid {
        /// API name of the field.
        param: &'static str,
        /// One sentence with what was found and what was expected.
        message: String,
    },
    /// The request can never fit the context or the pool; the message has the numbers. Maps to HTTP 400.
    #[error("{0}")]
    NeverFits(String),
    /// No adapter has this name, or it is being unloaded. Maps to HTTP 404.
    #[error("The model `{0}` does not exist.")]
    UnknownAdapter(String),
    /// The queue is full; a later attempt may succeed. Maps to HTTP 429.
    #[error(
        "the queue is full: found {waiting} waiting requests, expected fewer than {limit} (--max-queued-requests); try again later"
    )]
    QueueFull {
        /// Number of requests in the queue.
        waiting: usize,
        /// Greatest number of requests in the queue.
        limit: usize,
    },
    /// The engine sleeps. Maps to HTTP 503.
    #[error("the engine sleeps and takes no requests, expected that it was woken; send POST /wake_up")]
    Asleep,
    /// The engine is shutting down or has ended. Maps to HTTP 503.
    #[error("the engine is shutting down and accepts no new requests")]
    Closed,
}

/// Why an adapter cannot be loaded or unloaded. Displays as one line.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The engine was started without memory for adapters.
    #[error("LoRA adapters are not enabled; start with --enable-lora")]
    Disabled,
    /// The name is empty.
    #[error("the name of an adapter is empty; expected at least one character")]
    NoName,
    /// The name is taken.
    #[error("The lora adapter '{0}' has already been loaded.")]
    AlreadyLoaded(String),
    /// No adapter has the name.
    #[error("The lora adapter '{0}' cannot be found.")]
    NotFound(String),
    /// The adapter of this name waits for its last requests.
    #[error("The lora adapter '{0}' is being unloaded; try again when its requests have ended.")]
    Unloading(String),
    /// Too many names.
    #[error("{0} adapters are loaded, the greatest number; unload some")]
    TooMany(usize),
    /// The files cannot be used.
    #[error(transparent)]
    Read(#[from] models::lora::AdapterError),
    /// Another rank cannot read the files, or finds others.
    #[error("{0}")]
    OtherRank(String),
    /// The engine is shutting down or has ended.
    #[error("the engine is shutting down")]
    Closed,
}

impl SubmitError {
    /// Returns [`SubmitError::Invalid`] with a message that starts with the name of the field.
    pub(crate) fn invalid(param: &'static str, problem: impl fmt::Display) -> SubmitError {
        SubmitError::Invalid { param, message: format!("{param}: {problem}") }
    }
}
