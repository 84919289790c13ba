//! The last minute in buckets of half a second, counted at every step: what the rates and the charts are made of.
//!
//! A step costs one look at the clock and a few additions. Buckets in which nothing happened are filled in when somebody asks.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::Serialize;

const BUCKET: Duration = Duration::from_millis(500);
const BUCKETS: usize = 120;
/// Whole buckets that a rate is taken over: two seconds.
const RATE_OVER: usize = 4;

/// Speed now, over the last whole buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Prompt tokens computed a second, recomputed ones included.
    pub prefill: f64,
    /// Tokens drawn a second.
    pub decode: f64,
    /// Sequences in a step, on average.
    pub batch: f64,
    /// Steps a second.
    pub steps: f64,
}

/// The last minute, oldest first; the last bucket is not over yet.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct History {
    /// Seconds of a bucket.
    pub seconds: f64,
    /// Prompt tokens computed in each.
    pub prefill: Vec<u64>,
    /// Tokens drawn in each.
    pub decode: Vec<u64>,
    /// Sequences in a step, on average, in each.
    pub batch: Vec<f64>,
    /// Requests that gave their blocks back in each.
    pub preemptions: Vec<u64>,
}

/// What a step reports: counters since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub prefill: u64,
    pub decode: u64,
    pub preemptions: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    prefill: u64,
    decode: u64,
    preemptions: u64,
    steps: u64,
    sequences: u64,
}

impl Bucket {
    fn batch(&self) -> f64 {
        if self.steps == 0 { 0.0 } else { self.sequences as f64 / self.steps as f64 }
    }
}

/// Counts steps.
pub(crate) struct Recent {
    start: Instant,
    /// Number of the newest bucket since the start.
    newest: u64,
    /// Newest last, at most [`BUCKETS`].
    buckets: VecDeque<Bucket>,
    before: Counters,
}

impl Recent {
    pub fn new() -> Recent {
        let buckets = VecDeque::from([Bucket::default()]);
        Recent { start: Instant::now(), newest: 0, buckets, before: Counters::default() }
    }

    /// Seconds since the start.
    pub fn uptime(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// A step of so many sequences is over.
    pub fn step(&mut self, sequences: usize, now: Counters) {
        self.step_at(self.start.elapsed(), sequences, now);
    }

    /// The last two seconds.
    pub fn rates(&mut self) -> Rates {
        self.roll(self.start.elapsed());
        self.rates_now()
    }

    /// The last minute.
    pub fn history(&mut self) -> History {
        self.roll(self.start.elapsed());
        let buckets = &self.buckets;
        History {
            seconds: BUCKET.as_secs_f64(),
            prefill: buckets.iter().map(|b| b.prefill).collect(),
            decode: buckets.iter().map(|b| b.decode).collect(),
            batch: buckets.iter().map(|b| (b.batch() * 10.0).round() / 10.0).collect(),
            preemptions: buckets.iter().map(|b| b.preemptions).collect(),
        }
    }

    fn step_at(&mut self, at: Duration, sequences: usize, now: Counters) {
        self.roll(at);
        let before = std::mem::replace(&mut self.before, now);
        if let Some(bucket) = self.buckets.back_mut() {
            bucket.prefill += now.prefill - before.prefill;
            bucket.decode += now.decode - before.decode;
            bucket.preemptions += now.preemptions - before.preemptions;
            bucket.steps += 1;
            bucket.sequences += sequences as u64;
        }
    }

    fn rates_now(&self) -> Rates {
        let whole: Vec<&Bucket> = self.buckets.iter().rev().skip(1).take(RATE_OVER).collect();
        let seconds = BUCKET.as_secs_f64() * whole.len().max(1) as f64;
        let sum = |of: fn(&Bucket) -> u64| whole.iter().map(|bucket| of(bucket)).sum::<u64>() as f64;
        let steps = sum(|b| b.steps);
        Rates {
            prefill: sum(|b| b.prefill) / seconds,
            decode: sum(|b| b.decode) / seconds,
            batch: sum(|b| b.sequences) / steps.max(1.0),
            steps: steps / seconds,
        }
    }

    fn roll(&mut self, at: Duration) {
        let newest = (at.as_millis() / BUCKET.as_millis()) as u64;
        for _ in 0..newest.saturating_sub(self.newest).min(BUCKETS as u64) {
            if self.buckets.len() == BUCKETS {
                self.buckets.pop_front();
            }
            self.buckets.push_back(Bucket::default());
        }
        self.newest = self.newest.max(newest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(prefill: u64, decode: u64) -> Counters {
        Counters { prefill, decode, preemptions: 0 }
    }

    #[test]
    fn rates_are_taken_over_the_last_two_seconds_that_are_whole() {
        let mut recent = Recent::new();
        recent.step_at(Duration::from_millis(100), 1, counters(400, 1));
        recent.step_at(Duration::from_millis(600), 3, counters(400, 4));
        assert_eq!(recent.rates_now(), Rates { prefill: 800.0, decode: 2.0, batch: 1.0, steps: 2.0 });
        recent.roll(Duration::from_millis(2100));
        assert_eq!(recent.rates_now(), Rates { prefill: 200.0, decode: 2.0, batch: 2.0, steps: 1.0 });
        recent.roll(Duration::from_millis(3100));
        assert_eq!(recent.rates_now(), Rates::default(), "and go to nothing when nothing happens");
    }

    #[test]
    fn the_history_is_a_minute_whatever_the_pauses() {
        let mut recent = Recent::new();
        recent.step_at(Duration::from_millis(100), 1, counters(7, 0));
        recent.roll(Duration::from_secs(3600));
        assert_eq!(recent.buckets.len(), BUCKETS);
        recent.step_at(Duration::from_secs(3600), 2, counters(7, 5));
        let last = recent.buckets.back().copied().unwrap_or_default();
        assert_eq!((last.prefill, last.decode, last.sequences), (0, 5, 2));
    }
}
