//! Worker threads: rayon behind the few calls that kernels need.
//!
//! How work is split never changes a result: every item is computed by one thread, in one order.

use std::sync::Arc;

use rayon::prelude::*;

use crate::DeviceError;

/// Work below this many multiply-adds is not worth waking a second thread.
const MIN_WORK_PER_TASK: usize = 1 << 16;

/// A fixed set of worker threads; clones share them.
#[derive(Clone)]
pub struct Pool {
    rayon: Arc<rayon::ThreadPool>,
    threads: usize,
}

impl Pool {
    /// Starts `threads` workers (`None`: one per core).
    pub fn new(threads: Option<usize>) -> Result<Pool, DeviceError> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = threads.unwrap_or(cores).max(1);
        let rayon = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("quire-worker-{i}"))
            .build()
            .map_err(|e| DeviceError::Threads(threads, e.to_string()))?;
        Ok(Pool { rayon: Arc::new(rayon), threads })
    }

    /// Number of workers.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `f` on a worker. Inside, starting a parallel loop costs no hand-over between threads, so a caller with many
    /// small loops (a forward pass has hundreds) enters once.
    pub fn enter<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        if self.threads == 1 { f() } else { self.rayon.install(f) }
    }

    /// Calls `f(0..tasks)`, each once, in any order. `work_per_task` is a count of multiply-adds: small jobs stay on
    /// the calling thread.
    pub fn run(&self, tasks: usize, work_per_task: usize, f: impl Fn(usize) + Sync + Send) {
        let grain = grain(work_per_task);
        if self.threads == 1 || tasks <= grain {
            (0..tasks).for_each(f);
        } else {
            self.rayon.install(|| (0..tasks).into_par_iter().with_min_len(grain).for_each(f));
        }
    }

    /// Calls `f(i, chunk)` for every chunk of `chunk_len` elements of `data`; see [`Pool::run`].
    pub fn chunks_mut<T: Send>(
        &self,
        data: &mut [T],
        chunk_len: usize,
        work_per_chunk: usize,
        f: impl Fn(usize, &mut [T]) + Sync + Send,
    ) {
        let grain = grain(work_per_chunk);
        if self.threads == 1 || data.len() <= chunk_len * grain {
            data.chunks_mut(chunk_len).enumerate().for_each(|(i, chunk)| f(i, chunk));
        } else {
            self.rayon.install(|| {
                data.par_chunks_mut(chunk_len).enumerate().with_min_len(grain).for_each(|(i, chunk)| f(i, chunk))
            });
        }
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_task_runs_once_whatever_the_threads() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(Some(threads)).unwrap();
            let calls: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
            pool.run(1000, 1 << 20, |i| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            let mut data = vec![0usize; 1003];
            pool.chunks_mut(&mut data, 10, 1 << 20, |i, chunk| chunk.fill(i));
            assert!(data.iter().enumerate().all(|(i, &v)| v == i / 10));
        }
    }
}
