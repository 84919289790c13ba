//! The cost of a step: a roofline of bytes moved and FLOPs, plus launches.
//!
//! A forward pass over `rows` tokens that reads `context` tokens of cache in total and computes `pairs` (query, key)
//! pairs takes
//!
//! ```text
//! bytes  = weights + kv_bytes_per_token * (context + rows)
//! flops  = 2 * parameters * rows + 4 * layers * hidden * pairs
//! device = max(bytes / bandwidth, flops / peak) + launches * launch_seconds
//! ```
//!
//! The host takes `host_seconds` to plan and sample. The device waits for it unless the next step is planned ahead. The
//! model ignores that neither peak is ever reached, sampling on the device, and communication. The costs are the same
//! for all policies, so ratios are more reliable than absolute numbers.

/// Work of one forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Number of tokens computed, including padding.
    pub rows: usize,
    /// Number of cached tokens read, summed over sequences.
    pub context: usize,
    /// Number of (query, key) pairs of attention.
    pub pairs: usize,
}

impl Work {
    /// Adds a span of `rows` tokens after `start` cached ones.
    pub fn add_span(&mut self, start: usize, rows: usize) {
        self.rows += rows;
        self.context += start;
        self.pairs += rows * start + rows * (rows + 1) / 2;
    }
}

/// A GPU, a model, and a host.
#[derive(Clone, Debug)]
pub struct CostModel {
    pub name: &'static str,
    /// Memory bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Floating-point operations per second.
    pub peak: f64,
    /// Number of parameters of the model.
    pub parameters: f64,
    /// Size of the weights in bytes. Each step reads all of them.
    pub weights: f64,
    pub layers: usize,
    /// Width of the model.
    pub hidden: usize,
    /// Size of the keys and values of a token in bytes.
    pub kv_bytes_per_token: f64,
    /// Number of kernel launches per step.
    pub launches: f64,
    /// Overhead of a launch in seconds.
    pub launch_seconds: f64,
    /// Host time per step in seconds.
    pub host_seconds: f64,
    /// Capacity of the cache in tokens.
    pub kv_capacity: usize,
    pub max_model_len: usize,
}

impl CostModel {
    /// OPT-13B in 16 bits on an A100 of 40 GB, the first setting of the PagedAttention paper (Kwon et al. 2023,
    /// arXiv:2309.06180, table 1: 26 GB of weights, 12 GB of cache). Bandwidth and peak are from NVIDIA's data
    /// sheet. 12 launches per layer of 2 µs and 0.5 ms of host time are assumptions.
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

    /// Llama 3 8B in 16 bits on an H100 of 80 GB, by a roofline model: 15.01 GB of weights that a step reads, 90 % of
    /// 3.35 TB/s, 989 TFLOP/s, 8 launches per layer and 5 more of 1 µs. The cache gets 90 % of the memory, less all
    /// 16.06 GB of weights. The host is hidden by planning a step ahead.
    pub fn llama_8b_on_h100() -> CostModel {
        let (layers, hidden) = (32, 4096);
        let kv_bytes_per_token = (2 * 2 * layers * 8 * 128) as f64;
        CostModel {
            name: "Llama 3 8B, bf16, on an H100 of 80 GB",
            bandwidth: 0.9 * 3.35e12,
            peak: 989e12,
            parameters: 15.01e9 / 2.0,
            weights: 15.01e9,
            layers,
            hidden,
            kv_bytes_per_token,
            launches: (8 * layers + 5) as f64,
            launch_seconds: 1e-6,
            host_seconds: 0.0,
            kv_capacity: ((0.9 * 80e9 - 16.06e9) / kv_bytes_per_token) as usize,
            max_model_len: 8192,
        }
    }

    /// Every step takes a millisecond and memory is unlimited, so that only the occupancy of the batch matters. The
    /// setting of the simplest claims.
    pub fn flat(max_model_len: usize) -> CostModel {
        CostModel {
            name: "1 ms per step, unlimited memory",
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

    /// Returns the device time of a forward pass in seconds.
    pub fn device_seconds(&self, work: Work) -> f64 {
        let bytes = self.weights + self.kv_bytes_per_token * (work.context + work.rows) as f64;
        let attention = 4.0 * (self.layers * self.hidden) as f64 * work.pairs as f64;
        let flops = 2.0 * self.parameters * work.rows as f64 + attention;
        (bytes / self.bandwidth).max(flops / self.peak) + self.launches * self.launch_seconds
    }
}
