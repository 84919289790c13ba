//! The pool: every block, its owners, and the operations on tables.
//!
//! A block is free or referenced, never both. Free blocks stand in one list: those without a hash in front,
//! then cached ones, least recently used first; blocks are taken from the front. Every operation is O(blocks
//! it touches) and either succeeds or changes nothing.
//!
//! The pool touches no memory. What the memory must undergo is kept as an ordered list of [`MemOp`], to be
//! drained and applied before the next write to any block.

use std::sync::Arc;

use crate::free_list::FreeList;
use crate::hash::PrefixHasher;
use crate::prefix::{Content, PrefixIndex};
use crate::{BlockId, BlockTable, NoSpace, PoolConfig, PoolError, PrefixStats, Uncommitted};

/// Something the memory behind the pool must undergo. Apply in order, and before the writes of the appends
/// that caused them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

/// Where the blocks are; the three always sum to the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gauges {
    /// Blocks that live tables own.
    pub in_use: usize,
    /// Blocks that nobody owns and that hold a cached prefix: reusable, and to be had when needed.
    pub cached: usize,
    /// Blocks that hold nothing.
    pub free: usize,
}

/// Owner of all blocks.
pub struct BlockPool {
    pub(crate) block_size: usize,
    /// Owners per block.
    pub(crate) refs: Box<[u32]>,
    pub(crate) free: FreeList,
    /// Blocks of the free list that are cached.
    pub(crate) cached_free: usize,
    /// `None` with prefix caching off.
    pub(crate) index: Option<PrefixIndex>,
    pub(crate) stats: PrefixStats,
    memory_ops: Vec<MemOp>,
    poison: bool,
}

impl BlockPool {
    /// A pool of which every block is free.
    pub fn new(config: PoolConfig) -> Result<BlockPool, PoolError> {
        let num_blocks = config.check()?;
        let index = config.prefix_caching.then(|| {
            let hasher = PrefixHasher::new(config.hash_seed, config.hash_bits);
            PrefixIndex::new(hasher, config.num_blocks, config.block_size)
        });
        Ok(BlockPool {
            block_size: config.block_size,
            refs: vec![0; config.num_blocks].into(),
            free: FreeList::full(num_blocks),
            cached_free: 0,
            index,
            stats: PrefixStats::default(),
            memory_ops: Vec::new(),
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

    /// Blocks that can be had now: free ones and, by eviction, cached ones.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Where the blocks are.
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

    /// The seed of the prefix hash's key, drawn or given; `None` with prefix caching off.
    pub fn hash_seed(&self) -> Option<u64> {
        self.index.as_ref().map(PrefixIndex::seed)
    }

    /// Owners of a block.
    pub fn references(&self, block: BlockId) -> u32 {
        self.refs[block.index()]
    }

    /// Whether the block is in the prefix index.
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.index.as_ref().is_some_and(|index| index.contains(block))
    }

    /// The blocks that can be had, in the order in which they will be.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.free.iter()
    }

    /// What the memory must undergo since the last call, in order.
    pub fn drain_memory_ops(&mut self) -> impl Iterator<Item = MemOp> + '_ {
        self.memory_ops.drain(..)
    }

