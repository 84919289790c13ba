//! Errors of a group of ranks; each is one line.

use crate::DeviceError;

/// An error of a group of ranks. The group cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    /// A rank has ended the group.
    #[error("the group of ranks was ended: {0}")]
    Aborted(String),
    /// The ranks do not call the same methods, or a slice does not have the size that the call says.
    #[error("rank {rank}: {what}: found {found} bytes, expected {expected}; all ranks must run the same build")]
    Size {
        /// This rank.
        rank: usize,
        /// What has another size.
        what: &'static str,
        /// Its size.
        found: usize,
        /// The size that the other ranks expect.
        expected: usize,
    },
    /// Two ranks have different values of something that must be equal.
    #[error("rank {rank}: {what} {found:016x}, expected {expected:016x}, that of rank 0; start all ranks alike")]
    Differs {
        /// What differs.
        what: &'static str,
        /// The first rank that differs from rank 0.
        rank: usize,
        /// Its value.
        found: u64,
        /// The value of rank 0.
        expected: u64,
    },
    /// A rank that the group does not have.
    #[error("found rank {found}, expected one below {expected}")]
    NoSuchRank {
        /// The rank.
        found: usize,
        /// Number of ranks.
        expected: usize,
    },
    /// An error of the device whose memory is exchanged.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl CollectiveError {
    /// Checks a size that the call determines.
    pub(super) fn check(rank: usize, what: &'static str, found: usize, expected: usize) -> Result<(), CollectiveError> {
        if found == expected { Ok(()) } else { Err(CollectiveError::Size { rank, what, found, expected }) }
    }
}
