//! Measurement of one operation at one shape: generates inputs, checks the results of each variant, and times or counts it.

use std::collections::BTreeMap;
use std::sync::Arc;

use device::sim::{Counts, Tally};
use device::{Buffer, Device};
use linear::{Purpose, Quantization, Uploader, WeightBlock, WeightRows, quantize_row};
use simd::Isa;

use crate::cell::{Cell, Shape};
use crate::low_rank::{LowRankProblem, SlotRanks};
use crate::numbers::{Random, element, from_bytes, int8_row, round, to_byte, to_bytes, ulp};
use crate::peaks::BEYOND_CACHES;
use crate::problem::{Look, Problem};
use crate::run::{OnDevice, buffer, bytes, floats};
use crate::time::{Time, time};
use attention_kernels::AttentionBatch;
use attention_kernels::KernelError;
use attention_kernels::KvShape;
use attention_kernels::{BlockCopyArgs, CacheWriteArgs, KvCache, KvScales, LinearArgs, Rows};
use attention_kernels::{CacheFormat, Dtype, KvDtype};
use attention_kernels::{LinearScratch, Rewritten, ScratchSizes};
use attention_kernels::{Operation, Variant};
use attention_kernels::{Workspace, WorkspaceLimits};

/// Most multiply-adds in float64 that go into the expected result.
const TRUTH: usize = 1 << 27;
/// Rank of the adapters of low-rank additions.
const RANK: usize = 16;
/// Most adapters of low-rank additions.
const ADAPTERS: usize = 8;
/// Number of rows of a written cache, or of a product, that are compared.
const SAMPLE: usize = 64;

/// Blocks of a cache that have numbers of their own; the others repeat them.
const OWN_BLOCKS: usize = 256;
/// Rows of the factors of a product that have numbers of their own.
const OWN_ROWS: usize = 512;

type Kernels = BTreeMap<String, (u64, Counts)>;
type Found<'a> = &'a mut dyn FnMut(&Variant, Cell);

/// How often variants run.
#[derive(Clone, Copy)]
pub(super) struct Runs<'a> {
    /// Number of untimed runs.
    pub warmup: usize,
    /// Number of timed runs.
    pub repeat: usize,
    /// Counts of the device's launches. Variants then run once and are not timed.
    pub tally: Option<&'a Tally>,
}

/// Variants that share their inputs.
struct Case<'a> {
    device: &'a Arc<dyn Device>,
    shape: &'a Shape,
    format: CacheFormat,
    variants: &'a [&'static Variant],
    runs: Runs<'a>,
}

impl Case<'_> {
    /// Returns the number of copies of the inputs that repetitions use in turn, so that together they exceed the caches.
    fn sets(&self, bytes: usize) -> usize {
        if self.device.name() == "cuda-sim" { 1 } else { BEYOND_CACHES.div_ceil(bytes.max(1)).clamp(1, 64) }
    }

    /// Runs the call whose result is checked, and returns what the device has counted of it.
    fn first<T>(&self, run: impl FnOnce() -> Result<T, KernelError>) -> Result<(T, Kernels), KernelError> {
        let taken = || self.runs.tally.map(Tally::take).unwrap_or_default();
        taken();
        let result = run()?;
        Ok((result, taken()))
    }

    /// Times calls, unless they are counted.
    fn time(&self, run: impl FnMut(usize) -> Result<(), KernelError>) -> Result<Time, KernelError> {
        match self.runs.tally {
            Some(_) => Ok(Time::default()),
            None => time(&**self.device, self.runs.warmup, self.runs.repeat, run),
        }
    }
}

