//! Sending the requests at their times.
//!
//! Open loop (finite rate): the times are drawn before the first request, with gamma-distributed intervals of mean `1 / rate` (shape
//! 1: a Poisson process). A request's clock starts at its time, so waiting for one of `--max-concurrency` permits counts. Closed loop
//! (`inf`): a request starts when a permit is free, and its clock starts then.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::dataset::Question;
use super::measure::Record;
use super::request::Sender;
use crate::random::Random;

/// Time of each request in seconds after the start; `None` for a closed loop.
pub fn arrivals(count: usize, rate: f64, burstiness: f64, seed: u64) -> Option<Vec<f64>> {
    if rate.is_infinite() {
        return None;
    }
    let mut random = Random::new(seed ^ 0xA771_7A15);
    let mut at = 0.0;
    let next = |_| {
        let this = at;
        at += random.gamma(burstiness) / (rate * burstiness);
        this
    };
    Some((0..count).map(next).collect())
}

/// The outcome of a run.
pub struct Run {
    /// One record per request, in the order of their times.
    pub records: Vec<Record>,
    /// Seconds from the start to the end of the last answer.
    pub seconds: f64,
}

/// Sends every request at its time and waits for all answers.
pub async fn run(
    sender: Sender,
    questions: Vec<Question>,
    arrivals: Option<Vec<f64>>,
    max_concurrency: Option<usize>,
) -> Run {
    let sender = Arc::new(sender);
    let permits = Arc::new(Semaphore::new(max_concurrency.unwrap_or(Semaphore::MAX_PERMITS)));
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for (index, question) in questions.into_iter().enumerate() {
        let meant = arrivals.as_ref().map(|times| start + Duration::from_secs_f64(times[index]));
        if let Some(meant) = meant {
            tokio::time::sleep_until(meant.into()).await;
        }
        // Acquired here and not in the task, because tasks start in any order. The semaphore is never closed.
        let permit = permits.clone().acquire_owned().await;
        let (sender, meant) = (sender.clone(), meant.unwrap_or_else(Instant::now));
        tasks.spawn(async move {
            let _permit = permit;
            (index, sender.send(&question, start, meant).await)
        });
    }
    let mut records: Vec<(usize, Record)> = tasks.join_all().await;
    records.sort_by_key(|(index, _)| *index);
    Run { records: records.into_iter().map(|(_, record)| record).collect(), seconds: start.elapsed().as_secs_f64() }
}
