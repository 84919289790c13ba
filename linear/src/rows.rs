//! Activations as a product takes them.

use device::Element;
use simd::Lanes;

use super::quantize::{BLOCK, bytes};

/// A block of [`RowBlock::LEN`] quantised activations. The numbers are `scale * values`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RowBlock {
    /// Integers from −127 to 127, in the groups of four that one instruction multiplies.
    pub values: [[i8; 4]; BLOCK / 4],
    /// Step between two integers; NaN if the block holds a NaN or an infinity, so that the result is NaN too.
    pub scale: f32,
    /// −128·Σ values; see [`DotLanes::start`](simd::int8::DotLanes::start).
    pub correction: i32,
    /// −128·Σ of the first half of the values.
    pub first_half: i32,
}

// SAFETY: 44 bytes of numbers without padding; every bit pattern is valid.
unsafe impl Element for RowBlock {}

impl RowBlock {
    /// Numbers in a block.
    pub const LEN: usize = BLOCK;

    /// A block of zeros.
    pub const ZERO: RowBlock = RowBlock { values: [[0; 4]; BLOCK / 4], scale: 0.0, correction: 0, first_half: 0 };

    /// Cost of quantising one number, in multiply-adds, for [`Pool::run`](simd::Pool::run).
    pub const COST: usize = 8;

    /// Integers 8e..8e+8.
    #[inline(always)]
    pub(super) fn eight(&self, e: usize) -> &[[i8; 4]; 2] {
        &self.values.as_chunks().0[e]
    }

    /// Quantises `numbers` into this block. Pad the last block of a row with zeros.
    #[inline(always)]
    pub fn set<L: Lanes>(&mut self, numbers: &[f32; BLOCK]) {
        let Some(values) = self.values.as_flattened_mut().first_chunk_mut() else { return };
        let (scale, [first, second]) = bytes::<L>(numbers, values);
        self.scale = scale;
        (self.first_half, self.correction) = (-128 * first, -128 * (first + second));
    }
}

/// Whole rows of activations.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// Floats `[rows, k]`.
    Numbers(&'a [f32]),
    /// Quantised blocks `[rows, ceil(k / 32)]`; only for quantised weights.
    Blocks(&'a [RowBlock]),
}

impl<'a> Rows<'a> {
    /// Returns the floats, which unquantised weights need.
    pub(super) fn numbers(self) -> &'a [f32] {
        match self {
            Rows::Numbers(x) => x,
            Rows::Blocks(_) => panic!("found quantised rows for unquantised weights, expected floats"),
        }
    }
}
