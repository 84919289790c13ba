//! Floats to blocks of 32 bytes with a scale: weights once, when they are packed; activations before every product.
//!
//! A block's integers are `round(127·x / greatest |x|)`, ties to even, as in the Q8_0 format of GGUF files. What differs
//! is the scale of **weights**: Q8_0 rounds `greatest / 127` to half precision; here it is the half-precision number
//! nearest to Σwq / Σq², which for these integers leaves the least sum of squared errors of all. So the error of a block
//! is at most that of Q8_0, in the same bits. Activations keep the single-precision `greatest / 127`.
//!
//! Every step is one rounded operation in an order that does not depend on the instruction set (no fused ones), so
//! blocks are the same bits everywhere.

use std::cell::Cell;

use half::f16;

use crate::simd::{LANES, Lanes};
use crate::{Isa, Pool, dispatch};

/// Numbers that share a scale.
pub(super) const BLOCK: usize = 32;

/// A greatest magnitude below this counts as zero; the reciprocal would overflow.
const LEAST: f32 = 1e-30;

/// Part of a row of activations, ready to be multiplied. The numbers are `scale * values`.
#[derive(Clone, Copy)]
pub(super) struct RowBlock {
    /// −127..=127, in the fours that one instruction multiplies.
    pub values: [[i8; 4]; BLOCK / 4],
    /// Not a number where the block holds one or an infinity, so that the result is none either.
    pub scale: f32,
    /// −128·Σ values: see [`DotLanes::start`](crate::simd::int8::DotLanes::start).
    pub correction: i32,
}

impl RowBlock {
    const ZERO: RowBlock = RowBlock { values: [[0; 4]; BLOCK / 4], scale: 0.0, correction: 0 };
}

/// Part of a row of weights. The numbers are `scale * values`.
#[derive(Clone, Copy)]
pub(super) struct WeightBlock {
    /// −127..=127.
    pub values: [i8; BLOCK],
    /// Not negative.
    pub scale: f16,
}

thread_local! {
    /// Of the last product of this thread; its memory serves the next one. Taken, not borrowed: a worker that waits may
    /// be given another product to compute.
    static SCRATCH: Cell<Vec<RowBlock>> = const { Cell::new(Vec::new()) };
}

/// Bytes that the activations of `rows` rows of `k` numbers take.
pub(super) fn activation_bytes(rows: usize, k: usize) -> usize {
    rows * k.div_ceil(BLOCK) * size_of::<RowBlock>()
}

/// Calls `f` with the rows of `x` (each of `k` numbers) in blocks, the last one of a row filled up with zeros.
pub(super) fn with_activations<R>(isa: Isa, pool: &Pool, x: &[f32], k: usize, f: impl FnOnce(&[RowBlock]) -> R) -> R {
    let blocks = k.div_ceil(BLOCK);
    let mut scratch = SCRATCH.take();
    scratch.resize(x.len() / k * blocks, RowBlock::ZERO);
    pool.chunks_mut(&mut scratch, blocks, k, |row, out| activation_row(isa, &x[row * k..][..k], out));
    let result = f(&scratch);
    SCRATCH.set(scratch);
    result
}

fn activation_row(isa: Isa, x: &[f32], out: &mut [RowBlock]) {
    dispatch!(isa, activations(x: &[f32], out: &mut [RowBlock]));
}

/// One row in blocks.
pub(super) fn row_blocks(isa: Isa, x: &[f32]) -> Vec<RowBlock> {
    let mut blocks = vec![RowBlock::ZERO; x.len().div_ceil(BLOCK)];
    activation_row(isa, x, &mut blocks);
    blocks
}

#[inline(always)]
fn activations<L: Lanes>(x: &[f32], out: &mut [RowBlock]) {
    let (whole, rest) = x.as_chunks();
    for (x, out) in whole.iter().zip(out.iter_mut()) {
        *out = activation_block::<L>(x);
    }
    if !rest.is_empty() {
        let mut padded = [0.0; BLOCK];
        padded[..rest.len()].copy_from_slice(rest);
        out[whole.len()] = activation_block::<L>(&padded);
    }
}

