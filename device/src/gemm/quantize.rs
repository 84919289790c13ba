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
//! Every step is exact, or one rounded operation in an order that does not depend on the instruction set (no fused ones),
//! so blocks are the same bits everywhere.

use half::f16;

use crate::simd::small_float::f32_to_f16;
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

/// Steps are compared by what the best scale gains, before it is rounded. Another one than Q4_0's must gain more by this part
/// of it, and so is better for certain: gains are within 14 roundings, and with a scale's last bit at most 2^-22 of them is lost.
const MARGIN: f32 = 1.0 / (1 << 18) as f32;

/// The same over the greatest magnitude, squared, for scales whose last bit is worth 2^-24 however small they are: then
/// (2^-25 / scale)² is lost, and a scale is at least an eighteenth of the greatest magnitude.
const COARSE: f32 = 1.0 / (1 << 20) as f32;

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
    dispatch!(isa, blocks::<8>(row: &[f32], out: &mut [WeightBlock]));
    out.iter().all(|block| block.scale.is_finite())
}

/// The same in 4 bits.
pub(super) fn q4(isa: Isa, row: &[f32], out: &mut [WeightBlock]) -> bool {
    dispatch!(isa, blocks::<4>(row: &[f32], out: &mut [WeightBlock]));
    out.iter().all(|block| block.scale.is_finite())
}

#[inline(always)]
fn blocks<L: Lanes, const BITS: u32>(row: &[f32], out: &mut [WeightBlock]) {
    let (whole, rest) = row.as_chunks();
    for (w, out) in whole.iter().zip(out.iter_mut()) {
        *out = block::<L, BITS>(w);
    }
    if !rest.is_empty() {
        let mut padded = [0.0; BLOCK];
        padded[..rest.len()].copy_from_slice(rest);
        out[whole.len()] = block::<L, BITS>(&padded);
    }
}

#[inline(always)]
fn block<L: Lanes, const BITS: u32>(w: &[f32; BLOCK]) -> WeightBlock {
    let (a, b) = halves::<L>(w);
    let (greatest, poison) = (greatest(a, b), poison(a, b));
    if greatest < LEAST || !poison.is_finite() {
        return WeightBlock { scale: f16::from_f32(poison), ..WeightBlock::ZERO };
    }
    let q = if BITS == 8 { bytes_of_q8_0::<L>(w, greatest) } else { best_nibbles::<L>(w, greatest) };
    packed((a, b), q, greatest)
}

// Loops over indices: closures the compiler may leave outside of the functions that are made for an instruction set.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn bytes_of_q8_0<L: Lanes>(w: &[f32; BLOCK], greatest: f32) -> (L, L) {
    let inverse = 1.0 / (greatest / 127.0);
    let mut q = [0.0; BLOCK];
    for i in 0..BLOCK {
        q[i] = half_away_from_zero(w[i] * inverse);
    }
    halves(&q)
}

/// The nearest integer, as Q8_0 rounds. Another rule for halves would be as good for *its* scale, but not always for the
/// best half-precision one: the block could be more wrong than Q8_0's. The summand is the float below 0.5, for with 0.5
/// itself the float below 0.5 would become 1.
#[inline(always)]
fn half_away_from_zero(x: f32) -> f32 {
    (x + 0.5f32.next_down().copysign(x)).trunc()
}

/// The integers of the step that fits best.
#[inline(always)]
fn best_nibbles<L: Lanes>(w: &[f32; BLOCK], greatest: f32) -> (L, L) {
    let (a, b) = halves::<L>(w);
    let (above, below) = (a.max(b).greatest(), negative(a).max(negative(b)).greatest());
    // The first of equal magnitudes, as in Q4_0: its sign becomes the scale's, for there are more numbers below 0.
    let peak = match above == below {
        true => w.iter().copied().find(|w| w.abs() == greatest).unwrap_or(greatest),
        false if above > below => above,
        false => -below,
    };
    let mut inverses = [0.0; LANES];
    inverses[..STEPS.len()].copy_from_slice(&STEPS);
    L::splat(1.0).div(L::splat(peak).div(L::load(&inverses))).store(&mut inverses);
    let mut sums = [[L::splat(0.0); 4]; STEPS.len().div_ceil(2)];
    for step in 0..STEPS.len() {
        let (qa, qb) = nibbles::<L>(w, inverses[step]);
        sums[step / 2][step % 2 * 2] = a.mul(qa).add(b.mul(qb));
        sums[step / 2][step % 2 * 2 + 1] = qa.mul(qa).add(qb.mul(qb));
    }
    // What the best scale takes off the squared error: (Σwq)² / Σq². No term of Σwq is below 0, or none above.
    let mut gains = [0.0; 2 * STEPS.len().div_ceil(2)];
    for (gains, sums) in gains.as_chunks_mut::<2>().0.iter_mut().zip(sums) {
        let [wq, qq, wq2, qq2] = L::sums(sums);
        *gains = [wq * wq / qq, wq2 * wq2 / qq2];
    }
    let mut most = gains[0] * (1.0 + MARGIN + (COARSE / greatest) * (COARSE / greatest));
    let mut inverse = inverses[0];
    for step in 1..STEPS.len() {
        inverse = if gains[step] > most { inverses[step] } else { inverse };
        most = most.max(gains[step]);
    }
    nibbles(w, inverse)
}

/// The integers of Q4_0 for a scale of `1 / inverse`: −8..=7, halves upwards.
#[inline(always)]
fn nibbles<L: Lanes>(w: &[f32; BLOCK], inverse: f32) -> (L, L) {
    let mut q = [0.0; BLOCK];
    for i in 0..BLOCK {
        q[i] = (w[i] * inverse + 8.5).floor().clamp(0.0, 15.0) - 8.0;
    }
    halves(&q)
}

