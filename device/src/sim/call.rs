//! A launch as a value that borrows nothing.

use std::ffi::CString;

use crate::launch::Packed;

/// A launch with its arguments in memory.
pub(crate) struct Call {
    pub(super) name: CString,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared_bytes: u32,
    pub(super) arguments: Packed,
}

impl Call {
    /// The kernel.
    pub fn kernel(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }
}
