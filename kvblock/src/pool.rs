//! The pool: all blocks, their owners, and how blocks are taken and given back.
//!
//! A block is free or referenced, never both. Free blocks stand in one list: those without a hash in front,
//! then cached ones, least recently used first; blocks are taken from the front. Taking and giving back a block
//! is O(1) and touches its links, its count, and, if it was cached, its entry and bucket.
//!
//! The pool touches no memory. What the memory must undergo is kept as an ordered list of [`MemOp`], to be
//! drained and applied before the next write to any block.

use std::collections::{BTreeSet, VecDeque};
use std::sync::mpsc::Receiver;

use crate::events::EventLog;
use crate::free_list::FreeList;
use crate::hash::PrefixHasher;
use crate::host_pool::HostPool;
use crate::leak::{Home, Leak, Lost};
use crate::prefix::PrefixIndex;
use crate::{
    BlockEvent, BlockId, BlockTable, CacheGroup, Counters, Gauges, GroupTable, HostBlockId, NoSpace, PoolConfig,
    PoolError, PrefixHash, PrefixStats, TableError,
};

/// An operation on the memory behind the pool. Apply all of them in order, and before the writes of the appends that
/// caused them. There may be more kinds later: whoever applies them must fail at one that it does not know, not skip it.
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
    /// Fill the slots from `from_slot` to the block's end with NaN: nothing may read them before they are
    /// written again.
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
    /// The block whose contents are unknown if the operation fails; see [`BlockPool::forget_contents`].
    pub fn destination(&self) -> Option<BlockId> {
        match *self {
            MemOp::Copy { dst, .. } | MemOp::SwapIn { dst, .. } => Some(dst),
            MemOp::SwapOut { .. } | MemOp::Poison { .. } => None,
        }
    }

    /// The host block whose contents are unknown if the operation fails; see [`BlockPool::forget_host_contents`].
    pub fn host_destination(&self) -> Option<HostBlockId> {
        match *self {
            MemOp::SwapOut { dst, .. } => Some(dst),
            MemOp::Copy { .. } | MemOp::SwapIn { .. } | MemOp::Poison { .. } => None,
        }
    }
}

/// In words, as in "copy block 1 to block 2".
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

/// Owner of all blocks.
pub struct BlockPool {
    pub(crate) block_size: usize,
    pub(crate) groups: Box<[CacheGroup]>,
    /// Owners per block.
    pub(crate) refs: Box<[u32]>,
    pub(crate) free: FreeList,
    /// Blocks of the free list that are cached.
    cached_free: usize,
    /// Blocks in use whose contents are not what their tokens say, because a copy into them failed. No table that holds
    /// one is indexed from there on. Empty but after a failure.
    pub(crate) invalid: BTreeSet<BlockId>,
    /// `None` with prefix caching off.
    pub(crate) index: Option<PrefixIndex>,
    pub(crate) host: HostPool,
    pub(crate) stats: PrefixStats,
    pub(crate) counters: Counters,
    pub(crate) memory_ops: VecDeque<MemOp>,
    pub(crate) events: EventLog,
    pub(crate) home: Home,
    pub(crate) lost: Receiver<Lost>,
    poison: bool,
}

impl BlockPool {
    /// A pool of which every block is free.
    pub fn new(config: PoolConfig) -> Result<BlockPool, PoolError> {
        let (num_blocks, host_blocks) = config.check()?;
        let index = config.prefix_caching.then(|| {
            let hasher = PrefixHasher::new(config.hash_seed, config.hash_bits);
            PrefixIndex::new(hasher, config.num_blocks, config.block_size, config.groups.len())
        });
        let (home, lost) = Home::new();
        Ok(BlockPool {
            block_size: config.block_size,
            groups: config.groups.into(),
            refs: vec![0; config.num_blocks].into(),
            free: FreeList::full(num_blocks),
            cached_free: 0,
            invalid: BTreeSet::new(),
            index,
            host: HostPool::new(host_blocks),
            stats: PrefixStats::default(),
            counters: Counters::default(),
            memory_ops: VecDeque::new(),
            events: EventLog::new(config.events),
            home,
            lost,
            poison: config.poison,
        })
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.refs.len()
    }

    /// The groups of layers, in the order of every table's groups.
    pub fn groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// Number of blocks that can be taken now: free ones and, by eviction, cached ones.
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

    /// Hits and misses of the prefix cache since the start.
    pub fn stats(&self) -> &PrefixStats {
        &self.stats
    }

    /// Counts of what happened to blocks since the start.
    pub fn counters(&self) -> Counters {
        Counters { hashed: self.index.as_ref().map_or(0, PrefixIndex::hashed), ..self.counters }
    }

    /// Bytes of the pool's own books, all of them allocated at the start: at most 96 and four for each token, per block.
    pub fn metadata_bytes(&self) -> usize {
        self.free.bytes() + size_of_val(&*self.refs) + self.index.as_ref().map_or(0, PrefixIndex::bytes)
    }

    /// The seed of the prefix hash's key, drawn or given; `None` with prefix caching off.
    pub fn hash_seed(&self) -> Option<u64> {
        self.index.as_ref().map(PrefixIndex::seed)
    }

    /// Owners of a block.
    pub fn references(&self, block: BlockId) -> u32 {
        self.refs.get(block.index()).copied().unwrap_or(0)
    }

