//! A launch that borrows nothing, so that a graph can keep it.

use std::ffi::CString;

use crate::launch::Packed;

/// A launch whose arguments are laid out in memory.
pub(crate) struct Call {
    pub(super) name: CString,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared_bytes: u32,
    pub(super) arguments: Packed,
}

impl Call {
    /// Name of the kernel.
    pub fn kernel(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }
}
