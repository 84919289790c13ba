//! Lanes in a plain array. The compiler may vectorise it; no result depends on that.

use super::{LANES, Lanes, small_float};

/// Sixteen floats in an array. `FUSED`: multiply-adds round once, as those of the other instruction sets do.
#[derive(Clone, Copy)]
pub struct Portable<const FUSED: bool = false>(pub(super) [f32; LANES]);

impl<const FUSED: bool> Lanes for Portable<FUSED> {
    const MANY: bool = false;
    const VECTORS: bool = false;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Portable([x; LANES])
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        Portable(*from)
    }
    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> Self {
        Portable(from.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }
    #[inline(always)]
    fn load_f16(from: &[u16; LANES]) -> Self {
        Portable(from.map(small_float::f16_to_f32))
    }
    #[inline(always)]
    fn load_e4m3(from: &[u8; LANES]) -> Self {
        Portable(from.map(small_float::e4m3_to_f32))
    }
    #[inline(always)]
    fn load_e5m2(from: &[u8; LANES]) -> Self {
        Portable(from.map(small_float::e5m2_to_f32))
    }
    #[inline(always)]
    fn load_i8(from: &[u8; LANES]) -> Self {
        Portable(from.map(|byte| f32::from(byte as i8)))
    }
    #[inline(always)]
    fn load_u8(from: &[u8; LANES]) -> Self {
        Portable(from.map(f32::from))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Portable(std::array::from_fn(|i| match FUSED {
            true => self.0[i].mul_add(a.0[i], b.0[i]),
            // Rounds twice: without an FMA instruction a fused multiply-add is a slow library call.
            false => self.0[i] * a.0[i] + b.0[i],
        }))
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i] * other.0[i]))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i] / other.0[i]))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Portable(std::array::from_fn(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] }))
    }
    #[inline(always)]
    fn round(self) -> Self {
        Portable(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn round_to_bytes(self, to: &mut [i8; LANES]) {
        *to = self.0.map(|v| v.round_ties_even() as i8);
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        Portable(self.0.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23)))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut v = self.0;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                v[i] += v[i + half];
            }
        }
        v[0]
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}
