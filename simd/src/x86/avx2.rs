//! [`Lanes`] in two AVX2 registers. Of the `unsafe` here the [module above](super) holds.

use std::arch::x86_64::*;

use super::super::{LANES, Lanes, Pairs};

/// Two 256-bit registers.
#[derive(Clone, Copy)]
pub struct Avx2(pub(crate) __m256, pub(crate) __m256);

/// Makes `$type` of two registers by evaluating an expression twice. A closure may stay a function of its own, compiled without the
/// instruction set: then each instruction in it is a call.
macro_rules! halves {
    ($type:ident, |$from:pat_param| $each:expr, $first:expr, $second:expr) => {{
        let $from = $first;
        let first = $each;
        let $from = $second;
        $type(first, $each)
    }};
}
pub(crate) use halves;

impl Lanes for Avx2 {
    const MANY: bool = false;

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
        // SAFETY: see the module; each half of the array is 16 bytes long.
        unsafe {
            let from = from.as_ptr().cast::<__m128i>();
            halves!(
                Avx2,
                |half| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(half)))),
                from,
                from.add(1)
            )
        }
    }
    #[inline(always)]
    fn load_half<const HIGH: bool>(from: &Pairs) -> Self {
        // SAFETY: see the module; each half of the pairs is 32 bytes long.
        unsafe {
            let from = from.0.as_ptr().cast::<__m256i>();
            halves!(
                Avx2,
                |half| _mm256_castsi256_ps(match HIGH {
                    true => _mm256_and_si256(_mm256_loadu_si256(half), _mm256_set1_epi32(0xffff_0000_u32 as i32)),
                    false => _mm256_slli_epi32::<16>(_mm256_loadu_si256(half)),
                }),
                from,
                from.add(1)
            )
        }
    }
    #[inline(always)]
    fn load_f16(from: &[u16; LANES]) -> Self {
        // SAFETY: see the module; each half of the array is 16 bytes long.
        unsafe {
            let from = from.as_ptr().cast::<__m128i>();
            halves!(Avx2, |half| _mm256_cvtph_ps(_mm_loadu_si128(half)), from, from.add(1))
        }
    }
    #[inline(always)]
    fn load_e4m3(from: &[u8; LANES]) -> Self {
        // SAFETY: see the module.
        two_halves(unsafe { e4m3_halves(from) }).mul(Self::splat(256.0))
    }
    #[inline(always)]
    fn load_e5m2(from: &[u8; LANES]) -> Self {
        // SAFETY: see the module.
        two_halves(unsafe { e5m2_halves(from) })
    }
    #[inline(always)]
    fn lookup_floats(words: &[u8; 4 * LANES], shift: u32, table: &[f32; LANES]) -> Self {
        // SAFETY: see the module; the halves of both arrays are 32 bytes long. A lookup takes the lowest 3 bits of each index; the
        // fourth, moved to the sign, chooses the half of the table.
        unsafe {
            let (words, shift) = (words.as_ptr().cast::<__m256i>(), _mm_cvtsi32_si128(shift as i32));
            let (low, high) = (_mm256_loadu_ps(table.as_ptr()), _mm256_loadu_ps(table[8..].as_ptr()));
            halves!(
                Avx2,
                |half| {
                    let indices = _mm256_srl_epi32(_mm256_loadu_si256(half), shift);
                    let (low, high) = (_mm256_permutevar8x32_ps(low, indices), _mm256_permutevar8x32_ps(high, indices));
                    _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(indices)))
                },
                words,
                words.add(1)
            )
        }
    }
    #[inline(always)]
    fn load_i8(from: &[u8; LANES]) -> Self {
        // SAFETY: see the module; the array is 16 bytes long.
        unsafe {
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            let high = _mm_unpackhi_epi64(bytes, bytes);
            halves!(Avx2, |half| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(half)), bytes, high)
        }
    }
    #[inline(always)]
    fn load_u8(from: &[u8; LANES]) -> Self {
        // SAFETY: see the module; the array is 16 bytes long.
        unsafe {
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            let high = _mm_unpackhi_epi64(bytes, bytes);
            halves!(Avx2, |half| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(half)), bytes, high)
        }
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
        unsafe { Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see the module.
        unsafe { Avx2(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: see the module.
        unsafe { Avx2(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)) }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see the module.
        unsafe { Avx2(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
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
        // SAFETY: see the module.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            halves!(
                Avx2,
                |v| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(v), bias))),
                self.0,
                self.1
            )
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see the module.
        sum8(unsafe { _mm256_add_ps(self.0, self.1) })
    }
    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        let mut quarters = [[[Self::splat(0.0).0; 8]; 2]; 2];
        for (j, row) in rows.iter().enumerate() {
            (quarters[j / 8][0][j % 8], quarters[j / 8][1][j % 8]) = (row.0, row.1);
        }
        let [[a, b], [c, d]] = quarters;
        // SAFETY: see the module.
        let (a, b, c, d) = unsafe { (transpose8(a), transpose8(b), transpose8(c), transpose8(d)) };
        let mut transposed = rows;
        for i in 0..8 {
            transposed[i] = Avx2(a[i], c[i]);
            transposed[8 + i] = Avx2(b[i], d[i]);
        }
        transposed
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        // SAFETY: see the module.
        unsafe {
            let eight = _mm256_max_ps(self.0, self.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}

/// Returns e4m3 bytes as IEEE halves scaled by 2^-8: their 4-bit exponents in place of 5-bit exponents.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
pub(super) unsafe fn e4m3_halves(from: &[u8; LANES]) -> __m256i {
    // SAFETY: the array is 16 bytes long; the caller promises the rest.
    unsafe {
        let bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
        let halves = _mm256_and_si256(_mm256_slli_epi16::<7>(bytes), _mm256_set1_epi16(0xbf80_u16 as i16));
        // A magnitude of all ones is NaN.
        let ones = _mm256_set1_epi16(0x3f80);
        let nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, ones), ones);
        _mm256_or_si256(halves, _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00)))
    }
}

