//! Activations as a product takes them.

use super::quantize::{BLOCK, bytes};
use crate::memory::Element;
use crate::simd::Lanes;

/// Part of a row of activations, ready to be multiplied. The numbers are `scale * values`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RowBlock {
    /// −127..=127, in the fours that one instruction multiplies.
    pub(super) values: [[i8; 4]; BLOCK / 4],
    /// Not a number where the block holds one or an infinity, so that the result is none either.
    pub(super) scale: f32,
    /// −128·Σ values: see [`DotLanes::start`](crate::simd::int8::DotLanes::start).
    pub(super) correction: i32,
}

// SAFETY: numbers alone, in 40 bytes without a gap.
unsafe impl Element for RowBlock {}

impl RowBlock {
    /// Numbers in a block.
    pub const LEN: usize = BLOCK;

    /// Zeros.
    pub const ZERO: RowBlock = RowBlock { values: [[0; 4]; BLOCK / 4], scale: 0.0, correction: 0 };

    /// Multiply-adds that take about as long as to bring one number to 8 bits, for [`Pool::run`](crate::Pool::run).
    pub const COST: usize = 8;

    /// Becomes these numbers in 8 bits; those of a row's last block are filled up with zeros.
    #[inline(always)]
    pub fn set<L: Lanes>(&mut self, numbers: &[f32; BLOCK]) {
        let Some(values) = self.values.as_flattened_mut().first_chunk_mut() else { return };
        let (scale, sum) = bytes::<L>(numbers, values);
        (self.scale, self.correction) = (scale, -128 * sum);
    }
}

/// Activations, whole rows of them.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// `[rows, k]`.
    Numbers(&'a [f32]),
    /// `[rows, ceil(k / 32)]`: in 8 bits already, for quantised weights.
    Blocks(&'a [RowBlock]),
}

impl<'a> Rows<'a> {
    /// As weights that are not quantised need them.
    pub(super) fn numbers(self) -> &'a [f32] {
        match self {
            Rows::Numbers(x) => x,
            Rows::Blocks(_) => panic!("rows in blocks for weights that are not quantised"),
        }
    }
}
