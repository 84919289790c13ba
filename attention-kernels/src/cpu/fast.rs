//! Attention in vectors, and the packed matrix product. One source for every instruction set.
//!
//! A task is one query token and one key/value head. Its query heads (the group) share every key and value that is
//! read, up to four at a time:
//!
//! ```text
//! partition of 512 tokens        scores[r][j] = q[r]·k[j]     softmax over j      sums[r] += p[r][j] * v[j]
//!   block 7 ▒▒▒▒▒▒▒▒              4 query heads at once        in vectors of 16    v[j] is read once for the group
//!   block 2 ▒▒▒▒▒
//! ```
//!
//! The order of every sum depends on the row's own first and last visible token alone, so rows do not influence each
//! other. Scratch lives on the stack: 8 KiB of scores, and 4 × head_dim sums in the output row itself.

// Constant loops over registers read best with the index that several arrays share.
#![allow(clippy::needless_range_loop)]

use device::gemm::gemm;
use device::simd::{LANES, Lanes};
use device::{Device, Isa};

use super::expect_default;
use super::reference::{Merged, with_gemm};
use crate::args::{AttentionArgs, KernelError, KvShape, LinearArgs, PARTITION};

/// Greatest head size that the stack scratch holds.
pub(super) const MAX_HEAD_DIM: usize = 512;

/// Query heads that share one pass over keys and values.
const GROUP: usize = 4;

pub(super) fn linear(isa: Isa, device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    with_gemm(device, args, |pool, operands| gemm(isa, pool, operands))
}

/// What every task of a call shares.
struct Shared<'a> {
    shape: KvShape,
    keys: &'a [f32],
    values: &'a [f32],
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
}

/// One query token and `R` of its heads.
struct Rows<'a> {
    /// `[R, head_dim]`.
    query: &'a [f32],
    /// ALiBi slopes, `[R]`, if any.
    slopes: Option<&'a [f32]>,
    position: usize,
    kv_head: usize,
    table: &'a [i32],
}

pub(super) fn attention(isa: Isa, device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let shape = args.cache.shape;
    if shape.head_dim > MAX_HEAD_DIM {
        return Err(KernelError::Shape { what: "head size", found: shape.head_dim, expected: MAX_HEAD_DIM });
    }
    args.check()?;
    expect_default(args.cache)?;
    if args.lse.is_some() {
        return Err(KernelError::Unsupported { variant: "cpu", found: "an lse output".to_string() });
    }
    let shared = &Shared {
        shape,
        keys: args.cache.keys.host()?,
        values: args.cache.values.host()?,
        scale: args.scale,
        window: args.window,
        soft_cap: args.soft_cap,
    };
    let (batch, seqs, rows) = (args.batch, args.seqs.clone(), args.rows());
    let (group, dim, stride, slopes) =
        (args.num_heads / shape.num_kv_heads, shape.head_dim, args.query_stride, args.alibi_slopes);
    let query = args.query.host::<f32>()?;
    let width = args.num_heads * dim;
    let longest = batch.context_lens[seqs.clone()].iter().copied().max().unwrap_or(0) as usize;
    let work = 2 * group * dim * args.window.map_or(longest, |w| w.min(longest));
    let output = &mut args.output.host_mut::<f32>()?[rows.start * width..rows.end * width];
    device.pool().chunks_mut(output, group * dim, work, |task, out| {
        let (row, kv_head) = (rows.start + task / shape.num_kv_heads, task % shape.num_kv_heads);
        let seq =
            seqs.start + batch.query_starts[seqs.start..=seqs.end].partition_point(|&start| start as usize <= row) - 1;
        let context = batch.context_lens[seq] as usize;
        if context == 0 {
            return out.fill(0.0);
        }
        let position = context - (batch.query_starts[seq + 1] as usize - row);
        for (first, out) in (0..group).step_by(GROUP).zip(out.chunks_mut(GROUP * dim)) {
            let head = kv_head * group + first;
            let heads = out.len() / dim;
            let rows = &Rows {
                query: &query[row * stride + head * dim..][..out.len()],
                slopes: slopes.map(|s| &s[head..head + heads]),
                position,
                kv_head,
                table: batch.table(seq),
            };
            attend(isa, shared, rows, out);
        }
    });
    Ok(())
}

