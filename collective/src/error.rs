//! Errors of a group of ranks; each is one line.

use device::DeviceError;

use super::MOST_BROADCAST_BYTES;
use super::mpi::MpiError;
use super::nccl::NcclError;

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
    /// A broadcast is larger than any may be. Nothing was sent.
    #[error("rank {rank}: a broadcast of {found} bytes, expected at most {most}: send it in pieces")]
    TooLarge {
        /// This rank.
        rank: usize,
        /// Its size.
        found: usize,
        /// Most bytes of a broadcast.
        most: usize,
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
    /// An error of MPI.
    #[error(transparent)]
    Mpi(#[from] MpiError),
    /// An error of NCCL.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// An error of the device whose memory is exchanged.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl CollectiveError {
    /// Checks a size that the call determines.
    pub(super) fn check(rank: usize, what: &'static str, found: usize, expected: usize) -> Result<(), CollectiveError> {
        if found == expected { Ok(()) } else { Err(CollectiveError::Size { rank, what, found, expected }) }
    }

    /// Checks the rank that a call names.
    pub(super) fn check_rank(found: usize, expected: usize) -> Result<(), CollectiveError> {
        if found < expected { Ok(()) } else { Err(CollectiveError::NoSuchRank { found, expected }) }
    }

    /// Checks the length of a broadcast.
    pub(super) fn check_broadcast(rank: usize, found: usize) -> Result<(), CollectiveError> {
        let most = MOST_BROADCAST_BYTES;
        if found <= most { Ok(()) } else { Err(CollectiveError::TooLarge { rank, found, most }) }
    }

    /// Checks the sizes of the two slices of an all_gather, and returns the width of a gathered row.
    pub(super) fn check_gather(
        rank: usize,
        size: usize,
        (own, all): (usize, usize),
        rows: usize,
        widths: &[usize],
    ) -> Result<usize, CollectiveError> {
        CollectiveError::check(rank, "ranks of all_gather", widths.len(), size)?;
        let width: usize = widths.iter().sum();
        CollectiveError::check(rank, "own rows", own, rows * widths[rank])?;
        CollectiveError::check(rank, "gathered rows", all, rows * width)?;
        Ok(width)
    }
}
