//! Lower bound of the time that a model's work takes on this machine (a roofline), for comparison with measurements.

use std::sync::Arc;

use attention_kernels::Dtype;
use device::{Device, MemoryInfo};
use linear::Arithmetic;
use simd::roofline as measure;
use trial::Peaks;

use super::estimate::Estimate;
use super::open::{Opened, open};
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
    /// Operations per second (a multiplication and an addition are two): on a CPU of 8-bit integers if some weights take
    /// activations in 8 bits, otherwise of the type of the computation; on a GPU of half precision on tensor cores. On `cuda-sim`
    /// this and `read` are infinite.
    pub peak: f64,
    /// Bytes of weights that a step reads.
    pub weight_bytes: u64,
    /// Bytes of the keys and values of a token.
    pub kv_bytes_per_token: u64,
    /// Operations per token in the layers.
    pub layer_operations: u64,
    /// Operations per row of logits.
    pub logit_operations: u64,
    /// Share of the weights of the layers that a single token uses: less than 1 with experts.
    pub used_share: f64,
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
        let pool = opened.device.pool();
        let (read, peak) = match opened.device.name() {
            "cpu" => {
                let in_bytes = opened.config.decoder.all_linears().any(|linear| linear.form.takes_blocks());
                let peak = match (in_bytes, opened.kernels.arithmetic) {
                    (true, _) => measure::int8_peak(pool),
                    (false, Arithmetic::Tiles) => measure::tile_peak(pool).unwrap_or_else(|| measure::f32_peak(pool)),
                    (false, Arithmetic::Pairs) => measure::bf16_peak(pool),
                    (false, Arithmetic::Exact) => measure::f32_peak(pool),
                };
                (measure::read_bandwidth(pool, BEYOND_CACHES), peak)
            }
            // Infinite where time has no meaning, so that every share is 0.
            _ => {
                let peaks = Peaks::measure(&*opened.device)?;
                (peaks.read.unwrap_or(f64::INFINITY), peaks.halves.unwrap_or(f64::INFINITY))
            }
        };
        Ok((Roofline::of(&opened, &plan, read, peak), Arc::clone(&opened.device)))
    }

    /// Like [`Roofline::measure`], and on a CPU also times products like those of the model, which takes a few seconds.
    ///
    /// # Errors
    /// The errors of [`plan`](crate::plan).
    pub fn estimate(engine: &EngineConfig) -> Result<(Roofline, Option<Estimate>), EngineError> {
        let (roofline, device) = Roofline::measure(engine)?;
        if device.name() != "cpu" {
            return Ok((roofline, None));
        }
        Ok((roofline, Estimate::measure(&open(engine)?)?))
    }

    /// The plan and the lower bounds for a GPU that is not here, with this much memory, bytes read per second, and operations per second
    /// in half precision. The model is planned as on a CPU in bfloat16, whose matrices have the same size.
    ///
    /// # Errors
    /// The errors of [`plan`](crate::plan).
    pub fn of_card(engine: &EngineConfig, memory: u64, read: f64, peak: f64) -> Result<(Plan, Roofline), EngineError> {
        let dtype = Some(engine.dtype.filter(|dtype| *dtype == Dtype::F32).unwrap_or(Dtype::Bf16));
        let engine = EngineConfig { device: "cpu".to_string(), dtype, ..engine.clone() };
        let mut opened = open(&engine)?;
        opened.tokenizer()?;
        models::check_weights(&opened.whole, &opened.weights)?;
        opened.memory = MemoryInfo { total: memory, available: memory, is_own: true };
        let plan = Plan::new(&engine, &opened, 0)?;
        let roofline = Roofline::of(&opened, &plan, read, peak);
        Ok((plan, roofline))
    }

    fn of(opened: &Opened, plan: &Plan, read: f64, peak: f64) -> Roofline {
        let decoder = &opened.config.decoder;
        let embedding = (decoder.vocab_size() * decoder.hidden_size()) as u64;
        let parameters = decoder.num_parameters();
        // A step reads only a few rows of an embedding that is not the output layer.
        let unread = plan.weight_bytes as f64 * embedding as f64 / parameters as f64;
        let unread = if decoder.is_tied() { 0.0 } else { unread };
        Roofline {
            threads: opened.device.pool().threads(),
            read,
            peak,
            weight_bytes: plan.weight_bytes - unread as u64,
            kv_bytes_per_token: plan.kv_bytes_per_token,
            layer_operations: 2 * (parameters - embedding * if decoder.is_tied() { 1 } else { 2 }),
            logit_operations: 2 * embedding,
            used_share: 1.0 - decoder.idle_parameters() as f64 / parameters.max(1) as f64,
        }
    }

    /// Lower bound of the time for some work, in seconds.
    pub fn seconds(&self, work: &WorkCounts) -> f64 {
        let bytes = work.steps * self.weight_bytes + work.context * self.kv_bytes_per_token;
        let operations = work.tokens * self.layer_operations + work.logits * self.logit_operations;
        (bytes as f64 / self.read).max(operations as f64 / self.peak)
    }

    /// Lower bound of the time from one token of a single sequence to the next, in seconds.
    pub fn token_seconds(&self, context: u64) -> f64 {
        let weights = self.weight_bytes as f64 * self.used_share;
        (weights + (context * self.kv_bytes_per_token) as f64) / self.read
    }

    /// Lower bound of the time for a prompt of this many tokens, in seconds.
    pub fn prompt_seconds(&self, tokens: u64) -> f64 {
        let operations = (tokens * self.layer_operations) as f64 * self.used_share + self.logit_operations as f64;
        (operations / self.peak).max(self.token_seconds(0))
    }
}
