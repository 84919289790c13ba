//! Threads that read request bodies. Bodies go by the work that they may ask for into lanes with their own threads, so that
//! no request waits for one that takes longer by an order of magnitude, and few large ones are in memory as values at once.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::ApiError;

/// Bodies up to this effort are read on the serving thread: under a millisecond, including tokenization.
pub const INLINE: usize = 4 << 10;

/// For each lane: the greatest effort in it, and its number of threads. The first has what most requests take; the third
/// has the longest text that is tokenized by default, whatever is escaped in it.
pub const LANES: [(usize, usize); 4] = [(64 << 10, 2), (512 << 10, 1), (8 << 20, 1), (usize::MAX, 1)];

/// Permits for threads by effort.
pub struct ParsePool([Arc<Semaphore>; LANES.len()]);

impl Default for ParsePool {
    fn default() -> ParsePool {
        ParsePool(LANES.map(|(_, threads)| Arc::new(Semaphore::new(threads))))
    }
}

impl ParsePool {
    /// Runs `work` of this effort, in bytes of text to tokenize: on this thread if it is little, else on a thread of its lane. The lane's permit is
    /// held to the end of the work even if the caller is dropped.
    pub async fn run<T: Send + 'static>(
        &self,
        effort: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if effort <= INLINE {
            return work();
        }
        let lane = LANES.iter().take_while(|(most, _)| *most < effort).count();
        let failed = |error: &dyn std::fmt::Display| ApiError::internal(format!("reading the request failed: {error}"));
        let permit = self.0[lane].clone().acquire_owned().await.map_err(|error| failed(&error))?;
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        task.await.unwrap_or_else(|error| Err(failed(&error)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use futures_util::future::{join, join_all};

    #[tokio::test]
    async fn bodies_are_read_on_other_threads_by_their_effort_and_few_at_a_time() {
        let thread = || Ok(std::thread::current().id());
        let (lanes, here) = (ParsePool::default(), std::thread::current().id());
        assert_eq!(lanes.run(INLINE, thread).await, Ok(here));
        let mut least = INLINE + 1;
        for (most, threads) in LANES {
            for effort in [least, most] {
                assert_ne!(lanes.run(effort, thread).await, Ok(here));
                // All begin that have a permit, and none ends.
                let (begun, begins): (Sender<()>, Receiver<()>) = channel();
                let (release, held) = channel::<()>();
                let held = Arc::new(std::sync::Mutex::new(held));
                let works = join_all((0..threads + 2).map(|_| {
                    let (begun, held) = (begun.clone(), held.clone());
                    lanes.run(effort, move || {
                        // Nobody counts those that begin at the end.
                        let _ = begun.send(());
                        Ok(held.lock().unwrap().recv().is_err())
                    })
                }));
                let check = async {
                    let found = tokio::task::spawn_blocking(move || {
                        (0..threads).for_each(|_| begins.recv().unwrap());
                        let more = begins.recv_timeout(std::time::Duration::from_millis(20)).is_ok();
                        drop(release);
                        more
                    });
                    found.await.unwrap()
                };
                let (done, is_over) = join(works, check).await;
                assert!(done.iter().all(|done| *done == Ok(true)));
                assert!(!is_over, "{effort}: more than {threads} run");
            }
            least = most.saturating_add(1);
        }
    }

    #[tokio::test]
    async fn a_body_does_not_wait_for_those_of_other_lanes() {
        let lanes = ParsePool::default();
        // All lanes but one are full.
        for free in LANES {
            let others = LANES.iter().filter(|lane| **lane != free);
            let (release, held) = channel::<()>();
            let held = Arc::new(std::sync::Mutex::new(held));
            let full = join_all(others.flat_map(|&(effort, threads)| {
                let (lanes, held) = (&lanes, &held);
                (0..threads).map(move |_| {
                    let held = held.clone();
                    lanes.run(effort, move || Ok(held.lock().unwrap().recv().is_err()))
                })
            }));
            let one = async {
                let found = lanes.run(free.0, || Ok("done")).await;
                drop(release);
                found
            };
            assert_eq!(join(full, one).await.1, Ok("done"));
        }
    }
}
