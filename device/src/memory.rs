//! Host memory as devices hand it out: aligned, zeroed at birth, freed on drop, with guards around it if wanted.
//!
//! The `unsafe` acts of host memory live here: taking it from the allocator, viewing it as numbers, copying it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::DeviceError;

/// One cache line, and enough for every vector width in use.
const ALIGN: usize = 64;
/// Length of each guard.
const GUARD: usize = 256;
/// A guard is NaN in every floating type, so that a read beyond the end is loud too.
const GUARD_BYTE: u8 = 0xff;

/// Plain values: every bit pattern is one, and there is no padding.
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
elements!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64);
// SAFETY: an array has no padding between its elements.
unsafe impl<T: Element, const N: usize> Element for [T; N] {}

/// How many elements of `T` so many bytes are.
pub(crate) fn elements<T: Element>(bytes: usize) -> Result<usize, DeviceError> {
    let element = size_of::<T>();
    // A multiple of 0 is 0 alone, so an empty array never divides.
    if element != 0 && bytes.is_multiple_of(element) {
        Ok(bytes / element)
    } else {
        Err(DeviceError::BadView { bytes, element })
    }
}

/// That `bytes` bytes from `at` on lie in a buffer of `len`.
pub(crate) fn inside(at: usize, bytes: usize, len: usize) -> Result<(), DeviceError> {
    match at.checked_add(bytes) {
        Some(end) if end <= len => Ok(()),
        _ => Err(DeviceError::Outside { at, bytes, len }),
    }
}

/// A piece of memory of this process, 64-byte aligned.
pub(crate) struct HostMemory {
    /// What the allocator gave.
    allocation: NonNull<u8>,
    /// The first byte for the user, aligned.
    start: NonNull<u8>,
    bytes: usize,
    guarded: bool,
}

// SAFETY: the memory has one owner. Views follow the rules of references; what kernels do to it through its address is
// ordered by the device that owns it.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Untouched pages cost nothing. `None`: there is not that much memory.
    pub fn zeroed(bytes: usize) -> Option<HostMemory> {
        HostMemory::new(bytes, false)
    }

    /// With a guard on each side, see [`HostMemory::guards_hold`].
    pub fn guarded(bytes: usize) -> Option<HostMemory> {
        HostMemory::new(bytes, true)
    }

    fn new(bytes: usize, guarded: bool) -> Option<HostMemory> {
        // SAFETY: the layout has a size above zero.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout(bytes, guarded)?) })?;
        let guard = if guarded { GUARD } else { 0 };
        // SAFETY: the layout has room for a step to alignment and a guard on each side.
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

    /// The first byte.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// `None` if the size is no multiple of `T`'s.
    pub fn view<T: Element>(&self) -> Result<&[T], DeviceError> {
        let len = elements::<T>(self.bytes)?;
        // SAFETY: initialised (zeroed at birth), aligned to 64, `len` elements long, and `T` allows any bits.
        Ok(unsafe { std::slice::from_raw_parts(self.start().cast(), len) })
    }

    /// As [`HostMemory::view`], for writing.
    pub fn view_mut<T: Element>(&mut self) -> Result<&mut [T], DeviceError> {
        let len = elements::<T>(self.bytes)?;
        // SAFETY: as in `view`, and `&mut self` makes it the only one.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start().cast(), len) })
    }

    /// Whether nobody wrote next to the memory. True without guards.
    pub fn guards_hold(&self) -> bool {
        let holds = |at: *mut u8| {
            // SAFETY: the guards lie inside of the allocation and are initialised.
            unsafe { std::slice::from_raw_parts(at, GUARD) }.iter().all(|byte| *byte == GUARD_BYTE)
        };
        self.guards().all(holds)
    }

    /// The first byte of each guard.
    fn guards(&self) -> impl Iterator<Item = *mut u8> {
        let ends = [self.start().wrapping_sub(GUARD), self.start().wrapping_add(self.bytes)];
        ends.into_iter().take(if self.guarded { 2 } else { 0 })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Some(layout) = layout(self.bytes, self.guarded) {
            // SAFETY: allocated in `new` with this layout and owned by nobody else.
            unsafe { dealloc(self.allocation.as_ptr(), layout) }
        }
    }
}

/// Room for `bytes` from an aligned address on, and the guards. The allocator is asked for its own alignment only: for
/// a greater one the standard library writes the zeros itself and so touches every page, where the system's fresh pages
/// are zero already.
fn layout(bytes: usize, guarded: bool) -> Option<Layout> {
    let around = ALIGN + if guarded { 2 * GUARD } else { 0 };
    Layout::from_size_align(bytes.checked_add(around)?, 16).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn memory_is_zeroed_aligned_and_checked() {
        for memory in [HostMemory::zeroed(130).unwrap(), HostMemory::guarded(130).unwrap()] {
            assert!(memory.view::<u8>().unwrap().iter().all(|&b| b == 0));
            assert_eq!(memory.start() as usize % ALIGN, 0);
            let error = memory.view::<f32>().unwrap_err().to_string();
            assert!(error.contains("130") && error.contains('4'), "{error}");
        }
        assert!(HostMemory::zeroed(0).unwrap().view::<f32>().unwrap().is_empty());
        assert!(HostMemory::zeroed(0).unwrap().view::<[f32; 0]>().is_err());
    }

    #[test]
    fn a_write_beside_guarded_memory_is_seen() {
        for beside in [-1isize, -(GUARD as isize), 100, 100 + GUARD as isize - 1] {
            let memory = HostMemory::guarded(100).unwrap();
            assert!(memory.guards_hold());
            // SAFETY: the guards are part of the allocation.
            unsafe { memory.start().offset(beside).write(0) };
            assert!(!memory.guards_hold(), "{beside}");
        }
    }

    #[test]
    fn copies_stay_inside() {
        assert!(inside(3, 5, 8).is_ok() && inside(8, 0, 8).is_ok());
        for (at, bytes) in [(4, 5), (9, 0), (usize::MAX, 2)] {
            let error = inside(at, bytes, 8).unwrap_err().to_string();
            assert_eq!(error, format!("{bytes} bytes from byte {at} on do not lie in a buffer of 8 bytes"));
        }
    }

    #[test]
    fn an_impossible_size_is_no_memory() {
        assert!(HostMemory::zeroed(usize::MAX / 2).is_none() && HostMemory::guarded(usize::MAX).is_none());
    }
}
