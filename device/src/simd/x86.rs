//! Lanes in AVX-512 and AVX2 registers.
//!
//! Every intrinsic here is `unsafe` only because the CPU must have it: these types are used inside functions that
//! [`dispatch!`](crate::dispatch) enters after the check, and loads and stores go through arrays of the exact size.

use std::arch::x86_64::*;

use super::{LANES, Lanes};

/// One 512-bit register.
#[derive(Clone, Copy)]
pub struct Avx512(pub(super) __m512);

impl Lanes for Avx512 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: see the module.
        Avx512(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: see the module; the array is 64 bytes long.
        Avx512(unsafe { _mm512_loadu_ps(from.as_ptr()) })
    }
    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> Self {
        // SAFETY: see the module; the array is 32 bytes long.
        Avx512(unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        })
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: see the module; the array is 64 bytes long.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // SAFETY: see the module.
        Avx512(unsafe { _mm512_fmadd_ps(self.0, a.0, b.0) })
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see the module.
        Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see the module.
        Avx512(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see the module.
        Avx512(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: see the module.
        Avx512(unsafe { _mm512_roundscale_ps::<0>(self.0) })
    }
    #[inline(always)]
    fn round_to_bytes(self, to: &mut [i8; LANES]) {
        // SAFETY: see the module; the array is 16 bytes long. The conversion rounds ties to even, Rust's fixed mode.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(self.0))) }
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        // SAFETY: see the module.
        Avx512(unsafe {
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(n))
        })
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see the module.
        sum8(unsafe {
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            _mm256_add_ps(_mm512_castps512_ps256(self.0), high)
        })
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        // SAFETY: see the module.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
}

/// Two 256-bit registers.
#[derive(Clone, Copy)]
pub struct Avx2(pub(super) __m256, pub(super) __m256);

impl Avx2 {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(__m256, __m256) -> __m256) -> Self {
        Avx2(f(self.0, other.0), f(self.1, other.1))
    }
}

impl Lanes for Avx2 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: see the module.
        let v = unsafe { _mm256_set1_ps(x) };
        Avx2(v, v)
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: see the module; the array is 64 bytes long.
        unsafe { Avx2(_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from[8..].as_ptr())) }
    }
    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> Self {
        let half = |from: &[u16]| {
            // SAFETY: see the module; each half of the array is 16 bytes long.
            unsafe {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
        };
        Avx2(half(&from[..8]), half(&from[8..]))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: see the module; the array is 64 bytes long.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), self.0);
            _mm256_storeu_ps(to[8..].as_mut_ptr(), self.1);
        }
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // SAFETY: see the module.
        unsafe { Avx2(_mm256_fmadd_ps(self.0, a.0, b.0), _mm256_fmadd_ps(self.1, a.1, b.1)) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see the module.
        self.zip(other, |a, b| unsafe { _mm256_add_ps(a, b) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see the module.
        self.zip(other, |a, b| unsafe { _mm256_mul_ps(a, b) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see the module.
        self.zip(other, |a, b| unsafe { _mm256_max_ps(a, b) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: see the module.
        unsafe { Avx2(_mm256_round_ps::<0>(self.0), _mm256_round_ps::<0>(self.1)) }
    }
    #[inline(always)]
    fn round_to_bytes(self, to: &mut [i8; LANES]) {
        // SAFETY: see the module; the array is 16 bytes long. The conversion rounds ties to even, Rust's fixed mode.
        unsafe {
            let pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            let pairs = _mm256_permute4x64_epi64::<0b11_01_10_00>(pairs);
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        }
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        let half = |v| {
            // SAFETY: see the module.
            unsafe {
                let n = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
            }
        };
        Avx2(half(self.0), half(self.1))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see the module.
        sum8(unsafe { _mm256_add_ps(self.0, self.1) })
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

/// 8 → 4 → 2 → 1.
#[inline(always)]
fn sum8(v: __m256) -> f32 {
    // SAFETY: see the module; both callers have at least AVX2.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}
