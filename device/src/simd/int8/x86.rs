//! Sums of byte products in AVX-512 and AVX2 registers.
//!
//! Every intrinsic here is `unsafe` only because the CPU must have it: these types are used inside functions that
//! `dispatch_dot!` enters after the check, and loads go through arrays of the exact size.

use std::arch::x86_64::*;

use super::super::{Avx2, Avx512, LANES};
use super::{DotLanes, GROUP};

/// One 512-bit register, `vpdpbusd`.
#[derive(Clone, Copy)]
pub struct Avx512Vnni(__m512i);

impl DotLanes for Avx512Vnni {
    type Floats = Avx512;
    type Weights = __m512i;
    const ROWS: usize = 6;
    const WIDE: bool = true;

    #[inline(always)]
    fn start(correction: i32) -> Self {
        Avx512Vnni::splat(correction)
    }
    #[inline(always)]
    fn splat(sum: i32) -> Self {
        // SAFETY: see the module.
        Avx512Vnni(unsafe { _mm512_set1_epi32(sum) })
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
    fn dot(self, weights: __m512i, activations: [i8; 4]) -> Self {
        // SAFETY: see the module.
        Avx512Vnni(unsafe { _mm512_dpbusd_epi32(self.0, weights, _mm512_set1_epi32(word(activations))) })
    }
    #[inline(always)]
    fn to_floats(self) -> Avx512 {
        // SAFETY: see the module.
        Avx512(unsafe { _mm512_cvtepi32_ps(self.0) })
    }
    #[inline(always)]
    fn load_halves(from: &[u8; 2 * LANES]) -> Avx512 {
        // SAFETY: see the module; the array is 32 bytes long.
        Avx512(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) })
    }
}

/// Two 256-bit registers, `vpdpbusd` in its VEX encoding.
#[derive(Clone, Copy)]
pub struct AvxVnni(Halves);

impl DotLanes for AvxVnni {
    type Floats = Avx2;
    type Weights = Halves;
    const ROWS: usize = 3;
    const WIDE: bool = false;

    #[inline(always)]
    fn start(correction: i32) -> Self {
        AvxVnni::splat(correction)
    }
    #[inline(always)]
    fn splat(sum: i32) -> Self {
        AvxVnni(Halves::splat(sum))
    }
    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> Halves {
        Halves::load(from)
    }
    #[inline(always)]
    fn load_nibbles(from: &[u8; GROUP]) -> [Halves; 2] {
        Halves::load(from).nibbles()
    }
    #[inline(always)]
    fn dot(self, weights: Halves, activations: [i8; 4]) -> Self {
        // SAFETY: see the module.
        unsafe {
            let a = _mm256_set1_epi32(word(activations));
            let (sums, w) = (self.0, weights);
            AvxVnni(Halves(_mm256_dpbusd_avx_epi32(sums.0, w.0, a), _mm256_dpbusd_avx_epi32(sums.1, w.1, a)))
        }
    }
    #[inline(always)]
    fn to_floats(self) -> Avx2 {
        self.0.to_floats()
    }
    #[inline(always)]
    fn load_halves(from: &[u8; 2 * LANES]) -> Avx2 {
        load_halves(from)
    }
}

/// Two 256-bit registers, `vpmaddubsw`.
///
/// That instruction sums two products of an unsigned and a signed byte in 16 bits and saturates there. So the signs go
/// from the weights to the activations: with |w| ≤ 128 and |a| ≤ 127 a pair is at most 32,512, which fits.
#[derive(Clone, Copy)]
pub struct Avx2Dot(Halves);

impl DotLanes for Avx2Dot {
    type Floats = Avx2;
    type Weights = Halves;
    const ROWS: usize = 2;
    const WIDE: bool = false;

    #[inline(always)]
    fn start(_correction: i32) -> Self {
        Avx2Dot::splat(0)
    }
    #[inline(always)]
    fn splat(sum: i32) -> Self {
        Avx2Dot(Halves::splat(sum))
    }
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
    fn load_nibbles(from: &[u8; GROUP]) -> [Halves; 2] {
        Halves::load(from).nibbles()
    }
    #[inline(always)]
    fn dot(self, weights: Halves, activations: [i8; 4]) -> Self {
        let half = |sum, w| {
            // SAFETY: see the module.
            unsafe {
                let a = _mm256_set1_epi32(word(activations));
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
                _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        };
        Avx2Dot(Halves(half(self.0.0, weights.0), half(self.0.1, weights.1)))
    }
    /// A pair is at most 2·15·127 = 3,810: the signs can stay where they are.
    #[inline(always)]
    fn dot_small(self, weights: Halves, activations: [i8; 4]) -> Self {
        let half = |sum, w| {
            // SAFETY: see the module.
            unsafe {
                let pairs = _mm256_maddubs_epi16(w, _mm256_set1_epi32(word(activations)));
                _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        };
        Avx2Dot(Halves(half(self.0.0, weights.0), half(self.0.1, weights.1)))
    }
    #[inline(always)]
    fn to_floats(self) -> Avx2 {
        self.0.to_floats()
    }
    #[inline(always)]
    fn load_halves(from: &[u8; 2 * LANES]) -> Avx2 {
        load_halves(from)
    }
}

/// Lanes 0–7 and 8–15.
#[derive(Clone, Copy)]
pub struct Halves(__m256i, __m256i);

impl Halves {
    #[inline(always)]
    fn splat(x: i32) -> Halves {
        // SAFETY: see the module.
        let v = unsafe { _mm256_set1_epi32(x) };
        Halves(v, v)
    }
    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> Halves {
        // SAFETY: see the module; the array is 64 bytes long.
        unsafe { Halves(_mm256_loadu_si256(from.as_ptr().cast()), _mm256_loadu_si256(from[32..].as_ptr().cast())) }
    }
    /// The low halves of the bytes, and the high ones.
    #[inline(always)]
    fn nibbles(self) -> [Halves; 2] {
        // SAFETY: see the module.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let low = |v| _mm256_and_si256(v, mask);
            let high = |v| _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask);
            [Halves(low(self.0), low(self.1)), Halves(high(self.0), high(self.1))]
        }
    }
    #[inline(always)]
    fn to_floats(self) -> Avx2 {
        // SAFETY: see the module.
        unsafe { Avx2(_mm256_cvtepi32_ps(self.0), _mm256_cvtepi32_ps(self.1)) }
    }
}

#[inline(always)]
fn load_halves(from: &[u8; 2 * LANES]) -> Avx2 {
    // SAFETY: see the module; each half of the array is 16 bytes long.
    unsafe {
        let half = |from: &[u8]| _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast()));
        Avx2(half(&from[..LANES]), half(&from[LANES..]))
    }
}

/// Four bytes as the number that a broadcast takes.
#[inline(always)]
fn word(activations: [i8; 4]) -> i32 {
    i32::from_le_bytes(activations.map(|a| a as u8))
}
