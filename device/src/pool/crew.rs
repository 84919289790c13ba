//! How many threads compute while other processes use cores.
//!
//! A loop ends when its slowest thread has finished, so a thread that shares its core with another process delays all others. One
//! thread fewer then costs less than waiting: on a machine with n cores, of which another process uses one, n − 1 threads do all that
//! the machine has left.
//!
//! ```text
//! all threads ── lost a fifth of a window ──▶ one thread fewer ── for a pause ──▶ one more: a trial
//!                                                     ▲                                │
//!                                                     └── lost again, double the pause ┘
//! ```
//!
//! Times are those of loops; a pool without work decides nothing. No clock is read here.

use std::time::Duration;

/// Time in which waits are added up: several slices of the scheduler of an operating system.
const WINDOW: Duration = Duration::from_millis(20);

/// Time in a window that the caller may wait for threads that have lost their cores.
const MOST_LOST: Duration = Duration::from_millis(4);

/// Pauses before a thread is tried again.
const LEAST_PAUSE: Duration = Duration::from_millis(100);
const MOST_PAUSE: Duration = Duration::from_millis(1600);

/// See the [module](self).
pub(super) struct Crew {
    most: usize,
    active: usize,
    /// Time of the window so far, and what of it was lost.
    window: Duration,
    lost: Duration,
    /// Time since the number of threads last changed.
    since: Duration,
    pause: Duration,
}

impl Crew {
    pub fn new(threads: usize) -> Crew {
        let zero = Duration::ZERO;
        Crew { most: threads, active: threads, window: zero, lost: zero, since: zero, pause: LEAST_PAUSE }
    }

    /// A loop has taken `time`, of which the caller has waited `lost` for a thread that had lost its core. Returns the number of
    /// threads of the next loop.
    pub fn after(&mut self, time: Duration, lost: Duration) -> usize {
        self.window += time;
        self.lost += lost;
        self.since += time;
        if self.lost > MOST_LOST && self.active > 1 {
            let failed_trial = self.since < 2 * WINDOW;
            self.pause = if failed_trial { (2 * self.pause).min(MOST_PAUSE) } else { LEAST_PAUSE };
            self.change(self.active - 1);
        } else if self.active < self.most && self.since > self.pause {
            self.change(self.active + 1);
        } else if self.window >= WINDOW {
            (self.window, self.lost) = (Duration::ZERO, Duration::ZERO);
        }
        self.active
    }

    fn change(&mut self, active: usize) {
        self.active = active;
        (self.window, self.lost, self.since) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOP: Duration = Duration::from_micros(50);
    const SLICE: Duration = Duration::from_millis(3);

    /// Runs loops for some time on a machine where `taken` cores are shared. Returns the number of loops by number of threads.
    fn run(crew: &mut Crew, cores: usize, taken: usize, time: Duration) -> Vec<usize> {
        let (mut loops, mut passed, mut active) = (vec![0; cores + 1], Duration::ZERO, crew.active);
        while passed < time {
            // Of a thread on a shared core, every slice is followed by one of the other process.
            let lost = if active + taken > cores && passed.as_micros() % (2 * SLICE).as_micros() < 50 {
                SLICE
            } else {
                Duration::ZERO
            };
            loops[active] += 1;
            active = crew.after(LOOP + lost, lost);
            passed += LOOP + lost;
        }
        loops
    }

    #[test]
    fn as_many_threads_compute_as_there_are_free_cores() {
        for (cores, taken) in [(2, 1), (8, 1), (8, 3), (16, 2)] {
            let mut crew = Crew::new(cores);
            run(&mut crew, cores, taken, Duration::from_secs(2));
            let loops = run(&mut crew, cores, taken, Duration::from_secs(20));
            let (free, all) = (loops[cores - taken], loops.iter().sum::<usize>());
            assert!(free * 100 > all * 98, "{cores} cores, {taken} taken: {loops:?}");
            // When the other process has ended, all threads are back within some seconds, and stay.
            run(&mut crew, cores, 0, Duration::from_secs(6));
            assert_eq!(crew.active, cores, "{cores} cores, {taken} were taken");
        }
    }

    #[test]
    fn short_interruptions_change_nothing_and_one_thread_is_left() {
        let mut crew = Crew::new(4);
        for _ in 0..1000 {
            assert_eq!(crew.after(WINDOW, SLICE), 4);
        }
        for _ in 0..1000 {
            crew.after(WINDOW, WINDOW);
            assert!(crew.active >= 1);
        }
        assert_eq!(Crew::new(1).after(WINDOW, WINDOW), 1);
    }
}