#[inline(always)]
fn activation_block<L: Lanes>(x: &[f32; BLOCK]) -> RowBlock {
    let (bytes, scale) = block::<L>(x);
    let sum: i32 = bytes.iter().map(|&v| i32::from(v)).sum();
    let mut values = [[0; 4]; BLOCK / 4];
    values.as_flattened_mut().copy_from_slice(&bytes);
    RowBlock { values, scale, correction: -128 * sum }
}

/// A row of weights in blocks, the last one filled up with zeros. `false` if one can not be stored: it holds what is no
/// finite number, or its scale is beyond half precision.
pub(super) fn weights(isa: Isa, row: &[f32], out: &mut [WeightBlock]) -> bool {
    let mut sound = true;
    let sound_ref = &mut sound;
    dispatch!(isa, weight_blocks(row: &[f32], out: &mut [WeightBlock], sound_ref: &mut bool));
    sound
}

#[inline(always)]
fn weight_blocks<L: Lanes>(row: &[f32], out: &mut [WeightBlock], sound: &mut bool) {
    for (w, out) in row.chunks(BLOCK).zip(out) {
        let mut padded = [0.0; BLOCK];
        padded[..w.len()].copy_from_slice(w);
        let (values, scale) = block::<L>(&padded);
        let (mut with_weights, mut squares) = (L::splat(0.0), L::splat(0.0));
        for (w, q) in padded.as_chunks::<LANES>().0.iter().zip(values.as_chunks::<LANES>().0) {
            let q = L::load(&q.map(f32::from));
            // In units of the scale, so that nothing over- or underflows.
            with_weights = with_weights.add(L::load(w).mul(L::splat(1.0 / scale)).mul(q));
            squares = squares.add(q.mul(q));
        }
        let squares = squares.sum();
        let best = if squares > 0.0 { scale * (with_weights.sum() / squares) } else { scale };
        let scale = f16::from_f32(best);
        *sound &= scale.is_finite();
        *out = WeightBlock { values, scale };
    }
}

