//! Estimate of a model's speed on a CPU: products like its own are timed here, with generated weights.
//!
//! ```text
//! seconds of a token  = weights / rate of one-row products + keys and values / half the read bandwidth + starts of parallel loops
//! seconds of a prompt = operations / rate of many-row products + attention
//! ```
//!
//! The products have the shapes, the storage forms and the arithmetic of the linear layers of the model in the same proportions, and together
//! the size of its weights, so that a model that fits the caches is timed in them. What is not timed (norms, rotations, sampling) is little beside
//! them in models of a hundred million parameters and more, and much in smaller ones.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use linear::{Arithmetic, Gemm, Matrix, PackedMatrix, Rows, Uploader, gemm};
use models::MatrixOutline;
use simd::{Isa, Pool};

use super::open::Opened;
use super::roofline::Roofline;
use crate::error::EngineError;

/// Most bytes of weights for the measurement: several times the last-level cache of most machines.
const MOST_BYTES: f64 = (256 << 20) as f64;
/// Rows of the product that stands for a prompt.
const ROWS: usize = 256;
/// Shortest time of all passes of a measurement.
const AT_LEAST: Duration = Duration::from_millis(150);
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
    /// Times products like those of an opened model; `None` if it has none.
    pub(super) fn measure(opened: &Opened) -> Result<Option<Estimate>, EngineError> {
        let (decoder, pool) = (&opened.config.decoder, opened.device.pool());
        let (arithmetic, isa) = (opened.kernels.arithmetic, opened.kernels.linear.capabilities.isa);
        let of_experts = decoder.experts().flat_map(|experts| &experts.experts);
        let of_experts = of_experts.flat_map(|mlp| [&mlp.gate_up, &mlp.down]);
        let in_layers = decoder.branches().flat_map(|branch| branch.mixer.linears()).chain(of_experts);
        // How many matrices have each shape and size.
        let mut kinds = BTreeMap::new();
        for linear in in_layers {
            let outline = MatrixOutline::of(&[linear], &opened.weights)?;
            let [n, k] = outline.shape();
            kinds.entry([n, k, outline.packed_bytes(arithmetic)]).or_insert((0.0, outline)).0 += 1.0;
        }
        let output = decoder.head.linear.as_ref().unwrap_or(&decoder.embedding.tokens);
        let output = MatrixOutline::of(&[output], &opened.weights)?;
        let kinds: Vec<_> = kinds.into_values().chain([(1.0, output)]).collect();
        let bytes = kinds.iter().map(|(count, kind)| count * kind.packed_bytes(arithmetic) as f64).sum::<f64>();
        let share = (MOST_BYTES / bytes).min(1.0);
        let mut uploader = Uploader::new(&*opened.device)?.with_arithmetic(arithmetic);
        let (mut samples, mut operations, mut seconds) = (Vec::new(), 0.0, 0.0);
        for (index, (count, kind)) in kinds.iter().enumerate() {
            let [n, k] = kind.shape();
            let first = samples.len();
            for _ in 0..(count * share).round().max(1.0) as usize {
                samples.push(kind.zeros((count * share).min(1.0), &mut uploader, opened.dtype)?);
            }
            if index + 1 < kinds.len() {
                operations += count * (2 * n * k) as f64;
                let sample = &samples[first..][..1];
                let rows = sample[0].host()?.n() as f64;
                seconds += count * time((isa, pool), sample, ROWS)? / ROWS as f64 * n as f64 / rows;
            }
        }
        if operations == 0.0 {
            return Ok(None);
        }
        let bytes = samples.iter().map(Matrix::bytes).sum::<usize>() as f64;
        let attention = decoder.attention().map(|attention| 4.0 * attention.heads.query_width() as f64).sum();
        Ok(Some(Estimate {
            row_read: bytes / time((isa, pool), &samples, 1)?,
            rows_peak: operations / seconds,
            // The measured times of the products contain the starts of their own loops.
            start_seconds: LOOPS_OF_LAYER * decoder.layers.len() as f64 * start_of_loop(pool),
            attention_operations: attention,
            attention_rate: attention_rate(pool, arithmetic),
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

/// Seconds of the median pass of products with all samples.
fn time((isa, pool): (Isa, &Pool), samples: &[Matrix], rows: usize) -> Result<f64, EngineError> {
    let samples = samples.iter().map(Matrix::host).collect::<Result<Vec<_>, _>>()?;
    let most = |size: fn(&PackedMatrix) -> usize| samples.iter().map(|sample| size(sample)).max().unwrap_or(0);
    let x: Vec<f32> = (0..rows * most(PackedMatrix::k)).map(|i| ((i * 37 + 11) % 64) as f32 / 64.0 - 0.5).collect();
    let mut y = vec![0.0; rows * most(PackedMatrix::n)];
    Ok(usual(|| {
        for weights in &samples {
            let (x, y) = (Rows::Numbers(&x[..rows * weights.k()]), &mut y[..rows * weights.n()]);
            gemm(isa, pool, Gemm { x, weights, bias: None, y });
        }
        black_box(&y);
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
