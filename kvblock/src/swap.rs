//! The host tier: sequences that leave the pool and come back without being computed again.
//!
//! All tables of one request go together: a block that several of them share is copied once, out and in, and shared
//! again afterwards. What happens to a block that leaves:
//!
//! | block | device | host |
//! |---|---|---|
//! | of these tables alone, without a hash | free, poisoned after the copy | a copy |
//! | of these tables alone, cached | free and still findable, until it is evicted | a copy |
//! | shared with others, or pinned | stays with them | a copy |
//! | of slots that are not committed | free | nothing: those tokens are cut off |
//!
//! Coming back, a block that the prefix cache still holds is shared instead of copied; the rest are copied to new
//! blocks and indexed again. Orders go into the pool's one list, so a block that is poisoned or reused after it was
//! swapped out is so after the copy. Host blocks are never poisoned: only a swap-in reads one, all of it, and only
//! after a swap-out wrote all of it.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::sync::Arc;

use crate::key::PrefixKey;
use crate::leak::{Home, Lost};
use crate::prefix::Parent;
use crate::table::valid_entries;
use crate::{
    BlockId, BlockPool, BlockTable, GroupTable, HostBlockId, HostGauges, MemOp, NoSpace, PrefixHash, TableError,
};

/// The tables of a request while their contents are in host memory.
#[derive(Debug)]
#[must_use = "dropped, its host blocks are leaked; give it to BlockPool::swap_in or BlockPool::discard"]
pub struct Swapped {
    tables: Vec<SwappedTable>,
    /// Every host block of the tables, once.
    blocks: Vec<HostBlockId>,
    home: Home,
    opened: &'static Location<'static>,
}

#[derive(Debug)]
struct SwappedTable {
    groups: Vec<GroupTable<HostBlockId>>,
    tokens: Vec<u32>,
    /// See [`BlockTable::valid`].
    valid: usize,
    key: Option<Arc<PrefixKey>>,
    chain: Vec<Parent>,
    /// The names of its leading full blocks, as far as the pool knew them.
    names: Vec<PrefixHash>,
}

impl Swapped {
    /// The host blocks, each once.
    pub fn blocks(&self) -> &[HostBlockId] {
        &self.blocks
    }

    /// The tokens of each table, all of them committed, in the order of the tables.
    pub fn tokens(&self) -> impl Iterator<Item = &[u32]> {
        self.tables.iter().map(|t| &t.tokens[..])
    }
}

impl Drop for Swapped {
    fn drop(&mut self) {
        if !self.blocks.is_empty() {
            self.home.report(Lost::Swapped { blocks: std::mem::take(&mut self.blocks), opened: self.opened });
        }
    }
}

/// Where each host block of a request comes back to: a cached block, or a new one.
struct Return {
    found: BTreeMap<HostBlockId, Option<BlockId>>,
    wanted: usize,
}

impl BlockPool {
    /// Numbers of host blocks in use and free.
    pub fn host_gauges(&self) -> HostGauges {
        let free = self.host.free.len();
        HostGauges { in_use: self.host.total - free, free }
    }

