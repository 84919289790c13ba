//! Lower bound of the time that a model's work takes on this machine (a roofline), for comparison with measurements.

use std::sync::Arc;

use device::Device;
use linear::Arithmetic;
use simd::roofline as measure;
use trial::Peaks;

use super::open::open;
use crate::api::EngineConfig;
use crate::error::EngineError;
use crate::memory::Plan;

/// Bytes to read for a measurement of memory instead of caches: several times the last-level cache of most machines.
const BEYOND_CACHES: usize = 256 << 20;

/// Counts of computed work.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkCounts {
    /// Number of steps; each reads all weights once.
    pub steps: u64,
    /// Number of tokens computed in the layers.
    pub tokens: u64,
    /// Number of rows of logits.
    pub logits: u64,
    /// Number of tokens whose keys and values were read, counted for each row that attends to them.
    pub context: u64,
}

/// Peak rates of this machine's memory and arithmetic, and a model's demand for both.
///
/// The lower bound for some [`WorkCounts`] is the longer of two times: its bytes (weights, keys and values) at the read
/// bandwidth, and its operations (products with weights, without attention) at the peak rate of their arithmetic.
#[derive(Clone, Copy, Debug)]
pub struct Roofline {
    /// Number of threads that were measured.
    pub threads: usize,
    /// Read bandwidth in bytes per second.
    pub read: f64,
    /// Operations per second (a multiplication and an addition are two): on a CPU of 8-bit integers if weights are quantised,
    /// otherwise of the type of the computation; on a GPU of half precision on tensor cores. On `cuda-sim` this and `read` are infinite.
    pub peak: f64,
    /// Bytes of weights that a step reads.
    pub weight_bytes: u64,
    /// Bytes of the keys and values of a token.
    pub kv_bytes_per_token: u64,
    /// Operations per token in the layers.
    pub layer_operations: u64,
    /// Operations per row of logits.
    pub logit_operations: u64,
}

impl Roofline {
    /// Measures the device with the threads of this configuration, before a model takes its memory. Takes about a second. Also returns
    /// the device, for [`load`](crate::load).
    ///
    /// # Errors
    /// The errors of [`plan`](crate::plan).
    pub fn measure(engine: &EngineConfig) -> Result<(Roofline, Arc<dyn Device>), EngineError> {
        let opened = open(engine)?;
        let plan = Plan::new(engine, &opened, 0)?;
        let (decoder, pool) = (&opened.config.decoder, opened.device.pool());
        let embedding = (decoder.vocab_size() * decoder.hidden_size()) as u64;
        let parameters = decoder.num_parameters();
        let (read, peak) = match opened.device.name() {
            "cpu" => {
                let peak = match (engine.quantization, opened.kernels.arithmetic) {
                    (Some(_), _) => measure::int8_peak(pool),
                    (None, Arithmetic::Tiles) => measure::tile_peak(pool).unwrap_or_else(|| measure::f32_peak(pool)),
                    (None, Arithmetic::Pairs) => measure::bf16_peak(pool),
                    (None, Arithmetic::Exact) => measure::f32_peak(pool),
                };
                (measure::read_bandwidth(pool, BEYOND_CACHES), peak)
            }
            // Infinite where time has no meaning, so that every share is 0.
            _ => {
                let peaks = Peaks::measure(&*opened.device)?;
                (peaks.read.unwrap_or(f64::INFINITY), peaks.halves.unwrap_or(f64::INFINITY))
            }
        };
        // A step reads only a few rows of an embedding that is not the output layer.
        let unread = plan.weight_bytes as f64 * embedding as f64 / parameters as f64;
        let unread = if decoder.is_tied() { 0.0 } else { unread };
        let roofline = Roofline {
            threads: pool.threads(),
            read,
            peak,
            weight_bytes: plan.weight_bytes - unread as u64,
            kv_bytes_per_token: plan.kv_bytes_per_token,
            layer_operations: 2 * (parameters - embedding * if decoder.is_tied() { 1 } else { 2 }),
            logit_operations: 2 * embedding,
        };
        Ok((roofline, Arc::clone(&opened.device)))
    }

    /// Lower bound of the time for some work, in seconds.
    pub fn seconds(&self, work: &WorkCounts) -> f64 {
        let bytes = work.steps * self.weight_bytes + work.context * self.kv_bytes_per_token;
        let operations = work.tokens * self.layer_operations + work.logits * self.logit_operations;
        (bytes as f64 / self.read).max(operations as f64 / self.peak)
    }
}
