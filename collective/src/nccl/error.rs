//! Errors of NCCL; each is one line.

/// An error of NCCL, or of what it needs.
#[derive(Debug, thiserror::Error)]
pub enum NcclError {
    /// The library cannot be opened.
    #[error(
        "found no NCCL ({file}: {problem}); install libnccl2 or pip install nvidia-nccl-cu13, or name its file in QUIRE_NCCL_SO_PATH"
    )]
    NoLibrary {
        /// Name or path of the library.
        file: String,
        /// What the loader says.
        problem: String,
    },
    /// The library lacks a function.
    #[error("{file}: found no {symbol}, expected NCCL 2.13 or newer; name another in QUIRE_NCCL_SO_PATH")]
    Symbol {
        /// Name or path of the library.
        file: String,
        /// What it lacks.
        symbol: &'static str,
    },
    /// The device has no GPU.
    #[error("NCCL needs --device cuda, found --device {0}")]
    Device(&'static str),
    /// Another rank cannot use NCCL.
    #[error("another rank cannot use NCCL; its message says why")]
    OtherRank,
    /// A call failed.
    #[error("NCCL: {what}: {problem}; NCCL_DEBUG=INFO prints more")]
    Call {
        /// What was being done.
        what: &'static str,
        /// What the library says.
        problem: String,
    },
}