fn attend(isa: Isa, shared: &Shared<'_>, rows: &Rows<'_>, out: &mut [f32]) {
    device::dispatch!(isa, by_group(shared: &Shared<'_>, rows: &Rows<'_>, out: &mut [f32]));
}

#[inline(always)]
fn by_group<L: Lanes>(shared: &Shared<'_>, rows: &Rows<'_>, out: &mut [f32]) {
    match out.len() / shared.shape.head_dim {
        1 => all_partitions::<L, 1>(shared, rows, out),
        2 => all_partitions::<L, 2>(shared, rows, out),
        3 => all_partitions::<L, 3>(shared, rows, out),
        _ => all_partitions::<L, GROUP>(shared, rows, out),
    }
}

#[inline(always)]
fn all_partitions<L: Lanes, const R: usize>(shared: &Shared<'_>, rows: &Rows<'_>, out: &mut [f32]) {
    let dim = shared.shape.head_dim;
    let first = shared.window.map_or(0, |w| (rows.position + 1).saturating_sub(w));
    let mut merged: [Merged; R] = std::array::from_fn(|_| Merged::default());
    let mut part = [[0.0f32; MAX_HEAD_DIM]; R];
    let mut scores = [[0.0f32; PARTITION]; R];
    let mut partition = first / PARTITION * PARTITION;
    while partition <= rows.position {
        let (start, end) = (partition.max(first), (partition + PARTITION).min(rows.position + 1));
        score::<L, R>(shared, rows, start, end, &mut scores);
        let mut state = [(0.0, 0.0); R];
        for r in 0..R {
            bias(shared, rows, r, start, &mut scores[r][..end - start]);
            state[r] = softmax::<L>(&mut scores[r], end - start);
        }
        weigh::<L, R>(shared, rows, start, end, &scores, &mut part);
        for r in 0..R {
            let (greatest, total) = state[r];
            merged[r].merge(greatest, total, &mut out[r * dim..][..dim], &part[r][..dim]);
        }
        partition += PARTITION;
    }
    for r in 0..R {
        for value in &mut out[r * dim..][..dim] {
            *value /= merged[r].total;
        }
    }
}

/// The runs of tokens `start..end` that lie in one block each: `(first token, rows of head_dim)`.
struct Runs<'a> {
    shape: KvShape,
    cache: &'a [f32],
    table: &'a [i32],
    kv_head: usize,
    token: usize,
    end: usize,
}

