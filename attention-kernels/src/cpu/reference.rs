//! `cpu.reference`: every operation in the plainest loops that are right, in float32, one thread. What the others are
//! compared with; still row-invariant, because its sums run in absolute order too.

use device::gemm::{Gemm, gemm_reference};
use device::{Device, Pool};

use super::expect_default;
use crate::args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, KernelError, LinearArgs, PARTITION};

pub(super) fn attention(_: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_default(args.cache)?;
    let shape = args.cache.shape;
    let (heads, dim, stride) = (args.num_heads, shape.head_dim, args.query_stride);
    let (keys, values) = (args.cache.keys.host::<f32>()?, args.cache.values.host::<f32>()?);
    let (batch, scale, window, soft_cap, slopes) =
        (args.batch, args.scale, args.window, args.soft_cap, args.alibi_slopes);
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
            let out_row = &mut output[row * heads * dim..][..heads * dim];
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
                let at = |token: usize| {
                    let slot = table[token / shape.block_size] as usize * shape.block_size + token % shape.block_size;
                    shape.offset(slot, kv_head)
                };
                let score = |token: usize| {
                    let k = &keys[at(token)..][..dim];
                    let mut s = scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f32>();
                    if let Some(cap) = soft_cap {
                        s = cap * (s / cap).tanh();
                    }
                    s + slope * (token as f32 - position as f32)
                };
                let mut merged = Merged::default();
                let mut sums = vec![0.0f32; dim];
                let mut partition = first / PARTITION * PARTITION;
                while partition <= position {
                    let tokens = partition.max(first)..(partition + PARTITION).min(position + 1);
                    let scores: Vec<f32> = tokens.clone().map(score).collect();
                    let greatest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let mut total = 0.0;
                    let mut part = vec![0.0f32; dim];
                    for (token, s) in tokens.zip(scores) {
                        let p = (s - greatest).exp();
                        total += p;
                        for (sum, v) in part.iter_mut().zip(&values[at(token)..][..dim]) {
                            *sum += p * v;
                        }
                    }
                    merged.merge(greatest, total, &mut sums, &part);
                    partition += PARTITION;
                }
                for (out, sum) in out_row[head * dim..][..dim].iter_mut().zip(&sums) {
                    *out = sum / merged.total;
                }
                if let Some(lse) = &mut lse {
                    lse[row * heads + head] = merged.log_of_sum();
                }
            }
        }
    }
    Ok(())
}

/// Softmax state of the partitions seen so far: outputs are sums of values weighted by exp(score - greatest).
#[derive(Default)]
pub(super) struct Merged {
    greatest: Option<f32>,
    /// Sum of the weights.
    pub total: f32,
}

impl Merged {
    /// Natural log of the sum of exp(score).
    pub fn log_of_sum(&self) -> f32 {
        self.greatest.unwrap_or(f32::NEG_INFINITY) + self.total.ln()
    }

    /// Folds one partition in: `sums` holds the weighted values so far, `part` those of the partition.
    #[inline(always)]
    pub fn merge(&mut self, greatest: f32, total: f32, sums: &mut [f32], part: &[f32]) {
        let Some(before) = self.greatest else {
            self.greatest = Some(greatest);
            self.total = total;
            sums.copy_from_slice(part);
            return;
        };
        let after = before.max(greatest);
        let (old, new) = ((before - after).exp(), (greatest - after).exp());
        self.greatest = Some(after);
        self.total = self.total * old + total * new;
        for (sum, part) in sums.iter_mut().zip(part) {
            *sum = *sum * old + part * new;
        }
    }
}

pub(super) fn cache_write(_: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_default(args.cache)?;
    let shape = args.cache.shape;
    let source = args.source.host::<f32>()?;
    for (offset, buffer) in [(args.key_offset, &mut args.cache.keys), (args.value_offset, &mut args.cache.values)] {
        let cache = buffer.host_mut::<f32>()?;
        for (row, &slot) in args.slot_mapping.iter().enumerate() {
            for head in 0..shape.num_kv_heads {
                for d in 0..shape.head_dim {
                    if slot >= 0 {
                        cache[shape.offset(slot as usize, head) + d] =
                            source[offset + row * args.stride + head * shape.head_dim + d];
                    }
                }
            }
        }
    }
    Ok(())
}

pub(super) fn block_copy(_: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_default(args.cache)?;
    let elements = args.cache.shape.block_elements();
    for buffer in [&mut args.cache.keys, &mut args.cache.values] {
        let cache = buffer.host_mut::<f32>()?;
        for &(source, destination) in args.copies {
            for i in 0..elements {
                cache[destination as usize * elements + i] = cache[source as usize * elements + i];
            }
        }
    }
    Ok(())
}

pub(super) fn linear(device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    with_gemm(device, args, |_, gemm| gemm_reference(gemm))
}

/// The host view of a linear layer's operands; both CPU variants go through here.
pub(super) fn with_gemm(
    device: &dyn Device,
    args: LinearArgs<'_>,
    run: impl FnOnce(&Pool, Gemm<'_>),
) -> Result<(), KernelError> {
    let weights = args.weights.host()?;
    let shape = |what, found, expected| KernelError::Shape { what, found, expected };
    let (x, y) = (args.x.host::<f32>()?, args.y.host_mut::<f32>()?);
    let (x_len, y_len) = (args.rows * weights.k(), args.rows * weights.n());
    let x = x.get(..x_len).ok_or(shape("linear input elements", x.len(), x_len))?;
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
