//! A sequence's block table: which block holds which of its tokens.
//!
//! ```text
//! tokens     t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 .  .      block_size 4, len 10
//! blocks        b7             b2            b9
//! committed  ^------- 6 -------^                         keys and values of t0..t5 are in the pool
//! ```
//!
//! A table never holds a block that it does not need: `blocks = ceil(len / block_size)`. It is changed only
//! by its [`BlockPool`](crate::BlockPool), and it owns references: give it back with
//! [`BlockPool::release`](crate::BlockPool::release), do not drop it.

use std::ops::Range;
use std::sync::Arc;

use crate::BlockId;

/// The blocks of one sequence and the tokens they stand for.
#[derive(Debug)]
#[must_use = "a dropped table leaks its blocks; give it to BlockPool::release"]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) tokens: Vec<u32>,
    /// Leading tokens whose keys and values have been computed.
    pub(crate) committed: usize,
    pub(crate) salt: Option<Arc<str>>,
    pub(crate) block_size: usize,
}

impl BlockTable {
    /// The blocks, in order of position.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The tokens that have a slot.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that have a slot.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether no token has a slot.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Leading tokens that have been computed, those found in the prefix cache included.
    pub fn committed(&self) -> usize {
        self.committed
    }

    /// The slots of these positions: `blocks[p / block_size] * block_size + p % block_size` for each `p`.
    ///
    /// # Panics
    /// If a position is past the end of the table.
    pub fn slots(&self, positions: Range<usize>) -> impl Iterator<Item = i64> + '_ {
        assert!(positions.end <= self.len(), "positions {positions:?} of a table of {}", self.len());
        positions.map(|p| {
            let block = self.blocks[p / self.block_size];
            i64::from(block.0) * self.block_size as i64 + (p % self.block_size) as i64
        })
    }

    /// The block that the next token goes to, if there is one with room.
    pub(crate) fn open_tail(&self) -> Option<BlockId> {
        if self.len().is_multiple_of(self.block_size) { None } else { self.blocks.last().copied() }
    }

    /// The tokens of the `index`th block, which must be full.
    pub(crate) fn block_tokens(&self, index: usize) -> &[u32] {
        &self.tokens[index * self.block_size..][..self.block_size]
    }
}
