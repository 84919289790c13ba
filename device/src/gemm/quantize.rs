//! Floats to blocks of 32 integers with a scale in half precision: weights, once, when they are packed.
//!
//! | | integers | scale | error of a block |
//! |---|---|---|---|
//! | [`q8`] | those of Q8_0: `round(w / (greatest \|w\| / 127))` | best | at most that of Q8_0 |
//! | [`q4`] | those of Q4_0, or of one of four other steps: whichever fits best | best | at most that of Q4_0 |
//!
//! Q8_0 and Q4_0 are the formats of GGUF files; these take the same bits. The best scale for given integers q is Σwq / Σq²
//! (least squares), rounded to the nearest half, which is the best half there is, for the error is a parabola of the
//! scale. So a block is at most as wrong as the other format's with the same integers, whatever that one's scale.
//!
//! Every step is one rounded operation in an order that does not depend on the instruction set (no fused ones), so
//! blocks are the same bits everywhere.

use std::cmp::Ordering;

use half::f16;

use crate::simd::{LANES, Lanes};
use crate::{Isa, dispatch};

/// Numbers that share a scale.
pub(super) const BLOCK: usize = 32;

/// A greatest magnitude below this counts as zero; the reciprocal would overflow.
const LEAST: f32 = 1e-30;

/// What the weight of greatest magnitude becomes, before rounding, in the steps that [`q4`] tries. The first is Q4_0's. The
/// others were found by trying 21 of them on normally distributed weights: together they leave 0.89 of Q4_0's squared error,
/// all 21 leave 0.886.
const STEPS: [f32; 5] = [-8.0, -8.4, -7.3, -8.7, -7.8];

/// Part of a row of weights. The numbers are `scale * values`.
#[derive(Clone, Copy)]
pub(super) struct WeightBlock {
    /// −127..=127 ([`q8`]) or −8..=7 ([`q4`]).
    pub values: [i8; BLOCK],
    /// Finite, or the block could not be stored.
    pub scale: f16,
}

impl WeightBlock {
    pub const ZERO: WeightBlock = WeightBlock { values: [0; BLOCK], scale: f16::ZERO };
}

/// A row of weights in blocks of 8 bits, the last one filled up with zeros. `false` if one can not be stored: it holds
/// what is no finite number, or its scale is beyond half precision.
pub(super) fn q8(isa: Isa, row: &[f32], out: &mut [WeightBlock]) -> bool {
    dispatch!(isa, q8_blocks(row: &[f32], out: &mut [WeightBlock]));
    out.iter().all(|block| block.scale.is_finite())
}

/// The same in 4 bits.
pub(super) fn q4(isa: Isa, row: &[f32], out: &mut [WeightBlock]) -> bool {
    dispatch!(isa, q4_blocks(row: &[f32], out: &mut [WeightBlock]));
    out.iter().all(|block| block.scale.is_finite())
}

/// Weights of one block, filled up with zeros.
#[inline(always)]
fn padded(w: &[f32]) -> [f32; BLOCK] {
    let mut padded = [0.0; BLOCK];
    padded[..w.len()].copy_from_slice(w);
    padded
}

#[inline(always)]
fn q8_blocks<L: Lanes>(row: &[f32], out: &mut [WeightBlock]) {
    for (w, out) in row.chunks(BLOCK).zip(out) {
        let w = padded(w);
        let (a, b) = halves::<L>(&w);
        let (greatest, poison) = (greatest(a, b), poison(a, b));
        if greatest < LEAST || !poison.is_finite() {
            *out = WeightBlock { scale: f16::from_f32(poison), ..WeightBlock::ZERO };
            continue;
        }
        let scale = greatest / 127.0;
        let inverse = 1.0 / scale;
        let values = w.map(|w| half_away_from_zero(w * inverse) as i8);
        *out = WeightBlock { values, scale: best_scale(&w, &values.map(f32::from)) };
    }
}

/// The nearest integer, as Q8_0 rounds. Another rule for halves would be as good for *its* scale, but not always for the
/// best half-precision one: the block could be more wrong than Q8_0's. The summand is the float below 0.5, for with 0.5
/// itself the float below 0.5 would become 1.
#[inline(always)]
fn half_away_from_zero(x: f32) -> f32 {
    (x + 0.5f32.next_down().copysign(x)).trunc()
}

/// Σwq / Σq², for integers that are not all 0. In double precision, where the products are exact: two halves can be almost
/// equally good, and with few weights in a block the wrong one of them shows.
#[inline(always)]
fn best_scale(w: &[f32; BLOCK], q: &[f32; BLOCK]) -> f16 {
    nearest_half(dot(w, q) / dot(q, q))
}

/// In eight sums, which the compiler keeps in vectors.
#[inline(always)]
fn dot(a: &[f32; BLOCK], b: &[f32; BLOCK]) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
            *sum += f64::from(a) * f64::from(b);
        }
    }
    sums.iter().sum()
}

