//! A sequence's life after it was opened: it grows, is computed, forks, is cut back, and ends.
//!
//! Every operation is O(blocks it touches) and either succeeds or changes nothing.

use std::ops::Range;

use crate::prefix::{Inserted, Parent, PrefixIndex};
use crate::table::valid_entries;
use crate::{BlockId, BlockPool, BlockTable, CacheGroup, GroupTable, MemOp, PrefixHash, TableError};

impl BlockPool {
    /// Blocks that all these appends together would take: each entry is a table and the number of tokens to
    /// append to it.
    pub fn blocks_needed<'a>(&self, appends: impl IntoIterator<Item = (&'a BlockTable, usize)>) -> usize {
        let mut needed = 0;
        let mut shared_tails = Vec::new();
        for (table, tokens) in appends.into_iter().filter(|&(table, tokens)| tokens > 0 && self.owns(table)) {
            let entries = (table.len() + tokens).div_ceil(self.block_size) - table.num_entries();
            needed += entries * self.groups.len();
            shared_tails.extend((0..self.groups.len()).filter_map(|g| self.shared_tail(table, g)));
        }
        // Every sharer copies, but when all of them write, the last is the sole owner by then and writes in place.
        shared_tails.sort_unstable();
        for sharers in shared_tails.chunk_by(|a, b| a == b) {
            let all_write = sharers.len() == self.refs[sharers[0].index()] as usize;
            needed += sharers.len() - usize::from(all_write);
        }
        needed
    }

    /// Gives each of `tokens` a slot behind those the table has. If the last block is shared and has room, it
    /// is copied first; a sole owner writes in place. Returns the index of the first entry that is new or
    /// replaced: a mirror of the table keeps the entries before it and takes those from it on.
    pub fn append(&mut self, table: &mut BlockTable, tokens: &[u32]) -> Result<usize, TableError> {
        self.check_owner(table)?;
        let mut first_changed = table.num_entries();
        if tokens.is_empty() {
            return Ok(first_changed);
        }
        self.check_space(self.blocks_needed([(&*table, tokens.len())]))?;
        let from_slot = table.len() % self.block_size;
        for g in 0..self.groups.len() {
            if let Some(src) = self.shared_tail(table, g) {
                let dst = self.allocate()?;
                self.refs[src.index()] -= 1;
                if let Some(tail) = table.groups[g].blocks.last_mut() {
                    *tail = dst;
                }
                self.memory_ops.push_back(MemOp::Copy { src, dst });
                if self.invalid.contains(&src) {
                    self.invalid.insert(dst);
                }
                self.order_poison(dst, from_slot);
                self.counters.copied += 1;
                first_changed = table.num_entries() - 1;
            } else if let Some(tail) = table.open_tail(g) {
                // A truncated table may end within a block that is cached whole; from here on it holds something else.
                self.drop_hash(tail, from_slot, false);
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

    /// Says that the first `committed` tokens of the table have been computed. Blocks that are full of such tokens become
    /// findable, and those that fell behind a window are given back. Fewer than before says nothing new.
    ///
    /// Refuses another pool's table and tokens that have no slot.
    pub fn commit(&mut self, table: &mut BlockTable, committed: usize) -> Result<(), TableError> {
        self.check_owner(table)?;
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

    /// A second table on the same blocks, a partly filled last one included. Costs no block until one of the
    /// two appends. Refused while the table has tokens that are not committed: they would be written to a
    /// shared block.
    #[track_caller]
    pub fn fork(&mut self, table: &BlockTable) -> Result<BlockTable, TableError> {
        self.check_owner(table)?;
        if table.committed < table.len() {
            return Err(TableError::Uncommitted { committed: table.committed, len: table.len() });
        }
        for block in table.groups.iter().flat_map(GroupTable::blocks) {
            self.refs[block.index()] += 1;
        }
        Ok(table.clone_prefix(table.len()))
    }

    /// Cuts the table down to its first `len` tokens, as for drafts that were rejected. A block that the table alone owns
    /// and that is cut within loses its hash.
    ///
    /// Refuses another pool's table, more tokens than the table has, and a length whose window has been given back.
    pub fn truncate(&mut self, table: &mut BlockTable, len: usize) -> Result<(), TableError> {
        self.check_owner(table)?;
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
        table.chain.truncate(committed / self.block_size);
        table.valid = valid_entries(table.valid, keep);
        let from_slot = len % self.block_size;
        for g in 0..self.groups.len() {
            if let Some(tail) = table.open_tail(g)
                && self.refs[tail.index()] == 1
                && !self.drop_hash(tail, from_slot, false)
            {
                self.order_poison(tail, from_slot);
            }
        }
        Ok(())
    }

    /// Puts another token in the place of one that is not committed, such as a placeholder whose token has become
    /// known. The slot stays, and the memory is left alone. `None` outside of the tokens that are not committed.
    pub fn replace(&mut self, table: &mut BlockTable, position: usize, token: u32) -> Option<u32> {
        if !self.owns(table) || position < table.committed {
            return None;
        }
        table.tokens.get_mut(position).map(|place| std::mem::replace(place, token))
    }

    /// Takes the table's blocks back. Those with a hash stay findable until they are needed, the tail of the
    /// sequence first.
    ///
    /// The blocks of another pool's table go back to that pool, which counts the table among its
    /// [leaks](BlockPool::take_leaks).
    pub fn release(&mut self, mut table: BlockTable) {
        let _: Result<(), TableError> = self.try_release(&mut table);
    }

    /// As [`release`](BlockPool::release); refuses another pool's table and leaves it whole. A released table is empty.
    pub fn try_release(&mut self, table: &mut BlockTable) -> Result<(), TableError> {
        self.check_owner(table)?;
        let groups: Vec<_> = table
            .groups
            .iter_mut()
            .map(|g| std::mem::replace(g, GroupTable { holes: 0, blocks: Vec::new() }))
            .collect();
        self.release_groups(&groups);
        table.tokens.clear();
        table.chain.clear();
        table.committed = 0;
        Ok(())
    }

    /// Notes in the table where its first block with invalid contents is.
    pub(crate) fn note_invalid(&self, table: &mut BlockTable) {
        if self.invalid.is_empty() {
            return;
        }
        let first = |g: &GroupTable<BlockId>| Some(g.holes + g.blocks.iter().position(|b| self.invalid.contains(b))?);
        if let Some(first) = table.groups.iter().filter_map(first).min() {
            table.valid = table.valid.min(first);
        }
    }

    /// Puts the blocks of `full`, which are committed, into the prefix index, up to the first with invalid contents.
    /// `names` are the names of the table's leading blocks, as far as they are at hand.
    pub(crate) fn index_full(&mut self, table: &mut BlockTable, full: Range<usize>, names: &[PrefixHash]) {
        let chained = self.groups.iter().all(|g| *g != CacheGroup::Full);
        let mark = self.events.mark();
        for k in full.start..full.end.min(table.valid) {
            let Some(index) = &mut self.index else { return };
            let Some(parent) = prefix_before(index, table, k) else { return };
            let content = table.content(k, parent);
            let name = names.get(k).copied().unwrap_or_else(|| index.name(content));
            for (g, group) in table.groups.iter().enumerate() {
                let (Some(block), Some(index)) = (group.entry(k), &mut self.index) else { continue };
                match index.insert(g, block, name, content, table.chain.get(k).copied()) {
                    Inserted::Known => {}
                    Inserted::FirstOfName => {
                        self.events.stored(mark, g, parent.map(|p| p.hash), name, content.tokens, content.key);
                    }
                    Inserted::BesideOthers => self.uncache_orphans(block),
                }
            }
            if let Some(index) = self.index.as_mut().filter(|_| chained && table.chain.len() == k) {
                let prefix = index.prefix(name, content);
                table.chain.push(prefix);
            }
        }
    }

    /// Takes free blocks out of the index that no lookup reaches now that `block` stands under their name.
    fn uncache_orphans(&mut self, block: BlockId) {
        while let Some(orphan) = self.index.as_ref().and_then(|index| index.orphan_of(block, &self.refs)) {
            self.uncache(orphan);
        }
    }

    /// Refuses a length at which a query would read a block that the table does not have any more.
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
                let left = group.blocks.drain(..holes - group.holes).collect::<Vec<_>>();
                self.counters.left_window += left.len() as u64;
                let behind = GroupTable { holes: group.holes, blocks: left };
                group.holes = holes;
                self.release_groups(&[behind]);
            }
        }
    }

    /// The block of a group that a next token would go to, if others own it as well.
    fn shared_tail(&self, table: &BlockTable, group: usize) -> Option<BlockId> {
        table.open_tail(group).filter(|tail| self.refs[tail.index()] > 1)
    }
}

/// The prefix before the `k`th block of a table: `Some(None)` for the first block, `None` if the block before it is not
/// indexed, so that this one must not be either. A full group holds the prefix, else the table remembers it.
pub(crate) fn prefix_before(index: &PrefixIndex, table: &BlockTable, k: usize) -> Option<Option<Parent>> {
    let Some(before) = k.checked_sub(1) else { return Some(None) };
    let remembered = table.chain.get(before).copied();
    let held = || table.groups.iter().filter(|g| g.holes == 0).find_map(|g| index.as_parent(g.entry(before)?));
    remembered.or_else(held).map(Some)
}
