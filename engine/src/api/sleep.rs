//! An engine that sleeps gives memory back and computes nothing until it is woken.

/// What a sleeping engine gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SleepLevel {
    /// Nothing: it only takes no requests.
    Pause,
    /// The cache. The weights stay.
    Cache,
    /// The cache and the weights, which are read again.
    CacheAndWeights,
}

/// Why an engine cannot sleep or wake. Displays as one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SleepError {
    /// Requests are unfinished.
    #[error("{0} requests are unfinished, expected none; wait for them or abort them")]
    Busy(usize),
    /// This engine cannot sleep at this level.
    #[error("{0}")]
    Unsupported(String),
    /// Memory cannot be allocated, or the weights cannot be read. The engine sleeps on.
    #[error("the engine cannot wake: {0}")]
    Failed(String),
    /// The engine has ended.
    #[error("the engine has stopped")]
    Closed,
}
