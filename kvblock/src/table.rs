//! A sequence's block table: which block holds which of its tokens.
//!
//! ```text
//! tokens     t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 .  .      block_size 4, len 10
//! full          b7             b2            b9
//! sliding      (hole)          b3            b5          window 4: nothing reads t0..t3 any more
//! committed  ^------- 6 -------^                         keys and values of t0..t5 are in the pool
//! ```
//!
//! A table holds only blocks that it needs: each group has `ceil(len / block_size)` entries, of which
//! the holes are always the first ones. It is changed only by its [`BlockPool`](crate::BlockPool), and it owns
//! references: give it back with [`BlockPool::release`](crate::BlockPool::release), do not drop it.

use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use crate::group_table::GroupTable;
use crate::ids::BlockId;
use crate::key::PrefixKey;
use crate::leak::{Home, Lost};
use crate::prefix::{Content, Parent};

/// The blocks of one sequence and the tokens they stand for.
#[derive(Debug)]
#[must_use = "a dropped table leaks its blocks; give it to BlockPool::release"]
pub struct BlockTable {
    /// One per cache group of the pool; empty once released.
    pub(crate) groups: Vec<GroupTable<BlockId>>,
    pub(crate) tokens: Vec<u32>,
    /// Leading tokens whose keys and values have been computed.
    pub(crate) committed: usize,
    pub(crate) key: Option<Arc<PrefixKey>>,
    /// Number of leading entries that may be indexed: those before the first block with invalid contents that the
    /// table has held; `usize::MAX` if it never held one.
    pub(crate) valid: usize,
    /// The prefix up to each full committed block, in pools without a full group; empty in others.
    pub(crate) chain: Vec<Parent>,
    pub(crate) block_size: usize,
    pub(crate) home: Home,
    pub(crate) opened: &'static Location<'static>,
}

impl BlockTable {
    /// The blocks, in order of position: the whole table of a pool with one full group, else those of the first group.
    pub fn blocks(&self) -> &[BlockId] {
        self.groups.first().map_or(&[], |g| &g.blocks)
    }

    /// The table of each cache group, in the order of [`PoolConfig::groups`](crate::PoolConfig::groups).
    pub fn groups(&self) -> &[GroupTable<BlockId>] {
        &self.groups
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

    /// Salt, adapter and media of the sequence, if it has any.
    pub fn key(&self) -> Option<&PrefixKey> {
        self.key.as_deref()
    }

    /// The slots of these positions in the first group: `blocks[p / block_size] * block_size + p % block_size` for
    /// each `p`; -1 in a hole.
    ///
    /// # Panics
    /// If a position is past the end of the table.
    pub fn slots(&self, positions: Range<usize>) -> impl Iterator<Item = i64> + '_ {
        self.slots_in(0, positions)
    }

    /// The slots of these positions in one cache group.
    ///
    /// # Panics
    /// If there is no such group, or a position is past the end of the table.
    pub fn slots_in(&self, group: usize, positions: Range<usize>) -> impl Iterator<Item = i64> + '_ {
        assert!(positions.end <= self.len(), "positions {positions:?} of a table of {}", self.len());
        let (entries, block_size) = (&self.groups[group], self.block_size);
        positions.map(move |p| match entries.entry(p / block_size) {
            Some(block) => i64::from(block.0) * block_size as i64 + (p % block_size) as i64,
            None => -1,
        })
    }

    /// A second table of the first `len` committed tokens. The caller counts it as an owner.
    #[track_caller]
    pub(crate) fn clone_prefix(&self, len: usize) -> BlockTable {
        let entries = len.div_ceil(self.block_size);
        let cut =
            |g: &GroupTable<BlockId>| GroupTable { holes: g.holes, blocks: g.blocks[..entries - g.holes].to_vec() };
        BlockTable {
            groups: self.groups.iter().map(cut).collect(),
            tokens: self.tokens[..len].to_vec(),
            committed: len,
            valid: valid_entries(self.valid, entries),
            key: self.key.clone(),
            chain: self.chain[..self.chain.len().min(len / self.block_size)].to_vec(),
            block_size: self.block_size,
            home: self.home.clone(),
            opened: Location::caller(),
        }
    }

    /// Entries of each group, holes included.
    pub(crate) fn num_entries(&self) -> usize {
        self.len().div_ceil(self.block_size)
    }

    /// The block of a group that the next token goes to, if there is one with room.
    pub(crate) fn open_tail(&self, group: usize) -> Option<BlockId> {
        if self.len().is_multiple_of(self.block_size) { None } else { self.groups[group].blocks.last().copied() }
    }

    /// What the `k`th block, which must be full, holds behind `parent`.
    pub(crate) fn content(&self, k: usize, parent: Option<Parent>) -> Content<'_> {
        let start = k * self.block_size;
        Content { parent, key: self.key.as_ref(), start, tokens: &self.tokens[start..][..self.block_size] }
    }
}

/// [`BlockTable::valid`] of a table that keeps its first `entries`: a block that is cut off no longer counts.
pub(crate) fn valid_entries(valid: usize, entries: usize) -> usize {
    if entries <= valid { usize::MAX } else { valid }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        if self.groups.iter().any(|g| !g.blocks.is_empty()) {
            self.home.report(Lost::Table { groups: std::mem::take(&mut self.groups), opened: self.opened });
        }
    }
}
