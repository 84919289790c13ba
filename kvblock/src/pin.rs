//! Pinned prefixes: blocks that stay in the cache though no sequence uses them, such as a system prompt's.
//!
//! A pin is one more owner. Pinned blocks count as in use, so an admission sees them as room that is not there.

use crate::{BlockPool, BlockTable, TableError};

/// Whole blocks of a computed prefix that are kept until [`BlockPool::unpin`].
#[derive(Debug)]
#[must_use = "a dropped pin is a leak; give it to BlockPool::unpin"]
pub struct PinnedPrefix(BlockTable);

impl PinnedPrefix {
    /// What is pinned, as a table: its tokens, its blocks, and an owner for [`BlockPool::audit`] to count.
    pub fn table(&self) -> &BlockTable {
        &self.0
    }
}

impl BlockPool {
    /// Pins the whole blocks among the first `tokens` of a table, for groups with a window those that a hit of that
    /// length reads. Costs no block.
    ///
    /// Refused for tokens that are not committed, and where a part of the window has been given back.
    #[track_caller]
    pub fn pin(&mut self, table: &BlockTable, tokens: usize) -> Result<PinnedPrefix, TableError> {
        self.check_owner(table)?;
        if tokens > table.committed() {
            return Err(TableError::BeyondEnd { wanted: tokens, len: table.committed() });
        }
        let entries = tokens / self.block_size;
        let len = entries * self.block_size;
        self.check_window(table, len, len)?;
        let mut pinned = table.clone_prefix(len);
        self.note_invalid(&mut pinned);
        for (group, kind) in pinned.groups.iter_mut().zip(&self.groups) {
            let holes = kind.holes(len, self.block_size);
            group.blocks.drain(..holes - group.holes);
            group.holes = holes;
            group.blocks.iter().for_each(|block| self.refs[block.index()] += 1);
        }
        Ok(PinnedPrefix(pinned))
    }

    /// Gives a pinned prefix back to the cache, to be evicted when its turn comes.
    pub fn unpin(&mut self, pinned: PinnedPrefix) {
        self.release(pinned.0);
    }
}
