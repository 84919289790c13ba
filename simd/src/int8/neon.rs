//! Sums of byte products in NEON registers: with `usmmla`, with `sdot`, and without either.

use std::arch::aarch64::*;
use std::arch::asm;

use super::super::Neon;
use super::{DotLanes, GROUP, IntLanes, OFFSET, Weights, WithInts};

/// Sums in four 128-bit registers; weights as signed bytes.
impl WithInts for Neon {
    type Ints = [int32x4_t; 4];
}

impl IntLanes for [int32x4_t; 4] {
    type Floats = Neon;
    type Weights = [int8x16_t; 4];

    #[inline(always)]
    fn splat(sum: i32) -> Self {
        // SAFETY: every aarch64 CPU has NEON.
        [unsafe { vdupq_n_s32(sum) }; 4]
    }
    /// Flipping the highest bit removes the offset.
    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> [int8x16_t; 4] {
        std::array::from_fn(|i| {
            // SAFETY: every aarch64 CPU has NEON; each quarter of the array is 16 bytes long.
            unsafe { vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from[i * 16..i * 16 + 16].as_ptr()), vdupq_n_u8(OFFSET))) }
        })
    }
    /// Codes of less than 8 bits are equal with and without a sign.
    #[inline(always)]
    fn load_codes(from: &[u8; GROUP], shift: u32, width: u32) -> [int8x16_t; 4] {
        std::array::from_fn(|i| {
            // SAFETY: every aarch64 CPU has NEON; each quarter of the array is 16 bytes long.
            unsafe {
                let words = vreinterpretq_u32_u8(vld1q_u8(from[i * 16..i * 16 + 16].as_ptr()));
                let bytes = vreinterpretq_u8_u32(vshlq_u32(words, vdupq_n_s32(-(shift as i32))));
                vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(((1u32 << width) - 1) as u8)))
            }
        })
    }
    #[inline(always)]
    fn store(weights: [int8x16_t; 4], to: &mut [u8; GROUP]) {
        for (to, weights) in to.as_chunks_mut::<16>().0.iter_mut().zip(weights) {
            // SAFETY: every aarch64 CPU has NEON; the chunk is 16 bytes long.
            unsafe { vst1q_u8(to.as_mut_ptr(), vreinterpretq_u8_s8(weights)) };
        }
    }
    #[inline(always)]
    fn join(codes: [int8x16_t; 4], high: [int8x16_t; 4], width: u32) -> [int8x16_t; 4] {
        // SAFETY: every aarch64 CPU has NEON.
        std::array::from_fn(|i| unsafe { vorrq_s8(codes[i], vshlq_s8(high[i], vdupq_n_s8(width as i8))) })
    }
    #[inline(always)]
    fn look_up(codes: [int8x16_t; 4], table: &[u8; 16]) -> [int8x16_t; 4] {
        // SAFETY: every aarch64 CPU has NEON; the table is 16 bytes long.
        let table = unsafe { vreinterpretq_s8_u8(vld1q_u8(table.as_ptr())) };
        // SAFETY: as above.
        codes.map(|codes| unsafe { vqtbl1q_s8(table, vreinterpretq_u8_s8(codes)) })
    }
    #[inline(always)]
    fn byte(codes: [int8x16_t; 4], i: usize) -> Neon {
        // SAFETY: every aarch64 CPU has NEON.
        Neon(codes.map(|codes| unsafe {
            let words = vshlq_u32(vreinterpretq_u32_s8(codes), vdupq_n_s32(-8 * i as i32));
            vcvtq_f32_u32(vandq_u32(words, vdupq_n_u32(255)))
        }))
    }
    #[inline(always)]
    fn high_byte(codes: [int8x16_t; 4], i: usize, width: u32) -> Neon {
        // SAFETY: every aarch64 CPU has NEON.
        Neon(codes.map(|codes| unsafe {
            let codes = vshlq_u32(vreinterpretq_u32_s8(codes), vdupq_n_s32(8 - width as i32));
            let signed = veorq_u32(codes, vdupq_n_u32(u32::from_le_bytes([OFFSET; 4])));
            let high = vandq_u32(vshlq_u32(signed, vdupq_n_s32(24 - 8 * i as i32)), vdupq_n_u32(0xff00_0000));
            vcvtq_f32_s32(vreinterpretq_s32_u32(high))
        }))
    }
    #[inline(always)]
    fn to_floats(self) -> Neon {
        // SAFETY: every aarch64 CPU has NEON.
        Neon(self.map(|sum| unsafe { vcvtq_f32_s32(sum) }))
    }
}

