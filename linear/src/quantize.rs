//! Quantisation of floats to blocks of 32 integers with a scale. Weights are quantised once, when they are packed, to a
//! half-precision scale; activations before each product ([`bytes`]).
//!
//! | weights | integers | scale | squared error of a block |
//! |---|---|---|---|
//! | q8 | those of Q8_0: `round(w / (max \|w\| / 127))` | best | at most that of Q8_0 |
//! | q4 | those of Q4_0, or of one of four other steps: whichever fits best | best | at most that of Q4_0 |
//!
//! Q8_0 and Q4_0 are formats of GGUF files; these blocks have the same size. The best scale for given integers q is Σwq / Σq²
//! (least squares), rounded to the nearest half. That is the best half, because the error is a parabola of the scale. So the
//! error of a block is at most that of the other format with the same integers, whatever scale the other format uses.
//!
//! Every step is exact, or one rounded operation in an order that does not depend on the instruction set (none is fused), so
//! blocks have the same bits everywhere.

use half::f16;
use simd::small_float::f32_to_f16;
use simd::{Isa, LANES, Lanes, dispatch};

use super::Quantization;

/// Number of numbers that share a scale.
pub(super) const BLOCK: usize = 32;

/// Blocks whose greatest magnitude is smaller become zeros; the reciprocal would overflow.
const LEAST: f32 = 1e-30;

/// Values, before rounding, that the weight of greatest magnitude takes in the steps that q4 tries. The first is that of Q4_0.
/// The others were found by trying 21 steps on normally distributed weights: these five leave 0.89 of the squared error of
/// Q4_0, all 21 leave 0.886.
const STEPS: [f32; 5] = [-8.0, -8.4, -7.3, -8.7, -7.8];

/// Steps are compared by the gain of their best scale before it is rounded. Another step than that of Q4_0 must gain more by
/// this fraction, so that it is certainly better: gains are within 14 roundings, and rounding a scale loses at most 2^-22 of
/// them.
const MARGIN: f32 = 1.0 / (1 << 18) as f32;

/// A further margin, over the square of the greatest magnitude, for small scales, whose last bit is 2^-24 however small they
/// are: they lose (2^-25 / scale)², and a scale is at least 1/18 of the greatest magnitude.
const COARSE: f32 = 1.0 / (1 << 20) as f32;

/// A block of 32 quantised weights. The numbers are `scale * values`.
#[derive(Clone, Copy)]
pub struct WeightBlock {
    /// Integers from −127 to 127 (q8) or −8 to 7 (q4).
    pub values: [i8; BLOCK],
    /// Step between two integers; finite if the block could be stored.
    pub scale: f16,
}

impl WeightBlock {
    /// A block of zeros.
    pub const ZERO: WeightBlock = WeightBlock { values: [0; BLOCK], scale: f16::ZERO };
}

