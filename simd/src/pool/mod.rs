//! Worker threads for the parallel loops of a step.
//!
//! A step has hundreds of loops, most of them a few microseconds long, so starting one must cost less than that:
//! workers spin for the next loop, and sleep only if none comes for a while ([`handover`]). The calling thread
//! works too. Nothing is allocated after the start.
//!
//! The split of the work never changes a result: each item is computed by one thread, in one order.

mod affinity;
mod handover;

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;

use handover::Handover;

/// Minimum number of multiply-adds that is worth a second thread.
const MIN_WORK_PER_TASK: usize = 1 << 16;

/// The system could not start the worker threads.
#[derive(Debug, thiserror::Error)]
#[error("--threads: could not start {threads} worker threads ({problem}); lower the number")]
pub struct ThreadsError {
    /// Number of threads.
    pub threads: usize,
    /// What the system says.
    pub problem: String,
}

/// A fixed set of threads; clones share them. Callers on several threads do not wait for each other: while one uses the
/// workers, the loops of the others run on the calling threads.
#[derive(Clone)]
pub struct Pool {
    workers: Arc<Workers>,
}

/// The worker threads. They end when the last clone of the pool is dropped.
struct Workers {
    handover: Arc<Handover>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.handover.stop();
        self.wake(self.threads.len());
        for worker in self.threads.drain(..) {
            // Workers catch panics of their tasks, so there is no error to report.
            let _ = worker.join();
        }
    }
}

impl Workers {
    /// Wakes the sleeping ones of the first `count` workers.
    fn wake(&self, count: usize) {
        for (index, worker) in self.threads.iter().enumerate().take(count) {
            if self.handover.clear_asleep(index) {
                worker.thread().unpark();
            }
        }
    }
}

impl Pool {
    /// Starts a pool of `threads` threads, including the caller's (`None`: one per core). If that is one thread for each core
    /// that this process may use, each worker is pinned to a core.
    ///
    /// # Errors
    /// [`ThreadsError`] if the system cannot start that many threads.
    pub fn new(threads: Option<usize>) -> Result<Pool, ThreadsError> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = threads.unwrap_or(cores).clamp(1, handover::MOST_THREADS);
        let cpus = affinity::cpus().filter(|cpus| cpus.len() == threads && threads == cores);
        let mut workers = Workers { handover: Arc::new(Handover::new(threads)), threads: Vec::new() };
        for index in 0..threads - 1 {
            let handover = Arc::clone(&workers.handover);
            let place = cpus.as_ref().map(|cpus| affinity::Place::new(cpus, index + 1));
            let worker = std::thread::Builder::new()
                .name(format!("quire-worker-{index}"))
                .spawn(move || handover.serve(index, place))
                .map_err(|error| ThreadsError { threads, problem: error.to_string() })?;
            workers.threads.push(worker);
        }
        Ok(Pool { workers: Arc::new(workers) })
    }

    /// A pool of the calling thread alone.
    pub fn alone() -> Pool {
        Pool { workers: Arc::new(Workers { handover: Arc::new(Handover::new(1)), threads: Vec::new() }) }
    }

    /// Number of threads that compute, including the caller's.
    #[inline]
    pub fn threads(&self) -> usize {
        self.workers.threads.len() + 1
    }

    /// Runs `f`, which has many small loops. Sleeping workers are woken first, so that the first loop finds them ready.
    pub fn enter<R>(&self, f: impl FnOnce() -> R) -> R {
        self.workers.wake(self.workers.threads.len());
        f()
    }

    /// Calls `f(i)` once for every `i` in `0..tasks`, in any order. `work_per_task` is the cost of a task in multiply-adds:
    /// small loops run on the calling thread, as do all loops that are started by a task.
    ///
    /// # Panics
    /// If a task panics, after all other tasks have ended.
    pub fn run(&self, tasks: usize, work_per_task: usize, f: impl Fn(usize) + Sync) {
        self.ranges(tasks, work_per_task, |range| range.for_each(&f));
    }

    /// Cuts `0..tasks` into a few ranges per thread, and calls `f` once for each; see [`Pool::run`].
    pub fn ranges(&self, tasks: usize, work_per_task: usize, f: impl Fn(Range<usize>) + Sync) {
        // Number of tasks in the smallest piece of work that is worth a thread.
        let grain = (MIN_WORK_PER_TASK / work_per_task.max(1)).max(1);
        if self.workers.threads.is_empty() || tasks <= grain {
            return f(0..tasks);
        }
        let done = self.workers.handover.run(tasks, tasks.div_ceil(grain), &f, |workers| self.workers.wake(workers));
        if !done {
            f(0..tasks);
        }
    }

    /// Calls `f(i, chunk)` for every chunk of `chunk_len` elements of `data`, the last of which may be shorter; see
    /// [`Pool::run`].
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
            // SAFETY: inside of `data`, which is borrowed until the loop ends; each `i` occurs once, and chunks of different
            // `i` do not overlap.
            f(i, unsafe { std::slice::from_raw_parts_mut(start.at(first), count) });
        });
    }

    /// As [`Pool::chunks_mut`] for two slices with the same number of chunks, each given with its chunk length: calls
    /// `f(i, chunk of a, chunk of b)`.
    ///
    /// # Panics
    /// If the slices have different numbers of chunks, or a chunk is not whole.
    pub fn zip_chunks_mut<A: Send, B: Send>(
        &self,
        (a, a_len): (&mut [A], usize),
        (b, b_len): (&mut [B], usize),
        work_per_chunk: usize,
        f: impl Fn(usize, &mut [A], &mut [B]) + Sync,
    ) {
        assert!(a.len().is_multiple_of(a_len) && b.len().is_multiple_of(b_len), "expected whole chunks");
        assert_eq!(a.len() / a_len, b.len() / b_len, "expected equal numbers of chunks");
        let start = Shared(b.as_mut_ptr());
        self.chunks_mut(a, a_len, work_per_chunk, |i, a| {
            // SAFETY: chunk `i` exists because the numbers of chunks are equal; see `chunks_mut`.
            let b = unsafe { std::slice::from_raw_parts_mut(start.at(i * b_len), b_len) };
            f(i, a, b);
        });
    }
}

/// Start of a slice whose parts are used by different threads.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);
// SAFETY: shared only with the threads of a loop, each of which uses parts that no other thread uses; T is Send.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Returns a pointer to element `index`.
    fn at(&self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}
