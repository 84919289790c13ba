//! Lanes in NEON registers. NEON is part of every 64-bit ARM CPU that Rust targets.

use std::arch::aarch64::*;

use super::{LANES, Lanes};

/// Four 128-bit registers.
#[derive(Clone, Copy)]
pub struct Neon(pub(super) [float32x4_t; 4]);

impl Neon {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Neon(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes for Neon {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: NEON is always there.
        Neon([unsafe { vdupq_n_f32(x) }; 4])
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: each quarter of the array is 16 bytes long.
        Neon(std::array::from_fn(|i| unsafe { vld1q_f32(from[i * 4..i * 4 + 4].as_ptr()) }))
    }
    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> Self {
        Neon(std::array::from_fn(|i| {
            // SAFETY: each quarter of the array is 8 bytes long.
            unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from[i * 4..i * 4 + 4].as_ptr()))) }
        }))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        for i in 0..4 {
            // SAFETY: each quarter of the array is 16 bytes long.
            unsafe { vst1q_f32(to[i * 4..i * 4 + 4].as_mut_ptr(), self.0[i]) }
        }
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // SAFETY: NEON is always there.
        Neon(std::array::from_fn(|i| unsafe { vfmaq_f32(b.0[i], self.0[i], a.0[i]) }))
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: NEON is always there.
        self.zip(other, |a, b| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: NEON is always there.
        self.zip(other, |a, b| unsafe { vmulq_f32(a, b) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: NEON is always there.
        self.zip(other, |a, b| unsafe { vmaxq_f32(a, b) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: NEON is always there.
        Neon(self.0.map(|v| unsafe { vrndnq_f32(v) }))
    }
    #[inline(always)]
    fn round_to_bytes(self, to: &mut [i8; LANES]) {
        // SAFETY: NEON is always there; the array is 16 bytes long.
        unsafe {
            let [a, b, c, d] = self.0.map(|v| vqmovn_s32(vcvtnq_s32_f32(v)));
            let (low, high) = (vqmovn_s16(vcombine_s16(a, b)), vqmovn_s16(vcombine_s16(c, d)));
            vst1q_s8(to.as_mut_ptr(), vcombine_s8(low, high));
        }
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        Neon(self.0.map(|v| {
            // SAFETY: NEON is always there.
            unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(v), vdupq_n_s32(127)))) }
        }))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: NEON is always there.
        unsafe {
            let four = vaddq_f32(vaddq_f32(self.0[0], self.0[2]), vaddq_f32(self.0[1], self.0[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        // SAFETY: NEON is always there.
        unsafe { vmaxvq_f32(vmaxq_f32(vmaxq_f32(self.0[0], self.0[1]), vmaxq_f32(self.0[2], self.0[3]))) }
    }
}
