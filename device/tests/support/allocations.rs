//! A global allocator for test programs that counts allocations and their bytes, and keeps the size of the largest. A test program uses it
//! by including this file: `#[path = "…/device/tests/support/allocations.rs"] mod counter;`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system allocator, with a count of calls per thread.
struct Counting;

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded to `System` unchanged; the counts are thread-locals without destructors, so counting neither
// allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        BYTES.set(BYTES.get() + layout.size());
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: as the caller promises for `layout`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `alloc` returned `pointer` from `System` for this `layout`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the number of allocations of this thread so far.
pub fn allocations() -> usize {
    CALLS.get()
}

/// Returns the number of bytes that this thread has allocated so far.
#[allow(dead_code)] // each test program uses its part
pub fn allocated_bytes() -> usize {
    BYTES.get()
}

/// Returns the size in bytes of the largest allocation of this thread since the last call.
#[allow(dead_code)] // each test program uses its part
pub fn largest_allocation() -> usize {
    LARGEST.replace(0)
}
