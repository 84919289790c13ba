//! The inner loops of gated delta nets on a CPU: the convolution and the delta rule of one head and token.
//!
//! The delta rule reads a head's matrix twice and writes it once. Columns do not depend on each other, so both passes go over some
//! columns at a time, whose sums stay in registers and whose numbers are still in the cache in the second pass.

use simd::{Isa, LANES, Lanes, dispatch};

/// Computes the convolution of the channels of one head: the inputs in `tail`, the oldest first, then those in `row`. `pieces`: where
/// the channels lie in a row and in `sums`, and how many.
pub fn convolve(
    isa: Isa,
    conv: &[f32],
    tail: &[f32],
    row: &[f32],
    pieces: [(usize, usize, usize); 3],
    sums: &mut [f32],
) {
    dispatch!(isa, convolve_head(conv: &[f32], tail: &[f32], row: &[f32], pieces: [(usize, usize, usize); 3], sums: &mut [f32]));
}

/// Computes `S ← decay · S; S ← S + k ⊗ beta · (v − Sᵀk); out = Sᵀq` for a matrix S `[key_dim, value_dim]`, with sums over the rows of S
/// in their order. `qkv`: q, k and v, and key_dim; `scales`: decay and beta.
pub fn delta_rule(isa: Isa, matrix: &mut [f32], qkv: (&[f32], usize), scales: (f32, f32), out: &mut [f32]) {
    dispatch!(isa, delta_rule_of(matrix: &mut [f32], qkv: (&[f32], usize), scales: (f32, f32), out: &mut [f32]));
}

#[allow(clippy::extra_unused_type_parameters)] // the instruction set, for the loops
#[inline(always)]
fn convolve_head<L: Lanes>(
    conv: &[f32],
    tail: &[f32],
    row: &[f32],
    pieces: [(usize, usize, usize); 3],
    sums: &mut [f32],
) {
    let (channels, width) = (sums.len(), conv.len() / (tail.len() / sums.len() + 1));
    for (from, to, len) in pieces {
        let sums = &mut sums[to..to + len];
        sums.fill(0.0);
        let older = tail.chunks_exact(channels).map(|inputs| &inputs[to..to + len]);
        for (weights, inputs) in conv.chunks_exact(width).zip(older.chain([&row[from..from + len]])) {
            for ((sum, weight), input) in sums.iter_mut().zip(&weights[from..]).zip(inputs) {
                *sum += weight * input;
            }
        }
    }
}

#[inline(always)]
fn delta_rule_of<L: Lanes>(matrix: &mut [f32], (qkv, key_dim): (&[f32], usize), scales: (f32, f32), out: &mut [f32]) {
    let (q, kv) = qkv.split_at(key_dim);
    let (k, v) = kv.split_at(key_dim);
    let mut at = 0;
    while v.len() - at >= 4 * LANES && L::MANY {
        columns::<L, 4>(matrix, at, [q, k, v], scales, out);
        at += 4 * LANES;
    }
    while v.len() - at >= 2 * LANES {
        columns::<L, 2>(matrix, at, [q, k, v], scales, out);
        at += 2 * LANES;
    }
    if v.len() - at >= LANES {
        columns::<L, 1>(matrix, at, [q, k, v], scales, out);
        at += LANES;
    }
    let (decay, beta) = scales;
    for at in at..v.len() {
        let column = matrix.iter_mut().skip(at).step_by(v.len());
        let sum = column.zip(k).fold(0.0, |sum, (s, k)| sum + *s * k);
        let delta = beta * (v[at] - decay * sum);
        let column = matrix.iter_mut().skip(at).step_by(v.len());
        out[at] = column.zip(k).zip(q).fold(0.0, |sum, ((s, k), q)| {
            *s = *s * decay + k * delta;
            sum + *s * q
        });
    }
}

/// [`delta_rule`] for `N` vectors of columns from column `at` on.
#[inline(always)]
fn columns<L: Lanes, const N: usize>(
    matrix: &mut [f32],
    at: usize,
    [q, k, v]: [&[f32]; 3],
    (decay, beta): (f32, f32),
    out: &mut [f32],
) {
    let (width, end) = (v.len(), at + N * LANES);
    let mut deltas = [L::splat(0.0); N];
    for (row, k) in matrix.chunks_exact(width).zip(k) {
        let k = L::splat(*k);
        for (sum, s) in deltas.iter_mut().zip(row[at..end].as_chunks().0) {
            *sum = sum.add(L::load(s).mul(k));
        }
    }
    let (less, beta) = (L::splat(-decay), L::splat(beta));
    for (delta, v) in deltas.iter_mut().zip(v[at..end].as_chunks().0) {
        *delta = L::load(v).add(delta.mul(less)).mul(beta);
    }
    let mut sums = [L::splat(0.0); N];
    let decay = L::splat(decay);
    for ((row, k), q) in matrix.chunks_exact_mut(width).zip(k).zip(q) {
        let (k, q) = (L::splat(*k), L::splat(*q));
        for ((s, delta), sum) in row[at..end].as_chunks_mut().0.iter_mut().zip(deltas).zip(&mut sums) {
            let updated = L::load(s).mul(decay).add(delta.mul(k));
            *sum = sum.add(updated.mul(q));
            updated.store(s);
        }
    }
    for (sum, out) in sums.into_iter().zip(out[at..end].as_chunks_mut().0) {
        sum.store(out);
    }
}
