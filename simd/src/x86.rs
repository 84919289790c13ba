//! Lanes in AVX-512 and AVX2 registers.
//!
//! Every intrinsic here is `unsafe` only because the CPU must have it: these types are used inside functions that
//! [`dispatch!`](crate::dispatch) enters after the check, and loads and stores go through arrays of the exact size.

mod avx2;

use std::arch::x86_64::*;

use super::{EXP2, LANES, LEAST_EXP2, Lanes, Pairs};
pub use avx2::Avx2;
pub(super) use avx2::halves;
use avx2::{e4m3_halves, e5m2_halves, sum8};

/// One 512-bit register.
#[derive(Clone, Copy)]
pub struct Avx512(pub(super) __m512);

impl Lanes for Avx512 {
    const MANY: bool = true;

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
    fn load_i32(from: &Pairs) -> Self {
        // SAFETY: see the module; the pairs are 64 bytes long.
        Avx512(unsafe { _mm512_cvtepi32_ps(_mm512_loadu_si512(from.0.as_ptr().cast())) })
    }
    #[inline(always)]
    fn load_half<const HIGH: bool>(from: &Pairs) -> Self {
        // SAFETY: see the module; the pairs are 64 bytes long.
        Avx512(unsafe {
            let pairs = _mm512_loadu_si512(from.0.as_ptr().cast());
            _mm512_castsi512_ps(match HIGH {
                true => _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32)),
                false => _mm512_slli_epi32::<16>(pairs),
            })
        })
    }
    #[inline(always)]
    fn load_f16(from: &[u16; LANES]) -> Self {
        // SAFETY: see the module; the array is 32 bytes long.
        Avx512(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) })
    }
    #[inline(always)]
    fn load_e4m3(from: &[u8; LANES]) -> Self {
        // SAFETY: see the module; the array is 16 bytes long.
        Avx512(unsafe { _mm512_mul_ps(_mm512_cvtph_ps(e4m3_halves(from)), _mm512_set1_ps(256.0)) })
    }
    #[inline(always)]
    fn load_e5m2(from: &[u8; LANES]) -> Self {
        // SAFETY: see the module; the array is 16 bytes long.
        Avx512(unsafe { _mm512_cvtph_ps(e5m2_halves(from)) })
    }
    #[inline(always)]
    fn lookup_floats(words: &[u8; 4 * LANES], shift: u32, table: &[f32; LANES]) -> Self {
        // SAFETY: see the module; both arrays are 64 bytes long. The lookup takes the lowest 4 bits of each index.
        unsafe {
            let words = _mm512_loadu_si512(words.as_ptr().cast());
            let indices = _mm512_srl_epi32(words, _mm_cvtsi32_si128(shift as i32));
            Avx512(_mm512_permutexvar_ps(indices, _mm512_loadu_ps(table.as_ptr())))
        }
    }
    #[inline(always)]
    fn load_i8(from: &[u8; LANES]) -> Self {
        // SAFETY: see the module; the array is 16 bytes long.
        Avx512(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) })
    }
    #[inline(always)]
    fn load_u8(from: &[u8; LANES]) -> Self {
        // SAFETY: see the module; the array is 16 bytes long.
        Avx512(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) })
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
    fn div(self, other: Self) -> Self {
        // SAFETY: see the module.
        Avx512(unsafe { _mm512_div_ps(self.0, other.0) })
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
    fn exp2(self) -> Self {
        // SAFETY: see the module.
        Avx512(unsafe {
            // Both differences are exact.
            let r = _mm512_reduce_ps::<0>(self.0);
            let n = _mm512_sub_ps(self.0, r);
            let mut p = _mm512_set1_ps(EXP2[0]);
            for c in &EXP2[1..] {
                p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
            }
            // All but those below the least exponent, so NaN too.
            let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, _mm512_set1_ps(LEAST_EXP2));
            _mm512_maskz_scalef_ps(kept, p, n)
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
    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        let mut v = rows;
        // Interleave the lanes of pairs of vectors, then of groups of four, within each quarter of a register.
        for j in 0..LANES / 2 {
            let (a, b) = (v[2 * j].0, v[2 * j + 1].0);
            // SAFETY: see the module.
            (v[2 * j].0, v[2 * j + 1].0) = unsafe { (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)) };
        }
        for j in 0..LANES / 4 {
            // SAFETY: see the module. No closures here, for the reason given in `sums`.
            unsafe {
                let (a, b) = (_mm512_castps_pd(v[4 * j].0), _mm512_castps_pd(v[4 * j + 1].0));
                let (c, d) = (_mm512_castps_pd(v[4 * j + 2].0), _mm512_castps_pd(v[4 * j + 3].0));
                v[4 * j].0 = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
                v[4 * j + 1].0 = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
                v[4 * j + 2].0 = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
                v[4 * j + 3].0 = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
            }
        }
        // Vector 4j + i now has lane i of vectors 4j.. in its first quarter, lane i + 4 in its second, and so on: exchange
        // quarters.
        let mut transposed = v;
        for i in 0..4 {
            let (a, b, c, d) = (v[i].0, v[4 + i].0, v[8 + i].0, v[12 + i].0);
            // SAFETY: see the module.
            unsafe {
                let (ab, cd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d));
                transposed[i].0 = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                transposed[8 + i].0 = _mm512_shuffle_f32x4::<0xdd>(ab, cd);
                let (ab, cd) = (_mm512_shuffle_f32x4::<0xdd>(a, b), _mm512_shuffle_f32x4::<0xdd>(c, d));
                transposed[4 + i].0 = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                transposed[12 + i].0 = _mm512_shuffle_f32x4::<0xdd>(ab, cd);
            }
        }
        transposed
    }
    #[inline(always)]
    fn sums(four: [Self; 4]) -> [f32; 4] {
        // SAFETY: see the module; 128 bits are four floats. The order of additions is that of `sum`.
        unsafe {
            // No closures: the compiler may keep them, and what they call, out of line, compiled without the instruction set.
            let mut eights = [_mm256_setzero_ps(); 4];
            for (eight, Avx512(v)) in eights.iter_mut().zip(four) {
                *eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            }
            let [a, b, c, d] = eights;
            let ab = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            let cd = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(c, d), _mm256_permute2f128_ps::<0x31>(c, d));
            let two =
                _mm256_add_ps(_mm256_shuffle_ps::<0b01_00_01_00>(ab, cd), _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
            // a a c c, b b d d
            let one = _mm256_add_ps(
                _mm256_shuffle_ps::<0b10_00_10_00>(two, two),
                _mm256_shuffle_ps::<0b11_01_11_01>(two, two),
            );
            let one = _mm_unpacklo_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps::<1>(one));
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), one);
            sums
        }
    }
}
