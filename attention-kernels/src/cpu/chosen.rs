//! Attention of each row to some tokens of a latent cache, which an indexer chooses for it ("DeepSeek-V3.2", DeepSeek-AI, 2025).
//!
//! Each row is computed for itself, with sums in the order of positions, so its bits depend on its sequence alone.

use std::cell::Cell;

use device::Buffer;
use simd::{LANES, Pool};

use super::stored::{GivenScales, Slot, Stored, by_kv_dtype, expect_ours, offsets};
use crate::args::KvCache;
use crate::batch::AttentionBatch;
use crate::error::{KernelError, at_least};
use crate::shape::KvShape;

/// Arguments of [`attend_chosen`].
pub struct ChosenArgs<'a> {
    /// Float32 rows that begin with the queries of heads, as wide as keys of the cache.
    pub query: &'a Buffer,
    /// Elements between rows.
    pub query_stride: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of first elements of a key that a query is multiplied with.
    pub dim: usize,
    /// Factor of the products.
    pub scale: f32,
    /// A latent cache.
    pub cache: &'a KvCache,
    /// Rows and block tables of sequences.
    pub batch: &'a AttentionBatch,
    /// Float32 `[rows, num_heads, value_dim]`.
    pub output: &'a mut Buffer,
    /// Most tokens that a row attends to.
    pub most: usize,
    /// `[rows, most]`: the chosen positions of each row, ascending. A row at a position below `most` attends to all tokens.
    pub chosen: &'a mut [u32],
    /// What chooses; `None`: `chosen` holds the positions.
    pub index: Option<IndexRows<'a>>,
}

/// What scores the tokens: `sum over heads of weight * max(query · key, 0)`, with a key that all heads share. Factors of all scores have no
/// effect.
pub struct IndexRows<'a> {
    /// `[rows, heads, dim]`, of the type of the queries of attention.
    pub queries: &'a Buffer,
    /// `[rows, heads]`, factors of heads, of the same type.
    pub weights: &'a Buffer,
    /// Number of heads.
    pub heads: usize,
    /// Elements of a query, and of a key.
    pub dim: usize,
    /// The first element of the key in a row of the cache.
    pub first: usize,
}

/// Memory of a row, which is reused.
#[derive(Default)]
struct Scratch {
    /// Keys, and scores of a head.
    numbers: Vec<f32>,
    /// The score of each token.
    scored: Vec<(f32, u32)>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// Computes attention of all rows to the tokens that are chosen for each. Of equal scores the earlier token is chosen.
///
/// # Errors
/// A cache that the CPU variants do not support, and buffers that are too small.
pub fn attend_chosen(pool: &Pool, args: ChosenArgs<'_>) -> Result<(), KernelError> {
    expect_ours(args.cache)?;
    by_kv_dtype!(args.cache.format.kv_dtype, |S| by_type::<S>(pool, args))
}

/// A product of vectors: sixteen sums that are added at the end.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a).zip(b).for_each(|((sum, a), b)| *sum += a * b);
    }
    let tail: f32 = a_tail.iter().zip(b_tail).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + tail
}

/// Reads elements of the key of a token, whose cache has the scale `given`.
fn read<S: Stored>(
    (pages, shape, given): (&[S::Raw], &KvShape, f32),
    table: &[i32],
    token: usize,
    first: usize,
    to: &mut [f32],
) {
    let (row, scale) = offsets::<S>(shape, Slot::of_token(table, shape.block_size, token), 0);
    let scale = S::scale(&pages[scale..][..S::SCALE]) * given;
    let from = &pages[row + first..][..to.len()];
    to.iter_mut().zip(from).for_each(|(to, raw)| *to = S::widen(*raw) * scale);
}