/// Rounded once. By way of a float, which stands on the side of `x` of every middle between two halves: where it is not `x`,
/// it is the odd one of the two floats about it, and middles are even.
#[inline(always)]
fn nearest_half(x: f64) -> f16 {
    let near = x as f32;
    let bits = near.to_bits();
    let odd = match f64::from(near).abs().total_cmp(&x.abs()) {
        _ if bits & 1 == 1 => bits,
        Ordering::Equal => bits,
        Ordering::Less => bits + 1,
        Ordering::Greater => bits - 1,
    };
    f16::from_f32(f32::from_bits(odd))
}

#[inline(always)]
fn q4_blocks<L: Lanes>(row: &[f32], out: &mut [WeightBlock]) {
    for (w, out) in row.chunks(BLOCK).zip(out) {
        *out = q4_block::<L>(&padded(w));
    }
}

/// Plain loops over whole blocks, which the compiler makes vectors of; sums are of sixteen lanes.
#[inline(always)]
fn q4_block<L: Lanes>(w: &[f32; BLOCK]) -> WeightBlock {
    let (a, b) = halves::<L>(w);
    let (greatest, poison) = (greatest(a, b), poison(a, b));
    if greatest < LEAST || !poison.is_finite() {
        return WeightBlock { scale: f16::from_f32(poison), ..WeightBlock::ZERO };
    }
    // The first of equal magnitudes, as in Q4_0: its sign becomes the scale's, for there are more numbers below 0.
    let peak = w.iter().copied().find(|w| w.abs() == greatest).unwrap_or(greatest);
    let (mut best, mut least) = (WeightBlock { scale: f16::INFINITY, ..WeightBlock::ZERO }, f32::INFINITY);
    for step in STEPS {
        let inverse = 1.0 / (peak / step);
        let q = w.map(|w| (w * inverse + 8.5).floor().clamp(0.0, 15.0) - 8.0);
        let scale = best_scale(w, &q);
        let (qa, qb) = halves::<L>(&q);
        // Exact but for one rounding, for a half times a small integer is a float.
        let off = |w: L, q: L| w.add(q.mul(L::splat(-scale.to_f32())));
        let (off_a, off_b) = (off(a, qa), off(b, qb));
        let error = off_a.mul(off_a).add(off_b.mul(off_b)).sum();
        if error < least {
            (best, least) = (WeightBlock { values: q.map(|q| q as i8), scale }, error);
        }
    }
    best
}

/// Writes the integers; gives `greatest / 127`, which is not a number where a number is none or infinite, and their sum.
#[inline(always)]
pub(super) fn bytes<L: Lanes>(x: &[f32; BLOCK], values: &mut [i8; BLOCK]) -> (f32, i32) {
    let (a, b) = halves::<L>(x);
    let greatest = greatest(a, b);
    let (scale, inverse) = if greatest < LEAST { (0.0, 0.0) } else { (greatest / 127.0, 127.0 / greatest) };
    let (low, high) = values.as_chunks_mut().0.split_at_mut(1);
    let (qa, qb) = (a.mul(L::splat(inverse)).round(), b.mul(L::splat(inverse)).round());
    qa.round_to_bytes(&mut low[0]);
    qb.round_to_bytes(&mut high[0]);
    // Exact, and sooner there than a sum of what has just been written.
    (scale + poison(a, b), qa.add(qb).sum() as i32)
}

#[inline(always)]
fn halves<L: Lanes>(x: &[f32; BLOCK]) -> (L, L) {
    let (vectors, _) = x.as_chunks::<LANES>();
    (L::load(&vectors[0]), L::load(&vectors[1]))
}

#[inline(always)]
fn greatest<L: Lanes>(a: L, b: L) -> f32 {
    let magnitude = |v: L| v.max(v.mul(L::splat(-1.0)));
    magnitude(a).max(magnitude(b)).greatest()
}

