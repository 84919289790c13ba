//! Many copies between the device and page-locked memory in one call.

use crate::memory::inside;
use crate::{Buffer, DeviceError, Pinned};

/// One copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// First byte in the source.
    pub from: usize,
    /// First byte in the target.
    pub to: usize,
    /// Number of bytes.
    pub bytes: usize,
}

/// Copies from a buffer, for [`Device::download_ranges`](crate::Device::download_ranges).
pub struct Download<'a> {
    /// Source.
    pub from: &'a Buffer,
    /// Target.
    pub to: &'a mut Pinned,
    /// What is copied.
    pub ranges: &'a [CopyRange],
}

/// Copies to a buffer, for [`Device::upload_ranges`](crate::Device::upload_ranges).
pub struct Upload<'a> {
    /// Source.
    pub from: &'a Pinned,
    /// Target.
    pub to: &'a mut Buffer,
    /// What is copied.
    pub ranges: &'a [CopyRange],
}

/// Checks that all ranges lie inside of a source and a target of these sizes.
pub(crate) fn check(ranges: &[CopyRange], from: usize, to: usize) -> Result<(), DeviceError> {
    let mut ranges = ranges.iter();
    ranges.try_for_each(|range| inside(range.from, range.bytes, from).and(inside(range.to, range.bytes, to)))
}
