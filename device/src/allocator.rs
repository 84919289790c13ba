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

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    #![allow(clippy::unwrap_used)]

    fn resident() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn freed_memory_goes_back_to_the_system_even_below_what_is_in_use() {
        super::keep_little();
        let mut texts: Vec<String> = (0..200_000).map(|i| format!("{i:0256}")).collect();
        let full = resident();
        let kept = texts.pop();
        drop(texts);
        super::give_back();
        assert!(resident() + (30 << 10) < full, "{full} KiB, then {}", resident());
        drop(kept);
    }
}