    /// Blocks that all these appends together would take: each entry is a table and the number of tokens to
    /// append to it.
    pub fn blocks_needed<'a>(&self, appends: impl IntoIterator<Item = (&'a BlockTable, usize)>) -> usize {
        let mut needed = 0;
        let mut shared_tails = Vec::new();
        for (table, tokens) in appends.into_iter().filter(|&(_, tokens)| tokens > 0) {
            needed += (table.len() + tokens).div_ceil(self.block_size) - table.blocks.len();
            shared_tails.extend(self.shared_tail(table));
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
    /// is copied first; a sole owner writes in place. Returns the index of the first block that is new or
    /// replaced: a mirror of the table keeps the blocks before it and takes those from it on.
    pub fn append(&mut self, table: &mut BlockTable, tokens: &[u32]) -> Result<usize, NoSpace> {
        if tokens.is_empty() {
            return Ok(table.blocks.len());
        }
        let wanted = self.blocks_needed([(&*table, tokens.len())]);
        if wanted > self.free.len() {
            return Err(NoSpace { wanted, free: self.free.len() });
        }
        let mut first_changed = table.blocks.len();
        if let Some(src) = self.shared_tail(table) {
            first_changed -= 1;
            let dst = self.take()?;
            self.refs[src.index()] -= 1;
            table.blocks[first_changed] = dst;
            self.memory_ops.push(MemOp::Copy { src, dst });
            self.order_poison(dst, table.len() % self.block_size);
        } else if let Some(tail) = table.open_tail() {
            // A truncated table may end within a block that is cached whole; from here on it holds something else.
            self.drop_hash(tail, table.len() % self.block_size);
        }
        table.tokens.extend_from_slice(tokens);
        while table.blocks.len() * self.block_size < table.len() {
            let block = self.take()?;
            table.blocks.push(block);
        }
        Ok(first_changed)
    }

    /// Says that the first `committed` tokens of the table have been computed. Blocks that are full of such
    /// tokens become findable. Less than before says nothing new.
    pub fn commit(&mut self, table: &mut BlockTable, committed: usize) {
        debug_assert!(committed <= table.len(), "{committed} tokens computed of {}", table.len());
        let full = table.committed / self.block_size..committed / self.block_size;
        table.committed = committed.max(table.committed);
        let Some(index) = &mut self.index else { return };
        for k in full {
            let parent = k.checked_sub(1).and_then(|before| index.as_parent(table.blocks[before]));
            let content = Content { parent, salt: table.salt.as_ref(), tokens: table.block_tokens(k) };
            index.insert(table.blocks[k], content);
        }
    }

    /// A second table on the same blocks, a partly filled last one included. Costs no block until one of the
    /// two appends. Refused while the table has tokens that are not committed: they would be written to a
    /// shared block.
    pub fn fork(&mut self, table: &BlockTable) -> Result<BlockTable, Uncommitted> {
        if table.committed < table.len() {
            return Err(Uncommitted { committed: table.committed, len: table.len() });
        }
        for block in &table.blocks {
            self.refs[block.index()] += 1;
        }
        Ok(BlockTable {
            blocks: table.blocks.clone(),
            tokens: table.tokens.clone(),
            committed: table.committed,
            salt: table.salt.clone(),
            block_size: table.block_size,
        })
    }

    /// Cuts the table down to its first `len` tokens. A block that the table alone owns and that is cut
    /// within loses its hash.
    pub fn truncate(&mut self, table: &mut BlockTable, len: usize) {
        if len >= table.len() {
            return;
        }
        let cut = table.blocks.split_off(len.div_ceil(self.block_size));
        self.release_blocks(&cut);
        table.tokens.truncate(len);
        table.committed = table.committed.min(len);
        if let Some(tail) = table.open_tail()
            && self.refs[tail.index()] == 1
        {
            let from_slot = len % self.block_size;
            if !self.drop_hash(tail, from_slot) {
                self.order_poison(tail, from_slot);
            }
        }
    }

    /// Takes the table's blocks back. Those with a hash stay findable until they are needed, the tail of the
    /// sequence first.
    pub fn release(&mut self, table: BlockTable) {
        self.release_blocks(&table.blocks);
    }

    /// Forgets every cached prefix. `false`, and nothing happens, while a block is in use.
    pub fn reset_prefix_cache(&mut self) -> bool {
        if self.gauges().in_use > 0 {
            return false;
        }
        for id in 0..self.num_blocks() as u32 {
            self.drop_hash(BlockId(id), 0);
        }
        self.cached_free = 0;
        true
    }

    /// A table over the blocks `hits`, which are pinned, with slots for all of `tokens`. Changes nothing if
    /// that and `keep_free` more blocks can not be had.
    pub(crate) fn open_table(
        &mut self,
        hits: &[BlockId],
        tokens: &[u32],
        salt: Option<&str>,
        keep_free: usize,
    ) -> Result<BlockTable, NoSpace> {
        let wanted = self.blocks_to_open(hits, tokens.len()) + keep_free;
        if wanted > self.free.len() {
            return Err(NoSpace { wanted, free: self.free.len() });
        }
        for &block in hits {
            if self.free.remove(block) {
                self.cached_free -= 1;
            }
            self.refs[block.index()] += 1;
        }
        let mut table = BlockTable {
            blocks: Vec::with_capacity(tokens.len().div_ceil(self.block_size)),
            tokens: tokens[..hits.len() * self.block_size].to_vec(),
            committed: hits.len() * self.block_size,
            salt: salt.map(Arc::from),
            block_size: self.block_size,
        };
        table.blocks.extend_from_slice(hits);
        self.append(&mut table, &tokens[hits.len() * self.block_size..])?;
        Ok(table)
    }

    /// Blocks that leave the free list when a table over `hits` with `len` tokens is opened.
    pub(crate) fn blocks_to_open(&self, hits: &[BlockId], len: usize) -> usize {
        let repinned = hits.iter().filter(|b| self.free.contains(**b)).count();
        repinned + len.div_ceil(self.block_size) - hits.len()
    }

    /// The block a next token would go to, if others own it as well.
    fn shared_tail(&self, table: &BlockTable) -> Option<BlockId> {
        table.open_tail().filter(|tail| self.refs[tail.index()] > 1)
    }

    /// Takes the front block of the free list, evicting what it cached.
    fn take(&mut self) -> Result<BlockId, NoSpace> {
        let block = self.free.pop_front().ok_or(NoSpace { wanted: 1, free: 0 })?;
        if self.drop_hash(block, 0) {
            self.cached_free -= 1;
        }
        self.refs[block.index()] = 1;
        Ok(block)
    }

    fn release_blocks(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.refs[block.index()] -= 1;
            if self.refs[block.index()] == 0 && !self.is_cached(block) {
                self.order_poison(block, 0);
                self.free.push_front(block);
            }
        }
        // The tail of a chain is of no use without its head, so it shall be evicted first.
        for &block in blocks.iter().rev() {
            if self.refs[block.index()] == 0 && self.is_cached(block) {
                self.cached_free += 1;
                self.free.push_back(block);
            }
        }
    }

    /// Takes the block out of the prefix index; its slots from `from_slot` on must not be read again.
    fn drop_hash(&mut self, block: BlockId, from_slot: usize) -> bool {
        let dropped = self.index.as_mut().is_some_and(|index| index.remove(block));
        if dropped {
            self.order_poison(block, from_slot);
        }
        dropped
    }

    fn order_poison(&mut self, block: BlockId, from_slot: usize) {
        if self.poison {
            self.memory_ops.push(MemOp::Poison { block, from_slot });
        }
    }
}
