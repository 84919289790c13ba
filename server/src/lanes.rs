//! Threads that read request bodies. Bodies go by size into lanes with their own threads, so that a small request does
//! not wait for a large one and few large ones are in memory as values at once.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::error::ApiError;

/// Bodies up to this size are read on the serving thread: under a millisecond, including tokenization.
pub const INLINE_BYTES: usize = 4 << 10;

/// Bodies up to this size do not wait for larger ones.
const MEDIUM_BYTES: usize = 256 << 10;

/// Number of threads for bodies of medium size.
const MEDIUM_AT_ONCE: usize = 2;

/// Number of threads for larger bodies.
const LARGE_AT_ONCE: usize = 1;

/// Permits for threads by size of the body.
pub struct Lanes {
    medium: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

impl Default for Lanes {
    fn default() -> Lanes {
        let permits = |count| Arc::new(Semaphore::new(count));
        Lanes { medium: permits(MEDIUM_AT_ONCE), large: permits(LARGE_AT_ONCE) }
    }
}

impl Lanes {
    /// Runs `work` on a body of `bytes` bytes: on this thread if it is small, else on a thread of its lane. The lane's
    /// permit is held to the end of the work even if the caller is dropped.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= INLINE_BYTES {
            return work();
        }
        let lane = if bytes <= MEDIUM_BYTES { &self.medium } else { &self.large };
        let failed = |error: &dyn std::fmt::Display| ApiError::internal(format!("reading the request failed: {error}"));
        let permit = lane.clone().acquire_owned().await.map_err(|error| failed(&error))?;
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
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    #[tokio::test]
    async fn large_bodies_are_read_on_few_other_threads() {
        let thread = || Ok(std::thread::current().id());
        let (lanes, here) = (Lanes::default(), std::thread::current().id());
        assert_eq!(lanes.run(INLINE_BYTES, thread).await, Ok(here));
        assert_ne!(lanes.run(INLINE_BYTES + 1, thread).await, Ok(here));
        for (bytes, most) in [(MEDIUM_BYTES, MEDIUM_AT_ONCE), (MEDIUM_BYTES + 1, LARGE_AT_ONCE)] {
            let running = Arc::new(AtomicUsize::new(0));
            let works = (0..6).map(|_| {
                let running = running.clone();
                lanes.run(bytes, move || {
                    let found = running.fetch_add(1, Ordering::SeqCst) + 1;
                    std::thread::sleep(Duration::from_millis(20));
                    running.fetch_sub(1, Ordering::SeqCst);
                    Ok(found)
                })
            });
            let found = futures_util::future::join_all(works).await;
            assert!(found.into_iter().map(Result::unwrap).max().unwrap() <= most);
        }
    }

    #[tokio::test]
    async fn a_small_body_does_not_wait_for_a_large_one() {
        let lanes = Lanes::default();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let large = lanes.run(MEDIUM_BYTES + 1, move || {
            held.recv().unwrap();
            Ok("large")
        });
        let small = async {
            let found = lanes.run(MEDIUM_BYTES, || Ok("small")).await;
            // Lets the large one end.
            release.send(()).unwrap();
            found
        };
        assert_eq!(futures_util::future::join(large, small).await, (Ok("large"), Ok("small")));
    }
}