/// The integers and `greatest / 127`.
#[inline(always)]
fn block<L: Lanes>(x: &[f32; BLOCK]) -> ([i8; BLOCK], f32) {
    let (vectors, _) = x.as_chunks::<LANES>();
    let (a, b) = (L::load(&vectors[0]), L::load(&vectors[1]));
    let magnitude = |v: L| v.max(v.mul(L::splat(-1.0)));
    let greatest = magnitude(a).max(magnitude(b)).greatest();
    // 0, or not a number if any is none or infinite: maxima may pass over those.
    let poison = a.mul(L::splat(0.0)).add(b.mul(L::splat(0.0))).sum();
    let (scale, inverse) = if greatest < LEAST { (0.0, 0.0) } else { (greatest / 127.0, 127.0 / greatest) };
    let mut values = [0; BLOCK];
    let (halves, _) = values.as_chunks_mut();
    a.mul(L::splat(inverse)).round_to_bytes(&mut halves[0]);
    b.mul(L::splat(inverse)).round_to_bytes(&mut halves[1]);
    (values, scale + poison)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn isas() -> impl Iterator<Item = Isa> {
        [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Neon].into_iter().filter(|isa| isa.is_available())
    }

    /// Squared error of a block in Q8_0: the scale is `greatest / 127` in half precision, the integers are rounded with
    /// the unrounded one, halves away from zero.
    fn q8_0_error(block: &[f32]) -> f64 {
        let greatest = block.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        let scale = greatest / 127.0;
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let stored = f64::from(f16::from_f32(scale).to_f32());
        block.iter().map(|&w| (f64::from(w) - stored * f64::from((w * inverse).round())).powi(2)).sum()
    }

    fn our_error(block: &[f32], packed: &WeightBlock) -> f64 {
        let scale = f64::from(packed.scale.to_f32());
        block.iter().zip(packed.values).map(|(&w, q)| (f64::from(w) - scale * f64::from(q)).powi(2)).sum()
    }

    proptest! {
        #[test]
        fn no_block_of_weights_has_more_error_than_in_q8_0(
            row in prop::collection::vec(-1.0f32..1.0, 1..200), exponent in -14i32..14, outlier in 1.0f32..30.0,
        ) {
            let mut row: Vec<f32> = row.iter().map(|w| w * 2f32.powi(exponent)).collect();
            row[0] *= outlier;
            let blocks = row.len().div_ceil(BLOCK);
            let mut first: Option<Vec<([i8; BLOCK], u16)>> = None;
            for isa in isas() {
                let mut out = vec![WeightBlock { values: [0; BLOCK], scale: f16::ZERO }; blocks];
                prop_assert!(weights(isa, &row, &mut out));
                for (block, packed) in row.chunks(BLOCK).zip(&out) {
                    let (ours, theirs) = (our_error(block, packed), q8_0_error(block));
                    // Two scales can be equally good; which is nearer is then decided by rounding.
                    prop_assert!(ours <= theirs * (1.0 + 1e-5) + 1e-30, "{isa}: {ours} against {theirs}");
                    prop_assert!(packed.values[block.len()..].iter().all(|&q| q == 0), "{isa}: the end is filled with zeros");
                }
                let bits: Vec<_> = out.iter().map(|b| (b.values, b.scale.to_bits())).collect();
                prop_assert_eq!(first.get_or_insert(bits.clone()), &bits, "{} differs in some bit", isa);
            }
        }

        #[test]
        fn activations_are_within_half_a_step_and_the_same_bits_everywhere(
            x in prop::collection::vec(-1.0f32..1.0, 1..200), exponent in -60i32..60,
        ) {
            let x: Vec<f32> = x.iter().map(|x| x * 2f32.powi(exponent)).collect();
            let pool = Pool::new(Some(1)).unwrap();
            let mut first = None;
            for isa in isas() {
                let blocks = with_activations(isa, &pool, &x, x.len(), <[RowBlock]>::to_vec);
                for (x, block) in x.chunks(BLOCK).zip(&blocks) {
                    let values: Vec<i8> = block.values.concat();
                    prop_assert_eq!(block.correction, -128 * values.iter().map(|&v| i32::from(v)).sum::<i32>());
                    for (&x, q) in x.iter().zip(values) {
                        let error = (f64::from(x) - f64::from(block.scale) * f64::from(q)).abs();
                        prop_assert!(error <= f64::from(block.scale) * 0.50002, "{isa}: {x} {q}");
                    }
                }
                let bits: Vec<_> = blocks.iter().map(|b| (b.values, b.scale.to_bits())).collect();
                prop_assert_eq!(first.get_or_insert(bits.clone()), &bits, "{} differs in some bit", isa);
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_none_and_weights_that_do_not_fit_are_refused() {
        let pool = Pool::new(Some(1)).unwrap();
        for isa in isas() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 17, 33, 39] {
                    let mut row = [0.25f32; 40];
                    row[at] = bad;
                    let blocks = with_activations(isa, &pool, &row, 40, <[RowBlock]>::to_vec);
                    assert!(
                        blocks[at / BLOCK].scale.is_nan() && blocks[1 - at / BLOCK].scale.is_finite(),
                        "{isa} {bad}"
                    );
                    let mut out = [WeightBlock { values: [0; BLOCK], scale: f16::ZERO }; 2];
                    assert!(!weights(isa, &row, &mut out), "{isa} {bad}");
                }
            }
            let mut out = [WeightBlock { values: [1; BLOCK], scale: f16::ONE }];
            assert!(!weights(isa, &[1e8], &mut out), "{isa}: a scale beyond 65504");
            assert!(weights(isa, &[1e-38, -1e-42], &mut out), "{isa}");
            assert_eq!((out[0].values, out[0].scale), ([0; BLOCK], f16::ZERO), "{isa}: too small to matter");
        }
    }
}