fn by_type<S: Stored>(pool: &Pool, args: ChosenArgs<'_>) -> Result<(), KernelError> {
    let ChosenArgs { query, query_stride, num_heads, dim, scale, cache, batch, output, most, chosen, index } = args;
    let (rows, value_dim, shape) = (batch.num_rows(), cache.value_dim(), cache.shape);
    let (query, pages) = (query.host::<f32>()?, cache.keys.host::<S::Raw>()?);
    let pages = (pages, &shape, GivenScales::of(cache.given_scales())?.head(0)[0]);
    at_least("elements of queries", query.len(), rows * query_stride)?;
    at_least("elements of a key", shape.head_dim, dim.max(value_dim))?;
    at_least("chosen positions", chosen.len(), rows * most)?;
    let index = match &index {
        None => None,
        Some(index) => {
            let (queries, weights) = (index.queries.host::<f32>()?, index.weights.host::<f32>()?);
            at_least("elements of index queries", queries.len(), rows * index.heads * index.dim)?;
            at_least("factors of index heads", weights.len(), rows * index.heads)?;
            at_least("elements of a key", shape.head_dim, index.first + index.dim)?;
            Some((index, queries, weights))
        }
    };
    let width = num_heads * value_dim;
    let output = output.host_mut::<f32>()?;
    at_least("elements of the output", output.len(), rows * width)?;
    let (output, chosen) = (&mut output[..rows * width], &mut chosen[..rows * most]);
    let longest = batch.context_lens.iter().copied().max().unwrap_or(0) as usize;
    let cost = 2 * longest.min(most) * num_heads * (dim + value_dim);
    pool.zip_chunks_mut((output, width), (chosen, most), cost, |row, out, chosen| {
        let seq = batch.query_starts.partition_point(|start| *start as usize <= row) - 1;
        let context = batch.context_lens[seq] as usize;
        if context == 0 {
            return out.fill(0.0);
        }
        let position = context - (batch.query_starts[seq + 1] as usize - row);
        let table = batch.table(seq);
        let Scratch { mut numbers, mut scored } = SCRATCH.take();
        let count = (position + 1).min(most);
        let chosen = &mut chosen[..count];
        if position < most {
            chosen.iter_mut().zip(0..).for_each(|(chosen, at)| *chosen = at);
        } else if let Some((index, queries, weights)) = &index {
            let IndexRows { heads, dim, first, .. } = **index;
            let queries = &queries[row * heads * dim..][..heads * dim];
            let weights = &weights[row * heads..][..heads];
            numbers.resize(numbers.len().max(dim), 0.0);
            let key = &mut numbers[..dim];
            scored.clear();
            scored.extend((0..=position).map(|token| {
                read::<S>(pages, table, token, first, key);
                let of_heads = queries.chunks_exact(dim).zip(weights);
                let score = of_heads.map(|(query, weight)| weight * dot(query, key).max(0.0)).sum::<f32>();
                (score, token as u32)
            }));
            scored.select_nth_unstable_by(count - 1, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            chosen.iter_mut().zip(&scored).for_each(|(chosen, (_, token))| *chosen = *token);
            chosen.sort_unstable();
        }
        // Keys, then scores of a head.
        numbers.resize(numbers.len().max(count * (dim + 1)), 0.0);
        let (keys, scores) = numbers[..count * (dim + 1)].split_at_mut(count * dim);
        for (key, token) in keys.chunks_exact_mut(dim).zip(&*chosen) {
            read::<S>(pages, table, *token as usize, 0, key);
        }
        let queries = query[row * query_stride..].chunks_exact(shape.head_dim).take(num_heads);
        for (query, out) in queries.zip(out.chunks_exact_mut(value_dim)) {
            let mut greatest = f32::NEG_INFINITY;
            for (score, key) in scores.iter_mut().zip(keys.chunks_exact(dim)) {
                *score = dot(&query[..dim], key) * scale;
                greatest = greatest.max(*score);
            }
            out.fill(0.0);
            let mut total = 0.0;
            for (score, key) in scores.iter().zip(keys.chunks_exact(dim)) {
                let share = (score - greatest).exp();
                total += share;
                out.iter_mut().zip(key).for_each(|(out, value)| *out += share * value);
            }
            out.iter_mut().for_each(|out| *out /= total);
        }
        SCRATCH.set(Scratch { numbers, scored });
    });
    Ok(())
}
