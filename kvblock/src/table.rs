//! The block table of a sequence: which block holds which of its tokens.
//!
//! ```text
//! tokens     t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 .  .      block_size 4, len 10
//! full          b7             b2            b9
//! sliding      (hole)          b3            b5          window 4: no query reads t0..t3 any more
//! committed  ^------- 6 -------^                         keys and values of t0..t5 are in the pool
//! ```
//!
//! Each group has `ceil(len / block_size)` entries. The holes always come first. Only its
//! [`BlockPool`](crate::BlockPool) changes a table. A table owns references to its blocks: pass it to
//! [`BlockPool::release`](crate::BlockPool::release) instead of dropping it.

use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use crate::group_table::GroupTable;
use crate::ids::BlockId;
use crate::key::PrefixKey;
use crate::leak::{Leaked, PoolRef};
use crate::prefix::{Content, Prefix};

/// The blocks of one sequence and the tokens that they hold.
#[derive(Debug)]
#[must_use = "a dropped table leaks its blocks; give it to BlockPool::release"]
pub struct BlockTable {
    /// One per cache group of the pool.
    pub(crate) groups: Vec<GroupTable<BlockId>>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) committed: usize,
    pub(crate) key: Option<Arc<PrefixKey>>,
    /// Number of leading entries that may be indexed: those before the first block with invalid contents that the table
    /// has held; `usize::MAX` if it never held one.
    pub(crate) num_valid: usize,
    /// The prefix up to each full committed block, in pools without a full group; empty in others.
    pub(crate) prefixes: Vec<Prefix>,
    pub(crate) block_size: usize,
    pub(crate) pool: PoolRef,
    pub(crate) opened: &'static Location<'static>,
}

impl BlockTable {
    /// The blocks of the first group, in order of position: the whole table in a pool with one full group.
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

    /// Number of tokens that have a slot.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether no token has a slot.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Number of leading tokens whose keys and values have been computed, those found in the prefix cache included.
    pub fn committed(&self) -> usize {
        self.committed
    }

    /// Salt, adapter and media of the sequence, if it has any.
    pub fn key(&self) -> Option<&PrefixKey> {
        self.key.as_deref()
    }

    /// Returns the slots of these positions in the first group: `blocks[p / block_size] * block_size + p % block_size`
    /// for each `p`; -1 in a hole.
    ///
    /// # Panics
    /// If a position is past the end of the table.
    pub fn slots(&self, positions: Range<usize>) -> impl Iterator<Item = i64> + '_ {
        self.slots_in(0, positions)
    }

    /// Returns the slots of these positions in one cache group.
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

    /// Creates a second table of the first `len` committed tokens. The caller counts the references.
    #[track_caller]
    pub(crate) fn clone_prefix(&self, len: usize) -> BlockTable {
        let entries = len.div_ceil(self.block_size);
        let clone =
            |g: &GroupTable<BlockId>| GroupTable { holes: g.holes, blocks: g.blocks[..entries - g.holes].to_vec() };
        BlockTable {
            groups: self.groups.iter().map(clone).collect(),
            tokens: self.tokens[..len].to_vec(),
            committed: len,
            num_valid: num_valid_of(self.num_valid, entries),
            key: self.key.clone(),
            prefixes: self.prefixes[..self.prefixes.len().min(len / self.block_size)].to_vec(),
            block_size: self.block_size,
            pool: self.pool.clone(),
            opened: Location::caller(),
        }
    }

    /// Number of entries of each group, including holes.
    pub(crate) fn num_entries(&self) -> usize {
        self.len().div_ceil(self.block_size)
    }

    /// Returns the last block of a group if it is partly filled.
    pub(crate) fn partial_block(&self, group: usize) -> Option<BlockId> {
        if self.len().is_multiple_of(self.block_size) { None } else { self.groups[group].blocks.last().copied() }
    }

    /// Returns the content of the `k`th block, which must be full.
    pub(crate) fn content(&self, k: usize, parent: Option<Prefix>) -> Content<'_> {
        let start = k * self.block_size;
        Content { parent, key: self.key.as_ref(), start, tokens: &self.tokens[start..][..self.block_size] }
    }
}

/// Returns [`BlockTable::num_valid`] of a table that keeps its first `entries`. Blocks that are cut off no longer
/// count.
pub(crate) fn num_valid_of(num_valid: usize, entries: usize) -> usize {
    if entries <= num_valid { usize::MAX } else { num_valid }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        if self.groups.iter().any(|g| !g.blocks.is_empty()) {
            self.pool.report(Leaked::Table { groups: std::mem::take(&mut self.groups), opened: self.opened });
        }
    }
}
