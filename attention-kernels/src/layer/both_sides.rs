//! Attention of one row to the rows of its sequence, before and behind it, without a cache. Encoders have no other.
//!
//! **Order of sums.** A score is sixteen fused sums over the vectors of a head, added in the order of [`Lanes::sum`], then the
//! columns that fill no vector. The weights and the weighted values are summed in the order of positions. So the bits of a row depend on
//! its sequence alone.

use std::cell::Cell;

use simd::{Isa, LANES, Lanes, dispatch};

/// What all rows of a layer share.
#[derive(Clone, Copy)]
pub struct BothSides<'a> {
    /// Number of query heads, and of key/value heads, which divides it.
    pub heads: (usize, usize),
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements between rows, which begin with queries, keys and values.
    pub stride: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// `Some(c)`: a score s becomes `c * tanh(s / c)`.
    pub soft_cap: Option<f32>,
    /// `Some(w)`: a row sees those less than w positions away.
    pub window: Option<usize>,
    /// Added to scores by the distance from query to key: `[heads, 2 * reach + 1]`, the distance `-reach` first. Greater distances
    /// count as `reach`. Empty: nothing.
    pub by_distance: &'a [f32],
    /// Slopes of ALiBi, `[heads]`: a score is decreased by the slope times the distance. Empty: nothing.
    pub slopes: &'a [f32],
}

thread_local! {
    static SCORES: Cell<Vec<f32>> = Cell::default();
}

/// Computes row `row` of a sequence, `[heads, head_dim]`. `rows`: all rows of the sequence.
///
/// ```
/// use attention_kernels::layer::{BothSides, both_sides};
/// let layer = BothSides {
///     heads: (1, 1), head_dim: 1, stride: 3, scale: 1.0, soft_cap: None, window: None, by_distance: &[], slopes: &[],
/// };
/// // Two rows of query, key and value. Equal scores: the mean of the values.
/// let rows = [0.0, 1.0, 4.0, 0.0, 2.0, 8.0];
/// let mut out = [0.0];
/// both_sides(simd::Isa::best(), layer, &rows, 0, &mut out);
/// assert_eq!(out, [6.0]);
/// ```
pub fn both_sides(isa: Isa, layer: BothSides<'_>, rows: &[f32], row: usize, out: &mut [f32]) {
    let mut scores = SCORES.take();
    scores.resize(scores.len().max(rows.len() / layer.stride), 0.0);
    let buffer = &mut scores[..];
    dispatch!(isa, attend(layer: BothSides<'_>, rows: &[f32], row: usize, buffer: &mut [f32], out: &mut [f32]));
    SCORES.set(scores);
}

#[inline(always)]
fn attend<L: Lanes>(layer: BothSides<'_>, rows: &[f32], row: usize, buffer: &mut [f32], out: &mut [f32]) {
    let BothSides { heads: (num_heads, num_kv_heads), head_dim: dim, stride, .. } = layer;
    let count = rows.len() / stride;
    let seen = match layer.window {
        Some(window) => (row + 1).saturating_sub(window)..count.min(row + window),
        None => 0..count,
    };
    let (keys, values) = (num_heads * dim, (num_heads + num_kv_heads) * dim);
    let scores = &mut buffer[..seen.len()];
    for (head, out) in out.chunks_exact_mut(dim).enumerate() {
        let of_group = head / (num_heads / num_kv_heads) * dim;
        let query = &rows[row * stride + head * dim..][..dim];
        let mut greatest = f32::NEG_INFINITY;
        for (score, at) in scores.iter_mut().zip(seen.clone()) {
            let product = dot::<L>(query, &rows[at * stride + keys + of_group..][..dim]) * layer.scale;
            let capped = layer.soft_cap.map_or(product, |cap| cap * (product / cap).tanh());
            *score = capped + distance_bias(layer, head, row, at);
            greatest = greatest.max(*score);
        }
        let total = weights::<L>(scores, greatest);
        out.fill(0.0);
        for (weight, at) in scores.iter().zip(seen.clone()) {
            add_weighted::<L>(out, &rows[at * stride + values + of_group..][..dim], *weight);
        }
        out.iter_mut().for_each(|x| *x /= total);
    }
}

/// What the distance of two rows adds to their score.
#[inline(always)]
fn distance_bias(layer: BothSides<'_>, head: usize, row: usize, at: usize) -> f32 {
    let width = layer.by_distance.len() / layer.heads.0;
    if width == 0 {
        return layer.slopes.get(head).map_or(0.0, |slope| -slope * row.abs_diff(at) as f32);
    }
    let reach = width / 2;
    layer.by_distance[head * width + (at + reach).saturating_sub(row).min(2 * reach)]
}

#[inline(always)]
fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sum = L::splat(0.0);
    for (a, b) in a.iter().zip(b) {
        sum = L::load(a).mul_add(L::load(b), sum);
    }
    a_rest.iter().zip(b_rest).fold(sum.sum(), |sum, (a, b)| sum + a * b)
}

/// Turns scores into e to the power of what they exceed `greatest` by, and returns their sum.
#[inline(always)]
fn weights<L: Lanes>(scores: &mut [f32], greatest: f32) -> f32 {
    let (vectors, rest) = scores.as_chunks_mut::<LANES>();
    for vector in vectors {
        L::load(vector).add(L::splat(-greatest)).exp().store(vector);
    }
    let mut last = [f32::NEG_INFINITY; LANES];
    last[..rest.len()].copy_from_slice(rest);
    L::load(&last).add(L::splat(-greatest)).exp().store(&mut last);
    rest.copy_from_slice(&last[..rest.len()]);
    scores.iter().sum()
}

#[inline(always)]
fn add_weighted<L: Lanes>(sum: &mut [f32], value: &[f32], weight: f32) {
    let ((sums, sums_rest), (values, values_rest)) = (sum.as_chunks_mut::<LANES>(), value.as_chunks::<LANES>());
    let factor = L::splat(weight);
    for (sum, value) in sums.iter_mut().zip(values) {
        L::load(value).mul_add(factor, L::load(sum)).store(sum);
    }
    for (sum, value) in sums_rest.iter_mut().zip(values_rest) {
        *sum += value * weight;
    }
}
