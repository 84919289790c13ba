//! Block-sparse attention: the rule by which a head sees only some blocks of the context.
//!
//! ```text
//! block of keys          0 1 2 3 4 5 6 7 8 9    stride 4, 2 local blocks, a query in block 9
//! head of offset 1       . . . # . . . # # #    columns: (block + offset) mod stride = 0
//! head of offset 2       . . # . . . # . # #    local blocks: the query's own and the one before
//! ```
//!
//! The rule is that of the paged kernels of vLLM 0.4 to 0.9 and of Phi-3-small (Microsoft, 2024). Keys and values of all blocks
//! are stored, and only reading is sparse: another head, or a later query, reads what one head skips. So a layer with this rule
//! keeps all its blocks. This file defines the rule, with [`Pattern::sees_block`] as its core; `csrc/sparse.cuh`
//! and the example plug-in compute the same.

use std::ops::Range;

use serde::Serialize;

use crate::error::{KernelError, at_least, expect};

/// The rule of a block-sparse layer. A query in sparse block q sees the keys of sparse block k if it sees the position (causality,
/// and a window if there is one) and `k > q - local_blocks`, or `(k + offset) mod vertical_stride = 0`.
///
/// The offset of a head is `head * step + 1` for a step of 0 or more, and `kv_head * -step + 1` for a negative step, where heads
/// are counted over all ranks of a tensor-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BlockSparse {
    /// Tokens of a sparse block; a multiple of the cache's block size, so that a block of the cache lies in one sparse block.
    pub block_size: usize,
    /// Number of blocks up to the query's own that every head sees, at least 1.
    pub local_blocks: usize,
    /// Distance between the further blocks that a head sees, at least 1. With 1 it sees all.
    pub vertical_stride: usize,
    /// Blocks by which the columns of neighbouring heads differ; if negative, those of neighbouring KV heads.
    pub head_sliding_step: i32,
    /// Number of query heads of the ranks before this one.
    pub first_head: usize,
    /// Number of KV heads of the ranks before this one.
    pub first_kv_head: usize,
}

impl BlockSparse {
    /// Returns the rule of attention within chunks: a query sees the keys of its own block of `size` tokens.
    pub fn chunks(size: usize) -> BlockSparse {
        // No block has so great a number that it is a column.
        let vertical_stride = u32::MAX as usize;
        BlockSparse {
            block_size: size,
            local_blocks: 1,
            vertical_stride,
            head_sliding_step: 0,
            first_head: 0,
            first_kv_head: 0,
        }
    }

    /// Returns the blocks that at least one of some adjacent heads of a KV head sees. Heads are counted within the call.
    ///
    /// ```
    /// use attention_kernels::BlockSparse;
    /// let sparse = BlockSparse {
    ///     block_size: 64,
    ///     local_blocks: 2,
    ///     vertical_stride: 4,
    ///     head_sliding_step: 1,
    ///     first_head: 0,
    ///     first_kv_head: 0,
    /// };
    /// let seen = |head| (0..10).filter(move |key| sparse.heads(head..head + 1, 0).sees_block(9, *key));
    /// assert_eq!(seen(0).collect::<Vec<_>>(), [3, 7, 8, 9]);
    /// assert_eq!(seen(1).collect::<Vec<_>>(), [2, 6, 8, 9]);
    /// ```
    #[inline(always)]
    pub fn heads(&self, heads: Range<usize>, kv_head: usize) -> Pattern {
        // Unchecked rules must not divide by zero.
        let (block_size, stride) = (self.block_size.max(1), self.vertical_stride.max(1));
        let step = self.head_sliding_step.unsigned_abs() as usize % stride;
        // Heads of one KV head have one offset if the step is negative.
        let (index, step, heads) = match self.head_sliding_step {
            0.. => (self.first_head + heads.start, step, heads.len()),
            _ => (self.first_kv_head + kv_head, step, heads.len().min(1)),
        };
        let offset = (index % stride * step + 1) % stride;
        Pattern { block_size, local_blocks: self.local_blocks, stride, offset, step, heads }
    }

