//! Errors of host libraries, and faults of kernels.

use std::fmt;
use std::path::PathBuf;

use crate::LaunchError;

/// Why a library could not be opened, or why a launch failed.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The file does not exist or is not a shared library.
    #[error("{path}: {problem}; run `cargo xtask build-kernels --sim`")]
    Open {
        /// The file.
        path: PathBuf,
        /// Error of the loader.
        problem: libloading::Error,
    },
    /// The library was built for another version of the interface.
    #[error("{path}: found interface {found}, expected {expected}; run `cargo xtask build-kernels --sim`")]
    Interface {
        /// The file.
        path: PathBuf,
        /// Version of the library.
        found: u32,
        /// Version of this program.
        expected: u32,
    },
    /// The launch does not match its kernel; nothing has run.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The kernel broke a rule of CUDA, or the launch exceeds the limits of a device.
    #[error(transparent)]
    Fault(Box<Fault>),
}

/// Kind of the mistake that ended a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A grid, a block or a size of shared memory that no device supports.
    BadLaunch,
    /// Threads of a block wait at different barriers.
    DivergentBarrier,
    /// Some threads wait at a barrier while others have returned.
    BarrierAfterExit,
    /// Some threads wait at a barrier while others wait for them in a warp operation.
    Deadlock,
    /// The mask of a warp operation lacks the calling lane, or includes one that has returned.
    BadMask,
    /// The lanes of one mask call different operations.
    DivergentCollective,
    /// A shuffle reads from a lane outside its mask.
    BadLane,
    /// `ldmatrix` or `cp.async` at an address that is not a multiple of 16.
    Misaligned,
    /// The kernel called `__trap()`.
    Trap,
    /// An mbarrier, a bulk copy or a wgmma was used incorrectly.
    BadAsync,
    /// A thread of a kernel that overlaps with the launch before it accesses global memory, or exits, before it has waited.
    TooEarly,
}

impl FaultKind {
    /// Returns the kind for a code of the header. Other codes cannot occur: `Api::load` has compared the versions, and the
    /// kernel's name was looked up before the launch.
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
            12 => FaultKind::TooEarly,
            _ => FaultKind::BadLaunch,
        }
    }
}

/// Where and why a launch failed. `Display` prints all of it in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the mistake.
    pub kind: FaultKind,
    /// Name of the kernel.
    pub kernel: String,
    /// `blockIdx` of the thread.
    pub block: [u32; 3],
    /// `threadIdx` of the thread.
    pub thread: [u32; 3],
    /// Source file; empty for [`FaultKind::BadLaunch`].
    pub file: String,
    /// Line in the source file; 0 for [`FaultKind::BadLaunch`].
    pub line: u32,
    pub(super) message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Fault {}
