//! A global allocator for test programs that counts allocations and their bytes, and keeps the size of the largest. A test program uses it
//! by including this file: `#[path = "…/device/tests/support/allocations.rs"] mod counter;`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system allocator, with counts of each thread.
struct Counting;

struct Counts {
    calls: Cell<usize>,
    bytes: Cell<usize>,
    largest: Cell<usize>,
}

thread_local! {
    static COUNTS: Counts = const { Counts { calls: Cell::new(0), bytes: Cell::new(0), largest: Cell::new(0) } };
}

fn count(size: usize) {
    COUNTS.with(|Counts { calls, bytes, largest }| {
        calls.set(calls.get() + 1);
        bytes.set(bytes.get() + size);
        if size > largest.get() {
            largest.set(size);
        }
    });
}

// SAFETY: every call is forwarded to `System` unchanged; the counts are thread-locals without destructors, so counting neither
// allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as the caller promises for `layout`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as the caller promises for `layout`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: `alloc` returned `pointer` from `System` for this `layout`, and the caller promises the rest.
        unsafe { System.realloc(pointer, layout, size) }
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
    COUNTS.with(|counts| counts.calls.get())
}

/// Returns the number of bytes that this thread has allocated so far.
#[allow(dead_code)] // each test program uses its part
pub fn allocated_bytes() -> usize {
    COUNTS.with(|counts| counts.bytes.get())
}

/// Returns the size in bytes of the largest allocation of this thread since the last call.
#[allow(dead_code)] // each test program uses its part
pub fn largest_allocation() -> usize {
    COUNTS.with(|counts| counts.largest.take())
}
