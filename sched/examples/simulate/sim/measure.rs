//! What is measured of a run.

/// A run as it goes, and its figures in the end.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Seconds from the first arrival to the last token.
    pub elapsed: f64,
    /// Seconds that the device computes.
    pub device: f64,
    /// Forward passes.
    pub steps: usize,
    /// Tokens of all answers.
    pub output_tokens: usize,
    /// Most sequences at once.
    pub largest_batch: usize,
    /// Times that a request lost its cache.
    pub preemptions: u64,
    /// Seconds from arrival to the first forward pass, per request.
    pub queueing: Vec<f64>,
    /// Seconds from arrival to the last token, per request.
    pub end_to_end: Vec<f64>,
    /// Sequences that compute a token somebody wants, integrated over the time of steps.
    wanted: f64,
    /// Tokens of cache that hold keys and values somebody wants, likewise.
    kv_used: f64,
    /// Tokens of cache that are reserved, likewise.
    kv_reserved: f64,
}

/// What one forward pass occupies.
#[derive(Clone, Copy, Debug)]
pub struct Occupancy {
    /// Sequences in the batch.
    pub batch: usize,
    /// Those of them that compute a token somebody wants.
    pub wanted: usize,
    /// Tokens whose keys and values are cached and wanted when the pass is done.
    pub kv_used: usize,
    /// Tokens of cache that nobody else can have.
    pub kv_reserved: usize,
}

impl Run {
    /// Notes a forward pass of `seconds`.
    pub fn step(&mut self, seconds: f64, occupancy: Occupancy) {
        self.steps += 1;
        self.device += seconds;
        self.largest_batch = self.largest_batch.max(occupancy.batch);
        self.wanted += seconds * occupancy.wanted as f64;
        self.kv_used += seconds * occupancy.kv_used as f64;
        self.kv_reserved += seconds * occupancy.kv_reserved as f64;
    }

    /// Output tokens per second.
    pub fn throughput(&self) -> f64 {
        self.output_tokens as f64 / self.elapsed
    }

    /// Share of the time that the device computes at all.
    pub fn device_busy(&self) -> f64 {
        self.device / self.elapsed
    }

    /// Share of the places of the largest batch that compute a token somebody wants, over the time of steps. This
    /// is what "GPU busy" means where static batching is said to waste it.
    pub fn places_busy(&self) -> f64 {
        self.wanted / (self.device * self.largest_batch as f64)
    }

    /// Share of the reserved cache that holds wanted keys and values, over the time of steps.
    pub fn kv_utilisation(&self) -> f64 {
        self.kv_used / self.kv_reserved
    }

    /// The `share` quantile of some seconds, nearest rank.
    pub fn quantile(seconds: &[f64], share: f64) -> f64 {
        let mut sorted = seconds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let rank = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }
}
