//! Measurements of a fleet.

/// Ratio of the borders of a histogram's bucket.
const BUCKET: f64 = 1.01;
/// Lower border of the first bucket in seconds.
const LEAST: f64 = 1e-6;

/// Counts of seconds in buckets of 1 %.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    buckets: Vec<u64>,
    /// Number of values.
    pub count: u64,
}

impl Histogram {
    /// Counts a value `count` times.
    pub fn add(&mut self, seconds: f64, count: u64) {
        let bucket = ((seconds / LEAST).ln() / BUCKET.ln()).max(0.0) as usize;
        if bucket >= self.buckets.len() {
            self.buckets.resize(bucket + 1, 0);
        }
        self.buckets[bucket] += count;
        self.count += count;
    }

    /// Returns a quantile by nearest rank: the middle of the bucket, which is at most 0.5 % off.
    pub fn quantile(&self, quantile: f64) -> f64 {
        let rank = (quantile * self.count as f64).ceil() as u64;
        let mut below = 0;
        let holds_rank = |count: &u64| (below += count, below >= rank).1;
        self.buckets.iter().position(holds_rank).map_or(0.0, |bucket| LEAST * BUCKET.powf(bucket as f64 + 0.5))
    }
}

/// What replicas measure.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// Seconds between two tokens of a request.
    pub intervals: Histogram,
    /// Seconds between a request's first and second token, if different replicas compute them.
    pub handovers: Histogram,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// How many of them were cached.
    pub cached_tokens: u64,
}

/// The measurements of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    pub replicas: usize,
    /// Requests that arrived, and those that got all of their tokens.
    pub requests: u64,
    pub finished: u64,
    /// Tokens that requests asked for, and those that replicas computed.
    pub asked_tokens: u64,
    pub output_tokens: u64,
    /// Seconds from arrival to the first token.
    pub first: Histogram,
    pub tally: Tally,
    /// Seconds in which replicas compute, summed.
    pub busy: f64,
    /// Seconds from the start to the last token, and the length of the day.
    pub elapsed: f64,
    pub day: f64,
}

impl Report {
    /// Fraction of prompt tokens that were cached.
    pub fn hit_rate(&self) -> f64 {
        self.tally.cached_tokens as f64 / self.tally.prompt_tokens.max(1) as f64
    }

    /// Fraction of the time in which a replica computes.
    pub fn utilisation(&self) -> f64 {
        self.busy / (self.replicas as f64 * self.elapsed)
    }

    /// Price of a million output tokens, at a price per replica and hour, if the fleet is paid for the whole day.
    pub fn cost_per_million(&self, price: f64) -> f64 {
        let hours = self.replicas as f64 * self.elapsed.max(self.day) / 3600.0;
        1e6 * price * hours / self.output_tokens as f64
    }
}
