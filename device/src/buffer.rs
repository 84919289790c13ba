//! Device memory: aligned, zeroed at birth, freed on drop.
//!
//! The two `unsafe` acts of host memory live here: taking it from the allocator and viewing it as numbers.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::DeviceError;

/// One cache line, and enough for every vector width in use.
const ALIGN: usize = 64;

/// Plain numbers: every bit pattern is a value, no padding.
///
/// # Safety
/// Implementors must be `Copy`, valid for every bit pattern, free of padding, and aligned to at most 64 bytes.
pub unsafe trait Element: Copy + Send + Sync + 'static {}
macro_rules! elements {
    ($($number:ty),*) => {
        // SAFETY: primitive numbers without padding or invalid patterns.
        $(unsafe impl Element for $number {})*
    };
}
elements!(u8, u16, u32, u64, i32, i64, f32);

/// A piece of device memory, 64-byte aligned. Host memory is its only kind so far.
pub struct Buffer {
    /// What the allocator gave.
    allocation: NonNull<u8>,
    /// The first aligned byte of it.
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a buffer owns its memory alone; shared access is read-only through `&self`.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) fn zeroed_host(device: &'static str, bytes: usize) -> Result<Buffer, DeviceError> {
        let out_of_memory = || DeviceError::OutOfMemory { device, wanted: bytes };
        let layout = layout(bytes).ok_or_else(out_of_memory)?;
        // SAFETY: the layout has a size above zero.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(out_of_memory)?;
        // SAFETY: the layout has `ALIGN` bytes more than are used, so the step to alignment stays inside.
        let start = unsafe { allocation.add(allocation.align_offset(ALIGN)) };
        Ok(Buffer { allocation, start, bytes })
    }

    /// Size in bytes.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// The memory as elements of `T`. An error if the size is no multiple of `T` (or, for other backends, if the CPU
    /// can not reach it).
    pub fn host<T: Element>(&self) -> Result<&[T], DeviceError> {
        let len = self.elements::<T>()?;
        // SAFETY: the memory is initialised (zeroed at birth), aligned to 64, `len` elements long, and `T` allows any bits.
        Ok(unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), len) })
    }

    /// As [`Buffer::host`], for writing.
    pub fn host_mut<T: Element>(&mut self) -> Result<&mut [T], DeviceError> {
        let len = self.elements::<T>()?;
        // SAFETY: as in `host`, and `&mut self` makes it the only view.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), len) })
    }

    /// The address that a kernel gets for byte 0.
    pub(crate) fn address(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn elements<T: Element>(&self) -> Result<usize, DeviceError> {
        let element = size_of::<T>();
        if self.bytes.is_multiple_of(element) {
            Ok(self.bytes / element)
        } else {
            Err(DeviceError::BadView { bytes: self.bytes, element })
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(layout) = layout(self.bytes) {
            // SAFETY: allocated in `zeroed_host` with this layout and owned by nobody else.
            unsafe { dealloc(self.allocation.as_ptr(), layout) }
        }
    }
}

/// Room for `bytes` from an aligned address on. The allocator is asked for its own alignment only: for a greater one the
/// standard library writes the zeros itself and so touches every page, where the system's fresh pages are zero already.
fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.checked_add(ALIGN)?, 16).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn memory_is_zeroed_aligned_and_checked() {
        let buffer = Buffer::zeroed_host("cpu", 130).unwrap();
        assert!(buffer.host::<u8>().unwrap().iter().all(|&b| b == 0));
        assert_eq!(buffer.host::<u8>().unwrap().as_ptr() as usize % ALIGN, 0);
        let error = buffer.host::<f32>().unwrap_err().to_string();
        assert!(error.contains("130") && error.contains('4'), "{error}");
        assert!(Buffer::zeroed_host("cpu", 0).unwrap().host::<f32>().unwrap().is_empty());
    }

    #[test]
    fn an_impossible_size_is_an_error_value() {
        let error = Buffer::zeroed_host("cpu", usize::MAX / 2).err().unwrap().to_string();
        assert!(error.contains("--kv-cache-memory-bytes"), "{error}");
    }
}
