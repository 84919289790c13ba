//! The inner loops of recurrent layers on a CPU: the convolution and the update of the matrix of one head and token.
//!
//! The delta rule reads a head's matrix twice and writes it once. Columns do not depend on each other, so both passes go over some
//! columns at a time, whose sums stay in registers and whose numbers are still in the cache in the second pass.

use simd::{Isa, LANES, Lanes, dispatch};

/// A convolution of each of `width` channels.
#[derive(Clone, Copy)]
pub struct Convolution<'a> {
    /// Factors of the older inputs, the oldest first, then of the newest, `[kernel, width]`.
    pub weights: &'a [f32],
    /// What is added, `[width]`; empty if there is none.
    pub bias: &'a [f32],
    /// Number of channels.
    pub width: usize,
}

/// The update of a matrix S `[key_dim, value_dim]`.
#[derive(Clone, Copy)]
pub struct Update {
    /// Factor of S.
    pub decay: f32,
    /// Factor of what is added.
    pub beta: f32,
    /// Whether what S already has for k is subtracted from v first: the delta rule.
    pub corrects: bool,
}

/// Computes the convolution of the channels of one head: the inputs in `tail`, the oldest first, then those in `newest`. `pieces`: where
/// the channels lie in a row of weights and in `sums`, and how many.
pub fn convolve(
    isa: Isa,
    conv: Convolution<'_>,
    tail: &[f32],
    newest: &[f32],
    pieces: [(usize, usize, usize); 3],
    sums: &mut [f32],
) {
    dispatch!(isa, convolve_head(conv: Convolution<'_>, tail: &[f32], newest: &[f32], pieces: [(usize, usize, usize); 3], sums: &mut [f32]));
}

/// Computes `S ← decay · S; S ← S + k ⊗ beta · v; out = Sᵀq` for a matrix S `[key_dim, value_dim]`, with sums over the rows of S
/// in their order; if the update corrects, with `v − Sᵀk` for v. `qkv`: q, k and v, and key_dim.
pub fn update(isa: Isa, matrix: &mut [f32], qkv: (&[f32], usize), update: Update, out: &mut [f32]) {
    dispatch!(isa, update_of(matrix: &mut [f32], qkv: (&[f32], usize), update: Update, out: &mut [f32]));
}

/// Computes `S ← e^(decay · step) · S; S ← S + k ⊗ step · v; out = Sᵀq` for a matrix S `[key_dim, value_dim]` whose columns have steps of
/// their own, with sums over the rows of S in their order. `decays`: those of the first row, and the distance to the next row's.
pub fn scan(
    isa: Isa,
    matrix: &mut [f32],
    decays: (&[f32], usize),
    kq: [&[f32]; 2],
    steps: &[f32],
    v: &[f32],
    out: &mut [f32],
) {
    dispatch!(isa, scan_of(matrix: &mut [f32], decays: (&[f32], usize), kq: [&[f32]; 2], steps: &[f32], v: &[f32], out: &mut [f32]));
}

#[inline(always)]
fn scan_of<L: Lanes>(
    matrix: &mut [f32],
    (decays, stride): (&[f32], usize),
    [k, q]: [&[f32]; 2],
    steps: &[f32],
    v: &[f32],
    out: &mut [f32],
) {
    let width = out.len();
    out.fill(0.0);
    for (((row, decays), k), q) in matrix.chunks_exact_mut(width).zip(decays.chunks(stride)).zip(k).zip(q) {
        let (k, q) = (L::splat(*k), L::splat(*q));
        for at in (0..width).step_by(LANES) {
            let len = LANES.min(width - at);
            let (step, sum) = (load::<L>(steps, at), load::<L>(out, at));
            let decay = load::<L>(&decays[..width], at).mul(step).exp();
            let updated = load::<L>(row, at).mul(decay).add(step.mul(load::<L>(v, at)).mul(k));
            for (to, from) in [(&mut *row, updated), (&mut *out, sum.add(updated.mul(q)))] {
                let mut numbers = [0.0; LANES];
                from.store(&mut numbers);
                to[at..at + len].copy_from_slice(&numbers[..len]);
            }
        }
    }
}

/// Loads the numbers from `at` on, padded with zeros.
#[inline(always)]
fn load<L: Lanes>(from: &[f32], at: usize) -> L {
    match from[at..].first_chunk() {
        Some(whole) => L::load(whole),
        None => {
            let mut numbers = [0.0; LANES];
            numbers[..from.len() - at].copy_from_slice(&from[at..]);
            L::load(&numbers)
        }
    }
}

#[allow(clippy::extra_unused_type_parameters)] // the instruction set, for the loops
#[inline(always)]
fn convolve_head<L: Lanes>(
    conv: Convolution<'_>,
    tail: &[f32],
    newest: &[f32],
    pieces: [(usize, usize, usize); 3],
    sums: &mut [f32],
) {
    let channels = sums.len();
    for (from, to, len) in pieces {
        let sums = &mut sums[to..to + len];
        match conv.bias {
            [] => sums.fill(0.0),
            bias => sums.copy_from_slice(&bias[from..from + len]),
        }
        let older = tail.chunks_exact(channels).map(|inputs| &inputs[to..to + len]);
        for (weights, inputs) in conv.weights.chunks_exact(conv.width).zip(older.chain([&newest[to..to + len]])) {
            for ((sum, weight), input) in sums.iter_mut().zip(&weights[from..]).zip(inputs) {
                *sum += weight * input;
            }
        }
    }
}

#[inline(always)]
fn update_of<L: Lanes>(matrix: &mut [f32], (qkv, key_dim): (&[f32], usize), update: Update, out: &mut [f32]) {
    let (q, kv) = qkv.split_at(key_dim);
    let (k, v) = kv.split_at(key_dim);
    let mut at = 0;
    while v.len() - at >= 4 * LANES && L::MANY {
        columns::<L, 4>(matrix, at, [q, k, v], update, out);
        at += 4 * LANES;
    }
    while v.len() - at >= 2 * LANES {
        columns::<L, 2>(matrix, at, [q, k, v], update, out);
        at += 2 * LANES;
    }
    if v.len() - at >= LANES {
        columns::<L, 1>(matrix, at, [q, k, v], update, out);
        at += LANES;
    }
    let Update { decay, beta, corrects } = update;
    for at in at..v.len() {
        let column = matrix.iter_mut().skip(at).step_by(v.len());
        let known = if corrects { column.zip(k).fold(0.0, |sum, (s, k)| sum + *s * k) } else { 0.0 };
        let delta = beta * (v[at] - decay * known);
        let column = matrix.iter_mut().skip(at).step_by(v.len());
        out[at] = column.zip(k).zip(q).fold(0.0, |sum, ((s, k), q)| {
            *s = *s * decay + k * delta;
            sum + *s * q
        });
    }
}

/// [`update`] for `N` vectors of columns from column `at` on.
#[inline(always)]
fn columns<L: Lanes, const N: usize>(
    matrix: &mut [f32],
    at: usize,
    [q, k, v]: [&[f32]; 3],
    Update { decay, beta, corrects }: Update,
    out: &mut [f32],
) {
    let (width, end) = (v.len(), at + N * LANES);
    let mut deltas = [L::splat(0.0); N];
    let read = if corrects { matrix.len() } else { 0 };
    for (row, k) in matrix[..read].chunks_exact(width).zip(k) {
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
