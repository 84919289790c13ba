//! The least time that a model's work takes on this machine, for figures to be compared with.

use attention_kernels::trial::Peaks;
use device::roofline;
use models::Decoder;

use super::load::plan;
use super::open::open;
use crate::api::EngineConfig;
use crate::error::EngineError;

/// Bytes for which memory, not a cache, decides: several times the last cache of most machines.
const BEYOND_CACHES: usize = 256 << 20;

/// What was computed, as counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// Steps; each reads all weights once.
    pub steps: u64,
    /// Tokens that went through the layers.
    pub tokens: u64,
    /// Rows of logits.
    pub logits: u64,
    /// Tokens whose keys and values were read, counted once for each row that attends to them.
    pub context: u64,
}

/// How fast this machine's memory and arithmetic are, and how much of both a model needs.
///
/// The floor of some [`Work`] is the longer of two times: its bytes (weights, keys and values) at the speed of reading, and its
/// operations (products with weights; attention is left out) at the peak of the arithmetic that they are done in.
#[derive(Clone, Copy, Debug)]
pub struct Floor {
    /// Threads that were measured.
    pub threads: usize,
    /// Bytes a second, from memory.
    pub read: f64,
    /// Operations a second (a multiplication and an addition are two): on a CPU of bytes where weights are quantised, else of
    /// float32; on a GPU of halves on tensor cores. On `cuda-sim` this and `read` are infinite.
    pub peak: f64,
    /// Bytes of weights that a step reads.
    pub weight_bytes: u64,
    /// Bytes of keys and values of a token.
    pub kv_bytes_per_token: u64,
    /// Operations of a token in the layers.
    pub layer_operations: u64,
    /// Operations of a row of logits.
    pub logit_operations: u64,
}

impl Floor {
    /// Measures the device, with the threads that an engine of this configuration would have; takes about a second.
    ///
    /// # Errors
    /// Those of [`plan`](crate::plan).
    pub fn measure(engine: &EngineConfig) -> Result<Floor, EngineError> {
        let plan = plan(engine)?;
        let opened = open(engine)?;
        let (decoder, pool) = (&opened.config.decoder, opened.device.pool());
        let embedding = (decoder.vocab_size() * decoder.hidden_size()) as u64;
        let parameters = decoder.num_parameters();
        let (read, peak) = match opened.device.name() {
            "cpu" => {
                let quantized = engine.quantization.is_some();
                let peak = if quantized { roofline::int8_peak(pool) } else { roofline::f32_peak(pool) };
                (roofline::read_bandwidth(pool, BEYOND_CACHES), peak)
            }
            // Without a limit where time means nothing: every share is 0.
            _ => {
                let peaks = Peaks::measure(&*opened.device)?;
                (peaks.read.unwrap_or(f64::INFINITY), peaks.tensor.unwrap_or(f64::INFINITY))
            }
        };
        Ok(Floor {
            threads: pool.threads(),
            read,
            peak,
            weight_bytes: read_each_step(decoder, plan.weight_bytes, embedding, parameters),
            kv_bytes_per_token: plan.kv_bytes_per_token,
            layer_operations: 2 * (parameters - embedding * if decoder.is_tied() { 1 } else { 2 }),
            logit_operations: 2 * embedding,
        })
    }

    /// Seconds that the work takes at least.
    pub fn seconds(&self, work: &Work) -> f64 {
        let bytes = work.steps * self.weight_bytes + work.context * self.kv_bytes_per_token;
        let operations = work.tokens * self.layer_operations + work.logits * self.logit_operations;
        (bytes as f64 / self.read).max(operations as f64 / self.peak)
    }
}

/// Of an embedding that is not the output layer, a step reads a few rows only.
fn read_each_step(decoder: &Decoder, bytes: u64, embedding: u64, parameters: u64) -> u64 {
    if decoder.is_tied() { bytes } else { bytes - (bytes as f64 * embedding as f64 / parameters as f64) as u64 }
}
