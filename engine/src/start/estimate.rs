//! Estimate of a model's speed on a CPU: products like its own are timed here, with generated weights.
//!
//! ```text
//! seconds of a token  = weights / rate of one-row products + keys and values / half the read bandwidth + starts of parallel loops
//! seconds of a prompt = operations / rate of many-row products + attention
//! ```
//!
//! The products have the shape, the storage form and the arithmetic of the largest linear layers of the model, and together the size of
//! its weights, so that a model that fits the caches is timed in them. What is not timed (norms, rotations, sampling) is little beside
//! them in models of a hundred million parameters and more, and much in smaller ones.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use device::Dtype;
use linear::{Arithmetic, Gemm, Matrix, Purpose, Rows, Uploader, WeightRows, gemm};
use models::decoder::Form;
use simd::{Isa, Pool};

use super::open::Opened;
use super::roofline::Roofline;
use crate::error::EngineError;

/// Most bytes of weights for the measurement: several times the last-level cache of most machines.
const MOST_BYTES: u64 = 256 << 20;
/// Rows of the product that stands for a prompt.
const ROWS: usize = 256;
/// Shortest time of all passes of a measurement.
const AT_LEAST: Duration = Duration::from_millis(300);
/// Parallel loops of a layer besides its products: norms, rotation and cache, attention, activation.
const LOOPS_OF_LAYER: f64 = 5.0;
/// Shares of the peak at which attention to a prompt multiplies: in vectors, of 1,024 tokens on Zen 5; on tiles, of 8,064 tokens on
/// Emerald Rapids (`docs/benchmarks/cpu.md`).
const ATTENTION_SHARES: [f64; 2] = [0.4, 0.06];
/// Share of the read bandwidth at which a token's attention reads keys and values, of 8,064 tokens on Zen 5.
const ATTENTION_READS: f64 = 0.5;

/// Rates of a model's products on this machine.
#[derive(Clone, Copy, Debug)]
pub struct Estimate {
    /// Bytes of weights per second that products of one row read.
    pub row_read: f64,
    /// Operations per second of products of many rows.
    pub rows_peak: f64,
    /// Seconds for the starts of the parallel loops of a step.
    start_seconds: f64,
    /// Operations of the attention of a token to each token before it.
    attention_operations: f64,
    /// Operations of attention per second.
    attention_rate: f64,
}

impl Estimate {
    /// Times products like those of an opened model whose weights take `weight_bytes`. `None` if it has none, or if its checkpoint is
    /// quantised.
    pub(super) fn measure(opened: &Opened, weight_bytes: u64) -> Result<Option<Estimate>, EngineError> {
        let (decoder, pool) = (&opened.config.decoder, opened.device.pool());
        let mut sizes: HashMap<[usize; 2], (usize, Form)> = HashMap::new();
        let of_experts = decoder.experts().flat_map(|experts| &experts.experts);
        let of_experts = of_experts.flat_map(|mlp| [&mlp.gate_up, &mlp.down]);
        for linear in decoder.branches().flat_map(|branch| branch.mixer.linears()).chain(of_experts) {
            sizes.entry([linear.rows(), linear.inputs]).or_insert((0, linear.form)).0 += 1;
        }
        let largest = sizes.iter().max_by_key(|([n, k], (count, _))| (count * n * k, *n, *k));
        let Some((&[n, k], &(_, form))) = largest.filter(|([n, k], _)| n * k > 0) else { return Ok(None) };
        let products = sizes.values().map(|(count, _)| *count).sum::<usize>() as f64;
        let bits = weight_bytes as f64 * 8.0 / decoder.num_parameters().max(1) as f64;
        let quantization = match form {
            Form::Dense => None,
            Form::Quantized(quantization) => Some(quantization),
            // Products of a checkpoint's codes have other speeds than those of our own forms.
            Form::Stored { .. } => return Ok(None),
        };
        let dtype = if bits > 24.0 { Dtype::F32 } else { Dtype::Bf16 };
        let row: Vec<f32> = (0..k).map(|i| ((i * 37 + 11) % 64) as f32 / 64.0 - 0.5).collect();
        let mut numbers = vec![0; n * k * dtype.bytes()];
        let bytes_of_row: Vec<u8> = row.iter().flat_map(|x| x.to_le_bytes()).collect();
        numbers.chunks_mut(k * dtype.bytes()).for_each(|to| dtype.convert(Dtype::F32, &bytes_of_row, to));
        let mut uploader = Uploader::new(&*opened.device)?.with_arithmetic(opened.kernels.arithmetic);
        let mut matrices: Vec<Matrix> = Vec::new();
        while matrices.iter().map(|matrix| matrix.bytes() as u64).sum::<u64>() < weight_bytes.min(MOST_BYTES) {
            let parts = [WeightRows::Numbers(dtype, &numbers)];
            matrices.push(uploader.matrix(quantization, dtype, [n, k], &parts, Purpose::Product)?);
        }
        let bytes = matrices.iter().map(Matrix::bytes).sum::<usize>() as f64;
        let x: Vec<f32> = row.iter().copied().cycle().take(ROWS * k).collect();
        let mut y = vec![0.0; ROWS * n];
        let one = time(pool, &matrices, &x[..k], &mut y[..n])?;
        let many = time(pool, &matrices[..1], &x, &mut y)?;
        let loops = products + LOOPS_OF_LAYER * decoder.layers.len() as f64;
        let attention = decoder.attention().map(|attention| 4.0 * attention.heads.query_width() as f64).sum();
        Ok(Some(Estimate {
            row_read: bytes / one,
            rows_peak: 2.0 * (ROWS * n * k) as f64 / many,
            // The measured times of the products contain the starts of their own loops.
            start_seconds: (loops - products) * start_of_loop(pool),
            attention_operations: attention,
            attention_rate: attention_rate(pool, opened.kernels.arithmetic),
        }))
    }

