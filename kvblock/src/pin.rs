//! Pinned prefixes: blocks that stay in the cache while no sequence uses them, such as those of a system prompt.
//!
//! A pin is one more reference. Pinned blocks count as in use and are not available to admissions.

use crate::{BlockPool, BlockTable, TableError};

/// The full blocks of a computed prefix, kept until [`BlockPool::unpin`].
#[derive(Debug)]
#[must_use = "a dropped pin is a leak; give it to BlockPool::unpin"]
pub struct PinnedPrefix(BlockTable);

impl PinnedPrefix {
    /// The pinned tokens and blocks as a table. [`BlockPool::audit`] needs it among the live tables.
    pub fn table(&self) -> &BlockTable {
        &self.0
    }
}

impl BlockPool {
    /// Pins the full blocks among the first `tokens` of a table; in a sliding group those that a hit of that length
    /// reads. Allocates no block.
    ///
    /// Fails for tokens that are not committed, and if a part of the window has been freed.
    #[track_caller]
    pub fn pin(&mut self, table: &BlockTable, tokens: usize) -> Result<PinnedPrefix, TableError> {
        self.check_pool(table)?;
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

    /// Unpins a prefix. It remains cached until it is evicted.
    pub fn unpin(&mut self, pinned: PinnedPrefix) {
        self.release(pinned.0);
    }
}