    /// Whether the block is in the prefix index.
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.index.as_ref().is_some_and(|index| index.contains(block))
    }

    /// Group and name of the prefix that a cached block ends.
    pub fn prefix_of(&self, block: BlockId) -> Option<(usize, PrefixHash)> {
        self.index.as_ref()?.name_of(block)
    }

    /// The free blocks, in the order in which they will be taken.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.free.iter()
    }

    /// Takes the memory operations that were not taken yet, in order. Every one has to be applied. Those that the
    /// iterator has not reached when it is dropped stay for the next call.
    pub fn drain_memory_ops(&mut self) -> impl Iterator<Item = MemOp> + '_ {
        std::iter::from_fn(|| self.memory_ops.pop_front())
    }

    /// Takes the events since the last call, in order; none unless the configuration asks for events. Those that the
    /// iterator has not reached when it is dropped are lost.
    pub fn drain_events(&mut self) -> impl Iterator<Item = BlockEvent> + '_ {
        self.events.drain()
    }

    /// Whether the table was opened by this pool.
    pub fn owns(&self, table: &BlockTable) -> bool {
        self.home == table.home
    }

    /// Forgets every cached prefix. `false`, and nothing happens, while a block is in use.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.reclaim_leaks();
        if self.gauges().in_use > 0 {
            return false;
        }
        let Some(index) = &mut self.index else { return true };
        let cached: Vec<BlockId> =
            (0..self.refs.len() as u32).map(BlockId).filter(|b| index.remove(*b).is_some()).collect();
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
    /// Its owners keep it, but neither this block nor any block after it in their tables can enter the index: all of
    /// that would be computed from the invalid contents. To compute those tokens again, an owner truncates its table to
    /// before the block and appends them anew. Call this before anything that was computed from the block is committed.
    ///
    /// Refuses a block that the pool does not have.
    pub fn forget_contents(&mut self, block: BlockId) -> Result<(), TableError> {
        let blocks = self.num_blocks();
        let owners = *self.refs.get(block.index()).ok_or(TableError::NoSuchBlock { id: block.0, blocks })?;
        if owners > 0 {
            if !self.drop_hash(block, 0, false) {
                self.order_poison(block, 0);
            }
            self.invalid.insert(block);
        } else {
            self.uncache(block);
        }
        Ok(())
    }

    /// Takes a free block out of the prefix index, if it is cached, so that it is reused first.
    pub(crate) fn uncache(&mut self, block: BlockId) {
        if self.drop_hash(block, 0, false) {
            self.cached_free -= 1;
            self.free.remove(block);
            self.free.push_front(block);
        }
    }

    /// Refuses a table of another pool, whose block ids mean nothing here.
    pub(crate) fn check_owner(&self, table: &BlockTable) -> Result<(), TableError> {
        if self.owns(table) { Ok(()) } else { Err(TableError::ForeignTable) }
    }

    /// Refuses to take more blocks than the free list has.
    pub(crate) fn check_space(&self, wanted: usize) -> Result<(), NoSpace> {
        let free = self.free.len();
        if wanted > free { Err(NoSpace { wanted, free }) } else { Ok(()) }
    }

    /// Takes the front block of the free list for one owner, evicting what it cached.
    pub(crate) fn allocate(&mut self) -> Result<BlockId, NoSpace> {
        let block = self.free.pop_front().ok_or(NoSpace { wanted: 1, free: 0 })?;
        if self.drop_hash(block, 0, true) {
            self.cached_free -= 1;
            self.counters.evicted += 1;
        }
        self.refs[block.index()] = 1;
        self.counters.taken += 1;
        self.count_peak();
        Ok(block)
    }

    /// Adds an owner to a block that has some, or that is cached and free.
    pub(crate) fn share(&mut self, block: BlockId) {
        if self.free.remove(block) {
            self.cached_free -= 1;
        }
        self.refs[block.index()] += 1;
        self.count_peak();
    }

    /// Takes one reference off every block of these groups' tables. Those with a hash stay findable until they are needed.
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
                self.counters.given_back += 1;
            }
        }
        // The tail of a chain is useless without its head, so it is evicted first.
        for block in by_position().rev() {
            if self.refs[block.index()] == 0 && self.is_cached(block) {
                self.cached_free += 1;
                self.free.push_back(block);
                self.counters.given_back += 1;
            }
        }
    }

    /// Takes the block out of the prefix index; its slots from `from_slot` on must not be read again.
    pub(crate) fn drop_hash(&mut self, block: BlockId, from_slot: usize, evicted: bool) -> bool {
        let Some(index) = &mut self.index else { return false };
        let Some(removed) = index.remove(block) else { return false };
        if removed.last {
            if evicted {
                index.remember_evicted(removed.hash);
            }
            self.events.push(BlockEvent::Removed { group: removed.group, hash: removed.hash });
        }
        self.order_poison(block, from_slot);
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

/// Leaks.
impl BlockPool {
    /// Takes back the blocks of tables that were dropped instead of released, and says which.
    pub fn take_leaks(&mut self) -> Vec<Leak> {
        let mut leaks = Vec::new();
        while let Ok(lost) = self.lost.try_recv() {
            self.counters.leaked_tables += 1;
            leaks.push(match lost {
                Lost::Table { groups, opened } => {
                    self.release_groups(&groups);
                    Leak { opened, blocks: groups.iter().map(|g| g.blocks().len()).sum() }
                }
                Lost::Swapped { blocks, opened } => {
                    blocks.iter().for_each(|b| self.host.free_block(*b));
                    Leak { opened, blocks: blocks.len() }
                }
            });
        }
        leaks
    }

    /// Takes leaked blocks back; debug builds say who leaked.
    pub(crate) fn reclaim_leaks(&mut self) {
        if let Some(leak) = self.take_leaks().first() {
            debug_assert!(false, "{leak}");
        }
    }
}