/// Weights whose integers are `q`, not all 0, with the best scale: Σwq / Σq², rounded once.
///
/// The sums are exact, and so the same in every order: two halves can be almost equally good, and with few weights in a
/// block the wrong one of them shows. With 2^E ≤ `greatest` < 2^(E+1), weights are cut into multiples of 2^(E−11), of
/// 2^(E−24), and a rest. As 32 integers up to 127 sum up to less than 2^12, the sums of products are below 2^12 · 2^(E+1) in
/// multiples of 2^(E−11), and below 2^12 · 2^(E−12) in multiples of 2^(E−24): 24 bits, which floats have. Where q is not 0
/// the weight is above 2^(E−8), so that its rest, below 2^(E−24), is made of multiples of 2^(E−31): still fewer bits.
#[inline(always)]
fn packed<L: Lanes>((a, b): (L, L), (qa, qb): (L, L), greatest: f32) -> WeightBlock {
    let exponent = f32::from_bits(greatest.to_bits() & f32::INFINITY.to_bits());
    let (high_a, a) = cut(a, exponent * 2f32.powi(-11));
    let (high_b, b) = cut(b, exponent * 2f32.powi(-11));
    let (middle_a, a) = cut(a, exponent * 2f32.powi(-24));
    let (middle_b, b) = cut(b, exponent * 2f32.powi(-24));
    let high = high_a.mul(qa).add(high_b.mul(qb));
    let middle = middle_a.mul(qa).add(middle_b.mul(qb));
    let low = a.mul(qa).add(b.mul(qb));
    let [high, middle, low, qq] = L::sums([high, middle, low, qa.mul(qa).add(qb.mul(qb))]);
    let mut block = WeightBlock::ZERO;
    let (first, second) = block.values.as_chunks_mut().0.split_at_mut(1);
    qa.round_to_bytes(&mut first[0]);
    qb.round_to_bytes(&mut second[0]);
    block.scale = nearest_half((f64::from(high) + f64::from(middle) + f64::from(low)) / f64::from(qq));
    block
}

/// Multiples of `last`, a power of two, and what is left: adding and taking away a number whose last bit is worth that
/// much. It is half again a power of two, so that no sum is on the other side of one.
#[inline(always)]
fn cut<L: Lanes>(w: L, last: f32) -> (L, L) {
    let shift = 1.5 / f32::EPSILON * last;
    let multiple = w.add(L::splat(shift)).add(L::splat(-shift));
    (multiple, w.add(negative(multiple)))
}

/// Rounded once: by way of a float that is rounded to odd, where it is not `x`. Middles between two halves are even floats,
/// so it stands on the same side of them.
#[inline(always)]
fn nearest_half(x: f64) -> f16 {
    const BEYOND: u64 = (1 << (f64::MANTISSA_DIGITS - f32::MANTISSA_DIGITS)) - 1;
    let bits = x.to_bits();
    let odd = (bits & !BEYOND) | (u64::from(bits & BEYOND != 0) * (BEYOND + 1));
    f16::from_bits(f32_to_f16(f64::from_bits(odd) as f32))
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
    a.max(negative(a)).max(b.max(negative(b))).greatest()
}

#[inline(always)]
fn negative<L: Lanes>(v: L) -> L {
    v.mul(L::splat(-1.0))
}

/// 0, or not a number if any is none or infinite: maxima may pass over those.
#[inline(always)]
fn poison<L: Lanes>(a: L, b: L) -> f32 {
    a.mul(L::splat(0.0)).add(b.mul(L::splat(0.0))).sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::simd::tested::isas;
    use proptest::prelude::*;

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

    /// Whether no half is nearer to the best scale for these integers. Of sums with 44 bits at most none is rounded here.
    fn is_best(block: &[f32], packed: &WeightBlock) -> bool {
        let (mut wq, mut qq) = (0.0, 0.0);
        for (&w, q) in block.iter().zip(packed.values.map(f64::from)) {
            (wq, qq) = (wq + f64::from(w) * q, qq + q * q);
        }
        let off = |bits: u16| (f64::from(f16::from_bits(bits).to_f32()) - wq / qq).abs();
        let bits = packed.scale.to_bits();
        qq == 0.0 || off(bits) <= off(bits + 1) && (bits & 0x7fff == 0 || off(bits) <= off(bits - 1))
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
                prop_assert!(is_best(block, packed), "{isa}: {:?} is not the nearest scale", packed.scale);
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
    fn the_last_bit_of_a_small_weight_decides_between_two_scales() {
        // Right between 1 and the half above it; with a weight for the greatest integer and one for 1 of either form.
        let middle = 1.0 + 2f32.powi(-11);
        for (quantize, most) in [(q8 as fn(Isa, &[f32], &mut [WeightBlock]) -> bool, 127.0), (q4, -8.0)] {
            for (small, scale) in [(middle.next_down(), 1.0), (middle, 1.0), (middle.next_up(), 1.0 + 2f32.powi(-10))] {
                for isa in isas() {
                    let mut out = [WeightBlock::ZERO];
                    assert!(quantize(isa, &[most * middle, small], &mut out), "{isa}");
                    assert_eq!((f32::from(out[0].values[0]), out[0].values[1]), (most, 1), "{isa}");
                    assert_eq!(out[0].scale.to_f32(), scale, "{isa}: {most} {small}");
                }
            }
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
