//! Quantisation of weights and of activations to blocks.

use half::f16;
use linear::{Quantization, RowBlock, WeightBlock, quantize_row};
use proptest::prelude::*;
use simd::{Isa, Lanes, dispatch};

use super::cpu::isas;
use super::weights::values;

const BLOCK: usize = RowBlock::LEN;

/// Quantises a row of activations.
pub fn row_blocks(isa: Isa, x: &[f32]) -> Vec<RowBlock> {
    #[inline(always)]
    fn fill<L: Lanes>(numbers: &[[f32; BLOCK]], blocks: &mut [RowBlock]) {
        for (block, numbers) in blocks.iter_mut().zip(numbers) {
            block.set::<L>(numbers);
        }
    }
    let mut padded = vec![[0.0; BLOCK]; x.len().div_ceil(BLOCK)];
    padded.as_flattened_mut()[..x.len()].copy_from_slice(x);
    let mut all = vec![RowBlock::ZERO; padded.len()];
    let (numbers, blocks) = (&padded[..], &mut all[..]);
    dispatch!(isa, fill(numbers: &[[f32; BLOCK]], blocks: &mut [RowBlock]));
    all
}

/// Returns the squared error of a block in Q8_0: the scale is `greatest / 127` in half precision, the integers are rounded with
/// the unrounded scale, halves away from zero.
fn q8_0_error(block: &[f32]) -> f64 {
    let greatest = block.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    let scale = greatest / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let stored = f64::from(f16::from_f32(scale).to_f32());
    block.iter().map(|&w| (f64::from(w) - stored * f64::from((w * inverse).round())).powi(2)).sum()
}

/// Returns the squared error of a block in Q4_0: the scale is the weight of greatest magnitude over −8 in half precision, the
/// integers are rounded with the unrounded scale, halves up, at most 7.
fn q4_0_error(block: &[f32]) -> f64 {
    let peak = block.iter().fold(0.0f32, |m, &w| if w.abs() > m.abs() { w } else { m });
    let scale = peak / -8.0;
    let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    let stored = f64::from(f16::from_f32(scale).to_f32());
    let integer = |w: f32| f64::from(((w * inverse + 8.5) as i32).min(15) - 8);
    block.iter().map(|&w| (f64::from(w) - stored * integer(w)).powi(2)).sum()
}

fn our_error(block: &[f32], packed: &WeightBlock) -> f64 {
    let scale = f64::from(packed.scale.to_f32());
    block.iter().zip(packed.values).map(|(&w, q)| (f64::from(w) - scale * f64::from(q)).powi(2)).sum()
}

/// Returns whether no half is nearer to the best scale for these integers. The sums have at most 44 bits, so none is rounded.
fn is_best(block: &[f32], packed: &WeightBlock) -> bool {
    let (mut wq, mut qq) = (0.0, 0.0);
    for (&w, q) in block.iter().zip(packed.values.map(f64::from)) {
        (wq, qq) = (wq + f64::from(w) * q, qq + q * q);
    }
    let off = |bits: u16| (f64::from(f16::from_bits(bits).to_f32()) - wq / qq).abs();
    let bits = packed.scale.to_bits();
    qq == 0.0 || off(bits) <= off(bits + 1) && (bits & 0x7fff == 0 || off(bits) <= off(bits - 1))
}

/// Checks that every instruction set gives the same blocks, and that no block has more error than `theirs`.
fn holds(row: &[f32], quantization: Quantization, theirs: fn(&[f32]) -> f64) -> Result<(), TestCaseError> {
    let mut first: Option<Vec<([i8; BLOCK], u16)>> = None;
    for isa in isas() {
        let mut out = vec![WeightBlock::ZERO; row.len().div_ceil(BLOCK)];
        prop_assert!(quantize_row(isa, quantization, row, &mut out));
        for (block, packed) in row.chunks(BLOCK).zip(&out) {
            let (ours, theirs) = (our_error(block, packed), theirs(block));
            // Two scales can be equally good; then rounding decides which is nearer.
            prop_assert!(ours <= theirs * (1.0 + 1e-7) + 1e-30, "{isa}: {ours} against {theirs}");
            prop_assert!(is_best(block, packed), "{isa}: {:?} is not the nearest scale", packed.scale);
            prop_assert!(packed.values[block.len()..].iter().all(|&q| q == 0), "{isa}: the end is filled with zeros");
        }
        let bits: Vec<_> = out.iter().map(|b| (b.values, b.scale.to_bits())).collect();
        prop_assert_eq!(first.get_or_insert(bits.clone()), &bits, "{} differs in some bit", isa);
    }
    Ok(())
}

/// Weights of any magnitude with an outlier, some truncated to bfloat16: many of those lie exactly between two integers.
fn weights() -> impl Strategy<Value = Vec<f32>> {
    let numbers = prop::collection::vec(-1.0f32..1.0, 1..200);
    (numbers, -26i32..14, 1.0f32..30.0, any::<bool>()).prop_map(|(row, exponent, outlier, short)| {
        let mut row: Vec<f32> = row.iter().map(|w| w * 2f32.powi(exponent)).collect();
        row[0] *= outlier;
        let cut = |w: f32| f32::from_bits(w.to_bits() & 0xffff_0000);
        if short { row.into_iter().map(cut).collect() } else { row }
    })
}