    /// Seconds from one token of a single sequence to the next, behind this many tokens.
    pub fn token_seconds(&self, roofline: &Roofline, context: u64) -> f64 {
        let weights = roofline.weight_bytes as f64 * roofline.used_share / self.row_read;
        let cache = (context * roofline.kv_bytes_per_token) as f64 / (ATTENTION_READS * roofline.read);
        weights + cache + self.start_seconds
    }

    /// Seconds to the first token behind a prompt of this many tokens.
    pub fn prompt_seconds(&self, roofline: &Roofline, tokens: u64) -> f64 {
        let products = (tokens * roofline.layer_operations) as f64 * roofline.used_share / self.rows_peak;
        let logits = roofline.logit_operations as f64 / self.rows_peak;
        let attended = (tokens * tokens) as f64 / 2.0 * self.attention_operations;
        (products + logits + attended / self.attention_rate).max(self.token_seconds(roofline, 0))
    }
}

/// Seconds of the median pass of the products of `x` with all matrices.
fn time(pool: &Pool, matrices: &[Matrix], x: &[f32], y: &mut [f32]) -> Result<f64, EngineError> {
    let hosts = matrices.iter().map(Matrix::host).collect::<Result<Vec<_>, _>>()?;
    Ok(usual(|| {
        for weights in &hosts {
            gemm(Isa::best(), pool, Gemm { x: Rows::Numbers(x), weights, bias: None, y: &mut *y });
        }
        black_box(&*y);
    }))
}

/// Operations per second of attention to a prompt.
fn attention_rate(pool: &Pool, arithmetic: Arithmetic) -> f64 {
    let [in_vectors, on_tiles] = ATTENTION_SHARES;
    match arithmetic {
        Arithmetic::Exact => in_vectors * simd::roofline::f32_peak(pool),
        Arithmetic::Pairs => in_vectors * simd::roofline::bf16_peak(pool),
        Arithmetic::Tiles => match simd::roofline::tile_peak(pool) {
            Some(peak) => on_tiles * peak,
            None => in_vectors * simd::roofline::bf16_peak(pool),
        },
    }
}

/// Seconds to start and end a parallel loop.
fn start_of_loop(pool: &Pool) -> f64 {
    const LOOPS: usize = 64;
    // So much work that all threads take part.
    let work = 1 << 20;
    let pass = || {
        for _ in 0..LOOPS {
            pool.run(pool.threads(), work, |i| {
                black_box(i);
            });
        }
    };
    usual(pass) / LOOPS as f64
}

/// Seconds of the median pass.
fn usual(mut pass: impl FnMut()) -> f64 {
    let (start, mut seconds) = (Instant::now(), Vec::new());
    while start.elapsed() < AT_LEAST {
        let begun = Instant::now();
        pass();
        seconds.push(begun.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}
