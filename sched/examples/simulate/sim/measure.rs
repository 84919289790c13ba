//! Measurements of a run.

/// The measurements of a run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Seconds from the first arrival to the last token.
    pub elapsed: f64,
    /// Seconds during which the device computes.
    pub device: f64,
    pub steps: usize,
    pub output_tokens: usize,
    /// Greatest number of sequences at once.
    pub largest_batch: usize,
    pub preemptions: u64,
    /// Seconds from arrival to the first forward pass, per request.
    pub queueing: Vec<f64>,
    /// Seconds from arrival to the last token, per request.
    pub end_to_end: Vec<f64>,
    // The fields of `Occupancy`, integrated over the device time.
    wanted: f64,
    kv_used: f64,
    kv_reserved: f64,
}

/// What a forward pass occupies.
#[derive(Clone, Copy, Debug)]
pub struct Occupancy {
    /// Number of sequences in the batch.
    pub batch: usize,
    /// Number of sequences that compute a requested token.
    pub wanted: usize,
    /// Number of tokens of cache that are used after the pass.
    pub kv_used: usize,
    /// Number of tokens of cache that are reserved.
    pub kv_reserved: usize,
}

impl Run {
    /// Adds a forward pass.
    pub fn step(&mut self, seconds: f64, occupancy: Occupancy) {
        self.steps += 1;
        self.device += seconds;
        self.largest_batch = self.largest_batch.max(occupancy.batch);
        self.wanted += seconds * occupancy.wanted as f64;
        self.kv_used += seconds * occupancy.kv_used as f64;
        self.kv_reserved += seconds * occupancy.kv_reserved as f64;
    }

    /// Returns the output tokens per second.
    pub fn throughput(&self) -> f64 {
        self.output_tokens as f64 / self.elapsed
    }

    /// Returns the fraction of time during which the device computes.
    pub fn device_busy(&self) -> f64 {
        self.device / self.elapsed
    }

    /// Returns the fraction of the largest batch's slots that compute a requested token, over the device time. Claims
    /// about static batching call this "GPU utilization".
    pub fn slots_busy(&self) -> f64 {
        self.wanted / (self.device * self.largest_batch as f64)
    }

    /// Returns the used fraction of the reserved cache, over the device time.
    pub fn kv_utilisation(&self) -> f64 {
        self.kv_used / self.kv_reserved
    }

    /// Returns a quantile by nearest rank.
    pub fn quantile(seconds: &[f64], quantile: f64) -> f64 {
        let mut sorted = seconds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let rank = (quantile * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }
}
