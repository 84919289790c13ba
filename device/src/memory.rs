//! Host memory that devices allocate: aligned, initially zero, freed on drop, optionally with guard bytes around it.
//!
//! This file has the `unsafe` code that allocates host memory and views it as numbers.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

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

/// Memory of this process, 64-byte aligned: an allocation, or a part of one that no other part overlaps.
pub(crate) struct HostMemory {
    allocation: Arc<Allocation>,
    /// First byte for the user, counted from that of the allocation; aligned in memory.
    at: usize,
    bytes: usize,
}

/// What the parts of an allocation share.
struct Allocation {
    first: NonNull<u8>,
    layout: Layout,
    /// The bytes between the guards; `None` without guards.
    guarded: Option<Range<usize>>,
}

// SAFETY: each byte has one owner, the part that has it. Views follow the rules of references; the owning device orders accesses by
// kernels, which use addresses.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

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
        let layout = layout(bytes, guarded)?;
        // SAFETY: the layout has a size above zero.
        let first = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        // The layout has room for the alignment offset and a guard on each side.
        let at = first.align_offset(ALIGN) + if guarded { GUARD } else { 0 };
        let allocation = Allocation { first, layout, guarded: guarded.then_some(at..at + bytes) };
        for at in allocation.guards() {
            // SAFETY: both guards lie inside of the allocation.
            unsafe { at.write_bytes(GUARD_BYTE, GUARD) };
        }
        Some(HostMemory { allocation: Arc::new(allocation), at, bytes })
    }

    /// Size in bytes, without the guards.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Address of the first byte.
    pub fn start(&self) -> *mut u8 {
        self.allocation.first.as_ptr().wrapping_add(self.at)
    }

    /// Keeps the first `at` bytes and returns the others as memory of their own; `None` if there are not as many, or the rest would not
    /// be aligned.
    pub fn split_off(&mut self, at: usize) -> Option<HostMemory> {
        let bytes = self.bytes.checked_sub(at).filter(|_| at.is_multiple_of(ALIGN))?;
        self.bytes = at;
        Some(HostMemory { allocation: Arc::clone(&self.allocation), at: self.at + at, bytes })
    }

    /// Appends memory that was split off behind this; returns it if it was not.
    pub fn join(&mut self, behind: HostMemory) -> Result<(), HostMemory> {
        if !Arc::ptr_eq(&self.allocation, &behind.allocation) || self.at + self.bytes != behind.at {
            return Err(behind);
        }
        self.bytes += behind.bytes;
        Ok(())
    }

    /// Returns the memory as elements of `T`.
    pub fn view<T: Element>(&self) -> Result<&[T], DeviceError> {
        let len = elements::<T>(self.bytes)?;
        // SAFETY: initialised (zeroed when allocated), aligned to 64, `len` elements long, and `T` allows any bits. No other part
        // of the allocation has these bytes.
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
        self.allocation.guards().all(holds)
    }
}

impl Allocation {
    /// Returns the first byte of each guard.
    fn guards(&self) -> impl Iterator<Item = *mut u8> {
        let first = self.first.as_ptr();
        self.guarded.iter().flat_map(move |user| [user.start - GUARD, user.end].map(|at| first.wrapping_add(at)))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated in `HostMemory::new` with this layout, and no part is left.
        unsafe { dealloc(self.first.as_ptr(), self.layout) }
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

    #[test]
    fn parts_of_memory_are_disjoint_and_join_only_in_their_order() {
        let mut memory = HostMemory::guarded(256).unwrap();
        let mut last = memory.split_off(192).unwrap();
        let mut middle = memory.split_off(64).unwrap();
        assert!(memory.split_off(63).is_none() && memory.split_off(128).is_none());
        for (part, fill) in [(&mut memory, 1), (&mut middle, 2), (&mut last, 3)] {
            part.view_mut::<u8>().unwrap().fill(fill);
        }
        let last = memory.join(last).unwrap_err();
        memory.join(middle).map_err(|_| "its neighbour").unwrap();
        let other = HostMemory { at: memory.at + memory.bytes, ..HostMemory::guarded(256).unwrap() };
        assert!(memory.join(other).is_err(), "memory at the same place of another allocation");
        memory.join(last).map_err(|_| "its neighbour").unwrap();
        assert_eq!(memory.view::<u8>().unwrap(), [[1; 64].as_slice(), &[2; 128], &[3; 64]].concat());
        assert!(memory.guards_hold());
    }
}
