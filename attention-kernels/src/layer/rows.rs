//! Loops over single rows on a CPU: norms, rotation, activations.
//!
//! They are plain loops, which the compiler vectorises inside functions that are compiled for the instruction set.

use linear::{Activation, RowBlock};
use simd::{Isa, LANES, Lanes, dispatch};

/// A norm of a row, or of groups of `width` of its elements.
#[derive(Clone, Copy)]
pub struct NormRow<'a> {
    /// Factor of each element.
    pub weight: &'a [f32],
    /// What is added to each element; empty if there is none.
    pub bias: &'a [f32],
    /// Elements that are normed together.
    pub width: usize,
    /// Term added to the mean of the squares.
    pub eps: f32,
    /// Whether the mean is subtracted: a LayerNorm. Otherwise an RMS norm.
    pub centre: bool,
}

impl<'a> NormRow<'a> {
    /// The norm of a group, if groups have weights of their own.
    pub fn of_group(self, group: usize) -> NormRow<'a> {
        let of = |all: &'a [f32]| all.get(group * self.width..).unwrap_or_default();
        NormRow { weight: of(self.weight), bias: of(self.bias), ..self }
    }
}

/// What [`activate`] computes.
#[derive(Clone, Copy)]
pub struct Activate {
    /// The function.
    pub activation: Activation,
    /// Whether its result is multiplied by the up projection.
    pub gated: bool,
}

