//! Worker threads for the loops of a step.
//!
//! A step has hundreds of loops, most of them a few microseconds long, so handing one over must cost less than that:
//! workers spin for the next loop, and only when none comes for a while do they sleep ([`crew`]). The calling thread
//! works too. Nothing is allocated after the start.
//!
//! How work is split never changes a result: every item is computed by one thread, in one order.

mod affinity;
mod crew;

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::DeviceError;
use crew::Crew;

/// Work below this many multiply-adds is not worth a second thread.
const MIN_WORK_PER_TASK: usize = 1 << 16;

/// A fixed set of threads; clones share them. Callers on several threads do not wait for each other: while one has the
/// workers, the loops of the others run on their own threads.
#[derive(Clone)]
pub struct Pool {
    team: Arc<Team>,
}

/// The workers beside the caller. They end with the last clone of the pool.
struct Team {
    crew: Arc<Crew>,
    workers: Vec<JoinHandle<()>>,
}

impl Drop for Team {
    fn drop(&mut self) {
        self.crew.stop();
        self.wake(self.workers.len());
        for worker in self.workers.drain(..) {
            // A worker catches what its tasks throw; there is nothing to hear.
            let _ = worker.join();
        }
    }
}

impl Team {
    /// Wakes those of the first `count` workers that sleep.
    fn wake(&self, count: usize) {
        for (index, worker) in self.workers.iter().enumerate().take(count) {
            if self.crew.rouse(index) {
                worker.thread().unpark();
            }
        }
    }
}

impl Pool {
    /// A pool of `threads` threads, the caller's among them (`None`: one per core). Where it has one for every core that this
    /// process may use, each worker stays on one.
    ///
    /// # Errors
    /// If the system does not start so many.
    pub fn new(threads: Option<usize>) -> Result<Pool, DeviceError> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = threads.unwrap_or(cores).clamp(1, crew::MOST_THREADS);
        let cpus = affinity::cpus().filter(|cpus| cpus.len() == threads && threads == cores);
        let mut team = Team { crew: Arc::new(Crew::new(threads)), workers: Vec::new() };
        for index in 0..threads - 1 {
            let crew = Arc::clone(&team.crew);
            let place = cpus.as_ref().map(|cpus| affinity::Place::new(cpus, index + 1));
            let worker = std::thread::Builder::new()
                .name(format!("quire-worker-{index}"))
                .spawn(move || crew.serve(index, place))
                .map_err(|error| DeviceError::Threads(threads, error.to_string()))?;
            team.workers.push(worker);
        }
        Ok(Pool { team: Arc::new(team) })
    }

    /// Threads that compute, the caller's among them.
    pub fn threads(&self) -> usize {
        self.team.workers.len() + 1
    }

    /// Runs `f`, which has many small loops: workers that sleep are woken now, so that the first loop finds them ready.
    pub fn enter<R>(&self, f: impl FnOnce() -> R) -> R {
        self.team.wake(self.team.workers.len());
        f()
    }

    /// Calls `f(0..tasks)`, each once, in any order. `work_per_task` is a count of multiply-adds: small jobs stay on
    /// the calling thread, and so does all that is started inside of a task.
    ///
    /// # Panics
    /// If a task does, after all others have ended.
    pub fn run(&self, tasks: usize, work_per_task: usize, f: impl Fn(usize) + Sync) {
        let grain = grain(work_per_task);
        let each = |range: Range<usize>| range.for_each(&f);
        if self.team.workers.is_empty() || tasks <= grain {
            return each(0..tasks);
        }
        let done = self.team.crew.run(tasks, tasks.div_ceil(grain), &each, |workers| self.team.wake(workers));
        if !done {
            each(0..tasks);
        }
    }

    /// Calls `f(i, chunk)` for every chunk of `chunk_len` elements of `data`; see [`Pool::run`].
    pub fn chunks_mut<T: Send>(
        &self,
        data: &mut [T],
        chunk_len: usize,
        work_per_chunk: usize,
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let (len, start) = (data.len(), Shared(data.as_mut_ptr()));
        self.run(len.div_ceil(chunk_len), work_per_chunk, |i| {
            let first = i * chunk_len;
            let count = chunk_len.min(len - first);
            // SAFETY: inside of `data`, which is borrowed for as long as the loop runs; every i comes once, and chunks of
            // different i do not overlap.
            f(i, unsafe { std::slice::from_raw_parts_mut(start.at(first), count) });
        });
    }
}

impl Pool {
    /// Like [`Pool::chunks_mut`] for two slices of as many chunks, each slice beside the length of its own: `f(i, chunk of a, chunk
    /// of b)`.
    ///
    /// # Panics
    /// If one holds another number of chunks, or none whole.
    pub fn zip_chunks_mut<A: Send, B: Send>(
        &self,
        (a, a_len): (&mut [A], usize),
        (b, b_len): (&mut [B], usize),
        work_per_chunk: usize,
        f: impl Fn(usize, &mut [A], &mut [B]) + Sync,
    ) {
        assert!(a.len().is_multiple_of(a_len) && b.len().is_multiple_of(b_len), "whole chunks");
        assert_eq!(a.len() / a_len, b.len() / b_len, "as many chunks");
        let start = Shared(b.as_mut_ptr());
        self.chunks_mut(a, a_len, work_per_chunk, |i, a| {
            // SAFETY: chunk i of those that were counted; see `chunks_mut`.
            let b = unsafe { std::slice::from_raw_parts_mut(start.at(i * b_len), b_len) };
            f(i, a, b);
        });
    }
}

