//! `cpu.reference`: every operation in the simplest correct loops, on one thread, to compare other variants with. It is
//! row-invariant too, because its sums run in absolute order.

use device::{Buffer, Device};
use linear::{Gemm, RowBlock, gemm_reference};
use simd::{Isa, Pool};

use super::merge::Merged;
use super::store;
use super::stored::{GivenScales, Slot, Stored, by_kv_dtype, expect_ours, offsets};
use crate::args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, LinearArgs, Rows};
use crate::error::KernelError;
use crate::shape::{KvShape, PARTITION};

/// A cache that is read element by element.
struct Numbers<'a, S: Stored> {
    elements: &'a [S::Raw],
    shape: KvShape,
}

impl<S: Stored> Numbers<'_, S> {
    /// Returns the row of a token in one head, and its scale.
    fn row(&self, table: &[i32], token: usize, kv_head: usize) -> (Vec<f32>, f32) {
        let slot = Slot::of_token(table, self.shape.block_size, token);
        let (row, scale) = offsets::<S>(&self.shape, slot, kv_head);
        let row = self.elements[row..][..self.shape.head_dim].iter().map(|raw| S::widen(*raw));
        (row.collect(), S::scale(&self.elements[scale..][..S::SCALE]))
    }
}

pub(super) fn attention(_: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_ours(args.cache)?;
    by_kv_dtype!(args.cache.format.kv_dtype, |S| by_type::<S>(args))
}

fn by_type<S: Stored>(args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let shape = args.cache.shape;
    let (heads, dim, stride) = (args.num_heads, shape.head_dim, args.query_stride);
    let value_dim = args.cache.value_dim();
    let keys = Numbers::<S> { elements: args.cache.keys.host()?, shape };
    let values = Numbers::<S> { elements: args.cache.values().host()?, shape };
    let scales = GivenScales::of(args.cache.given_scales())?;
    let (batch, window, soft_cap) = (args.batch, args.window, args.soft_cap);
    let (slopes, sinks) = (of_heads(args.alibi_slopes)?, of_heads(args.sinks)?);
    let query = args.query.host::<f32>()?;
    let output = args.output.host_mut::<f32>()?;
    let mut lse = match args.lse {
        Some(lse) => Some(lse.host_mut::<f32>()?),
        None => None,
    };
    for seq in args.seqs {
        let (start, end) = (batch.query_starts[seq] as usize, batch.query_starts[seq + 1] as usize);
        let context = batch.context_lens[seq] as usize;
        let table = batch.table(seq);
        for row in start..end {
            let out_row = &mut output[row * heads * value_dim..][..heads * value_dim];
            if context == 0 {
                out_row.fill(0.0);
                if let Some(lse) = &mut lse {
                    lse[row * heads..][..heads].fill(f32::NEG_INFINITY);
                }
                continue;
            }
            let position = context - (end - row);
            let first = window.map_or(0, |w| (position + 1).saturating_sub(w));
            for head in 0..heads {
                let q = &query[row * stride + head * dim..][..dim];
                let slope = slopes.map_or(0.0, |s| s[head]);
                let kv_head = head * shape.num_kv_heads / heads;
                let [key_scale, value_scale] = scales.head(kv_head);
                let score = |at: usize| {
                    let (k, of_token) = keys.row(table, at, kv_head);
                    // In float64: summed in sequence in float32, 256 products would be less exact than the sums of the
                    // vector kernels.
                    let dot = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(b)).sum::<f64>() as f32;
                    let mut s = args.scale * key_scale * dot * of_token;
                    if let Some(cap) = soft_cap {
                        s = cap * (s / cap).tanh();
                    }
                    s + slope * (at as f32 - position as f32)
                };
                let mut merged = Merged::default();
                let mut sums = vec![0.0f32; value_dim];
                let pattern = args.sparse.map(|sparse| sparse.heads(head..head + 1, kv_head));
                let sees = |token: &usize| pattern.is_none_or(|pattern| pattern.sees(position, *token));
                let mut partition = first / PARTITION * PARTITION;
                while partition <= position {
                    let tokens = partition.max(first)..(partition + PARTITION).min(position + 1);
                    partition += PARTITION;
                    let tokens: Vec<usize> = tokens.filter(sees).collect();
                    if tokens.is_empty() {
                        continue;
                    }
                    let scores: Vec<f32> = tokens.iter().map(|token| score(*token)).collect();
                    let greatest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let mut total = 0.0;
                    let mut part = vec![0.0f32; value_dim];
                    for (token, s) in tokens.into_iter().zip(scores) {
                        let p = (s - greatest).exp();
                        total += p;
                        let (v, of_token) = values.row(table, token, kv_head);
                        for (sum, v) in part.iter_mut().zip(v) {
                            *sum += p * of_token * v;
                        }
                    }
                    merged.merge(Merged { greatest, total }, &mut sums, &part);
                }
                let share = sinks.map_or(1.0, |sinks| merged.add_sink(sinks[head]));
                for (out, sum) in out_row[head * value_dim..][..value_dim].iter_mut().zip(&sums) {
                    *out = sum * share / merged.total * value_scale;
                }
                if let Some(lse) = &mut lse {
                    lse[row * heads + head] = merged.log_of_sum();
                }
            }
        }
    }
    Ok(())
}

