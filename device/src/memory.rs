//! Host memory that devices allocate: aligned, initially zero, freed on drop, optionally with guard bytes around it.
//!
//! This file has the `unsafe` code that allocates host memory and views it as numbers.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::DeviceError;

/// Alignment: one cache line, and enough for every vector width.
const ALIGN: usize = 64;
/// Length of each guard in bytes.
const GUARD: usize = 256;
/// Guards are NaN in every floating-point type, so that a read past the end shows too.
const GUARD_BYTE: u8 = 0xff;

/// A plain value: every bit pattern is valid, and there is no padding.
///
/// # Safety
/// Implementors must be `Copy`, valid for every bit pattern, free of padding, and aligned to at most 64 bytes.
pub unsafe trait Element: Copy + Send + Sync + 'static {}
macro_rules! elements {
    ($($number:ty),*) => {
        // SAFETY: primitive numbers have no padding and no invalid bit patterns.
        $(unsafe impl Element for $number {})*
    };
}
elements!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64);
// SAFETY: an array has no padding between its elements.
unsafe impl<T: Element, const N: usize> Element for [T; N] {}

// SAFETY: sixteen numbers, aligned to their 64 bytes.
unsafe impl Element for simd::Pairs {}

/// Returns the number of elements of `T` in `bytes` bytes.
pub(crate) fn elements<T: Element>(bytes: usize) -> Result<usize, DeviceError> {
    let element = size_of::<T>();
    // An element of size 0 (an empty array) is refused.
    if element != 0 && bytes.is_multiple_of(element) {
        Ok(bytes / element)
    } else {
        Err(DeviceError::BadView { bytes, element })
    }
}

/// Checks that `bytes` bytes at offset `at` lie inside of a buffer of `len` bytes.
pub(crate) fn inside(at: usize, bytes: usize, len: usize) -> Result<(), DeviceError> {
    match at.checked_add(bytes) {
        Some(end) if end <= len => Ok(()),
        _ => Err(DeviceError::Outside { at, bytes, len }),
    }
}

/// Memory of this process, 64-byte aligned.
pub(crate) struct HostMemory {
    allocation: NonNull<u8>,
    /// First byte for the user, aligned.
    start: NonNull<u8>,
    bytes: usize,
    guarded: bool,
}

// SAFETY: the memory has one owner. Views follow the rules of references; the owning device orders accesses by kernels, which
// use its address.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates memory without guards; `None` if there is not enough. Pages that are never touched cost nothing.
    pub fn zeroed(bytes: usize) -> Option<HostMemory> {
        HostMemory::new(bytes, false)
    }

    /// Allocates memory with a guard on each side; see [`HostMemory::guards_hold`].
    pub fn guarded(bytes: usize) -> Option<HostMemory> {
        HostMemory::new(bytes, true)
    }

    fn new(bytes: usize, guarded: bool) -> Option<HostMemory> {
        // SAFETY: the layout has a size above zero.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout(bytes, guarded)?) })?;
        let guard = if guarded { GUARD } else { 0 };
        // SAFETY: the layout has room for the alignment offset and a guard on each side.
        let start = unsafe { allocation.add(allocation.align_offset(ALIGN) + guard) };
        let memory = HostMemory { allocation, start, bytes, guarded };
        for at in memory.guards() {
            // SAFETY: both guards lie inside of the allocation.
            unsafe { at.write_bytes(GUARD_BYTE, GUARD) };
        }
        Some(memory)
    }

    /// Size in bytes, without the guards.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Address of the first byte.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the memory as elements of `T`.
    pub fn view<T: Element>(&self) -> Result<&[T], DeviceError> {
        let len = elements::<T>(self.bytes)?;
        // SAFETY: initialised (zeroed when allocated), aligned to 64, `len` elements long, and `T` allows any bits.
        Ok(unsafe { std::slice::from_raw_parts(self.start().cast(), len) })
    }

    /// As [`HostMemory::view`], for writing.
    pub fn view_mut<T: Element>(&mut self) -> Result<&mut [T], DeviceError> {
        let len = elements::<T>(self.bytes)?;
        // SAFETY: as in `view`, and `&mut self` makes this the only view.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start().cast(), len) })
    }

    /// Returns whether the guards are unchanged; true without guards.
    pub fn guards_hold(&self) -> bool {
        let holds = |at: *mut u8| {
            // SAFETY: the guards lie inside of the allocation and are initialised.
            unsafe { std::slice::from_raw_parts(at, GUARD) }.iter().all(|byte| *byte == GUARD_BYTE)
        };
        self.guards().all(holds)
    }

    /// Returns the first byte of each guard.
    fn guards(&self) -> impl Iterator<Item = *mut u8> {
        let ends = [self.start().wrapping_sub(GUARD), self.start().wrapping_add(self.bytes)];
        ends.into_iter().take(if self.guarded { 2 } else { 0 })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Some(layout) = layout(self.bytes, self.guarded) {
            // SAFETY: allocated in `new` with this layout, and this is the only owner.
            unsafe { dealloc(self.allocation.as_ptr(), layout) }
        }
    }
}

/// Returns the layout for `bytes` aligned bytes and the guards. It has only the allocator's own alignment: for a greater
/// alignment the standard library writes the zeros itself, which touches every page, although fresh pages of the system are
/// already zero.
fn layout(bytes: usize, guarded: bool) -> Option<Layout> {
    let around = ALIGN + if guarded { 2 * GUARD } else { 0 };
    Layout::from_size_align(bytes.checked_add(around)?, 16).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_write_next_to_guarded_memory_is_detected() {
        for beside in [-1isize, -(GUARD as isize), 100, 100 + GUARD as isize - 1] {
            let memory = HostMemory::guarded(100).unwrap();
            assert!(memory.guards_hold() && memory.start().addr().is_multiple_of(ALIGN));
            // SAFETY: the guards are part of the allocation.
            unsafe { memory.start().offset(beside).write(0) };
            assert!(!memory.guards_hold(), "{beside}");
        }
    }
}
