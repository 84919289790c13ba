//! Activations in blocks of 32 bytes with a scale: what quantised weights are multiplied with. A product makes them of rows of
//! numbers, unless whoever computed these made them at once ([`RowBlock::set`]).
//!
//! A block's integers are `round(127·x / greatest |x|)`, ties to even, and its scale is the single-precision
//! `greatest / 127`. Every step is one rounded operation in an order that does not depend on the instruction set (no
//! fused ones), so blocks are the same bits everywhere.

use std::borrow::Cow;
use std::cell::Cell;

use super::quantize::BLOCK;
use super::rows::{RowBlock, Rows};
use crate::simd::Lanes;
use crate::{Isa, Pool, dispatch};

thread_local! {
    /// Of the last product of this thread; its memory serves the next one. Taken, not borrowed: a thread that computes
    /// a product may be given another one inside of it.
    static SCRATCH: Cell<Vec<RowBlock>> = const { Cell::new(Vec::new()) };
}

/// Bytes that the activations of `rows` rows of `k` numbers take.
pub(super) fn scratch_bytes(rows: usize, k: usize) -> usize {
    rows * k.div_ceil(BLOCK) * size_of::<RowBlock>()
}

/// Calls `f` with the rows of `x` (each of `k` numbers) in blocks, the last one of a row filled up with zeros.
pub(super) fn with_activations<R>(isa: Isa, pool: &Pool, x: Rows<'_>, k: usize, f: impl FnOnce(&[RowBlock]) -> R) -> R {
    let x = match x {
        Rows::Numbers(x) => x,
        Rows::Blocks(x) => return f(x),
    };
    let blocks = k.div_ceil(BLOCK);
    let mut scratch = SCRATCH.take();
    scratch.resize(x.len() / k * blocks, RowBlock::ZERO);
    pool.chunks_mut(&mut scratch, blocks, k * RowBlock::COST, |row, out| row_into(isa, &x[row * k..][..k], out));
    let result = f(&scratch);
    SCRATCH.set(scratch);
    result
}

fn row_into(isa: Isa, x: &[f32], out: &mut [RowBlock]) {
    dispatch!(isa, blocks(x: &[f32], out: &mut [RowBlock]));
}

/// Rows in blocks, by no particular instructions.
pub(super) fn rows_in_blocks(x: Rows<'_>, k: usize) -> Cow<'_, [RowBlock]> {
    match x {
        Rows::Numbers(x) => x.chunks(k).flat_map(|x| row_blocks(Isa::Portable, x)).collect(),
        Rows::Blocks(x) => x.into(),
    }
}

/// One row in blocks.
pub(super) fn row_blocks(isa: Isa, x: &[f32]) -> Vec<RowBlock> {
    let mut blocks = vec![RowBlock::ZERO; x.len().div_ceil(BLOCK)];
    row_into(isa, x, &mut blocks);
    blocks
}

#[inline(always)]
fn blocks<L: Lanes>(x: &[f32], out: &mut [RowBlock]) {
    let (whole, rest) = x.as_chunks();
    for (x, out) in whole.iter().zip(out.iter_mut()) {
        out.set::<L>(x);
    }
    if !rest.is_empty() {
        let mut padded = [0.0; BLOCK];
        padded[..rest.len()].copy_from_slice(rest);
        out[whole.len()].set::<L>(&padded);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::simd::tested::isas;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn activations_are_within_half_a_step_and_the_same_bits_everywhere(
            x in prop::collection::vec(-1.0f32..1.0, 1..200), exponent in -60i32..60,
        ) {
            let x: Vec<f32> = x.iter().map(|x| x * 2f32.powi(exponent)).collect();
            let pool = Pool::new(Some(1)).unwrap();
            let mut first = None;
            for isa in isas() {
                let blocks = with_activations(isa, &pool, Rows::Numbers(&x), x.len(), <[RowBlock]>::to_vec);
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
    fn what_is_no_number_stays_none() {
        let pool = Pool::new(Some(1)).unwrap();
        for isa in isas() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 17, 33, 39] {
                    let mut row = [0.25f32; 40];
                    row[at] = bad;
                    let blocks = with_activations(isa, &pool, Rows::Numbers(&row), 40, <[RowBlock]>::to_vec);
                    assert!(
                        blocks[at / BLOCK].scale.is_nan() && blocks[1 - at / BLOCK].scale.is_finite(),
                        "{isa} {bad}"
                    );
                }
            }
        }
    }
}