/// Returns numbers of the query heads, `[num_heads]`.
pub(super) fn of_heads(numbers: Option<&Buffer>) -> Result<Option<&[f32]>, KernelError> {
    Ok(numbers.map(Buffer::host::<f32>).transpose()?)
}

/// The code of `cpu.rows`, compiled without vector instructions.
pub(super) fn cache_write(device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    store::write(Isa::Portable, device.pool(), args)
}

pub(super) fn block_copy(_: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_ours(args.cache)?;
    let bytes = args.cache.format.block_bytes(&args.cache.shape);
    for buffer in args.cache.buffers_mut() {
        let cache = buffer.host_mut::<u8>()?;
        for &(source, destination) in args.copies {
            for i in 0..bytes {
                cache[destination as usize * bytes + i] = cache[source as usize * bytes + i];
            }
        }
    }
    Ok(())
}

pub(super) fn linear(device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    with_gemm(device, args, |_, gemm| gemm_reference(gemm))
}

/// Returns the first `len` elements of a linear layer's rows.
fn front<T>(x: &[T], len: usize) -> Result<&[T], KernelError> {
    x.get(..len).ok_or(KernelError::Shape { what: "linear input elements", found: x.len(), expected: len })
}

/// Runs a matrix product on host views of a linear layer's operands.
pub(super) fn with_gemm(
    device: &dyn Device,
    args: LinearArgs<'_>,
    run: impl FnOnce(&Pool, Gemm<'_>),
) -> Result<(), KernelError> {
    let weights = args.weights.host()?;
    let shape = |what, found, expected| KernelError::Shape { what, found, expected };
    let x = match args.x {
        Rows::Numbers(x) => linear::Rows::Numbers(front(x.host()?, args.rows * weights.k())?),
        Rows::Blocks(x) if weights.takes_blocks() => {
            linear::Rows::Blocks(front(x.host()?, args.rows * weights.k().div_ceil(RowBlock::LEN))?)
        }
        Rows::Blocks(_) => {
            let found = "rows in blocks for weights that are not quantised".to_string();
            return Err(KernelError::Unsupported { variant: "cpu", found });
        }
    };
    let columns = if args.activation.is_some() { weights.n() / 2 } else { weights.n() };
    let (y, y_len) = (args.y.host_mut::<f32>()?, args.rows * columns);
    let y_found = y.len();
    let y = y.get_mut(..y_len).ok_or(shape("linear output elements", y_found, y_len))?;
    let bias = match args.bias {
        Some(bias) => {
            let bias = bias.host::<f32>()?;
            Some(bias.get(..weights.n()).ok_or(shape("bias elements", bias.len(), weights.n()))?)
        }
        None => None,
    };
    run(device.pool(), Gemm { x, weights, bias, y });
    Ok(())
}