impl<'a> Runs<'a> {
    #[inline(always)]
    fn new(shared: &Shared<'_>, cache: &'a [f32], rows: &Rows<'a>, token: usize, end: usize) -> Runs<'a> {
        Runs { shape: shared.shape, cache, table: rows.table, kv_head: rows.kv_head, token, end }
    }
}

impl<'a> Iterator for Runs<'a> {
    type Item = (usize, &'a [f32]);

    #[inline(always)]
    fn next(&mut self) -> Option<(usize, &'a [f32])> {
        let (block_size, token) = (self.shape.block_size, self.token);
        if token >= self.end {
            return None;
        }
        self.token = self.end.min((token / block_size + 1) * block_size);
        let slot = self.table[token / block_size] as usize * block_size + token % block_size;
        let elements = (self.token - token) * self.shape.head_dim;
        Some((token, &self.cache[self.shape.offset(slot, self.kv_head)..][..elements]))
    }
}

/// `scores[r][j] = scale * q[r]·k[start + j]`.
#[inline(always)]
fn score<L: Lanes, const R: usize>(
    shared: &Shared<'_>,
    rows: &Rows<'_>,
    start: usize,
    end: usize,
    scores: &mut [[f32; PARTITION]; R],
) {
    let dim = shared.shape.head_dim;
    for (token, keys) in Runs::new(shared, shared.keys, rows, start, end) {
        for (j, key) in keys.chunks_exact(dim).enumerate() {
            let (vectors, tail) = key.as_chunks::<LANES>();
            let mut sums = [L::splat(0.0); R];
            for (i, vector) in vectors.iter().enumerate() {
                let k = L::load(vector);
                for r in 0..R {
                    sums[r] = lanes::<L>(&rows.query[r * dim..], i).mul_add(k, sums[r]);
                }
            }
            for r in 0..R {
                let mut dot = sums[r].sum();
                for (q, k) in rows.query[r * dim + vectors.len() * LANES..].iter().zip(tail) {
                    dot += q * k;
                }
                scores[r][token - start + j] = shared.scale * dot;
            }
        }
    }
}

/// Soft cap and ALiBi, for the few models that have them.
#[inline(always)]
fn bias(shared: &Shared<'_>, rows: &Rows<'_>, r: usize, start: usize, scores: &mut [f32]) {
    if let Some(cap) = shared.soft_cap {
        for s in scores.iter_mut() {
            *s = cap * (*s / cap).tanh();
        }
    }
    if let Some(slopes) = rows.slopes {
        for (j, s) in scores.iter_mut().enumerate() {
            *s += slopes[r] * ((start + j) as f32 - rows.position as f32);
        }
    }
}

/// Turns `len` scores into exp(score - greatest); gives the greatest score and the sum of the weights.
#[inline(always)]
fn softmax<L: Lanes>(scores: &mut [f32; PARTITION], len: usize) -> (f32, f32) {
    // Whole vectors: the padding is far below every score, its weight vanishes beside the greatest one's 1.
    let padded = len.next_multiple_of(LANES);
    scores[len..padded].fill(f32::MIN);
    let (vectors, _) = scores[..padded].as_chunks_mut::<LANES>();
    let mut greatest = L::splat(f32::MIN);
    for vector in vectors.iter() {
        greatest = greatest.max(L::load(vector));
    }
    let greatest = greatest.greatest();
    let mut total = L::splat(0.0);
    for vector in vectors.iter_mut() {
        let p = L::load(vector).add(L::splat(-greatest)).exp();
        total = total.add(p);
        p.store(vector);
    }
    (greatest, total.sum())
}

/// `part[r] = Σ_j p[r][j] * v[start + j]`, in the order of j.
#[inline(always)]
fn weigh<L: Lanes, const R: usize>(
    shared: &Shared<'_>,
    rows: &Rows<'_>,
    start: usize,
    end: usize,
    weights: &[[f32; PARTITION]; R],
    part: &mut [[f32; MAX_HEAD_DIM]; R],
) {
    let dim = shared.shape.head_dim;
    let vectors = dim / LANES;
    let mut at = 0;
    while at + 4 <= vectors {
        columns::<L, R, 4>(shared, rows, start, end, weights, part, at);
        at += 4;
    }
    while at < vectors {
        columns::<L, R, 1>(shared, rows, start, end, weights, part, at);
        at += 1;
    }
    for d in vectors * LANES..dim {
        let mut sums = [0.0f32; R];
        for (token, values) in Runs::new(shared, shared.values, rows, start, end) {
            for (j, value) in values.chunks_exact(dim).enumerate() {
                for r in 0..R {
                    sums[r] += weights[r][token - start + j] * value[d];
                }
            }
        }
        for r in 0..R {
            part[r][d] = sums[r];
        }
    }
}

/// The part of [`weigh`] for `C` vectors of the head, whose sums stay in registers.
#[inline(always)]
fn columns<L: Lanes, const R: usize, const C: usize>(
    shared: &Shared<'_>,
    rows: &Rows<'_>,
    start: usize,
    end: usize,
    weights: &[[f32; PARTITION]; R],
    part: &mut [[f32; MAX_HEAD_DIM]; R],
    at: usize,
) {
    let dim = shared.shape.head_dim;
    let mut sums = [[L::splat(0.0); C]; R];
    for (token, values) in Runs::new(shared, shared.values, rows, start, end) {
        for (j, value) in values.chunks_exact(dim).enumerate() {
            let v: [L; C] = std::array::from_fn(|c| lanes::<L>(value, at + c));
            for r in 0..R {
                let p = L::splat(weights[r][token - start + j]);
                for c in 0..C {
                    sums[r][c] = p.mul_add(v[c], sums[r][c]);
                }
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            let (vectors, _) = part[r].as_chunks_mut::<LANES>();
            sums[r][c].store(&mut vectors[at + c]);
        }
    }
}

/// Vector `i` of a row.
#[inline(always)]
fn lanes<L: Lanes>(row: &[f32], i: usize) -> L {
    let (vectors, _) = row.as_chunks::<LANES>();
    L::load(&vectors[i])
}