/// `out` = the norm of `x`.
pub fn norm(isa: Isa, x: &[f32], norm: NormRow<'_>, out: &mut [f32]) {
    dispatch!(isa, norm_row(x: &[f32], norm: NormRow<'_>, out: &mut [f32]));
}

/// [`norm`] quantised block by block.
pub fn norm_q8(isa: Isa, x: &[f32], norm: NormRow<'_>, out: &mut [RowBlock]) {
    dispatch!(isa, norm_row_q8(x: &[f32], norm: NormRow<'_>, out: &mut [RowBlock]));
}

/// `x += scale * y`.
pub fn add(isa: Isa, x: &mut [f32], y: &[f32], scale: f32) {
    dispatch!(isa, add_row(x: &mut [f32], y: &[f32], scale: f32));
}

/// `x *= factor`.
pub fn scale(isa: Isa, x: &mut [f32], factor: f32) {
    if factor != 1.0 {
        dispatch!(isa, scale_all(x: &mut [f32], factor: f32));
    }
}

/// Norms each group of `heads` in place.
pub fn norm_heads(isa: Isa, heads: &mut [f32], norm: NormRow<'_>) {
    dispatch!(isa, norm_groups(heads: &mut [f32], norm: NormRow<'_>));
}

/// Rotates the first elements of each head by the angles in `table`: cosines, then sines.
pub fn rotate_heads(isa: Isa, heads: &mut [f32], head_dim: usize, table: &[f32], interleaved: bool) {
    if interleaved {
        dispatch!(isa, rotate_neighbours(heads: &mut [f32], head_dim: usize, table: &[f32]));
    } else {
        dispatch!(isa, rotate_halves(heads: &mut [f32], head_dim: usize, table: &[f32]));
    }
}

/// Multiplies each head, of 2^n elements and at least 16, by the symmetric Hadamard matrix of its size, whose elements are 1 and −1,
/// and by a factor.
pub fn mix_heads(isa: Isa, heads: &mut [f32], head_dim: usize, factor: f32) {
    dispatch!(isa, mix_groups(heads: &mut [f32], head_dim: usize, factor: f32));
}

/// Factors of query heads and of key heads for [`mix_heads`]: powers of 2, whose product is 1 / `head_dim`.
pub fn mixing_factors(head_dim: usize) -> [f32; 2] {
    let halvings = head_dim.ilog2() as i32;
    [halvings - halvings / 2, halvings / 2].map(|exponent| 0.5_f32.powi(exponent))
}

/// `x *= sigmoid(gate)`.
pub fn gate(isa: Isa, x: &mut [f32], gate: &[f32]) {
    dispatch!(isa, gate_row(x: &mut [f32], gate: &[f32]));
}

/// `out` = the activation of a row `[gate][up]`, or `[up]` if there is no gate.
pub fn activate(isa: Isa, how: Activate, gate_up: &[f32], out: &mut [f32]) {
    let (gate, up) = gate_up.split_at(out.len());
    activate_by(isa, how, gate, up, out);
}

/// [`activate`] of a gate and what is multiplied by it in separate slices.
pub fn activate_by(isa: Isa, how: Activate, gate: &[f32], up: &[f32], out: &mut [f32]) {
    dispatch!(isa, activate_row(how: Activate, gate: &[f32], up: &[f32], out: &mut [f32]));
}

/// [`activate`] for a result of `width` elements, quantised block by block.
pub fn activate_q8(isa: Isa, how: Activate, gate_up: &[f32], width: usize, out: &mut [RowBlock]) {
    let (gate, up) = gate_up.split_at(width);
    dispatch!(isa, activate_row_q8(how: Activate, gate: &[f32], up: &[f32], out: &mut [RowBlock]));
}

#[inline(always)]
fn norm_row<L: Lanes>(x: &[f32], norm: NormRow<'_>, out: &mut [f32]) {
    let (mean, factor) = moments::<L>(x, norm);
    scale_row(x, mean, factor, norm.weight, norm.bias, out);
}

#[inline(always)]
fn norm_row_q8<L: Lanes>(x: &[f32], norm: NormRow<'_>, out: &mut [RowBlock]) {
    let (mean, factor) = moments::<L>(x, norm);
    let mut numbers = [0.0; RowBlock::LEN];
    for (i, out) in out.iter_mut().enumerate() {
        let at = i * RowBlock::LEN;
        let len = RowBlock::LEN.min(x.len() - at);
        let bias = if norm.bias.is_empty() { &[] } else { &norm.bias[at..at + len] };
        numbers[len..].fill(0.0);
        scale_row(&x[at..at + len], mean, factor, &norm.weight[at..at + len], bias, &mut numbers[..len]);
        out.set::<L>(&numbers);
    }
}

#[allow(clippy::extra_unused_type_parameters)] // the instruction set, for the loop
#[inline(always)]
fn add_row<L: Lanes>(x: &mut [f32], y: &[f32], scale: f32) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y * scale;
    }
}

#[allow(clippy::extra_unused_type_parameters)] // the instruction set, for the loop
#[inline(always)]
fn scale_all<L: Lanes>(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// `(x - mean) * factor * weight + bias`.
#[inline(always)]
fn scale_row(x: &[f32], mean: f32, factor: f32, weight: &[f32], bias: &[f32], out: &mut [f32]) {
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = (x - mean) * factor * w;
    }
    for (out, bias) in out.iter_mut().zip(bias) {
        *out += bias;
    }
}

#[inline(always)]
fn norm_groups<L: Lanes>(heads: &mut [f32], norm: NormRow<'_>) {
    let NormRow { weight, bias, width, .. } = norm;
    for (group, head) in heads.chunks_exact_mut(width).enumerate() {
        let (mean, factor) = moments::<L>(head, norm);
        let first = group * width % weight.len();
        for (x, w) in head.iter_mut().zip(&weight[first..]) {
            *x = (*x - mean) * (factor * w);
        }
        for (x, bias) in head.iter_mut().zip(bias.get(first..).unwrap_or_default()) {
            *x += bias;
        }
    }
}

/// The mean of a row, 0 for an RMS norm, and the factor of the differences from it.
#[inline(always)]
fn moments<L: Lanes>(x: &[f32], norm: NormRow<'_>) -> (f32, f32) {
    let mean = if norm.centre { sum::<L>(x) / x.len() as f32 } else { 0.0 };
    (mean, inverse_deviation::<L>(x, mean, norm.eps))
}

/// `1 / sqrt(mean((x - mean)²) + eps)`. Sixteen lanes sum whole vectors, then the rest is added in order.
#[inline(always)]
fn inverse_deviation<L: Lanes>(row: &[f32], mean: f32, eps: f32) -> f32 {
    let (vectors, tail) = row.as_chunks::<LANES>();
    let mut lanes = L::splat(0.0);
    let negative = L::splat(-mean);
    for vector in vectors {
        let x = L::load(vector).add(negative);
        lanes = x.mul_add(x, lanes);
    }
    let mut squares = lanes.sum();
    for x in tail {
        squares += (x - mean) * (x - mean);
    }
    1.0 / (squares / row.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn sum<L: Lanes>(row: &[f32]) -> f32 {
    let (vectors, tail) = row.as_chunks::<LANES>();
    let mut lanes = L::splat(0.0);
    for vector in vectors {
        lanes = lanes.add(L::load(vector));
    }
    tail.iter().fold(lanes.sum(), |sum, x| sum + x)
}

#[allow(clippy::extra_unused_type_parameters)] // the instruction set, for the loops
#[inline(always)]
fn rotate_halves<L: Lanes>(heads: &mut [f32], head_dim: usize, table: &[f32]) {
    let half = table.len() / 2;
    let (cos, sin) = table.split_at(half);
    for head in heads.chunks_exact_mut(head_dim) {
        let (low, high) = head.split_at_mut(half);
        for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
}

#[allow(clippy::extra_unused_type_parameters)] // the instruction set, for the loops
#[inline(always)]
fn rotate_neighbours<L: Lanes>(heads: &mut [f32], head_dim: usize, table: &[f32]) {
    let (cos, sin) = table.split_at(table.len() / 2);
    for head in heads.chunks_exact_mut(head_dim) {
        for (([a, b], c), s) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
}

/// Sums and differences of elements 1, 2, 4, … apart, in this order.
#[allow(clippy::extra_unused_type_parameters)] // the instruction set, for the loops
#[inline(always)]
fn mix_groups<L: Lanes>(heads: &mut [f32], head_dim: usize, factor: f32) {
    for head in heads.chunks_exact_mut(head_dim) {
        mix_near::<1>(head);
        mix_near::<2>(head);
        mix_near::<4>(head);
        let mut distance = 8;
        while distance < head_dim {
            for pair in head.chunks_exact_mut(2 * distance) {
                let (low, high) = pair.split_at_mut(distance);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance *= 2;
        }
        head.iter_mut().for_each(|x| *x *= factor);
    }
}

/// The part of [`mix_groups`] for elements less than eight apart.
#[inline(always)]
fn mix_near<const DISTANCE: usize>(head: &mut [f32]) {
    for eight in head.as_chunks_mut::<8>().0 {
        let old = *eight;
        for (i, x) in eight.iter_mut().enumerate() {
            let (own, other) = (old[i], old[i ^ DISTANCE]);
            *x = if i & DISTANCE == 0 { own + other } else { other - own };
        }
    }
}

#[inline(always)]
fn gate_row<L: Lanes>(x: &mut [f32], gate: &[f32]) {
    for (x, gate) in x.chunks_mut(LANES).zip(gate.chunks(LANES)) {
        let mut ends = [[0.0; LANES]; 2];
        ends[0][..gate.len()].copy_from_slice(gate);
        let [gates, sigmoids] = &mut ends;
        linear::sigmoid(L::load(gates)).store(sigmoids);
        x.iter_mut().zip(sigmoids).for_each(|(x, sigmoid)| *x *= *sigmoid);
    }
}

#[inline(always)]
fn activate_row_q8<L: Lanes>(how: Activate, gate: &[f32], up: &[f32], out: &mut [RowBlock]) {
    let mut numbers = [0.0; RowBlock::LEN];
    for (i, out) in out.iter_mut().enumerate() {
        let at = i * RowBlock::LEN;
        let end = gate.len().min(at + RowBlock::LEN);
        numbers[end - at..].fill(0.0);
        let up = if how.gated { &up[at..end] } else { up };
        activate_row::<L>(how, &gate[at..end], up, &mut numbers[..end - at]);
        out.set::<L>(&numbers);
    }
}

/// `out = activation(gate, up)`, sixteen elements at a time; `up` is 1 if there is no gate.
#[inline(always)]
fn activate_row<L: Lanes>(how: Activate, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let Activate { activation, gated } = how;
    let (gates, gate_tail) = gate.as_chunks();
    let (ups, up_tail) = up.as_chunks();
    let (outs, out_tail) = out.as_chunks_mut();
    if gated {
        for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
            activation.apply(L::load(gate), L::load(up)).store(out);
        }
    } else {
        for (gate, out) in gates.iter().zip(outs) {
            activation.apply(L::load(gate), L::splat(1.0)).store(out);
        }
    }
    if !out_tail.is_empty() {
        let mut ends = [[0.0; LANES], [1.0; LANES], [0.0; LANES]];
        ends[0][..gate_tail.len()].copy_from_slice(gate_tail);
        ends[1][..up_tail.len()].copy_from_slice(up_tail);
        let [gate, up, out] = &mut ends;
        activation.apply(L::load(gate), L::load(up)).store(out);
        out_tail.copy_from_slice(&out[..out_tail.len()]);
    }
}
