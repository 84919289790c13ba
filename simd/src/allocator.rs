//! Settings of the system allocator: how much freed memory it keeps.
//!
//! glibc keeps freed memory in arenas, up to eight per core, and returns only what lies at their ends. After large requests a
//! server would keep hundreds of megabytes. On other systems these functions do nothing.

use std::mem::MaybeUninit;

/// Bytes of a large page; systems with others ignore parts of the advice.
#[cfg(target_os = "linux")]
const LARGE_PAGE: usize = 2 << 20;

/// Allocations of at least this many bytes get their own mapping, which is returned to the system when it is freed. Smaller
/// ones come from the arenas: a mapping costs a page fault per page.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BYTES: libc::c_int = 4 << 20;

/// Configures the allocator for a process whose requests differ much in size: threads share few arenas, so that one reuses what
/// another has freed, and large allocations are returned at once. Call it before other threads exist.
pub fn limit_retention() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: `mallopt` takes two numbers and changes only settings of the allocator.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, 2);
            libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
        }
    }
}

/// Asks for large pages under memory that is about to be written: fewer page faults now, fewer misses of the translation buffers
/// whenever it is read. The contents do not change.
pub fn use_large_pages<T>(memory: &mut [MaybeUninit<T>]) {
    #[cfg(target_os = "linux")]
    {
        let range = memory.as_mut_ptr_range();
        let first = range.start.addr().next_multiple_of(LARGE_PAGE);
        let bytes = (range.end.addr() / LARGE_PAGE * LARGE_PAGE).saturating_sub(first);
        if bytes > 0 {
            // SAFETY: the whole pages of the slice; the advice changes no contents, and a system that refuses it changes nothing.
            unsafe { libc::madvise(range.start.with_addr(first).cast(), bytes, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

/// Returns all unused pages to the system. This takes milliseconds, during which other threads may wait for an allocation.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: `malloc_trim` takes a number and touches no memory that is in use.
        unsafe { libc::malloc_trim(0) };
    }
}
