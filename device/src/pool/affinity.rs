//! Which CPUs a thread may run on. Where the system has no say in that, nothing is pinned.

/// A worker's own CPU, and all that the process may use.
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

    /// The CPUs of this process's mask. `None` if there are more than the mask can name.
    pub fn cpus() -> Option<Vec<usize>> {
        let set = mask()?;
        // SAFETY: every index is below the size of the set.
        Some((0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
    }

    fn empty() -> libc::cpu_set_t {
        // SAFETY: a set of bits, of which none is set.
        unsafe { std::mem::zeroed() }
    }

    fn mask() -> Option<libc::cpu_set_t> {
        let mut set = empty();
        // SAFETY: `set` is as large as is said; 0 is the calling thread.
        (unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } == 0).then_some(set)
    }

    impl Place {
        /// CPU `index` of `cpus`, which must have one.
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

        /// Keeps the calling thread on its own CPU, or lets it go where it finds one. A refusal changes nothing.
        pub fn pin(&mut self, pinned: bool) {
            if self.pinned != pinned {
                let set = if pinned { &self.own } else { &self.all };
                // SAFETY: `set` is as large as is said; 0 is the calling thread.
                unsafe { libc::sched_setaffinity(0, size_of_val(set), set) };
                self.pinned = pinned;
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::Place;

    /// Nothing can be pinned here.
    pub fn cpus() -> Option<Vec<usize>> {
        None
    }

    impl Place {
        /// Of no meaning here.
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
