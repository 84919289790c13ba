//! What can go wrong with a library of kernels, and in a kernel.

use std::fmt;
use std::path::PathBuf;

use crate::LaunchError;

/// Why a library could not be opened, or a launch did not run or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The file is not there or is no library.
    #[error("{path}: {problem}; `cargo xtask build-kernels --sim` builds it")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the loader said.
        problem: libloading::Error,
    },
    /// The library is older or newer than this program.
    #[error("{path}: found interface {found}, expected {expected}; `cargo xtask build-kernels --sim` builds it anew")]
    Interface {
        /// The file.
        path: PathBuf,
        /// What it says of itself.
        found: u32,
        /// What this program was written for.
        expected: u32,
    },
    /// The launch does not fit its kernel.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The kernel did something wrong, or the launch asks for more than a device has.
    #[error(transparent)]
    Fault(Box<Fault>),
}

/// What kind of mistake ended a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A grid, a block or a size of shared memory that no device takes.
    BadLaunch,
    /// Threads of a block wait at different barriers.
    DivergentBarrier,
    /// Some threads wait at a barrier, others have left the kernel.
    BarrierAfterExit,
    /// Threads wait for each other at a barrier and in a warp.
    Deadlock,
    /// The mask of a warp operation lacks the lane that calls it, or names one that has left.
    BadMask,
    /// Lanes of one mask meet in different operations.
    DivergentCollective,
    /// A shuffle reads from a lane outside of its mask.
    BadLane,
    /// `ldmatrix` or `cp.async` at an address that is no multiple of 16.
    Misaligned,
    /// The kernel called `__trap()`.
    Trap,
    /// An mbarrier, a bulk copy or a wgmma was used against its rules.
    BadAsync,
}

impl FaultKind {
    /// Of a code of the header. `Api::load` has compared the interface, and the kernel's name was looked up before.
    pub(super) fn of(code: i32) -> FaultKind {
        match code {
            3 => FaultKind::DivergentBarrier,
            4 => FaultKind::BarrierAfterExit,
            5 => FaultKind::Deadlock,
            6 => FaultKind::BadMask,
            7 => FaultKind::DivergentCollective,
            8 => FaultKind::BadLane,
            9 => FaultKind::Misaligned,
            10 => FaultKind::Trap,
            11 => FaultKind::BadAsync,
            _ => FaultKind::BadLaunch,
        }
    }
}

/// Where and why a launch ended. Its text is one line with all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What kind.
    pub kind: FaultKind,
    /// The kernel.
    pub kernel: String,
    /// `blockIdx` of the thread.
    pub block: [u32; 3],
    /// `threadIdx` of the thread.
    pub thread: [u32; 3],
    /// The source file, empty for [`FaultKind::BadLaunch`].
    pub file: String,
    /// The line of it, 0 for [`FaultKind::BadLaunch`].
    pub line: u32,
    pub(super) message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Fault {}