    /// Returns the numbers of a checked rule as kernels for GPUs take them.
    pub(crate) fn numbers(&self) -> SparseNumbers {
        // Positions are below 2^32, so greater numbers of tokens or blocks have the same effect.
        let whole = |number: usize| u32::try_from(number).unwrap_or(u32::MAX / 2);
        let (stride, by_kv_head) = (self.vertical_stride.max(1), self.head_sliding_step < 0);
        let before = if by_kv_head { self.first_kv_head } else { self.first_head };
        SparseNumbers {
            block_size: whole(self.block_size),
            local_blocks: whole(self.local_blocks).min(u32::MAX / 2),
            stride: whole(stride),
            step: whole(self.head_sliding_step.unsigned_abs() as usize % stride),
            first: whole(before % stride),
            by_kv_head,
        }
    }

    /// Checks the rule for a cache with blocks of this size.
    pub(crate) fn check(&self, block_size: usize) -> Result<(), KernelError> {
        at_least("tokens of a sparse block", self.block_size, 1)?;
        expect("tokens of a sparse block modulo the block size", self.block_size % block_size.max(1), 0)?;
        at_least("local blocks", self.local_blocks, 1)?;
        at_least("vertical stride", self.vertical_stride, 1)?;
        let expected = u32::MAX as usize;
        if self.vertical_stride > expected {
            return Err(KernelError::Shape { what: "vertical stride", found: self.vertical_stride, expected });
        }
        Ok(())
    }
}

/// A rule as kernels for GPUs take it (`csrc/sparse.cuh`). Zeros: attention is dense.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SparseNumbers {
    pub block_size: u32,
    pub local_blocks: u32,
    pub stride: u32,
    /// Below the stride.
    pub step: u32,
    /// Heads, or KV heads, of the ranks before this one, modulo the stride.
    pub first: u32,
    pub by_kv_head: bool,
}

/// The blocks that one head sees, or that at least one of several adjacent heads sees ([`BlockSparse::heads`]).
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    block_size: usize,
    local_blocks: usize,
    stride: usize,
    /// Offset of the first head, below the stride.
    offset: usize,
    /// Difference to the offset of the next head, below the stride.
    step: usize,
    heads: usize,
}

impl Pattern {
    /// Whether a query in one sparse block sees the keys of another, as far as positions allow.
    #[inline(always)]
    pub fn sees_block(&self, query_block: usize, key_block: usize) -> bool {
        if key_block.saturating_add(self.local_blocks) > query_block {
            return true;
        }
        let mut offset = self.offset;
        for _ in 0..self.heads {
            if (key_block + offset).is_multiple_of(self.stride) {
                return true;
            }
            offset = (offset + self.step) % self.stride;
        }
        false
    }

    /// Whether the query at one position sees the key at another.
    pub fn sees(&self, query: usize, key: usize) -> bool {
        key <= query && self.sees_block(query / self.block_size, key / self.block_size)
    }

    /// Iterates over the runs of adjacent tokens, among some of the context, in blocks that the query at a position sees. The
    /// tokens may lie behind that position: rows after the query see them.
    #[inline(always)]
    pub fn runs(&self, query: usize, tokens: Range<usize>) -> Runs {
        Runs { pattern: *self, query_block: query / self.block_size, tokens }
    }
}

/// Iterator over runs of visible tokens.
#[derive(Clone, Debug)]
pub struct Runs {
    pattern: Pattern,
    query_block: usize,
    /// The tokens that are left.
    tokens: Range<usize>,
}

impl Runs {
    /// Returns the end of the blocks from `start` on that are alike: seen, or not.
    #[inline(always)]
    fn end_of(&self, start: usize, seen: bool) -> usize {
        let size = self.pattern.block_size;
        let mut at = start;
        while at < self.tokens.end && self.pattern.sees_block(self.query_block, at / size) == seen {
            at = (at / size + 1).saturating_mul(size);
        }
        at.min(self.tokens.end)
    }
}

impl Iterator for Runs {
    type Item = Range<usize>;

    #[inline(always)]
    fn next(&mut self) -> Option<Range<usize>> {
        let start = self.end_of(self.tokens.start, false);
        let end = self.end_of(start, true);
        self.tokens.start = end;
        if start < end { Some(start..end) } else { None }
    }
}
