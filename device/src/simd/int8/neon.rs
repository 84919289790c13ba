//! Sums of byte products in NEON registers, with and without the `sdot` instruction.

use std::arch::aarch64::*;
use std::arch::asm;

use super::super::{LANES, Neon};
use super::{DotLanes, GROUP, OFFSET};

/// Four 128-bit registers, `sdot`.
#[derive(Clone, Copy)]
pub struct NeonDot([int32x4_t; 4]);

impl DotLanes for NeonDot {
    type Floats = Neon;
    type Weights = [int8x16_t; 4];
    const ROWS: usize = 3;
    const WIDE: bool = false;

    #[inline(always)]
    fn start(_correction: i32) -> Self {
        NeonDot::splat(0)
    }
    #[inline(always)]
    fn splat(sum: i32) -> Self {
        NeonDot(splat(sum))
    }
    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> [int8x16_t; 4] {
        load_signed(from)
    }
    #[inline(always)]
    fn load_nibbles(from: &[u8; GROUP]) -> [[int8x16_t; 4]; 2] {
        load_nibbles(from)
    }
    #[inline(always)]
    fn dot(mut self, weights: [int8x16_t; 4], activations: [i8; 4]) -> Self {
        let a = broadcast(activations);
        for (sum, w) in self.0.iter_mut().zip(weights) {
            // The intrinsic, vdotq_s32, is not in stable Rust.
            // SAFETY: `dispatch_dot!` has checked that this CPU has the instruction; it touches registers alone.
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
        self
    }
    #[inline(always)]
    fn to_floats(self) -> Neon {
        to_floats(self.0)
    }
    #[inline(always)]
    fn load_halves(from: &[u8; 2 * LANES]) -> Neon {
        load_halves(from)
    }
}

/// Four 128-bit registers, products in 16 bits: two of them are at most 2·127·128 = 32,512, which fits.
#[derive(Clone, Copy)]
pub struct NeonWiden([int32x4_t; 4]);

impl DotLanes for NeonWiden {
    type Floats = Neon;
    type Weights = [int8x16_t; 4];
    const ROWS: usize = 3;
    const WIDE: bool = false;

    #[inline(always)]
    fn start(_correction: i32) -> Self {
        NeonWiden::splat(0)
    }
    #[inline(always)]
    fn splat(sum: i32) -> Self {
        NeonWiden(splat(sum))
    }
    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> [int8x16_t; 4] {
        load_signed(from)
    }
    #[inline(always)]
    fn load_nibbles(from: &[u8; GROUP]) -> [[int8x16_t; 4]; 2] {
        load_nibbles(from)
    }
    #[inline(always)]
    fn dot(mut self, weights: [int8x16_t; 4], activations: [i8; 4]) -> Self {
        let a = broadcast(activations);
        for (sum, w) in self.0.iter_mut().zip(weights) {
            // SAFETY: NEON is always there.
            unsafe {
                let low = vmull_s8(vget_low_s8(w), vget_low_s8(a));
                let high = vmull_high_s8(w, a);
                *sum = vpadalq_s16(*sum, vpaddq_s16(low, high));
            }
        }
        self
    }
    #[inline(always)]
    fn to_floats(self) -> Neon {
        to_floats(self.0)
    }
    #[inline(always)]
    fn load_halves(from: &[u8; 2 * LANES]) -> Neon {
        load_halves(from)
    }
}

#[inline(always)]
fn splat(sum: i32) -> [int32x4_t; 4] {
    // SAFETY: NEON is always there.
    [unsafe { vdupq_n_s32(sum) }; 4]
}

/// Weights as signed bytes: flipping the highest bit takes the offset off.
#[inline(always)]
fn load_signed(from: &[u8; GROUP]) -> [int8x16_t; 4] {
    std::array::from_fn(|i| {
        // SAFETY: NEON is always there; each quarter of the array is 16 bytes long.
        unsafe { vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from[i * 16..i * 16 + 16].as_ptr()), vdupq_n_u8(OFFSET))) }
    })
}

/// The low halves of the bytes and the high ones; from 0 to 15, they are the same with and without a sign.
#[inline(always)]
fn load_nibbles(from: &[u8; GROUP]) -> [[int8x16_t; 4]; 2] {
    // SAFETY: NEON is always there; each quarter of the array is 16 bytes long.
    let bytes: [uint8x16_t; 4] = std::array::from_fn(|i| unsafe { vld1q_u8(from[i * 16..i * 16 + 16].as_ptr()) });
    // SAFETY: NEON is always there.
    let low = |v| unsafe { vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15))) };
    // SAFETY: as above.
    let high = |v| unsafe { vreinterpretq_s8_u8(vshrq_n_u8::<4>(v)) };
    [bytes.map(low), bytes.map(high)]
}

#[inline(always)]
fn broadcast(activations: [i8; 4]) -> int8x16_t {
    // SAFETY: NEON is always there.
    unsafe { vreinterpretq_s8_s32(vdupq_n_s32(i32::from_le_bytes(activations.map(|a| a as u8)))) }
}

#[inline(always)]
fn to_floats(sums: [int32x4_t; 4]) -> Neon {
    // SAFETY: NEON is always there.
    Neon(sums.map(|sum| unsafe { vcvtq_f32_s32(sum) }))
}

/// The bits of a half, moved to where a single has them, are the number times 2⁻¹¹²; for subnormal halves too. The sign
/// moves further than the rest.
#[inline(always)]
fn load_halves(from: &[u8; 2 * LANES]) -> Neon {
    Neon(std::array::from_fn(|i| {
        // SAFETY: NEON is always there; each quarter of the array is 8 bytes long.
        unsafe {
            let bits = vreinterpret_u16_u8(vld1_u8(from[i * 8..i * 8 + 8].as_ptr()));
            let sign = vshll_n_u16::<16>(vand_u16(bits, vdup_n_u16(0x8000)));
            let number = vshll_n_u16::<13>(vand_u16(bits, vdup_n_u16(0x7fff)));
            vmulq_n_f32(vreinterpretq_f32_u32(vorrq_u32(sign, number)), f32::from_bits((127 + 112) << 23))
        }
    }))
}
