//! Threads that read request bodies. Bodies go by the work that they may ask for into lanes with their own threads, so that
//! no request waits for one that takes longer by an order of magnitude, and few large ones are in memory as values at once.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::error::ApiError;
use super::fields::Fields;
use super::settings::Limits;
use super::structured::compiled;

/// Bodies up to this effort are read on the serving thread: under a millisecond, including tokenization.
const INLINE: usize = 4 << 10;

/// Effort of a string besides its bytes: a short text takes as long to tokenize as this many bytes of a long one.
const STRING: usize = 64;

/// For each lane: the greatest effort in it, and its number of threads. The first has what most requests take; the third
/// has the longest text that is tokenized by default, whatever is escaped in it.
const LANES: [(usize, usize); 4] = [(64 << 10, 2), (512 << 10, 1), (8 << 20, 1), (usize::MAX, 1)];

/// Upper bound of the work on a body, in bytes of text to tokenize: stop strings, bad words and messages count as the texts
/// that they are.
pub fn effort(body: &[u8], limits: &Limits) -> usize {
    if body.len() > LANES[1].0 {
        // It has the bytes of a long text, beside which strings do not matter: fields limit their number.
        return body.len();
    }
    let strings = body.iter().filter(|&&byte| byte == b'"').count() / 2;
    let effort = body.len() + STRING * strings;
    // A field that is compiled takes milliseconds, however short it is.
    let is_compiled = |fields: Fields<'_>| compiled().any(|name| fields.raw(name).is_some());
    if effort <= INLINE && Fields::parse(body, limits).is_ok_and(is_compiled) { INLINE + 1 } else { effort }
}

/// Permits for threads by effort.
pub struct Lanes([Arc<Semaphore>; LANES.len()]);

impl Default for Lanes {
    fn default() -> Lanes {
        Lanes(LANES.map(|(_, threads)| Arc::new(Semaphore::new(threads))))
    }
}

impl Lanes {
    /// Runs `work` of this [`effort`]: on this thread if it is little, else on a thread of its lane. The lane's permit is
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
    use serde_json::json;

    #[tokio::test]
    async fn bodies_are_read_on_other_threads_by_their_effort_and_few_at_a_time() {
        let thread = || Ok(std::thread::current().id());
        let (lanes, here) = (Lanes::default(), std::thread::current().id());
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
        let lanes = Lanes::default();
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

    #[test]
    fn the_effort_is_that_of_the_texts_and_not_of_the_bytes() {
        let of = |body: serde_json::Value| effort(body.to_string().as_bytes(), &Limits::default());
        let turn = json!({"role": "user", "content": "What is the capital of France?"});
        assert!(of(json!({"messages": vec![turn; 5], "max_tokens": 5, "stop": ["a", "b"]})) <= INLINE);
        assert!(of(json!({"prompt": vec![7; 1000]})) <= INLINE, "ids are not tokenized");
        for (name, values) in [("bad_words", 700), ("prompt", 700), ("stop", 700)] {
            let body = json!({"prompt": "a", name: vec!["ab"; values]});
            assert!(body.to_string().len() <= INLINE && of(body) > 8 * INLINE, "{name}");
        }
        for name in compiled() {
            let effort = of(json!({"prompt": "a", name: "a"}));
            assert!(effort > INLINE && effort <= LANES[0].0, "{name}");
        }
        // A long prompt does not wait for a body that holds more than any text.
        let lane = |bytes: usize| LANES.iter().take_while(|(most, _)| *most < bytes).count();
        assert!(lane(300 << 10) < lane(4 << 20) && lane(4 << 20) < lane(16 << 20));
    }
}
