//! How a rank waits: MPI has no call that waits without using a core.

use std::time::{Duration, Instant};

/// Ranks that compute the same arrive within this time.
const SPIN: Duration = Duration::from_micros(50);
/// Until then the core is given to other threads, but not to sleep.
const YIELD: Duration = Duration::from_millis(5);
/// Sleeps last a thousandth of the time that has passed, within these limits: a rank arrives late by at most 0.1 % or the least. A
/// sleep and a poll cost about 20 us of CPU time, so a rank that waits for long uses 1 % of a core.
const SLEEP: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));

/// The pauses of one wait.
pub(super) struct Backoff(Instant);

impl Backoff {
    pub fn new() -> Backoff {
        Backoff(Instant::now())
    }

    /// Returns how long the wait has lasted.
    pub fn waited(&self) -> Duration {
        self.0.elapsed()
    }

    /// Pauses between two polls.
    pub fn pause(&self) {
        match self.waited() {
            waited if waited < SPIN => std::hint::spin_loop(),
            waited if waited < YIELD => std::thread::yield_now(),
            waited => std::thread::sleep((waited / 1000).clamp(SLEEP.0, SLEEP.1)),
        }
    }
}
