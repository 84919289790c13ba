//! Waits of the host for the GPU, with a time limit.
//!
//! `cuEventSynchronize` and `cuStreamSynchronize` have no limit: after a kernel that never ends they would keep the engine's
//! thread for ever. So the host asks whether the work is done, until it is or until the limit has passed.
//!
//! A wait spins for [`SPIN`], which is enough for small copies. Then it sleeps between two questions for 1/256 of the time
//! that it has waited so far, within [`PAUSES`]. Work that ends during a pause is noticed at the end of the pause: on average
//! 0.2 % later, and 10 µs later after a decode step of 5 ms. A blocking event (`CU_EVENT_BLOCKING_SYNC`) would need a second
//! thread that watches the time, and the interrupt that ends it takes longer than that. While the host waits for a
//! step of 5 ms it is awake for less than a fifth of the time.
//!
//! Linux adds 50 µs to each sleep of a thread unless the thread has asked for less ([`Precise`]): measured, a sleep of 20 µs
//! takes 75 µs with the default and 25 µs without.
//!
//! What waits within the driver has no limit: a launch into a full queue (about 1,000 launches), an allocation, and the loading
//! of kernels. Steps allocate and load nothing, and a graph is one launch; only two steps of a deep model in flight that are
//! launched kernel by kernel can fill the queue.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// How long the GPU may take for what the host waits for, unless [`Options::wait_limit`](crate::Options::wait_limit) says
/// otherwise. A step takes at most a few seconds.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// How long a wait asks without a pause.
const SPIN: Duration = Duration::from_micros(20);

/// Shortest and longest pause between two questions.
const PAUSES: RangeInclusive<Duration> = Duration::from_micros(5)..=Duration::from_micros(200);

/// Asks until the answer is `true` or an error. Returns `false` if that takes longer than `limit`.
pub(crate) fn until<E>(limit: Duration, mut is_done: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
    let start = Instant::now();
    let mut precise = None;
    while !is_done()? {
        let waited = start.elapsed();
        if waited > limit {
            return Ok(false);
        }
        if waited < SPIN {
            std::hint::spin_loop();
            continue;
        }
        precise.get_or_insert_with(Precise::sleeps);
        std::thread::sleep((waited / 256).clamp(*PAUSES.start(), *PAUSES.end()));
    }
    Ok(true)
}

/// While it exists, sleeps of this thread end when they should, not up to 50 µs later. Only Linux needs it.
struct Precise {
    #[cfg(target_os = "linux")]
    before: libc::c_int,
}

impl Precise {
    fn sleeps() -> Precise {
        Precise {
            #[cfg(target_os = "linux")]
            before: {
                // SAFETY: asks for a number of this thread, and sets it, in nanoseconds.
                unsafe {
                    let before = libc::prctl(libc::PR_GET_TIMERSLACK);
                    libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong);
                    before
                }
            },
        }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Precise {
    fn drop(&mut self) {
        // An error and 0 stand for the thread's default.
        let before = libc::c_ulong::try_from(self.before).unwrap_or(0);
        // SAFETY: as in `sleeps`.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, before) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_the_work_with_an_error_or_at_the_limit() {
        let limit = Duration::from_millis(20);
        let mut questions = 0;
        let third = |questions: &mut u32| {
            *questions += 1;
            Ok::<bool, ()>(*questions == 3)
        };
        assert_eq!((until(limit, || third(&mut questions)), questions), (Ok(true), 3));
        assert_eq!(until(limit, || Err(7)), Err(7));
        let start = Instant::now();
        let mut questions = 0u64;
        let never = || {
            questions += 1;
            Ok::<bool, ()>(false)
        };
        assert_eq!(until(limit, never), Ok(false));
        assert!(start.elapsed() >= limit);
        // Pauses of 5 to 80 µs, after 20 µs of questions.
        assert!(questions < 100_000, "{questions} questions in 20 ms: the wait does not sleep");
    }
}
