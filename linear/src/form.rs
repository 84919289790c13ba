//! Memory layout of the integers in a block of weights, and how they are multiplied.
//!
//! ```text
//! one block (32 k) of a panel (16 outputs), in cache lines
//!   Bytes    8 lines   line g: k = 4g..4g+4 of every output, each value + 128
//!   Nibbles  4 lines   line l: low halves k = 8l..8l+4, high halves k = 8l+4..8l+8, each value + 8
//! ```

use simd::int8::{DotLanes, GROUP, IntLanes, OFFSET, Weights};

use super::Quantization;
use super::quantize::BLOCK;

/// A cache line: one group of bytes, or two groups of nibbles.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line(pub [u8; GROUP]);

/// Offset that a stored nibble has over its value, so that it lies in 0..=15.
const NIBBLE_OFFSET: i8 = 8;

/// The order of the integers in a block, and their sums of products.
pub(super) trait Form: Send + Sync + 'static {
    /// The format that blocks are quantised to.
    const QUANTIZATION: Quantization;
    /// Weights of sixteen outputs for 32 k.
    type Block: Copy + Sync + Send;
    /// Bits of what [`Form::load`] returns: 8 with an [`OFFSET`], codes of fewer without.
    const BITS: u32;
    /// A block before anything is stored.
    const EMPTY: Self::Block;

    /// Writes the integers of output `lane` into a block that was [`Form::EMPTY`].
    fn store(block: &mut Self::Block, lane: usize, values: &[i8; BLOCK]);
    /// Returns the integer of output `lane` at index `index` of the block.
    fn value(block: &Self::Block, lane: usize, index: usize) -> i8;
    /// Returns what sums start from for activations with this [correction](super::rows::RowBlock::correction).
    fn start<D: DotLanes>(correction: i32) -> i32;
    /// Loads the groups of k = 8e..8e+8 of a block.
    fn load<D: DotLanes>(block: &Self::Block, e: usize) -> [Weights<D>; 2];
}

/// 8-bit integers.
pub(super) struct Bytes;

impl Form for Bytes {
    const QUANTIZATION: Quantization = Quantization::Q8;
    type Block = [Line; BLOCK / 4];
    const BITS: u32 = 8;
    const EMPTY: Self::Block = [Line([0; GROUP]); BLOCK / 4];

    fn store(block: &mut Self::Block, lane: usize, values: &[i8; BLOCK]) {
        for (line, four) in block.iter_mut().zip(values.as_chunks::<4>().0) {
            line.0[lane * 4..][..4].copy_from_slice(&four.map(|q| (q as u8).wrapping_add(OFFSET)));
        }
    }
    fn value(block: &Self::Block, lane: usize, index: usize) -> i8 {
        block[index / 4].0[lane * 4 + index % 4].wrapping_sub(OFFSET) as i8
    }
    #[inline(always)]
    fn start<D: DotLanes>(correction: i32) -> i32 {
        D::start(correction)
    }
    #[inline(always)]
    fn load<D: DotLanes>(block: &Self::Block, e: usize) -> [Weights<D>; 2] {
        [D::load(&block[2 * e].0), D::load(&block[2 * e + 1].0)]
    }
}

/// 4-bit integers.
pub(super) struct Nibbles;

impl Form for Nibbles {
    const QUANTIZATION: Quantization = Quantization::Q4;
    type Block = [Line; BLOCK / 8];
    const BITS: u32 = 4;
    const EMPTY: Self::Block = [Line([0; GROUP]); BLOCK / 8];

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
    #[inline(always)]
    fn start<D: DotLanes>(correction: i32) -> i32 {
        // The correction is −128·Σ; an offset of 8 needs −8·Σ, and the division is exact.
        correction / 16
    }
    #[inline(always)]
    fn load<D: DotLanes>(block: &Self::Block, e: usize) -> [Weights<D>; 2] {
        [D::Sums::load_codes(&block[e].0, 0, 4), D::Sums::load_codes(&block[e].0, 4, 4)]
    }
}
