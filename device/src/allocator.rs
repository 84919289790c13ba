//! The system's allocator: how much freed memory it keeps.
//!
//! glibc keeps what is freed in arenas, up to eight for each core, and gives back only what lies at their ends. A server
//! whose large requests are over would keep hundreds of megabytes. Elsewhere these functions do nothing.

/// Allocations of this many bytes are mappings of their own, which go back to the system when they are freed. Smaller ones
/// are left to the arenas: a mapping costs a page fault for every page.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BYTES: libc::c_int = 4 << 20;

/// Sets the allocator up for a process whose requests differ much in size: threads share few arenas, so that one uses what
/// another has freed, and large allocations go back at once. To be called before there are other threads.
pub fn keep_little() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: `mallopt` takes two numbers and changes nothing but the allocator's own settings.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, 2);
            libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
        }
    }
}

/// Gives all pages that hold nothing back to the system: milliseconds, while other threads may wait for an allocation.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: `malloc_trim` takes a number, and touches no memory that is in use.
        unsafe { libc::malloc_trim(0) };
    }
}
