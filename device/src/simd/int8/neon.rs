//! Sums of byte products in NEON registers, with and without the `sdot` instruction.

use std::arch::aarch64::*;
use std::arch::asm;

use super::super::Neon;
use super::{DotLanes, GROUP, IntLanes, OFFSET, WithInts};

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
    fn to_floats(self) -> Neon {
        // SAFETY: every aarch64 CPU has NEON.
        Neon(self.map(|sum| unsafe { vcvtq_f32_s32(sum) }))
    }
}

/// The `sdot` instruction.
pub struct NeonDot;

impl DotLanes for NeonDot {
    type Sums = [int32x4_t; 4];
    const ROWS: usize = 3;
    const WIDE: bool = false;
    const UNSIGNED: bool = false;

    #[inline(always)]
    fn dot(mut sums: [int32x4_t; 4], weights: [int8x16_t; 4], activations: [i8; 4]) -> [int32x4_t; 4] {
        let a = broadcast(activations);
        for (sum, w) in sums.iter_mut().zip(weights) {
            // The intrinsic, vdotq_s32, is not in stable Rust.
            // SAFETY: `dispatch_dot!` is entered after the check for the instruction; it touches registers only.
            unsafe {
                asm!(
                    ".arch_extension dotprod",
                    "sdot {sum:v}.4s, {w:v}.16b, {a:v}.16b",
                    sum = inout(vreg) *sum,
                    w = in(vreg) w,
                    a = in(vreg) a,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
        }
        sums
    }
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
