//! Exponential and logarithm built from additions, multiplications and divisions only, and probability masses in fixed
//! point. The CUDA kernels compute the same bits (`csrc/numbers.cuh`).
//!
//! IEEE arithmetic rounds identically everywhere; the functions of C libraries and GPUs do not. A probability mass is a
//! sum of integers, so it does not depend on the order of summation.

use std::f64::consts::LN_2;

/// Fraction bits of a [`weight`]. Masses of up to 2²² tokens fit 64 bits.
pub(crate) const WEIGHT_BITS: u32 = 42;

/// ln 2 in two parts. The first has 9 bits, so that its product with a small integer is exact.
const LN_2_HIGH: f32 = 355.0 / 512.0;
const LN_2_LOW: f32 = (LN_2 - 355.0 / 512.0) as f32;

/// Returns e^z in units of 2⁻⁴², rounded, for z ≤ 0. The relative error is 2⁻²² unless the result is small. Returns 0
/// for z below about −29.8 and for NaN.
#[inline]
pub(crate) fn weight(z: f32) -> u64 {
    if z > -30.0 {
        // n is the integer nearest to z / ln 2, r = z − n ln 2 is within ±0.35. The first omitted term of the series of
        // e^r is below 2⁻²⁷.
        let n = (z * std::f32::consts::LOG2_E - 0.5) as i32;
        let r = (z - n as f32 * LN_2_HIGH) - n as f32 * LN_2_LOW;
        let mut power = 1.0 / 5040.0;
        for inverse in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0f32] {
            power = power * r + inverse;
        }
        let unit = f32::from_bits(((127 + WEIGHT_BITS as i32 + n) as u32) << 23);
        // Through i64: that conversion is one instruction.
        (power * unit + 0.5) as i64 as u64
    } else {
        0
    }
}

/// Returns the sum of weights, saturating.
pub(crate) fn mass(weights: impl Iterator<Item = u64>) -> u64 {
    weights.fold(0, u64::saturating_add)
}

/// Returns the natural logarithm of a mass, in units of the weight of z = 0.
pub(crate) fn ln_mass(mass: u64) -> f64 {
    ln(mass as f64 / (1u64 << WEIGHT_BITS) as f64)
}

/// Returns the least mass that is at least `share` of `mass`, for a share below 1.
pub(crate) fn share_of(mass: u64, share: f32) -> u64 {
    (f64::from(share) * mass as f64).ceil() as u64
}

/// Returns the natural logarithm of a normal positive number, with a relative error of about 2⁻⁵¹.
#[inline]
pub(crate) fn ln(x: f64) -> f64 {
    // x = 2ᵏ m with m from √½ to √2, and ln m = 2 artanh s = 2 (s + s³/3 + s⁵/5 + …) with s = (m − 1) / (m + 1),
    // |s| < 0.172. The first omitted term is below 2⁻⁶⁰ of the sum.
    const ROOT_OF_HALF: u64 = std::f64::consts::FRAC_1_SQRT_2.to_bits();
    let exponent = x.to_bits().wrapping_sub(ROOT_OF_HALF) as i64 >> 52;
    let m = f64::from_bits(x.to_bits().wrapping_sub((exponent as u64) << 52));
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut series = 1.0 / 23.0;
    for odd in [21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0] {
        series = series * square + 1.0 / odd;
    }
    let twice = s + s;
    exponent as f64 * LN_2 + (twice + twice * square * series)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_equals_the_exponential_within_two_units_of_float32() {
        let unit = (1u64 << WEIGHT_BITS) as f64;
        for i in 0..3_000_000 {
            let z = i as f32 * -1e-5;
            let exact = f64::from(z).exp() * unit;
            let found = weight(z) as f64;
            assert!((found - exact).abs() <= exact * f64::from(f32::EPSILON) * 2.0 + 0.5, "{z}: {found}, not {exact}");
        }
        assert_eq!(weight(0.0), 1 << WEIGHT_BITS);
        assert_eq!(weight(-0.0), 1 << WEIGHT_BITS);
        for nothing in [-30.0, -31.0, f32::MIN, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(weight(nothing), 0, "{nothing}");
        }
        assert_eq!(mass([1, u64::MAX, 7].into_iter()), u64::MAX);
    }

    #[test]
    fn a_greater_logit_never_has_a_smaller_weight() {
        let mut last = weight(0.0);
        for bits in (0u32..(30.0f32).to_bits()).step_by(997) {
            let next = weight(-f32::from_bits(bits));
            // At a change of the exponent the rounding of the series may increase it slightly.
            assert!(next <= last + (last >> 22), "{}", f32::from_bits(bits));
            last = next;
        }
    }

    #[test]
    fn the_logarithm_equals_that_of_the_standard_library_up_to_rounding() {
        let below_one = (1..200_000u64).map(|i| 1.0 - i as f64 * 2f64.powi(-53));
        let spread = (0..200_000).map(|i| 1.0003f64.powi(i - 150_000));
        for x in below_one.chain(spread) {
            let (found, exact) = (ln(x), x.ln());
            assert!((found - exact).abs() <= exact.abs() * 1e-15, "{x}: {found}, not {exact}");
        }
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln_mass(1 << WEIGHT_BITS), 0.0);
    }
}
