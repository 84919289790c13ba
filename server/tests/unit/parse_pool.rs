//! The threads that read bodies.
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