    /// Number of host blocks these tables need in total, given how many leading tokens of each are committed.
    pub fn host_blocks_needed<'a>(&self, tables: impl IntoIterator<Item = (&'a BlockTable, usize)>) -> usize {
        self.leaving(tables).len()
    }

    /// Moves all these tables to host memory and orders the copies. On success `tables` is empty; if the host blocks
    /// cannot be had, nothing changes. Tokens that are not committed are cut off: their slots hold nothing yet.
    #[track_caller]
    pub fn swap_out(&mut self, tables: &mut Vec<BlockTable>) -> Result<Swapped, TableError> {
        tables.iter().try_for_each(|table| self.check_owner(table))?;
        let mut copies = BTreeMap::new();
        let leaving = self.leaving(tables.iter().map(|t| (t, t.committed)));
        let no_space = NoSpace { wanted: leaving.len(), free: self.host.free.len() };
        if no_space.wanted > no_space.free {
            return Err(TableError::NoHostSpace(no_space));
        }
        for src in leaving {
            let dst = self.host.allocate().ok_or(TableError::NoHostSpace(no_space))?;
            self.memory_ops.push_back(MemOp::SwapOut { src, dst });
            copies.insert(src, dst);
        }
        self.counters.swapped_out += copies.len() as u64;
        let mut swapped = Swapped {
            tables: Vec::new(),
            blocks: copies.values().copied().collect(),
            home: self.home.clone(),
            opened: Location::caller(),
        };
        for mut table in tables.drain(..) {
            self.note_invalid(&mut table);
            let moved = |g: &GroupTable<BlockId>| GroupTable {
                holes: g.holes,
                blocks: g.blocks.iter().filter_map(|b| copies.get(b).copied()).collect(),
            };
            let groups = table.groups.iter().map(moved).collect();
            let names = self.names(&table);
            let mut tokens = std::mem::take(&mut table.tokens);
            tokens.truncate(table.committed);
            let (key, chain) = (table.key.take(), std::mem::take(&mut table.chain));
            let valid = valid_entries(table.valid, tokens.len().div_ceil(self.block_size));
            swapped.tables.push(SwappedTable { groups, tokens, valid, key, chain, names });
            self.release(table);
        }
        Ok(swapped)
    }

    /// Blocks that would leave the free list if this came back now.
    pub fn blocks_to_swap_in(&self, swapped: &Swapped) -> usize {
        self.find_return(swapped).wanted
    }

    /// Brings the tables back, in their order, and orders the copies. On success `swapped` is empty; if that and
    /// `keep_free` more blocks cannot be had, nothing changes.
    #[track_caller]
    pub fn swap_in(&mut self, swapped: &mut Swapped, keep_free: usize) -> Result<Vec<BlockTable>, TableError> {
        if swapped.home != self.home {
            return Err(TableError::ForeignTable);
        }
        let Return { mut found, wanted } = self.find_return(swapped);
        self.check_space(wanted + keep_free)?;
        // One owner for each while blocks are taken, so that none that was found is evicted.
        for &block in found.values().flatten() {
            self.share(block);
            self.counters.swap_in_hits += 1;
        }
        for (&src, place) in found.iter_mut().filter(|(_, place)| place.is_none()) {
            let dst = self.allocate()?;
            self.memory_ops.push_back(MemOp::SwapIn { src, dst });
            self.counters.swapped_in += 1;
            *place = Some(dst);
        }
        let mut tables = Vec::with_capacity(swapped.tables.len());
        for SwappedTable { groups, tokens, valid, key, chain, names } in swapped.tables.drain(..) {
            let is_invalid = |b: &HostBlockId| self.host.invalid.contains(b);
            let first = |g: &GroupTable<HostBlockId>| Some(g.holes + g.blocks.iter().position(is_invalid)?);
            let valid = groups.iter().filter_map(first).min().unwrap_or(usize::MAX).min(valid);
            let place = |b: &HostBlockId| found.get(b).copied().flatten();
            let back = |g: &GroupTable<HostBlockId>| GroupTable {
                holes: g.holes,
                blocks: g.blocks.iter().filter_map(place).collect(),
            };
            let (block_size, home, opened) = (self.block_size, self.home.clone(), Location::caller());
            let committed = tokens.len();
            let groups = groups.iter().map(back).collect();
            let mut table = BlockTable { groups, tokens, committed, valid, key, chain, block_size, home, opened };
            table.groups.iter().flat_map(GroupTable::blocks).for_each(|block| self.share(*block));
            self.index_full(&mut table, 0..committed / block_size, &names);
            tables.push(table);
        }
        for block in found.values().flatten() {
            self.refs[block.index()] -= 1;
        }
        swapped.blocks.drain(..).for_each(|block| self.host.free_block(block));
        Ok(tables)
    }

    /// Marks the contents of a host block as invalid, because a copy into it failed. Tables that come back from it hold
    /// the invalid contents, but neither that block nor any block after it can enter the prefix index. See
    /// [`forget_contents`](BlockPool::forget_contents).
    ///
    /// Refuses a host block that the pool does not have.
    pub fn forget_host_contents(&mut self, block: HostBlockId) -> Result<(), TableError> {
        if block.index() >= self.host.total {
            return Err(TableError::NoSuchBlock { id: block.0, blocks: self.host.total });
        }
        if !self.host.free.contains(BlockId(block.0)) {
            self.host.invalid.insert(block);
        }
        Ok(())
    }

    /// Gives the host blocks of a request that has ended back.
    pub fn discard(&mut self, mut swapped: Swapped) {
        // Another pool's goes home by its drop.
        if swapped.home == self.home {
            swapped.blocks.drain(..).for_each(|block| self.host.free_block(block));
        }
    }

    /// The blocks that hold the given number of leading tokens of these tables, each once.
    fn leaving<'a>(&self, tables: impl IntoIterator<Item = (&'a BlockTable, usize)>) -> BTreeSet<BlockId> {
        let blocks = |(table, tokens): (&'a BlockTable, usize)| {
            let entries = tokens.div_ceil(self.block_size);
            table.groups.iter().flat_map(move |g| (g.holes..entries).filter_map(|k| g.entry(k)))
        };
        tables.into_iter().flat_map(blocks).collect()
    }

    /// The names of a table's leading full blocks, up to the first that the index does not have.
    fn names(&self, table: &BlockTable) -> Vec<PrefixHash> {
        let Some(index) = &self.index else { return Vec::new() };
        let indexed = |k: usize| table.groups.iter().find_map(|g| Some(index.name_of(g.entry(k)?)?.1));
        let name = |k: usize| table.chain.get(k).map(|prefix| prefix.hash).or_else(|| indexed(k));
        (0..table.committed / self.block_size).map_while(name).collect()
    }

    fn find_return(&self, swapped: &Swapped) -> Return {
        let mut found: BTreeMap<HostBlockId, Option<BlockId>> = swapped.blocks.iter().map(|b| (*b, None)).collect();
        for table in &swapped.tables {
            let hit = self.walk(&table.tokens, table.key.as_ref(), &table.names, &table.chain).0;
            for (k, g) in (0..hit.len).flat_map(|k| (0..self.groups.len()).map(move |g| (k, g))) {
                if let Some(host) = table.groups[g].entry(k) {
                    found.insert(host, hit.blocks[k * self.groups.len() + g]);
                }
            }
        }
        let hits: BTreeSet<BlockId> = found.values().flatten().copied().collect();
        let repinned = hits.iter().filter(|b| self.free.contains(**b)).count();
        let wanted = repinned + found.values().filter(|place| place.is_none()).count();
        Return { found, wanted }
    }
}
