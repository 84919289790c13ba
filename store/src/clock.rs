//! The time that records are made and end by.
//!
//! It is what the system's clock said when the process first asked, and what has passed since. So a clock that is moved, by hand or
//! by a time server, does not make records older or younger while the process runs. The next start takes the clock as it then is.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// Seconds since 1970, which tests replace.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Counts on while the machine sleeps.
#[cfg(any(target_os = "linux", target_os = "android"))]
const PASSING: ClockId = ClockId::Boottime;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const PASSING: ClockId = ClockId::Monotonic;

/// Seconds since 1970 by the clock of this process, which never goes back.
pub fn unix_seconds() -> u64 {
    static START: LazyLock<Start> = LazyLock::new(|| {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Start { clock, passed: passed() }
    });
    START.at(passed())
}

/// Time since some moment that does not change.
fn passed() -> Duration {
    let time = clock_gettime(PASSING);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// What both clocks said at first.
struct Start {
    clock: Duration,
    passed: Duration,
}

impl Start {
    fn at(&self, passed: Duration) -> u64 {
        (self.clock + passed.saturating_sub(self.passed)).as_secs()
    }
}

#[cfg(test)]
#[path = "../tests/unit/clock.rs"]
mod tests;