proptest! {
    #[test]
    fn no_block_of_weights_has_more_error_than_in_q8_0(row in weights()) {
        holds(&row, Quantization::Q8, q8_0_error)?;
    }

    #[test]
    fn no_block_of_weights_has_more_error_than_in_q4_0(row in weights()) {
        holds(&row, Quantization::Q4, q4_0_error)?;
    }
}

#[test]
fn eight_bit_integers_are_those_of_q8_0_at_every_half() {
    // Scales whose half-precision forms and reciprocals are exact or not; weights at, above and below the midpoint between two
    // integers; and a row that once had more error than in Q8_0.
    let middles =
        |scale: f32| (-127..127).map(move |q| (q as f32 + 0.5) * scale).flat_map(|w| [w, w.next_up(), w.next_down()]);
    let found = [1.2265625, 0.0, 0.0, 0.0, -0.765625, -0.84375, 0.0, -0.80859375, 0.921875, 0.61328125, -0.7109375];
    let mut rows = vec![found.to_vec()];
    for greatest in [127.0, 64.0, 1.2265625, 3.0e-3] {
        let weights: Vec<f32> = middles(greatest / 127.0).collect();
        rows.extend(weights.chunks(BLOCK - 1).map(|w| w.iter().copied().chain([greatest]).collect()));
    }
    for row in rows {
        holds(&row, Quantization::Q8, q8_0_error).unwrap();
    }
}

#[test]
fn the_last_bit_of_a_small_weight_decides_between_two_scales() {
    // The midpoint between 1 and the next half; with a weight for the greatest integer and a weight for 1.
    let middle = 1.0 + 2f32.powi(-11);
    for (form, most) in [(Quantization::Q8, 127.0), (Quantization::Q4, -8.0)] {
        for (small, scale) in [(middle.next_down(), 1.0), (middle, 1.0), (middle.next_up(), 1.0 + 2f32.powi(-10))] {
            for isa in isas() {
                let mut out = [WeightBlock::ZERO];
                assert!(quantize_row(isa, form, &[most * middle, small], &mut out), "{isa}");
                assert_eq!((f32::from(out[0].values[0]), out[0].values[1]), (most, 1), "{isa}");
                assert_eq!(out[0].scale.to_f32(), scale, "{isa}: {most} {small}");
            }
        }
    }
}

#[test]
fn four_bits_leave_a_tenth_less_error_than_q4_0() {
    // Sums of twelve uniform numbers are close to normally distributed.
    let numbers = values(12 * 200 * BLOCK, 11);
    let row: Vec<f32> = numbers.chunks(12).map(|n| n.iter().sum()).collect();
    let mut out = vec![WeightBlock::ZERO; row.len() / BLOCK];
    assert!(quantize_row(Isa::best(), Quantization::Q4, &row, &mut out));
    let ours: f64 = row.chunks(BLOCK).zip(&out).map(|(block, packed)| our_error(block, packed)).sum();
    let theirs: f64 = row.chunks(BLOCK).map(q4_0_error).sum();
    assert!(ours < 0.91 * theirs, "{}", ours / theirs);
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    for (form, too_large) in [(Quantization::Q8, 1e8), (Quantization::Q4, 1e6)] {
        for isa in isas() {
            let mut out = [WeightBlock::ZERO; 2];
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, too_large] {
                for at in [0, 17, 33, 39] {
                    let mut row = [0.25f32; 40];
                    row[at] = bad;
                    assert!(!quantize_row(isa, form, &row, &mut out), "{isa} {bad}");
                }
            }
            let mut out = [WeightBlock { values: [1; BLOCK], scale: f16::ONE }];
            assert!(quantize_row(isa, form, &[1e-38, -1e-42], &mut out), "{isa}");
            assert_eq!((out[0].values, out[0].scale), ([0; BLOCK], f16::ZERO), "{isa}: too small to matter");
        }
    }
}

proptest! {
    #[test]
    fn activations_are_within_half_a_step_and_the_same_bits_everywhere(
        x in prop::collection::vec(-1.0f32..1.0, 1..200), exponent in -60i32..60,
    ) {
        let x: Vec<f32> = x.iter().map(|x| x * 2f32.powi(exponent)).collect();
        let mut first = None;
        for isa in isas() {
            let blocks = row_blocks(isa, &x);
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
fn a_block_with_a_nan_or_an_infinity_has_a_nan_scale() {
    for isa in isas() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 17, 33, 39] {
                let mut row = [0.25f32; 40];
                row[at] = bad;
                let blocks = row_blocks(isa, &row);
                assert!(blocks[at / BLOCK].scale.is_nan() && blocks[1 - at / BLOCK].scale.is_finite(), "{isa} {bad}");
            }
        }
    }
}
