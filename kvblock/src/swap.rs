//! Swapping: moves sequences out to host memory and back, so that they need not be computed again.
//!
//! All tables of one request are swapped together. A block that several of them share is copied once in each direction,
//! and shared again afterwards. What happens to a block that is swapped out:
//!
//! | block | device | host |
//! |---|---|---|
//! | owned only by these tables, not cached | freed, poisoned after the copy | a copy |
//! | owned only by these tables, cached | freed, findable until it is evicted | a copy |
//! | shared with other tables | stays with its other owners | a copy |
//! | has only slots that are not committed | freed | nothing: those tokens are cut off |
//!
//! On the way back, a block that is still in the prefix cache is shared instead of copied. The others are copied to new
//! blocks and indexed again. The copies are part of the pool's one list of memory operations, so a block is poisoned or
//! reused only after it was copied out. Host blocks are never poisoned: a swap-in reads a whole host block, and only
//! after a swap-out wrote all of it. Free host blocks may cache prefixes (`host_cache`), which give way.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;

use crate::ids::Place;
use crate::leak::{Leaked, PoolRef};
use crate::table::num_valid_of;
use crate::{BlockId, BlockPool, BlockTable, GroupTable, HostBlockId, MemOp, NoSpace, PrefixHash, TableError};

/// The tables of a request while their contents are in host memory.
#[derive(Debug)]
#[must_use = "dropped, its host blocks are leaked; give it to BlockPool::swap_in or BlockPool::discard"]
pub struct Swapped {
    tables: Vec<SwappedTable>,
    /// All host blocks of the tables, each once.
    blocks: Vec<HostBlockId>,
    pool: PoolRef,
    opened: &'static Location<'static>,
}

#[derive(Debug)]
struct SwappedTable {
    /// The table, without blocks.
    table: BlockTable,
    groups: Vec<GroupTable<HostBlockId>>,
    /// Hashes of its leading full blocks, as far as they were indexed.
    hashes: Vec<PrefixHash>,
}

impl Swapped {
    /// The host blocks, each once.
    pub fn blocks(&self) -> &[HostBlockId] {
        &self.blocks
    }

    /// The tokens of each table, in the order of the tables. All of them are committed.
    pub fn tokens(&self) -> impl Iterator<Item = &[u32]> {
        self.tables.iter().map(|t| t.table.tokens())
    }
}

impl Drop for Swapped {
    fn drop(&mut self) {
        if !self.blocks.is_empty() {
            self.pool.report(Leaked::Swapped { blocks: std::mem::take(&mut self.blocks), opened: self.opened });
        }
    }
}

/// The destinations of a request's host blocks when it is swapped in.
struct SwapInPlan {
    /// The cached block with the contents of each host block; `None` if they have to be copied to a new one.
    targets: BTreeMap<HostBlockId, Option<BlockId>>,
    /// Number of blocks that leave the free list.
    wanted: usize,
}

