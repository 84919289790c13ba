//! How the integers of a block of weights lie in memory, and how they are multiplied.
//!
//! ```text
//! one block (32 k) of a panel (16 outputs), in cache lines
//!   Bytes    8 lines   line g: k = 4g..4g+4 of every output, each value + 128
//!   Nibbles  4 lines   line l: low halves k = 8l..8l+4, high halves k = 8l+4..8l+8, each value + 8
//! ```

use super::quantize::{self, BLOCK, WeightBlock};
use super::rows::RowBlock;
use crate::Isa;
use crate::simd::int8::{DotLanes, GROUP, OFFSET};

/// A cache line: one group of bytes, or two of nibbles.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line(pub [u8; GROUP]);

/// What [`Nibbles`] adds to a value, to have it from 0 to 15.
const NIBBLE_OFFSET: i8 = 8;

/// The order of the integers within a block, and their sums of products.
pub(super) trait Form: Send + Sync + 'static {
    /// Sixteen outputs, 32 k.
    type Block: Copy + Sync + Send;
    /// Lines of a block.
    const LINES: usize;
    /// Nothing stored yet.
    const EMPTY: Self::Block;

    /// Makes blocks of a row; see [`quantize`].
    fn quantize(isa: Isa, row: &[f32], out: &mut [WeightBlock]) -> bool;
    /// Writes the integers of output `lane` into a block, [`Form::EMPTY`] so far.
    fn store(block: &mut Self::Block, lane: usize, values: &[i8; BLOCK]);
    /// The integer of output `lane` at place `index` of the block.
    fn value(block: &Self::Block, lane: usize, index: usize) -> i8;
    /// Weights of a line, ready to be multiplied with many rows.
    type Loaded<D: DotLanes>: Copy;
    /// Sums of nothing, for this block of a row.
    fn start<D: DotLanes>(row: &RowBlock) -> D;
    /// Line `line` of a block.
    fn load<D: DotLanes>(block: &Self::Block, line: usize) -> Self::Loaded<D>;
    /// Adds the products of line `line` with a row.
    fn dot<D: DotLanes>(sum: D, weights: Self::Loaded<D>, row: &RowBlock, line: usize) -> D;
}

/// 8 bits.
pub(super) struct Bytes;

impl Form for Bytes {
    type Block = [Line; BLOCK / 4];
    const LINES: usize = BLOCK / 4;
    const EMPTY: Self::Block = [Line([0; GROUP]); Self::LINES];

    fn quantize(isa: Isa, row: &[f32], out: &mut [WeightBlock]) -> bool {
        quantize::q8(isa, row, out)
    }
    fn store(block: &mut Self::Block, lane: usize, values: &[i8; BLOCK]) {
        for (line, four) in block.iter_mut().zip(values.as_chunks::<4>().0) {
            line.0[lane * 4..][..4].copy_from_slice(&four.map(|q| (q as u8).wrapping_add(OFFSET)));
        }
    }
    fn value(block: &Self::Block, lane: usize, index: usize) -> i8 {
        block[index / 4].0[lane * 4 + index % 4].wrapping_sub(OFFSET) as i8
    }
    type Loaded<D: DotLanes> = D::Weights;
    #[inline(always)]
    fn start<D: DotLanes>(row: &RowBlock) -> D {
        D::start(row.correction)
    }
    #[inline(always)]
    fn load<D: DotLanes>(block: &Self::Block, line: usize) -> D::Weights {
        D::load(&block[line].0)
    }
    #[inline(always)]
    fn dot<D: DotLanes>(sum: D, weights: D::Weights, row: &RowBlock, line: usize) -> D {
        sum.dot(weights, row.values[line])
    }
}

/// 4 bits.
pub(super) struct Nibbles;

impl Form for Nibbles {
    type Block = [Line; BLOCK / 8];
    const LINES: usize = BLOCK / 8;
    const EMPTY: Self::Block = [Line([0; GROUP]); Self::LINES];

    fn quantize(isa: Isa, row: &[f32], out: &mut [WeightBlock]) -> bool {
        quantize::q4(isa, row, out)
    }
    fn store(block: &mut Self::Block, lane: usize, values: &[i8; BLOCK]) {
        for (line, eight) in block.iter_mut().zip(values.as_chunks::<8>().0) {
            for (i, byte) in line.0[lane * 4..][..4].iter_mut().enumerate() {
                let [low, high] = [eight[i], eight[i + 4]].map(|q| (q + NIBBLE_OFFSET) as u8);
                *byte = low | (high << 4);
            }
        }
    }
    fn value(block: &Self::Block, lane: usize, index: usize) -> i8 {
        let byte = block[index / 8].0[lane * 4 + index % 4];
        ((byte >> (index % 8 / 4 * 4)) & 15) as i8 - NIBBLE_OFFSET
    }
    type Loaded<D: DotLanes> = [D::Weights; 2];
    #[inline(always)]
    fn start<D: DotLanes>(row: &RowBlock) -> D {
        // Of −128·Σ, exactly −8·Σ.
        D::splat(row.correction / 16)
    }
    #[inline(always)]
    fn load<D: DotLanes>(block: &Self::Block, line: usize) -> [D::Weights; 2] {
        D::load_nibbles(&block[line].0)
    }
    #[inline(always)]
    fn dot<D: DotLanes>(sum: D, [low, high]: [D::Weights; 2], row: &RowBlock, line: usize) -> D {
        sum.dot_small(low, row.values[2 * line]).dot_small(high, row.values[2 * line + 1])
    }
}
