//! The block pool: all blocks, their reference counts, allocation and freeing.
//!
//! A block is free or referenced, never both. The free list contains blocks that are not cached first, then cached
//! ones, least recently used first. Blocks are allocated from its front. Allocating and freeing a block is O(1) and
//! touches its links, its reference count, and, if it is cached, its entry and bucket.
//!
//! The pool accesses no memory. It orders operations on the memory as a list of [`MemOp`], to be drained and applied
//! before the next write to any block.

use std::collections::{BTreeSet, VecDeque};
use std::sync::mpsc::Receiver;

use crate::events::EventLog;
use crate::free_list::FreeList;
use crate::hash::PrefixHasher;
use crate::host_pool::HostPool;
use crate::ids::Place;
use crate::leak::{Leak, Leaked, PoolRef};
use crate::prefix::PrefixIndex;
use crate::{
    BlockEvent, BlockId, BlockTable, CacheGroup, Counters, Gauges, GroupTable, HostBlockId, NoSpace, PoolConfig,
    PoolError, PrefixHash, PrefixStats, TableError,
};

/// An operation on the memory of the blocks. Apply all of them in order, before writing to the slots of the appends
/// that caused them. New kinds may be added: an executor must fail on an unknown kind instead of skipping it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum MemOp {
    /// Copy all slots of one block to another.
    Copy {
        /// Read.
        src: BlockId,
        /// Written.
        dst: BlockId,
    },
    /// Fill the slots from `from_slot` to the end of the block with NaN: nothing may read them before they are written
    /// again.
    Poison {
        /// The block.
        block: BlockId,
        /// First slot to fill.
        from_slot: usize,
    },
    /// Copy all slots of a block to host memory.
    SwapOut {
        /// Read.
        src: BlockId,
        /// Written.
        dst: HostBlockId,
    },
    /// Copy all slots of a block back from host memory.
    SwapIn {
        /// Read.
        src: HostBlockId,
        /// Written.
        dst: BlockId,
    },
}

impl MemOp {
    /// Returns the block whose contents are unknown if the operation fails; see [`BlockPool::forget_contents`].
    pub fn destination(&self) -> Option<BlockId> {
        match self.copy()? {
            (_, Place::Device(dst)) => Some(dst),
            (_, Place::Host(_)) => None,
        }
    }

    /// Returns the host block whose contents are unknown if the operation fails; see
    /// [`BlockPool::forget_host_contents`].
    pub fn host_destination(&self) -> Option<HostBlockId> {
        match self.copy()? {
            (_, Place::Host(dst)) => Some(dst),
            (_, Place::Device(_)) => None,
        }
    }

    /// Returns the blocks between which the operation copies all slots.
    pub(crate) fn copy(&self) -> Option<(Place, Place)> {
        match *self {
            MemOp::Copy { src, dst } => Some((Place::Device(src), Place::Device(dst))),
            MemOp::SwapOut { src, dst } => Some((Place::Device(src), Place::Host(dst))),
            MemOp::SwapIn { src, dst } => Some((Place::Host(src), Place::Device(dst))),
            MemOp::Poison { .. } => None,
        }
    }
}

/// Formats the operation in words, such as "copy block 1 to block 2".
impl std::fmt::Display for MemOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MemOp::Copy { src, dst } => write!(f, "copy {src} to {dst}"),
            MemOp::Poison { block, from_slot } => write!(f, "poison {block} from slot {from_slot}"),
            MemOp::SwapOut { src, dst } => write!(f, "swap out {src} to {dst}"),
            MemOp::SwapIn { src, dst } => write!(f, "swap in {src} to {dst}"),
        }
    }
}

/// The allocator of all blocks of a paged KV cache. See the [crate documentation](crate).
pub struct BlockPool {
    pub(crate) block_size: usize,
    pub(crate) groups: Box<[CacheGroup]>,
    /// Reference count of each block.
    pub(crate) refs: Box<[u32]>,
    pub(crate) free: FreeList<BlockId>,
    /// Number of cached blocks on the free list.
    cached_free: usize,
    /// Blocks in use with wrong contents, because a copy into them failed. A table that holds one is not indexed from
    /// there on. Empty unless a copy failed.
    pub(crate) invalid: BTreeSet<BlockId>,
    /// `None` with prefix caching off.
    pub(crate) index: Option<PrefixIndex>,
    pub(crate) host: HostPool,
    pub(crate) stats: PrefixStats,
    pub(crate) counters: Counters,
    pub(crate) memory_ops: VecDeque<MemOp>,
    pub(crate) events: EventLog,
    pub(crate) pool: PoolRef,
    leaked: Receiver<Leaked>,
    poison: bool,
}