/// Defines a function for an instruction whose intrinsic is not in stable Rust: it adds products of bytes to four sums.
macro_rules! products {
    ($name:ident, $extension:literal, $instruction:literal) => {
        #[inline(always)]
        fn $name(mut sums: int32x4_t, weights: int8x16_t, activations: int8x16_t) -> int32x4_t {
            // SAFETY: `dispatch_dot!` is entered after the check for the instruction; it touches registers only.
            unsafe {
                asm!(
                    concat!(".arch_extension ", $extension),
                    concat!($instruction, " {sums:v}.4s, {w:v}.16b, {a:v}.16b"),
                    sums = inout(vreg) sums,
                    w = in(vreg) weights,
                    a = in(vreg) activations,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            sums
        }
    };
}
products!(sdot, "dotprod", "sdot");
products!(usdot, "i8mm", "usdot");
products!(usmmla, "i8mm", "usmmla");

/// The `sdot` instruction.
pub struct NeonDot;

// The four registers are written out: in a loop, the compiler keeps sums in memory.
impl DotLanes for NeonDot {
    type Sums = [int32x4_t; 4];
    const ROWS: usize = 3;
    const WIDE: bool = false;
    const UNSIGNED: bool = false;

    #[inline(always)]
    fn dot([s, t, u, v]: [int32x4_t; 4], weights: [int8x16_t; 4], activations: [i8; 4]) -> [int32x4_t; 4] {
        let ([w, x, y, z], a) = (weights, broadcast(activations));
        [sdot(s, w, a), sdot(t, x, a), sdot(u, y, a), sdot(v, z, a)]
    }
}

/// The `usmmla` instruction: two outputs times two rows, eight products each.
///
/// ```text
/// weights        o0 k0..8   o1 k0..8          two groups, zipped
/// activations    r0 k0..8   r1 k0..8
/// sums           o0·r0  o0·r1  o1·r0  o1·r1
/// ```
///
/// The sums of rows 2i and 2i + 1 are in this order in their registers: outputs 0..8 in those of row 2i, the others in those of
/// row 2i + 1. A last row without a partner is multiplied by `usdot`, with its sums in the order of lanes.
pub struct NeonI8mm;

impl DotLanes for NeonI8mm {
    type Sums = [int32x4_t; 4];
    const ROWS: usize = 4;
    const WIDE: bool = false;
    const UNSIGNED: bool = true;

    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> [int8x16_t; 4] {
        // SAFETY: every aarch64 CPU has NEON; each quarter of the array is 16 bytes long.
        std::array::from_fn(|i| unsafe { vld1q_s8(from[i * 16..i * 16 + 16].as_ptr().cast()) })
    }
    #[inline(always)]
    fn dot([s, t, u, v]: [int32x4_t; 4], weights: [int8x16_t; 4], activations: [i8; 4]) -> [int32x4_t; 4] {
        let ([w, x, y, z], a) = (weights, broadcast(activations));
        [usdot(s, w, a), usdot(t, x, a), usdot(u, y, a), usdot(v, z, a)]
    }
    #[inline(always)]
    fn begin<const M: usize, const P: usize>(starts: [i32; M], _: u32) -> [[[int32x4_t; 4]; P]; M] {
        let mut sums = [[<[int32x4_t; 4]>::splat(0); P]; M];
        for m in 0..M {
            let (even, odd) = (m & !1, m | 1);
            let other = if odd < M { odd } else { even };
            // SAFETY: every aarch64 CPU has NEON.
            let two = unsafe { vzip1q_s32(vdupq_n_s32(starts[even]), vdupq_n_s32(starts[other])) };
            sums[m] = [[two; 4]; P];
        }
        sums
    }
    #[inline(always)]
    fn add<const M: usize, const P: usize>(
        sums: &mut [[[int32x4_t; 4]; P]; M],
        weights: [[Weights<Self>; 2]; P],
        rows: [&[[i8; 4]; 2]; M],
        _: u32,
    ) {
        for p in 0..P {
            let [first, second] = weights[p];
            let ([a, b], [c, d]) = (zip(first[0], second[0]), zip(first[1], second[1]));
            let ([e, f], [g, h]) = (zip(first[2], second[2]), zip(first[3], second[3]));
            for m in 0..M / 2 {
                let x = two_rows(rows[2 * m], rows[2 * m + 1]);
                let [s, t, u, v] = sums[2 * m][p];
                sums[2 * m][p] = [usmmla(s, a, x), usmmla(t, b, x), usmmla(u, c, x), usmmla(v, d, x)];
                let [s, t, u, v] = sums[2 * m + 1][p];
                sums[2 * m + 1][p] = [usmmla(s, e, x), usmmla(t, f, x), usmmla(u, g, x), usmmla(v, h, x)];
            }
            if M % 2 == 1 {
                let sum = Self::dot(sums[M - 1][p], first, rows[M - 1][0]);
                sums[M - 1][p] = Self::dot(sum, second, rows[M - 1][1]);
            }
        }
    }
    #[inline(always)]
    fn by_rows<const M: usize, const P: usize>(
        mut sums: [[[int32x4_t; 4]; P]; M],
        _: [i32; M],
        _: u32,
    ) -> [[[int32x4_t; 4]; P]; M] {
        for m in 0..M / 2 {
            for p in 0..P {
                let ([s, t, u, v], [w, x, y, z]) = (sums[2 * m][p], sums[2 * m + 1][p]);
                // SAFETY: every aarch64 CPU has NEON.
                unsafe {
                    sums[2 * m][p] = [vuzp1q_s32(s, t), vuzp1q_s32(u, v), vuzp1q_s32(w, x), vuzp1q_s32(y, z)];
                    sums[2 * m + 1][p] = [vuzp2q_s32(s, t), vuzp2q_s32(u, v), vuzp2q_s32(w, x), vuzp2q_s32(y, z)];
                }
            }
        }
        sums
    }
}

/// Weights of four outputs, four inputs each and the next four, by pairs of outputs.
#[inline(always)]
fn zip(first: int8x16_t, second: int8x16_t) -> [int8x16_t; 2] {
    // SAFETY: every aarch64 CPU has NEON.
    unsafe {
        let (first, second) = (vreinterpretq_s32_s8(first), vreinterpretq_s32_s8(second));
        [vreinterpretq_s8_s32(vzip1q_s32(first, second)), vreinterpretq_s8_s32(vzip2q_s32(first, second))]
    }
}

/// Eight activations of each of two rows.
#[inline(always)]
fn two_rows(even: &[[i8; 4]; 2], odd: &[[i8; 4]; 2]) -> int8x16_t {
    // SAFETY: every aarch64 CPU has NEON; the arrays are 8 bytes long.
    unsafe { vcombine_s8(vld1_s8(even.as_ptr().cast()), vld1_s8(odd.as_ptr().cast())) }
}

/// Products in 16 bits; the sum of two is at most 2·127·128 = 32,512, which fits.
pub struct NeonWiden;

impl DotLanes for NeonWiden {
    type Sums = [int32x4_t; 4];
    const ROWS: usize = 3;
    const WIDE: bool = false;
    const UNSIGNED: bool = false;

    #[inline(always)]
    fn dot(mut sums: [int32x4_t; 4], weights: [int8x16_t; 4], activations: [i8; 4]) -> [int32x4_t; 4] {
        let a = broadcast(activations);
        for (sum, w) in sums.iter_mut().zip(weights) {
            // SAFETY: every aarch64 CPU has NEON.
            unsafe {
                let low = vmull_s8(vget_low_s8(w), vget_low_s8(a));
                let high = vmull_high_s8(w, a);
                *sum = vpadalq_s16(*sum, vpaddq_s16(low, high));
            }
        }
        sums
    }
}

#[inline(always)]
fn broadcast(activations: [i8; 4]) -> int8x16_t {
    // SAFETY: every aarch64 CPU has NEON.
    unsafe { vreinterpretq_s8_s32(vdupq_n_s32(i32::from_le_bytes(activations.map(|a| a as u8)))) }
}
