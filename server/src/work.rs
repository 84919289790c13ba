//! The work on a request before the engine has it: parsing, rendering and tokenising, on threads that serve nobody else.
//!
//! Bodies go by size into lanes with threads of their own, so that a small request never waits behind a large one, and so
//! that few large ones are in memory as values at once. Work whose client has left ends at its next text.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::TokenizeError;
use tokio::sync::Semaphore;

use super::app::App;
use super::error::ApiError;
use super::options::too_long;

/// Bodies up to this many bytes are read where they arrive: well under a millisecond, tokenising included.
pub const INLINE_BYTES: usize = 4 << 10;

/// Bodies up to this many bytes do not wait for larger ones.
const MEDIUM_BYTES: usize = 256 << 10;

/// Threads for bodies of medium size.
const MEDIUM_AT_ONCE: usize = 2;

/// Threads for larger ones.
const LARGE_AT_ONCE: usize = 1;

/// Text that a tokenizer has to take at once may have this part of the bytes of other text.
const WHOLE: usize = 16;

/// Permits for threads, by size of the body.
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
    /// Runs `work` on a body of `bytes` bytes, where that is small here, else on a thread of its lane. The lane's permit is
    /// kept to the end of the work even if nobody waits for it any more.
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

/// A request that is being read: the server's state, and whether its client still waits.
pub struct Work {
    /// The server's state.
    pub app: Arc<App>,
    gone: Arc<AtomicBool>,
}

/// Held by whoever waits for the work; dropping it ends the work.
pub struct Waiting(Arc<AtomicBool>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Deref for Work {
    type Target = App;

    fn deref(&self) -> &App {
        &self.app
    }
}

impl Work {
    /// Work that goes on while the second value lives.
    pub fn new(app: Arc<App>) -> (Work, Waiting) {
        let gone = Arc::new(AtomicBool::new(false));
        (Work { app, gone: gone.clone() }, Waiting(gone))
    }

    /// An error, which nobody will read, once the client has left.
    pub fn check_client(&self) -> Result<(), ApiError> {
        if self.gone.load(Ordering::Acquire) { Err(ApiError::unavailable("the client has left")) } else { Ok(()) }
    }

    /// The token ids of a text. `param` is its field, for the error; `must_fit` where a text that is longer than the context
    /// would be refused afterwards: then it is refused before, as far as its bytes tell.
    pub fn encode(&self, text: &str, add_special: bool, param: &str, must_fit: bool) -> Result<Vec<u32>, ApiError> {
        self.check_client()?;
        let (found, most) = (text.len(), self.limits.max_text_bytes);
        if found > most {
            return Err(ApiError::over(param, found, most, "bytes of text", "send a shorter text (--max-text-bytes)"));
        }
        let least = self.tokenizer().least_tokens(found);
        if must_fit && least >= self.context() {
            return Err(too_long(self, &format!("at least {least}"), param));
        }
        let room = if must_fit { self.context() } else { self.limits.max_request_tokens };
        let go_on = |tokens| tokens < room && self.check_client().is_ok();
        self.tokenizer().encode_while(text, add_special, most / WHOLE, go_on).map_err(|error| {
            let Err(left) = self.check_client() else {
                return match error {
                    TokenizeError::Stopped(tokens) if must_fit => too_long(self, &format!("at least {tokens}"), param),
                    TokenizeError::Stopped(tokens) => {
                        let advice = "send a shorter text (--max-request-tokens)";
                        ApiError::over(param, tokens, room, "tokens or more", advice)
                    }
                    error => ApiError::invalid(param, error),
                };
            };
            left
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    #[tokio::test]
    async fn large_bodies_leave_the_thread_and_few_are_worked_on_at_once() {
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
            // The large one ends only after this.
            release.send(()).unwrap();
            found
        };
        assert_eq!(futures_util::future::join(large, small).await, (Ok("large"), Ok("small")));
    }
}