/// The start of a slice whose parts go to different threads.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);
// SAFETY: only moved to the threads of a loop, each of which takes parts that no other takes; T may change threads.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Element `index`.
    fn at(&self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

/// Tasks that one thread takes at a time.
fn grain(work_per_task: usize) -> usize {
    (MIN_WORK_PER_TASK / work_per_task.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    /// Work that is worth any number of threads.
    const LARGE: usize = 1 << 20;

    fn counts(n: usize) -> Vec<AtomicUsize> {
        (0..n).map(|_| AtomicUsize::new(0)).collect()
    }

    fn all_once(counts: &[AtomicUsize]) -> bool {
        counts.iter().all(|count| count.load(Ordering::Relaxed) == 1)
    }

    #[test]
    fn every_task_runs_once_whatever_the_threads() {
        for threads in 1..=8 {
            let pool = Pool::new(Some(threads)).unwrap();
            assert_eq!(pool.threads(), threads);
            for tasks in [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 100_003] {
                let calls = counts(tasks);
                pool.run(tasks, LARGE, |i| {
                    calls[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(all_once(&calls), "{threads} threads, {tasks} tasks");
            }
            let mut data = vec![0usize; 1003];
            pool.chunks_mut(&mut data, 10, LARGE, |i, chunk| chunk.fill(i));
            assert!(data.iter().enumerate().all(|(i, &v)| v == i / 10));
            let mut other = vec![0u8; 1003];
            pool.zip_chunks_mut((&mut data[..1000], 10), (&mut other[..300], 3), LARGE, |i, a, b| {
                assert!(b.len() == 3 && a.iter().all(|&v| v == i));
                b.fill(i as u8);
            });
            assert!(other[..300].iter().enumerate().all(|(i, &v)| v == (i / 3) as u8));
        }
    }

    /// Small loops one right after the other, with now and then a pause in which workers fall asleep: each loop must see
    /// all that the one before has written.
    #[test]
    fn loops_follow_each_other_without_a_gap() {
        for threads in 1..=8 {
            let pool = Pool::new(Some(threads)).unwrap();
            let mut data = vec![0u64; 97];
            for round in 0..2000u64 {
                if round % 500 == 499 {
                    std::thread::sleep(Duration::from_millis(3));
                }
                pool.chunks_mut(&mut data, 3, LARGE, |_, chunk| {
                    for value in chunk {
                        assert_eq!(*value, round);
                        *value += 1;
                    }
                });
            }
        }
    }

    /// A worker that comes late to a loop of few pieces finds the next one, of many: it must take none of them for its own.
    #[test]
    fn loops_of_few_and_of_many_pieces_take_turns() {
        for threads in 2..=8 {
            let pool = Pool::new(Some(threads)).unwrap();
            for round in 0..20_000 {
                let tasks = [1, 2, 3, 64, 2, 17][round % 6];
                let calls = counts(tasks);
                pool.run(tasks, LARGE, |i| {
                    calls[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(all_once(&calls), "{threads} threads, {tasks} tasks, round {round}");
            }
        }
    }

    #[test]
    fn a_loop_inside_of_a_task_runs_there() {
        let pool = Pool::new(Some(4)).unwrap();
        let calls = counts(40 * 30);
        pool.enter(|| {
            pool.run(40, LARGE, |i| {
                let thread = std::thread::current().id();
                pool.run(30, LARGE, |j| {
                    assert_eq!(std::thread::current().id(), thread);
                    calls[i * 30 + j].fetch_add(1, Ordering::Relaxed);
                });
            });
        });
        assert!(all_once(&calls));
    }

    #[test]
    fn callers_on_several_threads_share_a_pool() {
        let pool = Pool::new(Some(3)).unwrap();
        std::thread::scope(|scope| {
            for caller in 0..4usize {
                let pool = pool.clone();
                scope.spawn(move || {
                    for round in 0..500 {
                        let mut data = vec![0; 50];
                        pool.chunks_mut(&mut data, 1, LARGE, |i, chunk| chunk[0] = i * caller + round);
                        assert!(data.iter().enumerate().all(|(i, &v)| v == i * caller + round));
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_after_the_others_and_the_pool_goes_on() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(Some(threads)).unwrap();
            for bad in [0, 17, 63] {
                let calls = counts(64);
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(64, LARGE, |i| {
                        calls[i].fetch_add(1, Ordering::Relaxed);
                        assert!(i != bad, "task {i} fails");
                    });
                }));
                let message = outcome.unwrap_err().downcast::<String>().unwrap();
                assert_eq!(*message, format!("task {bad} fails"));
                assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) <= 1), "none runs twice");
                let calls = counts(64);
                pool.run(64, LARGE, |i| {
                    calls[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(all_once(&calls), "after a panic, {threads} threads");
            }
        }
    }

    #[test]
    fn a_pool_ends_busy_or_idle() {
        for threads in 1..=8 {
            drop(Pool::new(Some(threads)).unwrap());
            let pool = Pool::new(Some(threads)).unwrap();
            pool.run(100, LARGE, |_| {});
            drop(pool.clone());
            pool.run(100, LARGE, |_| {});
            drop(pool);
            let asleep = Pool::new(Some(threads)).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            drop(asleep);
        }
    }
}
