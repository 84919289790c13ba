//! Why a kernel refuses what it is called with, and the checks that say so.

use device::DeviceError;

/// A kernel was called with something it can not work on.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The memory is not where the kernel can use it, or the launch failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A size does not match another.
    #[error("{what}: found {found}, expected {expected}")]
    Shape {
        /// Which operand.
        what: &'static str,
        /// Its size.
        found: usize,
        /// The size that the others ask for.
        expected: usize,
    },
    /// Something that the variant's capabilities exclude.
    #[error("{variant} was called with {found}, which it does not do; `select` finds a variant that does")]
    Unsupported {
        /// The variant, or the device that runs it.
        variant: &'static str,
        /// What it was asked for.
        found: String,
    },
    /// A plug-in's function has returned an error.
    #[error("{variant} failed with code {code}: {message}")]
    Plugin {
        /// The variant.
        variant: &'static str,
        /// What it returned.
        code: i32,
        /// What the plug-in says of it, one line.
        message: String,
    },
    /// A variant that needs a [`Workspace`](crate::Workspace) was called without one, or before this was loaded into it.
    #[error("{variant}: found no {what} on the device; load the step into a Workspace and pass it")]
    NotLoaded {
        /// The variant.
        variant: &'static str,
        /// What is missing.
        what: &'static str,
    },
}

pub(crate) fn check_slots(slot_mapping: &[i64], slots: usize) -> Result<(), KernelError> {
    match slot_mapping.iter().find(|&&slot| slot < -1 || slot >= slots as i64) {
        Some(&slot) => Err(KernelError::Shape { what: "slot", found: slot as usize, expected: slots }),
        None => Ok(()),
    }
}

pub(crate) fn check_copies(copies: &[(u32, u32)], num_blocks: usize) -> Result<(), KernelError> {
    check_ids(copies.iter().flat_map(|&(a, b)| [a, b]), num_blocks)
}

pub(crate) fn check_ids(mut ids: impl Iterator<Item = u32>, num_blocks: usize) -> Result<(), KernelError> {
    match ids.find(|&id| id as usize >= num_blocks) {
        Some(id) => Err(KernelError::Shape { what: "block id", found: id as usize, expected: num_blocks }),
        None => Ok(()),
    }
}

pub(crate) fn expect(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found == expected { Ok(()) } else { Err(KernelError::Shape { what, found, expected }) }
}

pub(crate) fn at_least(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found >= expected { Ok(()) } else { Err(KernelError::Shape { what, found, expected }) }
}
