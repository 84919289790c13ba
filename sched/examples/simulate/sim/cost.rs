//! What a step costs: bytes moved, FLOPs, launches.
//!
//! A roofline. One forward pass over `rows` tokens, which read `context` tokens of cache in total and form
//! `pairs` (query, key) pairs, takes
//!
//! ```text
//! bytes  = weights + kv_bytes_per_token * (context + rows)
//! flops  = 2 * parameters * rows + 4 * layers * hidden * pairs
//! device = max(bytes / bandwidth, flops / peak) + launches * launch_seconds
//! ```
//!
//! and the host takes `host_seconds` to plan and sample, behind which the device waits unless the next step is
//! planned ahead. Left out: that neither peak is ever reached, sampling on the device, and communication. All
//! policies pay the same prices, so ratios hold better than absolute figures.

/// Work of one forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Tokens computed, padding included.
    pub rows: usize,
    /// Cached tokens read, summed over sequences: each sequence reads its own once.
    pub context: usize,
    /// (query, key) pairs of attention, summed over rows.
    pub pairs: usize,
}

impl Work {
    /// Adds a span of `rows` tokens behind `start` cached ones.
    pub fn add_span(&mut self, start: usize, rows: usize) {
        self.rows += rows;
        self.context += start;
        self.pairs += rows * start + rows * (rows + 1) / 2;
    }
}

/// A GPU, the model on it, and the host before it.
#[derive(Clone, Debug)]
pub struct CostModel {
    /// What it describes.
    pub name: &'static str,
    /// Bytes of memory traffic per second.
    pub bandwidth: f64,
    /// Floating-point operations per second.
    pub peak: f64,
    /// Parameters of the model.
    pub parameters: f64,
    /// Bytes of its weights, all read in each step.
    pub weights: f64,
    /// Layers of the model.
    pub layers: usize,
    /// Width of the model.
    pub hidden: usize,
    /// Bytes of keys and values of one token.
    pub kv_bytes_per_token: f64,
    /// Kernel launches per step.
    pub launches: f64,
    /// Seconds per launch that the device is not busy with the work.
    pub launch_seconds: f64,
    /// Seconds of the host per step.
    pub host_seconds: f64,
    /// Tokens of keys and values that the memory holds.
    pub kv_capacity: usize,
    /// Longest context.
    pub max_model_len: usize,
}

impl CostModel {
    /// OPT-13B in 16 bits on an A100 of 40 GB, the first setting of the PagedAttention paper (Kwon et al. 2023,
    /// arXiv:2309.06180, table 1: 26 GB of weights, 12 GB of cache). Bandwidth and peak are NVIDIA's data
    /// sheet; 12 launches per layer at 2 µs, and 0.5 ms of host, are round assumptions.
    pub fn opt_13b_on_a100() -> CostModel {
        let (layers, hidden) = (40, 5120);
        let kv_bytes_per_token = (2 * 2 * layers * hidden) as f64;
        CostModel {
            name: "OPT-13B, f16, on an A100 of 40 GB",
            bandwidth: 1.555e12,
            peak: 312e12,
            parameters: 13e9,
            weights: 26e9,
            layers,
            hidden,
            kv_bytes_per_token,
            launches: 12.0 * layers as f64,
            launch_seconds: 2e-6,
            host_seconds: 0.5e-3,
            kv_capacity: (12.0 * f64::from(1 << 30) / kv_bytes_per_token) as usize,
            max_model_len: 2048,
        }
    }

    /// Every step takes a millisecond, whatever is in it, and memory has no end: what is left is who occupies
    /// the batch. The setting of the simplest claims.
    pub fn flat(max_model_len: usize) -> CostModel {
        CostModel {
            name: "every step 1 ms, memory without end",
            bandwidth: 1.0,
            peak: f64::INFINITY,
            parameters: 0.0,
            weights: 1e-3,
            layers: 0,
            hidden: 0,
            kv_bytes_per_token: 0.0,
            launches: 0.0,
            launch_seconds: 0.0,
            host_seconds: 0.0,
            kv_capacity: 1 << 22,
            max_model_len,
        }
    }

    /// Seconds of the device for one forward pass.
    pub fn device_seconds(&self, work: Work) -> f64 {
        let bytes = self.weights + self.kv_bytes_per_token * (work.context + work.rows) as f64;
        let attention = 4.0 * (self.layers * self.hidden) as f64 * work.pairs as f64;
        let flops = 2.0 * self.parameters * work.rows as f64 + attention;
        (bytes / self.bandwidth).max(flops / self.peak) + self.launches * self.launch_seconds
    }
}
