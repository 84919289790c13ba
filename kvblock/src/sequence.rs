//! Operations on an open table: append, commit, fork, truncate, release.
//!
//! Every operation is O(blocks it touches) and either succeeds or changes nothing.

use std::ops::Range;

use crate::ids::{Place, Tier};
use crate::prefix::{Inserted, Prefix, PrefixIndex};
use crate::table::num_valid_of;
use crate::{BlockId, BlockPool, BlockTable, CacheGroup, GroupTable, MemOp, PrefixHash, TableError};

impl BlockPool {
    /// Returns the number of blocks that these appends need together. Each entry is a table and the number of tokens to
    /// append to it.
    pub fn blocks_needed<'a>(&self, appends: impl IntoIterator<Item = (&'a BlockTable, usize)>) -> usize {
        let mut needed = 0;
        let mut shared = Vec::new();
        for (table, tokens) in appends.into_iter().filter(|&(table, tokens)| tokens > 0 && self.owns(table)) {
            let entries = (table.len() + tokens).div_ceil(self.block_size) - table.num_entries();
            needed += entries * self.groups.len();
            shared.extend((0..self.groups.len()).filter_map(|g| self.shared_partial_block(table, g)));
        }
        // Each append to a shared block copies it. But if all owners append, the last one is the sole owner by then.
        shared.sort_unstable();
        for appends in shared.chunk_by(|a, b| a == b) {
            let all_append = appends.len() == self.refs[appends[0].index()] as usize;
            needed += appends.len() - usize::from(all_append);
        }
        needed
    }

    /// Appends tokens to the table and assigns a slot to each. A partly filled last block is copied first if others
    /// share it; a sole owner writes in place.
    ///
    /// Returns the index of the first entry that is new or replaced. A mirror of the table keeps the entries before it.
    pub fn append(&mut self, table: &mut BlockTable, tokens: &[u32]) -> Result<usize, TableError> {
        self.check_pool(table)?;
        let mut first_changed = table.num_entries();
        if tokens.is_empty() {
            return Ok(first_changed);
        }
        self.check_space(self.blocks_needed([(&*table, tokens.len())]))?;
        let from_slot = table.len() % self.block_size;
        for g in 0..self.groups.len() {
            if let Some(src) = self.shared_partial_block(table, g) {
                let dst = self.allocate()?;
                self.refs[src.index()] -= 1;
                if let Some(last) = table.groups[g].blocks.last_mut() {
                    *last = dst;
                }
                self.memory_ops.push_back(MemOp::Copy { src, dst });
                if self.invalid.contains(&src) {
                    self.invalid.insert(dst);
                }
                self.order_poison(dst, from_slot);
                self.counters.copied += 1;
                first_changed = table.num_entries() - 1;
            } else if let Some(last) = table.partial_block(g) {
                // A truncated table may end within a cached block, whose contents change now.
                self.drop_hash(last, from_slot, false);
            }
        }
        let entries = table.num_entries();
        table.tokens.extend_from_slice(tokens);
        for _ in entries..table.num_entries() {
            for group in &mut table.groups {
                group.blocks.push(self.allocate()?);
            }
        }
        Ok(first_changed)
    }

    /// Reports that the first `committed` tokens of the table have been computed. Full blocks of such tokens enter the
    /// prefix index, and blocks that fell behind a window are freed. A smaller number than before has no effect.
    ///
    /// Fails for a table of another pool, and for tokens that have no slot.
    pub fn commit(&mut self, table: &mut BlockTable, committed: usize) -> Result<(), TableError> {
        self.check_pool(table)?;
        if committed > table.len() {
            return Err(TableError::BeyondEnd { wanted: committed, len: table.len() });
        }
        self.note_invalid(table);
        let full = table.committed / self.block_size..committed / self.block_size;
        table.committed = committed.max(table.committed);
        self.index_full(table, full, &[]);
        self.release_behind_windows(table);
        Ok(())
    }

    /// Creates a second table of the same blocks, including a partly filled last one. Needs no block until one of the
    /// two tables appends.
    ///
    /// Fails for a table of another pool, and for one with tokens that are not committed: they would be written to a
    /// shared block.
    #[track_caller]
    pub fn fork(&mut self, table: &BlockTable) -> Result<BlockTable, TableError> {
        self.check_pool(table)?;
        if table.committed < table.len() {
            return Err(TableError::Uncommitted { committed: table.committed, len: table.len() });
        }
        for block in table.groups.iter().flat_map(GroupTable::blocks) {
            self.refs[block.index()] += 1;
        }
        Ok(table.clone_prefix(table.len()))
    }

    /// Truncates the table to its first `len` tokens, for example after drafts were rejected. If the cut is within a
    /// block that only this table owns, the block leaves the prefix index.
    ///
    /// Fails for a table of another pool, for more tokens than the table has, and for a length whose window has been
    /// freed.
    pub fn truncate(&mut self, table: &mut BlockTable, len: usize) -> Result<(), TableError> {
        self.check_pool(table)?;
        if len >= table.len() {
            let beyond = TableError::BeyondEnd { wanted: len, len: table.len() };
            return if len == table.len() { Ok(()) } else { Err(beyond) };
        }
        let committed = table.committed.min(len);
        self.check_window(table, committed, len)?;
        let keep = len.div_ceil(self.block_size);
        let cut =
            table.groups.iter_mut().map(|g| GroupTable { holes: keep, blocks: g.blocks.split_off(keep - g.holes) });
        let cut: Vec<GroupTable<BlockId>> = cut.collect();
        self.release_groups(&cut);
        table.tokens.truncate(len);
        table.committed = committed;
        table.prefixes.truncate(committed / self.block_size);
        table.num_valid = num_valid_of(table.num_valid, keep);
        let from_slot = len % self.block_size;
        for g in 0..self.groups.len() {
            if let Some(last) = table.partial_block(g)
                && self.refs[last.index()] == 1
                && !self.drop_hash(last, from_slot, false)
            {
                self.order_poison(last, from_slot);
            }
        }
        Ok(())
    }

    /// Replaces a token that is not committed, such as a placeholder whose token has become known, and returns the old
    /// one. The slot stays the same, and no memory operation is needed. Returns `None` for a committed token or past
    /// the end.
    pub fn replace(&mut self, table: &mut BlockTable, position: usize, token: u32) -> Option<u32> {
        if !self.owns(table) || position < table.committed {
            return None;
        }
        table.tokens.get_mut(position).map(|old| std::mem::replace(old, token))
    }

    /// Releases the table's blocks. Cached ones remain findable until they are reused, the end of the sequence first.
    ///
    /// The blocks of another pool's table go back to that pool, which counts the table among its
    /// [leaks](BlockPool::take_leaks).
    pub fn release(&mut self, mut table: BlockTable) {
        let _: Result<(), TableError> = self.try_release(&mut table);
    }

    /// As [`release`](BlockPool::release), but fails for a table of another pool and leaves it unchanged. A released
    /// table is empty.
    pub fn try_release(&mut self, table: &mut BlockTable) -> Result<(), TableError> {
        self.check_pool(table)?;
        let groups: Vec<_> = table
            .groups
            .iter_mut()
            .map(|g| std::mem::replace(g, GroupTable { holes: 0, blocks: Vec::new() }))
            .collect();
        self.release_groups(&groups);
        table.tokens.clear();
        table.prefixes.clear();
        table.committed = 0;
        table.num_valid = usize::MAX;
        Ok(())
    }

    /// Updates [`BlockTable::num_valid`] from the pool's set of invalid blocks.
    pub(crate) fn note_invalid(&self, table: &mut BlockTable) {
        table.num_valid = table.num_valid.min(self.first_invalid(table).unwrap_or(usize::MAX));
    }

    /// Returns the first entry of a table with invalid contents.
    pub(crate) fn first_invalid(&self, table: &BlockTable) -> Option<usize> {
        if self.invalid.is_empty() {
            return None;
        }
        table.groups.iter().filter_map(|g| g.position(|block| self.invalid.contains(block))).min()
    }

    /// Inserts the committed blocks `full` into the prefix index, up to the first with invalid contents. `hashes` are
    /// the hashes of the table's leading blocks, as far as they are known.
    pub(crate) fn index_full(&mut self, table: &mut BlockTable, full: Range<usize>, hashes: &[PrefixHash]) {
        let keeps_prefixes = self.groups.iter().all(|g| *g != CacheGroup::Full);
        let first_event = self.events.len();
        for k in full.start..full.end.min(table.num_valid) {
            let Some(index) = &mut self.index else { return };
            let Some(parent) = parent_of(index, table, k) else { return };
            let content = table.content(k, parent);
            let hash = hashes.get(k).copied().unwrap_or_else(|| index.hash(content));
            for (g, group) in table.groups.iter().enumerate() {
                let (Some(block), Some(index)) = (group.entry(k), &mut self.index) else { continue };
                match index.insert(g, Place::Device(block), hash, content, table.prefixes.get(k).copied()) {
                    Inserted::Known => {}
                    inserted @ (Inserted::NewHash | Inserted::SharedHash) => {
                        let stored = (Tier::Device, g, parent.map(|p| p.hash), hash);
                        self.events.stored(first_event, stored, content.tokens, content.key);
                        if inserted == Inserted::SharedHash {
                            self.uncache_orphans(Place::Device(block));
                        }
                    }
                }
            }
            if let Some(index) = self.index.as_mut().filter(|_| keeps_prefixes && table.prefixes.len() == k) {
                let prefix = index.prefix(hash, content);
                table.prefixes.push(prefix);
            }
        }
    }

    /// Removes the free blocks from the index that no lookup can reach now that `place` has the same hash.
    pub(crate) fn uncache_orphans(&mut self, place: Place) {
        let orphan_of = |pool: &BlockPool| pool.index.as_ref()?.orphan_of(place, |other| pool.has_no_owner(other));
        while let Some(orphan) = orphan_of(self) {
            match orphan {
                Place::Device(block) => self.uncache(block),
                Place::Host(block) => self.uncache_host(block),
            }
        }
    }

    fn has_no_owner(&self, place: Place) -> bool {
        match place {
            Place::Device(block) => self.refs[block.index()] == 0,
            Place::Host(block) => !self.host.is_held(block),
        }
    }

    /// Checks that a query at the given length reads no block that the table has freed.
    pub(crate) fn check_window(&self, table: &BlockTable, committed: usize, len: usize) -> Result<(), TableError> {
        let lacks = |(kind, g): (&CacheGroup, &GroupTable<BlockId>)| g.holes > kind.holes(committed, self.block_size);
        match self.groups.iter().zip(&table.groups).position(lacks) {
            Some(group) => Err(TableError::BehindWindow { len, group }),
            None => Ok(()),
        }
    }

    fn release_behind_windows(&mut self, table: &mut BlockTable) {
        for g in 0..self.groups.len() {
            let holes = self.groups[g].holes(table.committed, self.block_size);
            let group = &mut table.groups[g];
            if holes > group.holes {
                let blocks: Vec<BlockId> = group.blocks.drain(..holes - group.holes).collect();
                self.counters.behind_window += blocks.len() as u64;
                let behind = GroupTable { holes: group.holes, blocks };
                group.holes = holes;
                self.release_groups(&[behind]);
            }
        }
    }

    /// Returns the partly filled last block of a group if other tables own it too.
    fn shared_partial_block(&self, table: &BlockTable, group: usize) -> Option<BlockId> {
        table.partial_block(group).filter(|block| self.refs[block.index()] > 1)
    }
}

/// Returns the prefix before the `k`th block of a table: `Some(None)` for the first block, `None` if the block before
/// it is not indexed, so that this one cannot be either. The prefix comes from the table or from a group that has the
/// block.
pub(crate) fn parent_of(index: &PrefixIndex, table: &BlockTable, k: usize) -> Option<Option<Prefix>> {
    let Some(before) = k.checked_sub(1) else { return Some(None) };
    let indexed =
        || table.groups.iter().filter(|g| g.holes == 0).find_map(|g| index.prefix_of(Place::Device(g.entry(before)?)));
    table.prefixes.get(before).copied().or_else(indexed).map(Some)
}