/// 0, or not a number if any is none or infinite: maxima may pass over those.
#[inline(always)]
fn poison<L: Lanes>(a: L, b: L) -> f32 {
    a.mul(L::splat(0.0)).add(b.mul(L::splat(0.0))).sum()
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    pub fn isas() -> impl Iterator<Item = Isa> {
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

    /// Squared error of a block in Q4_0: the scale is that of the weight of greatest magnitude over −8 in half precision, the
    /// integers are those of the unrounded one, halves upwards, at most 7.
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

    /// The same integers and scales on every instruction set, each block at most as wrong as `theirs` says.
    fn holds(
        row: &[f32],
        quantize: fn(Isa, &[f32], &mut [WeightBlock]) -> bool,
        theirs: fn(&[f32]) -> f64,
    ) -> Result<(), TestCaseError> {
        let mut first: Option<Vec<([i8; BLOCK], u16)>> = None;
        for isa in isas() {
            let mut out = vec![WeightBlock::ZERO; row.len().div_ceil(BLOCK)];
            prop_assert!(quantize(isa, row, &mut out));
            for (block, packed) in row.chunks(BLOCK).zip(&out) {
                let (ours, theirs) = (our_error(block, packed), theirs(block));
                // Two scales can be equally good; which is nearer is then decided by rounding.
                prop_assert!(ours <= theirs * (1.0 + 1e-7) + 1e-30, "{isa}: {ours} against {theirs}");
                prop_assert!(
                    packed.values[block.len()..].iter().all(|&q| q == 0),
                    "{isa}: the end is filled with zeros"
                );
            }
            let bits: Vec<_> = out.iter().map(|b| (b.values, b.scale.to_bits())).collect();
            prop_assert_eq!(first.get_or_insert(bits.clone()), &bits, "{} differs in some bit", isa);
        }
        Ok(())
    }

    /// Weights of any size with an outlier, some cut to bfloat16: there, many lie right between two integers.
    fn weights() -> impl Strategy<Value = Vec<f32>> {
        let numbers = prop::collection::vec(-1.0f32..1.0, 1..200);
        (numbers, -14i32..14, 1.0f32..30.0, any::<bool>()).prop_map(|(row, exponent, outlier, short)| {
            let mut row: Vec<f32> = row.iter().map(|w| w * 2f32.powi(exponent)).collect();
            row[0] *= outlier;
            let cut = |w: f32| f32::from_bits(w.to_bits() & 0xffff_0000);
            if short { row.into_iter().map(cut).collect() } else { row }
        })
    }

    proptest! {
        #[test]
        fn no_block_of_weights_has_more_error_than_in_q8_0(row in weights()) {
            holds(&row, q8, q8_0_error)?;
        }

        #[test]
        fn no_block_of_weights_has_more_error_than_in_q4_0(row in weights()) {
            holds(&row, q4, q4_0_error)?;
        }
    }

    #[test]
    fn eight_bit_integers_are_those_of_q8_0_at_every_half() {
        // Scales of 1 and of 127 / 64, whose half-precision forms and reciprocals are exact or not; weights at, above and
        // below the middle between two integers, and the row that once had more error than Q8_0's.
        let middles = |scale: f32| {
            (-127..127).map(move |q| (q as f32 + 0.5) * scale).flat_map(|w| [w, w.next_up(), w.next_down()])
        };
        let found = [1.2265625, 0.0, 0.0, 0.0, -0.765625, -0.84375, 0.0, -0.80859375, 0.921875, 0.61328125, -0.7109375];
        let mut rows = vec![found.to_vec()];
        for greatest in [127.0, 64.0, 1.2265625, 3.0e-3] {
            let weights: Vec<f32> = middles(greatest / 127.0).collect();
            rows.extend(weights.chunks(BLOCK - 1).map(|w| w.iter().copied().chain([greatest]).collect()));
        }
        for row in rows {
            holds(&row, q8, q8_0_error).unwrap();
        }
    }

    #[test]
    fn four_bits_leave_a_tenth_less_error_than_q4_0() {
        // Sums of twelve uniform numbers are close to normally distributed.
        let numbers = super::super::tests::values(12 * 200 * BLOCK, 11);
        let row: Vec<f32> = numbers.chunks(12).map(|n| n.iter().sum()).collect();
        let mut out = vec![WeightBlock::ZERO; row.len() / BLOCK];
        assert!(q4(Isa::best(), &row, &mut out));
        let ours: f64 = row.chunks(BLOCK).zip(&out).map(|(block, packed)| our_error(block, packed)).sum();
        let theirs: f64 = row.chunks(BLOCK).map(q4_0_error).sum();
        assert!(ours < 0.91 * theirs, "{}", ours / theirs);
    }

    #[test]
    fn weights_that_do_not_fit_are_refused() {
        for (quantize, too_large) in [(q8 as fn(Isa, &[f32], &mut [WeightBlock]) -> bool, 1e8), (q4, 1e6)] {
            for isa in isas() {
                let mut out = [WeightBlock::ZERO; 2];
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, too_large] {
                    for at in [0, 17, 33, 39] {
                        let mut row = [0.25f32; 40];
                        row[at] = bad;
                        assert!(!quantize(isa, &row, &mut out), "{isa} {bad}");
                    }
                }
                let mut out = [WeightBlock { values: [1; BLOCK], scale: f16::ONE }];
                assert!(quantize(isa, &[1e-38, -1e-42], &mut out), "{isa}");
                assert_eq!((out[0].values, out[0].scale), ([0; BLOCK], f16::ZERO), "{isa}: too small to matter");
            }
        }
    }
}
