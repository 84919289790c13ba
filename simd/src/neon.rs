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
    const MANY: bool = false;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: every aarch64 CPU has NEON.
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
    fn load_f16(from: &[u16; LANES]) -> Self {
        Neon(std::array::from_fn(|i| {
            // SAFETY: each quarter of the array is 8 bytes long.
            unsafe { halves(vmovl_u16(vld1_u16(from[i * 4..i * 4 + 4].as_ptr()))) }
        }))
    }
    /// The bits of a half, shifted to the place of a single's exponent and mantissa, are the number times 2⁻¹¹², for subnormal
    /// halves too. The sign moves further than the rest.
    #[inline(always)]
    fn load_finite_f16(from: &[u16; LANES]) -> Self {
        Neon(std::array::from_fn(|i| {
            // SAFETY: every aarch64 CPU has NEON; each quarter of the array is 8 bytes long.
            unsafe {
                let bits = vld1_u16(from[i * 4..i * 4 + 4].as_ptr());
                let sign = vshll_n_u16::<16>(vand_u16(bits, vdup_n_u16(0x8000)));
                let number = vshll_n_u16::<13>(vand_u16(bits, vdup_n_u16(0x7fff)));
                vmulq_n_f32(vreinterpretq_f32_u32(vorrq_u32(sign, number)), f32::from_bits((127 + 112) << 23))
            }
        }))
    }
    #[inline(always)]
    fn load_e4m3(from: &[u8; LANES]) -> Self {
        Neon(widened(from).map(|bytes| {
            // SAFETY: every aarch64 CPU has NEON. As in `small_float`: the product moves the exponent, and a magnitude of all
            // ones is NaN.
            unsafe {
                let magnitude = vandq_u32(bytes, vdupq_n_u32(0x7f));
                let value = vreinterpretq_f32_u32(vshlq_n_u32::<20>(magnitude));
                let value = vmulq_f32(value, vreinterpretq_f32_u32(vdupq_n_u32((127 + 120) << 23)));
                let special = vandq_u32(vceqq_u32(magnitude, vdupq_n_u32(0x7f)), vdupq_n_u32(0x7fc0_0000));
                let sign = vshlq_n_u32::<24>(vandq_u32(bytes, vdupq_n_u32(0x80)));
                vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(vreinterpretq_u32_f32(value), special), sign))
            }
        }))
    }
    #[inline(always)]
    fn load_e5m2(from: &[u8; LANES]) -> Self {
        // SAFETY: every aarch64 CPU has NEON.
        Neon(widened(from).map(|bytes| unsafe { halves(vshlq_n_u32::<8>(bytes)) }))
    }
    #[inline(always)]
    fn load_i8(from: &[u8; LANES]) -> Self {
        // SAFETY: every aarch64 CPU has NEON; the array is 16 bytes long.
        unsafe {
            let bytes = vreinterpretq_s8_u8(vld1q_u8(from.as_ptr()));
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
            let quarters = [vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)];
            Neon(quarters.map(|quarter| vcvtq_f32_s32(vmovl_s16(quarter))))
        }
    }
    #[inline(always)]
    fn load_u8(from: &[u8; LANES]) -> Self {
        // SAFETY: every aarch64 CPU has NEON; the array is 16 bytes long.
        unsafe {
            let bytes = vld1q_u8(from.as_ptr());
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes)));
            let quarters = [vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)];
            Neon(quarters.map(|quarter| vcvtq_f32_u32(vmovl_u16(quarter))))
        }
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
        // SAFETY: every aarch64 CPU has NEON.
        Neon(std::array::from_fn(|i| unsafe { vfmaq_f32(b.0[i], self.0[i], a.0[i]) }))
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: every aarch64 CPU has NEON.
        self.zip(other, |a, b| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: every aarch64 CPU has NEON.
        self.zip(other, |a, b| unsafe { vmulq_f32(a, b) })
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: every aarch64 CPU has NEON.
        self.zip(other, |a, b| unsafe { vdivq_f32(a, b) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: every aarch64 CPU has NEON.
        self.zip(other, |a, b| unsafe { vmaxq_f32(a, b) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: every aarch64 CPU has NEON.
        Neon(self.0.map(|v| unsafe { vrndnq_f32(v) }))
    }
    #[inline(always)]
    fn round_to_bytes(self, to: &mut [i8; LANES]) {
        // SAFETY: every aarch64 CPU has NEON; the array is 16 bytes long.
        unsafe {
            let [a, b, c, d] = self.0.map(|v| vqmovn_s32(vcvtnq_s32_f32(v)));
            let (low, high) = (vqmovn_s16(vcombine_s16(a, b)), vqmovn_s16(vcombine_s16(c, d)));
            vst1q_s8(to.as_mut_ptr(), vcombine_s8(low, high));
        }
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        Neon(self.0.map(|v| {
            // SAFETY: every aarch64 CPU has NEON.
            unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(v), vdupq_n_s32(127)))) }
        }))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: every aarch64 CPU has NEON.
        unsafe {
            let four = vaddq_f32(vaddq_f32(self.0[0], self.0[2]), vaddq_f32(self.0[1], self.0[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        // SAFETY: every aarch64 CPU has NEON.
        unsafe { vmaxvq_f32(vmaxq_f32(vmaxq_f32(self.0[0], self.0[1]), vmaxq_f32(self.0[2], self.0[3]))) }
    }
}

/// Loads sixteen bytes, each widened to 32 bits.
#[inline(always)]
fn widened(from: &[u8; LANES]) -> [uint32x4_t; 4] {
    // SAFETY: every aarch64 CPU has NEON; the array is 16 bytes long.
    unsafe {
        let bytes = vld1q_u8(from.as_ptr());
        let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes)));
        [vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)]
            .map(|quarter| vmovl_u16(quarter))
    }
}

/// Widens IEEE halves, each in the low bits of 32; as in `small_float`.
#[inline(always)]
fn halves(bits: uint32x4_t) -> float32x4_t {
    // SAFETY: every aarch64 CPU has NEON.
    unsafe {
        let magnitude = vandq_u32(bits, vdupq_n_u32(0x7fff));
        let value = vreinterpretq_f32_u32(vshlq_n_u32::<13>(magnitude));
        let value = vmulq_f32(value, vreinterpretq_f32_u32(vdupq_n_u32((127 + 112) << 23)));
        let special = vandq_u32(vcgeq_u32(magnitude, vdupq_n_u32(0x7c00)), vdupq_n_u32(0x7f80_0000));
        let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
        vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(vreinterpretq_u32_f32(value), special), sign))
    }
}
