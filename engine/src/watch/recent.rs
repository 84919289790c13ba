//! Counts of the last minute in buckets of half a second, from which rates and charts are computed.
//!
//! A step costs one reading of the clock and a few additions. Empty buckets are added on demand.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::Serialize;

const BUCKET: Duration = Duration::from_millis(500);
const BUCKETS: usize = 120;
/// Number of whole buckets that a rate covers: two seconds.
const RATE_OVER: usize = 4;

/// Current speed, over the last two seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Prompt tokens computed per second, including recomputed ones.
    pub prefill: f64,
    /// Tokens drawn per second.
    pub decode: f64,
    /// Mean number of sequences per step.
    pub batch: f64,
    /// Steps per second.
    pub steps: f64,
}

/// The last minute, oldest bucket first; the last bucket is incomplete.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct History {
    /// Length of a bucket in seconds.
    pub seconds: f64,
    /// Prompt tokens computed in each bucket.
    pub prefill: Vec<u64>,
    /// Tokens drawn in each bucket.
    pub decode: Vec<u64>,
    /// Mean number of sequences per step in each bucket.
    pub batch: Vec<f64>,
    /// Preemptions in each bucket.
    pub preemptions: Vec<u64>,
}

/// Counters since the start, as of a step.
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

/// See the [module](self).
pub(crate) struct Recent {
    start: Instant,
    /// Number of the newest bucket since the start.
    newest: u64,
    /// At most [`BUCKETS`], the newest last.
    buckets: VecDeque<Bucket>,
    previous: Counters,
}

impl Recent {
    pub fn new() -> Recent {
        let buckets = VecDeque::from([Bucket::default()]);
        Recent { start: Instant::now(), newest: 0, buckets, previous: Counters::default() }
    }

    /// Seconds since the start.
    pub fn uptime(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Counts a step of `sequences` sequences.
    pub fn step(&mut self, sequences: usize, now: Counters) {
        self.step_at(self.start.elapsed(), sequences, now);
    }

    /// Returns the rates over the last two seconds.
    pub fn rates(&mut self) -> Rates {
        self.roll(self.start.elapsed());
        self.rates_now()
    }

    /// Returns the last minute.
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
        let before = std::mem::replace(&mut self.previous, now);
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
        assert_eq!(recent.rates_now(), Rates::default(), "and fall to 0 when no step runs");
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
