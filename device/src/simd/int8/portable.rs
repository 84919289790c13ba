//! Sums of byte products in a plain array; the compiler may vectorise it, nothing depends on that.

use half::f16;

use super::super::{LANES, Portable};
use super::{DotLanes, GROUP};

/// Sixteen sums in an array.
#[derive(Clone, Copy)]
pub struct PortableDot([i32; LANES]);

impl DotLanes for PortableDot {
    type Floats = Portable;
    type Weights = [u8; GROUP];
    const ROWS: usize = 2;
    const WIDE: bool = false;

    #[inline(always)]
    fn start(correction: i32) -> Self {
        PortableDot::splat(correction)
    }
    #[inline(always)]
    fn splat(sum: i32) -> Self {
        PortableDot([sum; LANES])
    }
    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> [u8; GROUP] {
        *from
    }
    #[inline(always)]
    fn load_nibbles(from: &[u8; GROUP]) -> [[u8; GROUP]; 2] {
        [from.map(|byte| byte & 15), from.map(|byte| byte >> 4)]
    }
    #[inline(always)]
    fn dot(mut self, weights: [u8; GROUP], activations: [i8; 4]) -> Self {
        for (sum, weights) in self.0.iter_mut().zip(weights.as_chunks::<4>().0) {
            for (&w, a) in weights.iter().zip(activations) {
                *sum += i32::from(w) * i32::from(a);
            }
        }
        self
    }
    #[inline(always)]
    fn to_floats(self) -> Portable {
        Portable(self.0.map(|sum| sum as f32))
    }
    /// Fused as everywhere else, if by a library call: there is one for 32 products.
    #[inline(always)]
    fn scale_add(self, scale: Portable, sum: Portable) -> Portable {
        Portable(std::array::from_fn(|i| (self.0[i] as f32).mul_add(scale.0[i], sum.0[i])))
    }
    #[inline(always)]
    fn load_halves(from: &[u8; 2 * LANES]) -> Portable {
        Portable(std::array::from_fn(|i| f16::from_le_bytes([from[2 * i], from[2 * i + 1]]).to_f32()))
    }
}
