//! Sums of byte products in AVX-512 and AVX2 registers.
//!
//! Every intrinsic here is `unsafe` only because the CPU must have it: these types are used inside functions that
//! `dispatch_dot!` enters after the check, and loads go through arrays of the exact size.

use std::arch::x86_64::*;

use super::super::{Avx2, Avx512};
use super::{DotLanes, GROUP, IntLanes};

/// Sums in one 512-bit register.
impl IntLanes for __m512i {
    type Floats = Avx512;
    type Weights = __m512i;

    #[inline(always)]
    fn splat(sum: i32) -> Self {
        // SAFETY: see the module.
        unsafe { _mm512_set1_epi32(sum) }
    }
    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> __m512i {
        // SAFETY: see the module; the array is 64 bytes long.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }
    #[inline(always)]
    fn load_nibbles(from: &[u8; GROUP]) -> [__m512i; 2] {
        let bytes = Self::load(from);
        // SAFETY: see the module.
        unsafe {
            let mask = _mm512_set1_epi8(15);
            [_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask)]
        }
    }
    #[inline(always)]
    fn to_floats(self) -> Avx512 {
        // SAFETY: see the module.
        Avx512(unsafe { _mm512_cvtepi32_ps(self) })
    }
}

/// Two 256-bit registers: lanes 0–7 and lanes 8–15.
#[derive(Clone, Copy)]
pub struct Halves(__m256i, __m256i);

impl IntLanes for Halves {
    type Floats = Avx2;
    type Weights = Halves;

    #[inline(always)]
    fn splat(sum: i32) -> Self {
        // SAFETY: see the module.
        let v = unsafe { _mm256_set1_epi32(sum) };
        Halves(v, v)
    }
    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> Halves {
        // SAFETY: see the module; the array is 64 bytes long.
        unsafe { Halves(_mm256_loadu_si256(from.as_ptr().cast()), _mm256_loadu_si256(from[32..].as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_nibbles(from: &[u8; GROUP]) -> [Halves; 2] {
        let Halves(a, b) = Self::load(from);
        // SAFETY: see the module.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let low = |v| _mm256_and_si256(v, mask);
            let high = |v| _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask);
            [Halves(low(a), low(b)), Halves(high(a), high(b))]
        }
    }
    #[inline(always)]
    fn to_floats(self) -> Avx2 {
        // SAFETY: see the module.
        unsafe { Avx2(_mm256_cvtepi32_ps(self.0), _mm256_cvtepi32_ps(self.1)) }
    }
}

/// AVX-512 with `vpdpbusd`.
pub struct Avx512Vnni;

impl DotLanes for Avx512Vnni {
    type Sums = __m512i;
    const ROWS: usize = 6;
    const WIDE: bool = true;
    const UNSIGNED: bool = true;

    #[inline(always)]
    fn dot(sums: __m512i, weights: __m512i, activations: [i8; 4]) -> __m512i {
        // SAFETY: see the module.
        unsafe { _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(word(activations))) }
    }
}

/// AVX2 with `vpdpbusd` in its VEX encoding.
pub struct AvxVnni;

impl DotLanes for AvxVnni {
    type Sums = Halves;
    const ROWS: usize = 3;
    const WIDE: bool = false;
    const UNSIGNED: bool = true;

    #[inline(always)]
    fn dot(sums: Halves, weights: Halves, activations: [i8; 4]) -> Halves {
        // SAFETY: see the module.
        unsafe {
            let a = _mm256_set1_epi32(word(activations));
            Halves(_mm256_dpbusd_avx_epi32(sums.0, weights.0, a), _mm256_dpbusd_avx_epi32(sums.1, weights.1, a))
        }
    }
}

/// AVX2 with `vpmaddubsw`.
///
/// That instruction sums two products of an unsigned and a signed byte in 16 bits and saturates there. So the signs move
/// from the weights to the activations: with |w| ≤ 128 and |a| ≤ 127 the sum of a pair is at most 32,512, which fits.
pub struct Avx2Dot;

impl DotLanes for Avx2Dot {
    type Sums = Halves;
    const ROWS: usize = 2;
    const WIDE: bool = false;
    const UNSIGNED: bool = false;

    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> Halves {
        let bytes = Halves::load(from);
        // SAFETY: see the module.
        unsafe {
            let flip = _mm256_set1_epi8(i8::MIN);
            Halves(_mm256_xor_si256(bytes.0, flip), _mm256_xor_si256(bytes.1, flip))
        }
    }
    #[inline(always)]
    fn dot(sums: Halves, weights: Halves, activations: [i8; 4]) -> Halves {
        let half = |sum, w| {
            // SAFETY: see the module.
            unsafe {
                let a = _mm256_set1_epi32(word(activations));
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
                _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        };
        Halves(half(sums.0, weights.0), half(sums.1, weights.1))
    }
    /// A pair is at most 2·15·127 = 3,810, so the signs stay with the activations.
    #[inline(always)]
    fn dot_small(sums: Halves, weights: Halves, activations: [i8; 4]) -> Halves {
        let half = |sum, w| {
            // SAFETY: see the module.
            unsafe {
                let pairs = _mm256_maddubs_epi16(w, _mm256_set1_epi32(word(activations)));
                _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        };
        Halves(half(sums.0, weights.0), half(sums.1, weights.1))
    }
}

/// Returns the four bytes as the 32-bit number that a broadcast takes.
#[inline(always)]
fn word(activations: [i8; 4]) -> i32 {
    i32::from_le_bytes(activations.map(|a| a as u8))
}
