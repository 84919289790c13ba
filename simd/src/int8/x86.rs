//! Sums of byte products in AVX-512 and AVX2 registers.
//!
//! Every intrinsic here is `unsafe` only because the CPU must have it: these types are used inside functions that
//! `dispatch_dot!` enters after the check, and loads go through arrays of the exact size.

use std::arch::x86_64::*;

use super::super::x86::halves;
use super::super::{Avx2, Avx512, LANES};
use super::{DotLanes, GROUP, IntLanes, OFFSET, WithInts};

/// Sums in one 512-bit register.
impl WithInts for Avx512 {
    type Ints = __m512i;
}

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
    fn load_codes(from: &[u8; GROUP], shift: u32, width: u32) -> __m512i {
        // SAFETY: see the module.
        unsafe {
            let words = _mm512_srl_epi32(Self::load(from), _mm_cvtsi32_si128(shift as i32));
            _mm512_and_si512(words, _mm512_set1_epi8(((1 << width) - 1) as i8))
        }
    }
    #[inline(always)]
    fn store(weights: __m512i, to: &mut [u8; GROUP]) {
        // SAFETY: see the module; the array is 64 bytes long.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), weights) };
    }
    #[inline(always)]
    fn join(codes: __m512i, high: __m512i, width: u32) -> __m512i {
        // SAFETY: see the module.
        unsafe { _mm512_or_si512(codes, _mm512_sll_epi32(high, _mm_cvtsi32_si128(width as i32))) }
    }
    #[inline(always)]
    fn look_up(codes: __m512i, table: &[u8; 16]) -> __m512i {
        // SAFETY: see the module; the table is 16 bytes long.
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), codes) }
    }
    #[inline(always)]
    fn byte(codes: __m512i, i: usize) -> Avx512 {
        // SAFETY: see the module.
        unsafe {
            // Byte i of each word, with zeros behind it.
            let order = _mm512_set4_epi32(
                0x8080_800c_u32 as i32,
                0x8080_8008_u32 as i32,
                0x8080_8004_u32 as i32,
                0x8080_8000_u32 as i32,
            );
            let words = _mm512_shuffle_epi8(codes, _mm512_add_epi32(order, _mm512_set1_epi32(i as i32)));
            Avx512(_mm512_cvtepi32_ps(words))
        }
    }
    #[inline(always)]
    fn high_byte(codes: __m512i, i: usize, width: u32) -> Avx512 {
        // SAFETY: see the module.
        unsafe {
            let codes = _mm512_sll_epi32(codes, _mm_cvtsi32_si128(8 - width as i32));
            // Byte i of each word, with zeros below it.
            let order = _mm512_set4_epi32(0x0c80_8080, 0x0880_8080, 0x0480_8080, 0x0080_8080);
            let order = _mm512_add_epi32(order, _mm512_set1_epi32((i as i32) << 24));
            let signed = _mm512_xor_si512(codes, _mm512_set1_epi8(OFFSET as i8));
            Avx512(_mm512_cvtepi32_ps(_mm512_shuffle_epi8(signed, order)))
        }
    }
    #[inline(always)]
    fn number(codes: __m512i, i: usize, [low, high]: &[[f32; LANES]; 2]) -> Avx512 {
        // SAFETY: see the module; both halves of the table are 64 bytes long. A lookup takes the lowest 5 bits of each index.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(low.as_ptr()), _mm512_loadu_ps(high.as_ptr()));
            let indices = _mm512_srl_epi32(codes, _mm_cvtsi32_si128(8 * i as i32));
            Avx512(_mm512_permutex2var_ps(low, indices, high))
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

impl WithInts for Avx2 {
    type Ints = Halves;
}

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
    fn load_codes(from: &[u8; GROUP], shift: u32, width: u32) -> Halves {
        let Halves(a, b) = Self::load(from);
        // SAFETY: see the module.
        unsafe {
            let (shift, mask) = (_mm_cvtsi32_si128(shift as i32), _mm256_set1_epi8(((1 << width) - 1) as i8));
            halves!(Halves, |v| _mm256_and_si256(_mm256_srl_epi32(v, shift), mask), a, b)
        }
    }
    #[inline(always)]
    fn store(Halves(a, b): Halves, to: &mut [u8; GROUP]) {
        // SAFETY: see the module; the array is 64 bytes long.
        unsafe {
            _mm256_storeu_si256(to.as_mut_ptr().cast(), a);
            _mm256_storeu_si256(to[32..].as_mut_ptr().cast(), b);
        }
    }
    #[inline(always)]
    fn join(codes: Halves, high: Halves, width: u32) -> Halves {
        // SAFETY: see the module.
        unsafe {
            let width = _mm_cvtsi32_si128(width as i32);
            let (codes, high) = ((codes.0, high.0), (codes.1, high.1));
            halves!(Halves, |(v, h)| _mm256_or_si256(v, _mm256_sll_epi32(h, width)), codes, high)
        }
    }
    #[inline(always)]
    fn look_up(codes: Halves, table: &[u8; 16]) -> Halves {
        // SAFETY: see the module; the table is 16 bytes long.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            Halves(_mm256_shuffle_epi8(table, codes.0), _mm256_shuffle_epi8(table, codes.1))
        }
    }
    #[inline(always)]
    fn byte(codes: Halves, i: usize) -> Avx2 {
        // SAFETY: see the module.
        unsafe {
            let (shift, mask) = (_mm_cvtsi32_si128(8 * i as i32), _mm256_set1_epi32(255));
            let Halves(a, b) = codes;
            halves!(Avx2, |v| _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(v, shift), mask)), a, b)
        }
    }
    #[inline(always)]
    fn high_byte(codes: Halves, i: usize, width: u32) -> Avx2 {
        // SAFETY: see the module.
        unsafe {
            let (up, shift) = (_mm_cvtsi32_si128(8 - width as i32), _mm_cvtsi32_si128(24 - 8 * i as i32));
            let (offset, mask) = (_mm256_set1_epi8(OFFSET as i8), _mm256_set1_epi32(0xff00_0000_u32 as i32));
            let Halves(a, b) = codes;
            let signed = |v| _mm256_xor_si256(_mm256_sll_epi32(v, up), offset);
            let high = |v| _mm256_and_si256(_mm256_sll_epi32(signed(v), shift), mask);
            halves!(Avx2, |v| _mm256_cvtepi32_ps(high(v)), a, b)
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
/// from the weights to the activations: with |w| ≤ 128 and |a| ≤ 127 the sum of a pair is at most 32,512, which fits. Codes have no
/// sign: two pairs of 6 bits are at most 2·2·63·127 = 32,004, and all eight of 32 inputs, in 4 bits, 8·2·15·127 = 30,480, so these
/// are added in 16 bits.
pub struct Avx2Dot;

/// Most bits of codes of which 32 inputs are added in 16 bits.
const IN_16_BITS: u32 = 4;

impl DotLanes for Avx2Dot {
    type Sums = Halves;
    const ROWS: usize = 4;
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
        // SAFETY: see the module.
        unsafe {
            let a = _mm256_set1_epi32(word(activations));
            let (low, high) = ((sums.0, weights.0), (sums.1, weights.1));
            halves!(
                Halves,
                |(sums, w)| add_pairs(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w))),
                low,
                high
            )
        }
    }
    #[inline(always)]
    fn begin<const M: usize, const P: usize>(starts: [i32; M], bits: u32) -> [[Halves; P]; M] {
        let mut sums = [[Halves::splat(0); P]; M];
        if bits > IN_16_BITS {
            for m in 0..M {
                sums[m] = [Halves::splat(starts[m]); P];
            }
        }
        sums
    }
    #[inline(always)]
    fn add<const M: usize, const P: usize>(
        sums: &mut [[Halves; P]; M],
        weights: [[Halves; 2]; P],
        rows: [&[[i8; 4]; 2]; M],
        bits: u32,
    ) {
        for m in 0..M {
            for p in 0..P {
                let [first, second] = weights[p];
                if bits > 6 {
                    sums[m][p] = Self::dot(Self::dot(sums[m][p], first, rows[m][0]), second, rows[m][1]);
                    continue;
                }
                // SAFETY: see the module.
                unsafe {
                    let [a, b] = [_mm256_set1_epi32(word(rows[m][0])), _mm256_set1_epi32(word(rows[m][1]))];
                    let Halves(low, high) = sums[m][p];
                    sums[m][p] = halves!(
                        Halves,
                        |(sums, v, w)| {
                            let pairs = _mm256_add_epi16(_mm256_maddubs_epi16(v, a), _mm256_maddubs_epi16(w, b));
                            match bits > IN_16_BITS {
                                true => add_pairs(sums, pairs),
                                false => _mm256_add_epi16(sums, pairs),
                            }
                        },
                        (low, first.0, second.0),
                        (high, first.1, second.1)
                    );
                }
            }
        }
    }
    #[inline(always)]
    fn by_rows<const M: usize, const P: usize>(
        mut sums: [[Halves; P]; M],
        starts: [i32; M],
        bits: u32,
    ) -> [[Halves; P]; M] {
        if bits <= IN_16_BITS {
            for m in 0..M {
                let Halves(start, _) = Halves::splat(starts[m]);
                for sums in &mut sums[m] {
                    *sums = Halves(add_pairs(start, sums.0), add_pairs(start, sums.1));
                }
            }
        }
        sums
    }
}

/// Adds pairs of sums in 16 bits to sums in 32 bits.
#[inline(always)]
fn add_pairs(sums: __m256i, pairs: __m256i) -> __m256i {
    // SAFETY: see the module.
    unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))) }
}

/// Returns the four bytes as the 32-bit number that a broadcast takes.
#[inline(always)]
fn word(activations: [i8; 4]) -> i32 {
    i32::from_le_bytes(activations.map(|a| a as u8))
}
