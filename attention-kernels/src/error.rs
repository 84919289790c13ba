//! Errors of kernel calls, and the checks that return them.

use device::DeviceError;
use linear::LinearError;

/// Error of a kernel call.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The device cannot access the memory, or the launch failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A weight matrix could not be made.
    #[error(transparent)]
    Matrix(#[from] LinearError),
    /// The ranks that compute the model together could not exchange their parts.
    #[error(transparent)]
    Ranks(Box<dyn std::error::Error + Send + Sync>),
    /// A size does not match the others.
    #[error("{what}: found {found}, expected {expected}")]
    Shape {
        /// Operand.
        what: &'static str,
        /// Size of the operand.
        found: usize,
        /// Size that the other operands require.
        expected: usize,
    },
    /// The variant does not support the call.
    #[error("{variant} was called with {found}, which it does not support; use a variant that `select` returns")]
    Unsupported {
        /// Name of the variant, or of the device that runs it.
        variant: &'static str,
        /// Unsupported property of the call.
        found: String,
    },
    /// The function of a plug-in returned an error.
    #[error("{variant} failed with code {code}: {message}")]
    Plugin {
        /// Name of the variant.
        variant: &'static str,
        /// Code that the function returned.
        code: i32,
        /// Message of the plug-in, one line.
        message: String,
    },
    /// A variant that needs a [`Workspace`](crate::Workspace) was called without one, or before the arguments were loaded
    /// into it.
    #[error("{variant}: found no {what} on the device; load the step into a Workspace and pass that")]
    NotLoaded {
        /// Name of the variant.
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