/// Quantises a row of weights to `ceil(row.len() / 32)` blocks, padding the last one with zeros. Returns `false` if a weight
/// cannot be stored: it is not finite, or its scale overflows half precision. The bits do not depend on `isa`, which this CPU
/// must have.
pub fn quantize_row(isa: Isa, quantization: Quantization, row: &[f32], out: &mut [WeightBlock]) -> bool {
    match quantization {
        Quantization::Q8 => dispatch!(isa, blocks::<8>(row: &[f32], out: &mut [WeightBlock])),
        Quantization::Q4 => dispatch!(isa, blocks::<4>(row: &[f32], out: &mut [WeightBlock])),
    }
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

// No closures: the compiler may keep them out of line, compiled without the instruction set.
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

/// Rounds to the nearest integer as Q8_0 does. Another rule for halves would be as good for the scale of Q8_0, but not always
/// for the best half-precision scale: the error of the block could exceed that of Q8_0. The addend is the float below 0.5,
/// because with 0.5 itself the float below 0.5 would become 1.
#[inline(always)]
fn half_away_from_zero(x: f32) -> f32 {
    (x + 0.5f32.next_down().copysign(x)).trunc()
}

/// Returns the integers of the step that fits best.
#[inline(always)]
fn best_nibbles<L: Lanes>(w: &[f32; BLOCK], greatest: f32) -> (L, L) {
    let (a, b) = halves::<L>(w);
    let (above, below) = (a.max(b).greatest(), negative(a).max(negative(b)).greatest());
    // The first of equal magnitudes, as in Q4_0: it becomes −8, because there is one more integer below 0 than above.
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
    // Reduction of the squared error by the best scale: (Σwq)² / Σq². All terms of Σwq have the same sign.
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

/// Returns the integers of Q4_0 for a scale of `1 / inverse`: −8..=7, halves rounded up.
#[inline(always)]
fn nibbles<L: Lanes>(w: &[f32; BLOCK], inverse: f32) -> (L, L) {
    let mut q = [0.0; BLOCK];
    for i in 0..BLOCK {
        q[i] = (w[i] * inverse + 8.5).floor().clamp(0.0, 15.0) - 8.0;
    }
    halves(&q)
}

/// Stores the integers `q`, not all 0, with the best scale: Σwq / Σq², rounded once.
///
/// The sums are exact, so their order does not matter: two halves can be almost equally good, and in a block of few weights the
/// wrong one would be noticed. With 2^E ≤ `greatest` < 2^(E+1), each weight is split into a multiple of 2^(E−11), a multiple of
/// 2^(E−24) and a rest. The sum of 32 integers up to 127 is below 2^12, so the sums of products are below 2^12 · 2^(E+1) in
/// multiples of 2^(E−11), and below 2^12 · 2^(E−12) in multiples of 2^(E−24): 24 bits, which floats have. Where q is not 0, the
/// weight is above 2^(E−8), so its rest, below 2^(E−24), is a multiple of 2^(E−31): fewer bits still.
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

/// Splits numbers into multiples of `last`, a power of two, and the rest, by adding and subtracting a number whose last bit is
/// `last`. That number is 1.5 times a power of two, so that no sum crosses a power of two.
#[inline(always)]
fn cut<L: Lanes>(w: L, last: f32) -> (L, L) {
    let shift = 1.5 / f32::EPSILON * last;
    let multiple = w.add(L::splat(shift)).add(L::splat(-shift));
    (multiple, w.add(negative(multiple)))
}

/// Rounds to the nearest half, once: by way of a float that is rounded to odd where it is not exact. Midpoints between two
/// halves are even floats, so that float lies on the same side of them as `x`.
#[inline(always)]
fn nearest_half(x: f64) -> f16 {
    const BEYOND: u64 = (1 << (f64::MANTISSA_DIGITS - f32::MANTISSA_DIGITS)) - 1;
    let bits = x.to_bits();
    let odd = (bits & !BEYOND) | (u64::from(bits & BEYOND != 0) * (BEYOND + 1));
    f16::from_bits(f32_to_f16(f64::from_bits(odd) as f32))
}

/// Quantises activations: writes the integers, and returns their scale, which is NaN if a number is NaN or infinite, and the sums
/// of their halves.
#[inline(always)]
pub(super) fn bytes<L: Lanes>(x: &[f32; BLOCK], values: &mut [i8; BLOCK]) -> (f32, [i32; 2]) {
    let (a, b) = halves::<L>(x);
    let greatest = greatest(a, b);
    let (scale, inverse) = if greatest < LEAST { (0.0, 0.0) } else { (greatest / 127.0, 127.0 / greatest) };
    let (low, high) = values.as_chunks_mut().0.split_at_mut(1);
    let (qa, qb) = (a.mul(L::splat(inverse)).round(), b.mul(L::splat(inverse)).round());
    qa.round_to_bytes(&mut low[0]);
    qb.round_to_bytes(&mut high[0]);
    // Exact, and available sooner than a sum of the stored bytes.
    (scale + poison(a, b), [qa.sum() as i32, qb.sum() as i32])
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

/// Returns 0, or NaN if any number is NaN or infinite, which the maximum may miss.
#[inline(always)]
fn poison<L: Lanes>(a: L, b: L) -> f32 {
    a.mul(L::splat(0.0)).add(b.mul(L::splat(0.0))).sum()
}
