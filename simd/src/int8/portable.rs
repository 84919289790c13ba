//! Sums of byte products in plain arrays. The compiler may vectorise them; no result depends on that.

use super::super::{LANES, Portable};
use super::{DotLanes, GROUP, IntLanes, OFFSET, WithInts};

impl<const FUSED: bool> WithInts for Portable<FUSED> {
    type Ints = Ints<FUSED>;
}

/// Sixteen integers in an array.
#[derive(Clone, Copy)]
pub struct Ints<const FUSED: bool>([i32; LANES]);

impl<const FUSED: bool> IntLanes for Ints<FUSED> {
    type Floats = Portable<FUSED>;
    type Weights = [u8; GROUP];

    #[inline(always)]
    fn splat(sum: i32) -> Self {
        Ints([sum; LANES])
    }
    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> [u8; GROUP] {
        *from
    }
    #[inline(always)]
    fn load_codes(from: &[u8; GROUP], shift: u32, width: u32) -> [u8; GROUP] {
        from.map(|byte| byte >> shift & ((1u32 << width) - 1) as u8)
    }
    #[inline(always)]
    fn store(weights: [u8; GROUP], to: &mut [u8; GROUP]) {
        *to = weights;
    }
    #[inline(always)]
    fn join(codes: [u8; GROUP], high: [u8; GROUP], width: u32) -> [u8; GROUP] {
        std::array::from_fn(|i| codes[i] | high[i] << width)
    }
    #[inline(always)]
    fn look_up(codes: [u8; GROUP], table: &[u8; 16]) -> [u8; GROUP] {
        codes.map(|code| table[usize::from(code & 15)])
    }
    #[inline(always)]
    fn byte(codes: [u8; GROUP], i: usize) -> Portable<FUSED> {
        Portable(std::array::from_fn(|lane| f32::from(codes[4 * lane + i])))
    }
    #[inline(always)]
    fn high_byte(codes: [u8; GROUP], i: usize, width: u32) -> Portable<FUSED> {
        let number = |code: u8| f32::from((code << (8 - width)).wrapping_sub(OFFSET) as i8);
        Portable(std::array::from_fn(|lane| number(codes[4 * lane + i]) * (1 << 24) as f32))
    }
    #[inline(always)]
    fn to_floats(self) -> Portable<FUSED> {
        Portable(self.0.map(|sum| sum as f32))
    }
    /// Fused as on every other instruction set, by a library call: one for 32 products.
    #[inline(always)]
    fn fused(numbers: Self::Floats, scale: Self::Floats, sum: Self::Floats) -> Self::Floats {
        Portable(std::array::from_fn(|i| numbers.0[i].mul_add(scale.0[i], sum.0[i])))
    }
}

/// Plain integer arithmetic.
pub struct PortableDot;

impl DotLanes for PortableDot {
    type Sums = Ints<false>;
    const ROWS: usize = 2;
    const WIDE: bool = false;
    const UNSIGNED: bool = true;

    #[inline(always)]
    fn dot(mut sums: Self::Sums, weights: [u8; GROUP], activations: [i8; 4]) -> Self::Sums {
        for (sum, weights) in sums.0.iter_mut().zip(weights.as_chunks::<4>().0) {
            for (&w, a) in weights.iter().zip(activations) {
                *sum += i32::from(w) * i32::from(a);
            }
        }
        sums
    }
}