/// Measures each of the variants.
pub(super) fn run(
    device: &Arc<dyn Device>,
    operation: Operation,
    shape: &Shape,
    variants: &[&'static Variant],
    runs: Runs<'_>,
    found: Found<'_>,
) -> Result<(), KernelError> {
    // Variants with the same layout share their inputs.
    let mut rest = variants.to_vec();
    while let Some(first) = rest.first() {
        let format = shape.format(first, &**device);
        let (same, others) = rest.iter().copied().partition(|v| shape.format(v, &**device) == format);
        let same: Vec<&'static Variant> = same;
        let case = Case { device, shape, format, variants: &same, runs };
        let unit = ulp(shape.dtype, 1.0) / ulp(format.dtype, 1.0);
        let found: Found<'_> = &mut |variant, cell| found(variant, Cell { ulps: cell.ulps / unit, ..cell });
        match operation {
            Operation::Decode | Operation::Prefill => attention(&case, found)?,
            Operation::CacheWrite => writes(&case, found)?,
            Operation::BlockCopy => copies(&case, found)?,
            Operation::Linear => products(&case, found)?,
            Operation::LowRank => additions(&case, found)?,
        }
        rest = others;
    }
    Ok(())
}

fn attention(case: &Case<'_>, found: Found<'_>) -> Result<(), KernelError> {
    let Case { device, shape, variants, format, .. } = *case;
    let look = Look {
        heads: (shape.heads, shape.kv_heads),
        dim: shape.head_size,
        block_size: shape.block_size,
        scales: format.kv_dtype.takes_scales().then_some(false),
        repeats: Some(OWN_BLOCKS),
        ..Look::plain(format, vec![(shape.query_len, shape.context); shape.batch])
    };
    let problem = Problem::new(1, &look);
    let (rows, all) = (problem.batch.num_rows(), 0..shape.batch);
    let sampled = (TRUTH / (2 * shape.heads * shape.context * shape.head_size).max(1)).clamp(1, rows);
    let truth = problem.truth_of((1..=sampled).map(|i| i * rows / sampled - 1).collect());
    let visible: usize = (1..=shape.query_len).map(|row| shape.context - shape.query_len + row).sum();
    let cache = 2 * shape.batch * shape.context * shape.kv_heads * format.row_bytes(shape.head_size);
    let mut places: Vec<OnDevice<'_>> = (0..case.sets(cache)).map(|_| problem.on(device)).collect::<Result<_, _>>()?;
    for variant in variants {
        let at_once = variant.items_at_once(&**device, format, problem.shape, shape.heads)?;
        places = places.into_iter().map(|place| place.split_for(at_once)).collect::<Result<_, _>>()?;
        let (results, kernels) = case.first(|| places[0].run(variant, all.clone(), false))?;
        let mut output = places[0].output()?;
        let time = case.time(|i| places[i % places.len()].call(variant, all.clone(), &mut output, None))?;
        let cell = Cell {
            time,
            bytes: (cache + 2 * rows * problem.width() * format.dtype.bytes()) as u64,
            operations: (4 * shape.batch * shape.heads * visible * shape.head_size) as u64,
            ulps: results.worst(&problem, &truth),
            kernels,
        };
        found(variant, cell);
    }
    Ok(())
}

/// Returns the shape of a cache with the blocks for a batch of contexts, and as many free blocks.
fn pool(shape: &Shape, tokens: usize) -> KvShape {
    let blocks = shape.batch * tokens.div_ceil(shape.block_size);
    let (num_kv_heads, block_size, head_dim) = (shape.kv_heads, shape.block_size, shape.head_size);
    KvShape { num_blocks: 2 * blocks, num_kv_heads, block_size, head_dim }
}

/// Returns a workspace for writes of up to `rows` rows to a cache, and for copies of blocks.
///
/// # Errors
/// The device cannot allocate it.
pub fn write_workspace(
    device: &dyn Device,
    shape: &KvShape,
    rows: usize,
    copies: usize,
) -> Result<Workspace, KernelError> {
    let limits = WorkspaceLimits {
        max_seqs: 1,
        max_rows: rows,
        max_blocks: 1,
        num_blocks: shape.num_blocks,
        block_size: shape.block_size,
        num_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        max_partials: 0,
        items_at_once: 0,
        max_copies: copies,
    };
    Ok(Workspace::new(device, limits)?)
}

fn writes(case: &Case<'_>, found: Found<'_>) -> Result<(), KernelError> {
    let Case { shape, variants, format, .. } = *case;
    let device = &**case.device;
    let (of, rows, width) = (pool(shape, shape.query_len), shape.batch * shape.query_len, shape.kv_width());
    let mut random = Random::new(2);
    let numbers: Vec<f32> = (0..2 * rows * width).map(|_| round(format.dtype, random.unit())).collect();
    let source = buffer(device, &to_bytes(format.dtype, &numbers))?;
    let mut slots: Vec<i64> = (0..(of.num_blocks * of.block_size) as i64).collect();
    random.shuffle(&mut slots);
    slots.truncate(rows);
    let mut workspace = write_workspace(device, &of, rows, 0)?;
    let batch = AttentionBatch { query_starts: vec![0], ..AttentionBatch::default() };
    workspace.load(device, &batch, &slots, None)?;
    let scale = 1.0 / 128.0;
    let moved = 2 * rows * (width * format.dtype.bytes() + shape.kv_heads * format.row_bytes(shape.head_size));
    let mut caches = Vec::new();
    for _ in 0..case.sets(moved) {
        let mut cache = KvCache::with_format(device, of, format)?;
        if format.kv_dtype.takes_scales() {
            let one = || floats(device, &[scale]);
            cache.scales = Some(Arc::new(KvScales { keys: one()?, values: one()?, per_head: false }));
        }
        caches.push(cache);
    }
    for variant in variants {
        let write = |cache: &mut KvCache| {
            let args = CacheWriteArgs {
                source: &source,
                key_offset: 0,
                value_offset: rows * width,
                stride: width,
                slot_mapping: &slots,
                cache,
                workspace: Some(&workspace),
            };
            variant.cache_write(device, args)
        };
        let ((), kernels) = case.first(|| write(&mut caches[0]))?;
        let stored = [bytes(device, &caches[0].keys)?, bytes(device, caches[0].values())?];
        let exact = (0..rows).step_by(rows.div_ceil(SAMPLE)).all(|row| {
            stored.iter().enumerate().all(|(which, stored)| {
                let row_of = &numbers[which * rows * width + row * width..][..width];
                row_of.chunks(shape.head_size).enumerate().all(|(head, want)| {
                    let slot = slots[row] as usize;
                    if format.kv_dtype == KvDtype::Int8PerToken {
                        let (block, token) = (slot / of.block_size, slot % of.block_size);
                        let ((want, scale), strides) = (int8_row(want), format.strides(&of));
                        let place = block * strides.block + head * strides.head;
                        let (row, scales) = (place + token * strides.token, place + of.block_size * of.head_dim);
                        return stored[row..].starts_with(&want)
                            && stored[scales + 4 * token..].starts_with(&scale.to_le_bytes());
                    }
                    want.iter().enumerate().all(|(column, want)| {
                        let at = format.layout.index(&of, which, slot, head, column) * format.element_bytes();
                        match element(format) {
                            Some(dtype) => stored[at..].starts_with(&to_bytes(dtype, &[*want])),
                            None => stored[at] == to_byte(format.kv_dtype, want / scale),
                        }
                    })
                })
            })
        });
        let count = caches.len();
        let time = case.time(|i| write(&mut caches[i % count]))?;
        let ulps = if exact { 0.0 } else { f64::INFINITY };
        found(variant, Cell { time, kernels, bytes: moved as u64, operations: 0, ulps });
    }
    Ok(())
}

fn copies(case: &Case<'_>, found: Found<'_>) -> Result<(), KernelError> {
    let Case { shape, variants, format, .. } = *case;
    let device = &**case.device;
    let of = pool(shape, shape.context);
    let (count, size) = (of.num_blocks / 2, format.block_bytes(&of));
    let mut random = Random::new(3);
    let mut blocks: Vec<u32> = (0..of.num_blocks as u32).collect();
    random.shuffle(&mut blocks);
    let pairs: Vec<(u32, u32)> = blocks[..count].iter().copied().zip(blocks[count..].iter().copied()).collect();
    let mut workspace = write_workspace(device, &of, 1, count)?;
    workspace.load_copies(device, &pairs)?;
    let moved = 4 * count * size;
    let mut noise = || buffer(device, &(0..of.num_blocks * size).map(|_| random.next() as u8).collect::<Vec<_>>());
    let mut caches = Vec::new();
    for _ in 0..case.sets(moved) {
        caches.push(KvCache { shape: of, format, keys: noise()?, values: noise()?.into(), scales: None });
    }
    for variant in variants {
        let copy = |cache: &mut KvCache| {
            variant.block_copy(device, BlockCopyArgs { copies: &pairs, cache, workspace: Some(&workspace) })
        };
        let ((), kernels) = case.first(|| copy(&mut caches[0]))?;
        let exact = caches[0].buffers().try_fold(true, |exact, cache| {
            let stored = bytes(device, cache)?;
            let block = |id: u32| &stored[id as usize * size..][..size];
            Ok::<bool, KernelError>(exact && pairs.iter().all(|&(from, to)| block(from) == block(to)))
        })?;
        let sets = caches.len();
        let time = case.time(|i| copy(&mut caches[i % sets]))?;
        let ulps = if exact { 0.0 } else { f64::INFINITY };
        found(variant, Cell { time, kernels, bytes: moved as u64, operations: 0, ulps });
    }
    Ok(())
}

fn products(case: &Case<'_>, found: Found<'_>) -> Result<(), KernelError> {
    let Case { shape, variants, format, .. } = *case;
    let device = &**case.device;
    let (rows, k, n) = (shape.batch * shape.query_len, shape.inputs(), shape.outputs);
    let dtype = format.dtype;
    let mut random = Random::new(4);
    let mut draw = |dtype, rows: usize| -> Vec<f32> {
        let own: Vec<f32> = (0..rows.min(OWN_ROWS) * k).map(|_| round(dtype, random.unit())).collect();
        own.iter().copied().cycle().take(rows * k).collect()
    };
    let (x, mut w) = (draw(dtype, rows), draw(shape.dtype, n));
    let raw = to_bytes(shape.dtype, &w);
    if let Some(quantization) = shape.weights {
        w.chunks_mut(k).for_each(|row| as_stored(quantization, dtype, row));
    }
    let input = buffer(device, &to_bytes(dtype, &x))?;
    let mut output: Buffer = device.alloc(rows * n * dtype.bytes())?;
    let matrices_for = |arithmetic| {
        let mut uploader = Uploader::new(device)?.with_arithmetic(arithmetic);
        let mut matrix = || {
            let rows = [WeightRows::Numbers(shape.dtype, raw.as_slice())];
            uploader.matrix(shape.weights, shape.dtype, [n, k], &rows, Purpose::Product)
        };
        let mut matrices = vec![matrix()?];
        while matrices.len() < case.sets(matrices[0].bytes()) {
            matrices.push(matrix()?);
        }
        Ok::<_, KernelError>(matrices)
    };
    let needs = shape.needs(device);
    let (mut packed, mut matrices) = (None, Vec::new());
    let mut sizes = ScratchSizes::default();
    if shape.weights.is_some() && device.features().launches {
        sizes.add(Rewritten::Order, [n, k], rows);
        sizes.add(Rewritten::Weights, [n, k], rows);
    }
    let mut scratch = LinearScratch::new(device, sizes)?;
    for variant in variants {
        let arithmetic = needs.products_of(variant);
        if packed != Some(arithmetic) {
            matrices.clear();
            (packed, matrices) = (Some(arithmetic), matrices_for(arithmetic)?);
        }
        let moved = matrices[0].bytes() + rows * (k + n) * dtype.bytes();
        let mut multiply = |i: usize| {
            let (weights, y, scratch) = (&matrices[i % matrices.len()], &mut output, Some(&mut scratch));
            let x = Rows::Numbers(&input);
            let args = LinearArgs { x, rows, weights, bias: None, y, output: dtype, activation: None, scratch };
            variant.linear(device, args)
        };
        let ((), kernels) = case.first(|| multiply(0))?;
        let time = case.time(&mut multiply)?;
        let y = from_bytes(dtype, &bytes(device, &output)?);
        let places = (0..rows * n).step_by((rows * n).div_ceil(SAMPLE * SAMPLE));
        let ulps = places.map(|at| {
            let products =
                x[at / n * k..][..k].iter().zip(&w[at % n * k..][..k]).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let (sum, magnitude) = products.fold((0.0, 0.0), |(sum, magnitude), p| (sum + p, magnitude + p.abs()));
            let ulps = (f64::from(y[at]) - sum).abs() / ulp(dtype, magnitude);
            if ulps.is_nan() { f64::INFINITY } else { ulps }
        });
        let ulps = ulps.fold(0.0, f64::max);
        found(variant, Cell { time, kernels, bytes: moved as u64, operations: 2 * (rows * n * k) as u64, ulps });
    }
    Ok(())
}

/// Replaces weights with those that they are stored as, in the type of products.
fn as_stored(quantization: Quantization, dtype: Dtype, row: &mut [f32]) {
    let mut blocks = vec![WeightBlock::ZERO; row.len().div_ceil(WeightBlock::ZERO.values.len())];
    quantize_row(Isa::best(), quantization, row, &mut blocks);
    for (weights, block) in row.chunks_mut(WeightBlock::ZERO.values.len()).zip(&blocks) {
        let scale = block.scale.to_f32();
        weights.iter_mut().zip(block.values).for_each(|(w, value)| *w = round(dtype, scale * f32::from(value)));
    }
}

/// The layer is square, like the output matrix of attention. Each sequence has an adapter; at most [`ADAPTERS`] are different.
fn additions(case: &Case<'_>, found: Found<'_>) -> Result<(), KernelError> {
    let Case { device, shape, variants, format, .. } = *case;
    let width = shape.heads * shape.head_size;
    let slots: Vec<SlotRanks> = (0..shape.batch.min(ADAPTERS)).map(|_| vec![Some(RANK)]).collect();
    let of_rows = (0..shape.batch * shape.query_len).map(|row| Some((row / shape.query_len % slots.len()) as u32));
    let problem = LowRankProblem::new(5, format.dtype, [width, RANK], &[width], &slots, of_rows.collect());
    let rows = problem.num_rows();
    let factors = slots.len() * 2 * width * RANK;
    let mut places =
        (0..case.sets(factors * format.dtype.bytes())).map(|_| problem.on(device)).collect::<Result<Vec<_>, _>>()?;
    for variant in variants {
        places[0].reset()?;
        let ((), kernels) = case.first(|| places[0].call(variant))?;
        let ulps = problem.worst(&places[0].output()?, rows.div_ceil(SAMPLE));
        let count = places.len();
        let time = case.time(|i| places[i % count].call(variant))?;
        let bytes = ((factors + 3 * rows * width) * format.dtype.bytes()) as u64;
        found(variant, Cell { time, kernels, bytes, operations: 4 * (rows * width * RANK) as u64, ulps });
    }
    Ok(())
}