impl BlockPool {
    /// Returns the number of host blocks these tables need in total, given how many leading tokens of each are
    /// committed.
    pub fn host_blocks_needed<'a>(&self, tables: impl IntoIterator<Item = (&'a BlockTable, usize)>) -> usize {
        self.blocks_of(tables).len()
    }

    /// Swaps all these tables out to host memory. On success `tables` is empty, and the copies are among the memory
    /// operations. If there are too few free host blocks, nothing changes. Tokens that are not committed are cut off,
    /// because their slots hold nothing yet.
    #[track_caller]
    pub fn swap_out(&mut self, tables: &mut Vec<BlockTable>) -> Result<Swapped, TableError> {
        tables.iter().try_for_each(|table| self.check_pool(table))?;
        let blocks = self.blocks_of(tables.iter().map(|t| (t, t.committed)));
        let no_space = NoSpace { wanted: blocks.len(), free: self.host.free.len() };
        if no_space.wanted > no_space.free {
            return Err(TableError::NoHostSpace(no_space));
        }
        let mut copies = BTreeMap::new();
        for src in blocks {
            let dst = self.allocate_host().ok_or(TableError::NoHostSpace(no_space))?;
            self.memory_ops.push_back(MemOp::SwapOut { src, dst });
            copies.insert(src, dst);
        }
        self.counters.swapped_out += copies.len() as u64;
        let mut swapped = Swapped {
            tables: Vec::new(),
            blocks: copies.values().copied().collect(),
            pool: self.pool.clone(),
            opened: Location::caller(),
        };
        for mut table in tables.drain(..) {
            self.note_invalid(&mut table);
            let hashes = self.leading_hashes(&table);
            let groups = table.groups.iter().map(|g| g.filter_map(|b| copies.get(b).copied())).collect();
            self.release_groups(&std::mem::take(&mut table.groups));
            table.tokens.truncate(table.committed);
            table.num_valid = num_valid_of(table.num_valid, table.num_entries());
            swapped.tables.push(SwappedTable { table, groups, hashes });
        }
        Ok(swapped)
    }

    /// Returns the number of blocks that would leave the free list if this were swapped in now.
    pub fn blocks_to_swap_in(&self, swapped: &Swapped) -> usize {
        self.plan_swap_in(swapped).wanted
    }

    /// Swaps the tables in, in their order, and orders the copies. On success `swapped` is empty. If the blocks needed
    /// and `keep_free` more are not available, nothing changes.
    #[track_caller]
    pub fn swap_in(&mut self, swapped: &mut Swapped, keep_free: usize) -> Result<Vec<BlockTable>, TableError> {
        if swapped.pool != self.pool {
            return Err(TableError::ForeignTable);
        }
        let SwapInPlan { mut targets, wanted } = self.plan_swap_in(swapped);
        self.check_space(wanted.saturating_add(keep_free))?;
        // References of this call keep the cached blocks from being evicted by the allocations below.
        for &block in targets.values().flatten() {
            self.share(block);
            self.counters.swap_in_hits += 1;
        }
        for (&src, target) in targets.iter_mut().filter(|(_, target)| target.is_none()) {
            let dst = self.allocate()?;
            self.memory_ops.push_back(MemOp::SwapIn { src, dst });
            self.counters.swapped_in += 1;
            *target = Some(dst);
        }
        let mut tables = Vec::with_capacity(swapped.tables.len());
        for SwappedTable { mut table, groups, hashes } in swapped.tables.drain(..) {
            let invalid = groups.iter().filter_map(|g| g.position(|b| self.host.invalid.contains(b))).min();
            table.num_valid = table.num_valid.min(invalid.unwrap_or(usize::MAX));
            table.groups = groups.iter().map(|g| g.filter_map(|b| targets.get(b).copied().flatten())).collect();
            table.opened = Location::caller();
            table.groups.iter().flat_map(GroupTable::blocks).for_each(|block| self.share(*block));
            let full = 0..table.committed / self.block_size;
            self.index_full(&mut table, full, &hashes);
            tables.push(table);
        }
        for block in targets.values().flatten() {
            self.refs[block.index()] -= 1;
        }
        swapped.blocks.drain(..).for_each(|block| self.host.free_block(block));
        Ok(tables)
    }

    /// Returns whether a swapped request holds a host block with invalid contents; see
    /// [`forget_host_contents`](BlockPool::forget_host_contents).
    pub fn holds_invalid_on_host(&self, swapped: &Swapped) -> bool {
        swapped.blocks.iter().any(|block| self.host.invalid.contains(block))
    }

    /// Frees the host blocks of a request that has ended.
    pub fn discard(&mut self, mut swapped: Swapped) {
        // Dropping a request of another pool reports its blocks to that pool.
        if swapped.pool == self.pool {
            swapped.blocks.drain(..).for_each(|block| self.host.free_block(block));
        }
    }

    /// The blocks that hold the given number of leading tokens of these tables, each once.
    fn blocks_of<'a>(&self, tables: impl IntoIterator<Item = (&'a BlockTable, usize)>) -> BTreeSet<BlockId> {
        let blocks = |(table, tokens): (&'a BlockTable, usize)| {
            let entries = tokens.div_ceil(self.block_size);
            table.groups.iter().flat_map(move |g| (g.holes..entries).filter_map(|k| g.entry(k)))
        };
        tables.into_iter().flat_map(blocks).collect()
    }

    /// The hashes of a table's leading full blocks, up to the first that is not indexed.
    fn leading_hashes(&self, table: &BlockTable) -> Vec<PrefixHash> {
        let Some(index) = &self.index else { return Vec::new() };
        let indexed = |k: usize| table.groups.iter().find_map(|g| Some(index.hash_of(Place::Device(g.entry(k)?))?.1));
        let hash = |k: usize| table.prefixes.get(k).map(|prefix| prefix.hash).or_else(|| indexed(k));
        (0..table.committed / self.block_size).map_while(hash).collect()
    }

    fn plan_swap_in(&self, swapped: &Swapped) -> SwapInPlan {
        let mut targets: BTreeMap<HostBlockId, Option<BlockId>> = swapped.blocks.iter().map(|b| (*b, None)).collect();
        for SwappedTable { table, groups, hashes } in &swapped.tables {
            let hit = self.walk(&table.tokens, table.key.as_ref(), hashes, &table.prefixes, false).0;
            for (k, g) in (0..hit.len).flat_map(|k| (0..groups.len()).map(move |g| (k, g))) {
                if let (Some(host), Some(Place::Device(block))) = (groups[g].entry(k), hit.blocks[k * groups.len() + g])
                {
                    targets.insert(host, Some(block));
                }
            }
        }
        let hits: BTreeSet<BlockId> = targets.values().flatten().copied().collect();
        let free_hits = hits.iter().filter(|b| self.free.contains(**b)).count();
        let wanted = free_hits + targets.values().filter(|target| target.is_none()).count();
        SwapInPlan { targets, wanted }
    }
}
