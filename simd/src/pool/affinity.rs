//! CPU affinity of worker threads. On systems other than Linux nothing is pinned.

/// The CPU of a worker, and all CPUs that the process may use.
pub(super) struct Place {
    #[cfg(target_os = "linux")]
    own: libc::cpu_set_t,
    #[cfg(target_os = "linux")]
    all: libc::cpu_set_t,
    pinned: bool,
}

#[cfg(target_os = "linux")]
mod system {
    use super::Place;

    /// Returns the CPUs that this process may use; `None` if there are more than the mask can represent.
    pub fn cpus() -> Option<Vec<usize>> {
        let set = mask()?;
        // SAFETY: every index is below the size of the set.
        Some((0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
    }

    fn empty() -> libc::cpu_set_t {
        // SAFETY: a set of bits; all zeros is the empty set.
        unsafe { std::mem::zeroed() }
    }

    fn mask() -> Option<libc::cpu_set_t> {
        let mut set = empty();
        // SAFETY: the size is that of `set`; 0 is the calling thread.
        (unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } == 0).then_some(set)
    }

    impl Place {
        /// Makes a place on the CPU at index `index` of `cpus`.
        pub fn new(cpus: &[usize], index: usize) -> Place {
            let (mut own, mut all) = (empty(), empty());
            for (i, &cpu) in cpus.iter().enumerate() {
                // SAFETY: the indices come from a set of this size.
                unsafe {
                    libc::CPU_SET(cpu, &mut all);
                    if i == index {
                        libc::CPU_SET(cpu, &mut own);
                    }
                }
            }
            Place { own, all, pinned: false }
        }

        /// Pins the calling thread to its CPU, or allows it all CPUs. If the system refuses, nothing changes.
        pub fn pin(&mut self, pinned: bool) {
            if self.pinned != pinned {
                let set = if pinned { &self.own } else { &self.all };
                // SAFETY: the size is that of `set`; 0 is the calling thread.
                unsafe { libc::sched_setaffinity(0, size_of_val(set), set) };
                self.pinned = pinned;
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::Place;

    /// Returns `None`: nothing can be pinned.
    pub fn cpus() -> Option<Vec<usize>> {
        None
    }

    impl Place {
        /// Makes a place without meaning.
        pub fn new(_: &[usize], _: usize) -> Place {
            Place { pinned: false }
        }

        /// Does nothing.
        pub fn pin(&mut self, pinned: bool) {
            self.pinned = pinned;
        }
    }
}

pub(super) use system::cpus;