/// Returns e5m2 bytes as IEEE halves, of which they are the upper bytes.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
pub(super) unsafe fn e5m2_halves(from: &[u8; LANES]) -> __m256i {
    // SAFETY: the array is 16 bytes long; the caller promises the rest.
    unsafe { _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(from.as_ptr().cast()))) }
}

/// Widens sixteen IEEE halves.
#[inline(always)]
fn two_halves(halves: __m256i) -> Avx2 {
    // SAFETY: see the module; F16C is part of `Isa::Avx2`.
    unsafe {
        let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
        Avx2(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
    }
}

/// Transposes an 8 × 8 matrix.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn transpose8(rows: [__m256; 8]) -> [__m256; 8] {
    let mut v = rows;
    for j in 0..4 {
        let (a, b) = (v[2 * j], v[2 * j + 1]);
        // SAFETY: the caller promises AVX2, here and below.
        (v[2 * j], v[2 * j + 1]) = unsafe { (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)) };
    }
    for j in 0..2 {
        let (a, b, c, d) = (v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
        // SAFETY: see above.
        unsafe {
            v[4 * j] = _mm256_shuffle_ps::<0b01_00_01_00>(a, c);
            v[4 * j + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(a, c);
            v[4 * j + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(b, d);
            v[4 * j + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(b, d);
        }
    }
    for i in 0..4 {
        let (a, b) = (v[i], v[4 + i]);
        // SAFETY: see above.
        (v[i], v[4 + i]) = unsafe { (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b)) };
    }
    v
}

/// Sums the lanes, 8 → 4 → 2 → 1.
#[inline(always)]
pub(super) fn sum8(v: __m256) -> f32 {
    // SAFETY: see the module; both callers have at least AVX2.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}