impl BlockPool {
    /// Creates a pool with all blocks free.
    pub fn new(config: PoolConfig) -> Result<BlockPool, PoolError> {
        let (num_blocks, host_blocks) = config.check()?;
        let index = config.prefix_caching.then(|| {
            let hasher = PrefixHasher::new(config.hash_seed, config.hash_bits);
            let host_blocks = if config.host_caching { config.host_blocks } else { 0 };
            PrefixIndex::new(hasher, (config.num_blocks, host_blocks), config.block_size, config.groups.len())
        });
        let (pool, leaked) = PoolRef::new();
        Ok(BlockPool {
            block_size: config.block_size,
            groups: config.groups.into(),
            refs: vec![0; config.num_blocks].into(),
            free: FreeList::full(num_blocks),
            cached_free: 0,
            invalid: BTreeSet::new(),
            index,
            host: HostPool::new(host_blocks, config.prefix_caching && config.host_caching),
            stats: PrefixStats::default(),
            counters: Counters::default(),
            memory_ops: VecDeque::new(),
            events: EventLog::new(config.events),
            pool,
            leaked,
            poison: config.poison,
        })
    }

    /// Number of tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.refs.len()
    }

    /// The cache groups, in the order of [`BlockTable::groups`].
    pub fn groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// Number of blocks that can be allocated now, those included that have to be evicted.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Numbers of blocks in use, cached and free.
    pub fn gauges(&self) -> Gauges {
        Gauges {
            in_use: self.num_blocks() - self.free.len(),
            cached: self.cached_free,
            free: self.free.len() - self.cached_free,
        }
    }

    /// Hits and misses of the prefix cache since the pool was created.
    pub fn stats(&self) -> &PrefixStats {
        &self.stats
    }

    /// Counts of block operations since the pool was created.
    pub fn counters(&self) -> Counters {
        Counters { hashed: self.index.as_ref().map_or(0, PrefixIndex::num_hashed), ..self.counters }
    }

    /// Size of the pool's metadata in bytes, all of it allocated at the start: at most 96 + 4 × block_size per block, and as
    /// much per host block that can cache.
    pub fn metadata_bytes(&self) -> usize {
        self.free.bytes() + size_of_val(&*self.refs) + self.index.as_ref().map_or(0, PrefixIndex::bytes)
    }

    /// The seed of the prefix hash's key, configured or random; `None` if prefix caching is off.
    pub fn hash_seed(&self) -> Option<u64> {
        self.index.as_ref().map(PrefixIndex::seed)
    }

    /// Reference count of a block.
    pub fn references(&self, block: BlockId) -> u32 {
        self.refs.get(block.index()).copied().unwrap_or(0)
    }

    /// Returns whether the block is in the prefix index.
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.index.as_ref().is_some_and(|index| index.contains(Place::Device(block)))
    }

    /// Returns the cache group of a cached block and the hash of the prefix that it ends.
    pub fn prefix_of(&self, block: BlockId) -> Option<(usize, PrefixHash)> {
        self.index.as_ref()?.hash_of(Place::Device(block))
    }

    /// The free blocks, in the order in which they will be allocated.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.free.iter()
    }

    /// The memory operations that have not been drained, in order.
    pub fn memory_ops(&self) -> impl Iterator<Item = MemOp> + '_ {
        self.memory_ops.iter().copied()
    }

    /// Drains the memory operations, in order. Every one has to be applied. Operations that the iterator has not
    /// reached when it is dropped remain for the next call.
    pub fn drain_memory_ops(&mut self) -> impl Iterator<Item = MemOp> + '_ {
        std::iter::from_fn(|| self.memory_ops.pop_front())
    }

    /// Drains the events since the last call, in order. Empty unless [`PoolConfig::events`] is set. Events that the
    /// iterator has not reached when it is dropped are lost.
    pub fn drain_events(&mut self) -> impl Iterator<Item = BlockEvent> + '_ {
        self.events.drain()
    }

    /// Returns the events that announce the prefixes of a cache group that a lookup can reach from the start of a
    /// sequence, parents first, in each tier: what an observer knows that has followed the events. For one that missed some. Takes a
    /// pass over the pool.
    pub fn cached_prefixes(&self, group: usize) -> Vec<BlockEvent> {
        let has_holes = self.groups.get(group).is_some_and(|kind| *kind != CacheGroup::Full);
        let reachable = self.index.as_ref().map_or(Vec::new(), |index| index.reachable(group, has_holes));
        let stored = reachable.into_iter().map(|found| BlockEvent::Stored {
            tier: found.tier,
            group,
            parent: found.parent,
            hashes: vec![found.hash],
            tokens: found.tokens.to_vec(),
            key: found.key.cloned(),
        });
        stored.collect()
    }

    /// Returns whether this pool opened the table.
    pub fn owns(&self, table: &BlockTable) -> bool {
        self.pool == table.pool
    }

    /// Empties the prefix cache, in both tiers. Returns `false` and does nothing while a block of either tier is in use: the contents
    /// of a table, or of a swapped sequence, could enter the index again.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.reclaim_leaks();
        if self.gauges().in_use > 0 || self.host_gauges().in_use > 0 {
            return false;
        }
        let Some(index) = &mut self.index else { return true };
        let blocks = (0..self.refs.len() as u32).map(BlockId);
        let cached: Vec<BlockId> = blocks.filter(|b| index.remove(Place::Device(*b)).is_some()).collect();
        for host in (0..self.host.num_blocks as u32).map(HostBlockId) {
            index.remove(Place::Host(host));
        }
        self.host.num_cached = 0;
        index.forget_evicted();
        for block in cached {
            self.order_poison(block, 0);
        }
        self.cached_free = 0;
        self.events.push(BlockEvent::Cleared);
        true
    }

    /// Marks the contents of a block as invalid, because a copy into it failed. The block leaves the prefix index.
    ///
    /// Its owners keep it, but neither this block nor any block after it in their tables can enter the index, because
    /// their contents are computed from invalid ones. To compute those tokens again, an owner truncates its table to
    /// before the block and appends them anew. Call this before committing anything that was computed from the block.
    ///
    /// The same holds for the blocks to which operations that are not drained copy the contents. Operations that were
    /// drained after the failed one have to be reported by the caller.
    ///
    /// Fails if the pool has no such block.
    pub fn forget_contents(&mut self, block: BlockId) -> Result<(), TableError> {
        let blocks = self.num_blocks();
        if block.index() >= blocks {
            return Err(TableError::NoSuchBlock { id: block.0, blocks });
        }
        self.forget(Place::Device(block));
        Ok(())
    }

    /// Marks the contents of a host block as invalid, because a copy into it failed. It caches nothing any more. Tables
    /// that are swapped in from it hold the invalid contents, but neither that block nor any block after it can enter the
    /// prefix index. See [`forget_contents`](BlockPool::forget_contents).
    ///
    /// Fails if the pool has no such host block.
    pub fn forget_host_contents(&mut self, block: HostBlockId) -> Result<(), TableError> {
        let blocks = self.host.num_blocks;
        if block.index() >= blocks {
            return Err(TableError::NoSuchBlock { id: block.0, blocks });
        }
        self.forget(Place::Host(block));
        Ok(())
    }

    /// Marks a block as invalid, and those to which operations that are not drained will copy its contents.
    fn forget(&mut self, place: Place) {
        let mut invalid = BTreeSet::from([place]);
        for (from, to) in self.memory_ops.iter().filter_map(MemOp::copy) {
            if invalid.contains(&from) {
                invalid.insert(to)
            } else {
                invalid.remove(&to)
            };
        }
        invalid.insert(place);
        for place in invalid {
            match place {
                Place::Device(block) if self.refs[block.index()] == 0 => self.uncache(block),
                Place::Device(block) => {
                    if !self.drop_hash(block, 0, false) {
                        self.order_poison(block, 0);
                    }
                    self.invalid.insert(block);
                }
                Place::Host(block) if self.host.is_held(block) => drop(self.host.invalid.insert(block)),
                Place::Host(block) => self.uncache_host(block),
            }
        }
    }

    /// Returns whether a table holds a block with invalid contents; see
    /// [`forget_contents`](BlockPool::forget_contents).
    pub fn holds_invalid(&self, table: &BlockTable) -> bool {
        self.first_invalid(table).is_some()
    }

    /// Removes a free block from the prefix index, if it is cached, and moves it to the front of the free list.
    pub(crate) fn uncache(&mut self, block: BlockId) {
        if self.drop_hash(block, 0, false) {
            self.cached_free -= 1;
            self.free.remove(block);
            self.free.push_front(block);
        }
    }

    /// Fails for a table of another pool, whose block ids are meaningless here.
    pub(crate) fn check_pool(&self, table: &BlockTable) -> Result<(), TableError> {
        if self.owns(table) { Ok(()) } else { Err(TableError::ForeignTable) }
    }

    /// Fails if fewer than `wanted` blocks are free.
    pub(crate) fn check_space(&self, wanted: usize) -> Result<(), NoSpace> {
        let free = self.free.len();
        if wanted > free { Err(NoSpace { wanted, free }) } else { Ok(()) }
    }

    /// Takes the front block off the free list, evicting the prefix that it caches, and counts one reference. The
    /// prefix goes to host memory if that can cache it.
    pub(crate) fn allocate(&mut self) -> Result<BlockId, NoSpace> {
        let block = self.free.pop_front().ok_or(NoSpace { wanted: 1, free: 0 })?;
        self.offload(block);
        if self.drop_hash(block, 0, true) {
            self.cached_free -= 1;
            self.counters.evicted += 1;
        }
        self.refs[block.index()] = 1;
        self.counters.allocated += 1;
        self.count_peak();
        Ok(block)
    }

    /// Adds a reference to a block that is in use, or that is cached and free.
    pub(crate) fn share(&mut self, block: BlockId) {
        if self.free.remove(block) {
            self.cached_free -= 1;
        }
        self.refs[block.index()] += 1;
        self.count_peak();
    }

    /// Drops one reference of every block of these tables. Cached blocks without references remain findable until
    /// reused.
    pub(crate) fn release_groups(&mut self, groups: &[GroupTable<BlockId>]) {
        let entries = groups.iter().map(GroupTable::num_entries).max().unwrap_or(0);
        let first = groups.iter().map(GroupTable::holes).min().unwrap_or(0);
        let by_position = || (first..entries).flat_map(|k| groups.iter().filter_map(move |g| g.entry(k)));
        for block in by_position() {
            self.refs[block.index()] -= 1;
            if self.refs[block.index()] == 0 && !self.is_cached(block) {
                self.invalid.remove(&block);
                self.order_poison(block, 0);
                self.free.push_front(block);
                self.counters.freed += 1;
            }
        }
        // The end of a sequence is useless without its beginning, so it is evicted first.
        for block in by_position().rev() {
            if self.refs[block.index()] == 0 && self.is_cached(block) {
                self.cached_free += 1;
                self.free.push_back(block);
                self.counters.freed += 1;
            }
        }
    }

    /// Removes the block from the prefix index and poisons its slots from `from_slot` on. Returns whether it was
    /// cached.
    pub(crate) fn drop_hash(&mut self, block: BlockId, from_slot: usize, evicted: bool) -> bool {
        let was_cached = self.drop_entry(Place::Device(block), evicted);
        if was_cached {
            self.order_poison(block, from_slot);
        }
        was_cached
    }

    /// Removes a block of either tier from the prefix index. Returns whether it was cached.
    pub(crate) fn drop_entry(&mut self, place: Place, evicted: bool) -> bool {
        let Some(index) = &mut self.index else { return false };
        let Some(removed) = index.remove(place) else { return false };
        if removed.is_last {
            if evicted {
                index.remember_evicted(removed.hash);
            }
            let (tier, group, hash) = (place.tier(), removed.group, removed.hash);
            self.events.push(BlockEvent::Removed { tier, group, hash });
        }
        true
    }

    pub(crate) fn order_poison(&mut self, block: BlockId, from_slot: usize) {
        if self.poison {
            self.memory_ops.push_back(MemOp::Poison { block, from_slot });
        }
    }

    fn count_peak(&mut self) {
        self.counters.peak_in_use = self.counters.peak_in_use.max(self.refs.len() - self.free.len());
    }
}

impl BlockPool {
    /// Frees the blocks of tables that were dropped instead of released, and returns where those were opened.
    pub fn take_leaks(&mut self) -> Vec<Leak> {
        let mut leaks = Vec::new();
        while let Ok(leaked) = self.leaked.try_recv() {
            self.counters.leaked_tables += 1;
            leaks.push(match leaked {
                Leaked::Table { groups, opened } => {
                    self.release_groups(&groups);
                    Leak { opened, blocks: groups.iter().map(|g| g.blocks().len()).sum() }
                }
                Leaked::Swapped { blocks, opened } => {
                    blocks.iter().for_each(|b| self.host.free_block(*b));
                    Leak { opened, blocks: blocks.len() }
                }
            });
        }
        leaks
    }

    /// Frees leaked blocks. In debug builds a leak panics with the line that opened the table.
    pub(crate) fn reclaim_leaks(&mut self) {
        if let Some(leak) = self.take_leaks().first() {
            debug_assert!(false, "{leak}");
        }
    }
}
