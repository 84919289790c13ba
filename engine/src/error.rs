//! What can go wrong, as values.

use std::fmt;

/// The engine could not start. Displays as one line that names the file or the flag.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A checkpoint file is missing, broken or not understood.
    #[error(transparent)]
    Load(#[from] models::LoadError),
    /// The device can not be had, or its memory is short.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// There is no sampling on the device.
    #[error(transparent)]
    Sample(#[from] sampling::device::SampleError),
    /// Buffers could not be set up.
    #[error(transparent)]
    Kernel(#[from] attention_kernels::KernelError),
    /// `[kernels]` asks for what can not serve.
    #[error(transparent)]
    Select(#[from] attention_kernels::SelectError),
    /// The scheduler's sizes contradict each other.
    #[error(transparent)]
    Scheduler(#[from] sched::ConfigError),
    /// A setting can not be used.
    #[error("{flag}: found {found}, expected {expected}")]
    Config {
        /// The flag as typed on the command line, e.g. `--block-size`.
        flag: &'static str,
        /// What was given.
        found: String,
        /// What would work, and what to do.
        expected: String,
    },
}

/// An invariant of the engine does not hold; see [`Engine::audit`](crate::Engine::audit).
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The block pool and the block tables contradict each other.
    #[error(transparent)]
    Pool(#[from] kvblock::AuditError),
    /// Something is left although no work is.
    #[error("no work is left, but {count} {what} are: expected none; this is a bug of the engine")]
    Leftover {
        /// What is left, in plural.
        what: &'static str,
        /// Number of them.
        count: usize,
    },
}

/// A setting that can not be used.
pub(crate) fn bad(flag: &'static str, found: impl fmt::Display, expected: impl Into<String>) -> EngineError {
    EngineError::Config { flag, found: found.to_string(), expected: expected.into() }
}

/// A request was refused before it began.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// A field is out of range; `param` is its API name. Maps to HTTP 400.
    #[error("{message}")]
    Invalid {
        /// API name of the field.
        param: &'static str,
        /// One sentence with what was found and what is allowed.
        message: String,
    },
    /// The request can never fit the context or the pool (numbers in the message). Maps to HTTP 400.
    #[error("{0}")]
    NeverFits(String),
    /// As many requests wait as may; later there is room. Maps to HTTP 429.
    #[error("{waiting} requests wait already, and at most {limit} may (--max-queued-requests): try again later")]
    QueueFull {
        /// Requests that wait now.
        waiting: usize,
        /// As many as may.
        limit: usize,
    },
    /// The engine is draining or has ended. Maps to HTTP 503.
    #[error("the engine is shutting down and takes no new requests")]
    Closed,
}
