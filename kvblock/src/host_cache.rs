//! The host tier of the prefix cache: prefixes that the pool evicts stay in host memory, and come back on a hit.
//!
//! ```text
//!               evicted: SwapOut, unless the host has it            evicted for a newer prefix or a swapped request
//! device block ──────────────────────────────────────────▶ host block ─────────────────────────────────────▶ gone
//!      ▲                                                       │
//!      └───────────── hit: SwapIn to a new block ──────────────┘  (stays cached)
//! ```
//!
//! Swapped requests and the cache share the host blocks. A cached host block is free: it is taken when a request is
//! swapped out or a newer prefix arrives, least recently used first. A hit leaves it cached, so a prefix that is used
//! again and again is copied to the host once. The price is that a prefix can be in both tiers at once.
//!
//! The copy is ordered when the block is reused, not before: contents that are still on the device cost no host block and
//! no copy. It precedes everything that the new owner does with the block in the list of memory operations. Only blocks
//! of the prefix index are copied, so the contents are whole, committed and valid, in groups of any kind. A host block
//! whose copy failed leaves the index ([`BlockPool::forget_host_contents`]).

use std::cmp::Reverse;

use crate::ids::{Place, Tier};
use crate::prefix::Inserted;
use crate::{BlockEvent, BlockId, BlockPool, GroupTable, HostBlockId, HostGauges, MemOp, NoSpace, PrefixHash};

impl BlockPool {
    /// Numbers of host blocks in use, cached and free.
    pub fn host_gauges(&self) -> HostGauges {
        let (available, cached) = (self.host.free.len(), self.host.num_cached);
        HostGauges { in_use: self.host.num_blocks - available, cached, free: available - cached }
    }

    /// Returns the cache group of a cached host block and the hash of the prefix that it ends.
    pub fn host_prefix_of(&self, block: HostBlockId) -> Option<(usize, PrefixHash)> {
        self.index.as_ref()?.hash_of(Place::Host(block))
    }

    /// Takes a host block that is not in use, evicting the prefix that it caches.
    pub(crate) fn allocate_host(&mut self) -> Option<HostBlockId> {
        let block = self.host.free.iter().next()?;
        self.take_host(block);
        Some(block)
    }

    /// Takes a host block for new contents.
    pub(crate) fn take_host(&mut self, block: HostBlockId) {
        self.host.hold(block);
        if self.drop_entry(Place::Host(block), true) {
            self.host.num_cached -= 1;
        }
        self.host.taken[block.index()] = self.host.taken[block.index()].wrapping_add(1);
    }

    /// Orders a copy to the host of a cached block that is about to be reused, unless the host has the prefix or no
    /// block for it.
    pub(crate) fn offload(&mut self, block: BlockId) {
        let Some(index) = self.index.as_ref().filter(|index| self.host.caching && index.contains(Place::Device(block)))
        else {
            return;
        };
        if let Some(copy) = index.host_copy_of(block) {
            if self.host.hold(copy) {
                self.host.let_go(copy);
            }
            return;
        }
        let Some(dst) = self.allocate_host() else { return };
        self.memory_ops.push_back(MemOp::SwapOut { src: block, dst });
        self.counters.offloaded += 1;
        self.host.let_go(dst);
        self.host.num_cached += 1;
        let Some(index) = &mut self.index else { return };
        let inserted = index.insert_copy(block, dst);
        if let Some((group, hash)) = index.hash_of(Place::Host(dst)) {
            let (tier, hashes, tokens) = (Tier::Host, vec![hash], Vec::new());
            self.events.push(BlockEvent::Stored { tier, group, parent: None, hashes, tokens, key: None });
        }
        if inserted == Inserted::SharedHash {
            self.uncache_orphans(Place::Host(dst));
        }
    }

    /// Shares the blocks of a hit that are on the device, and orders copies of the others to new blocks. The caller has
    /// checked that enough blocks are free.
    pub(crate) fn load(&mut self, hit: &[GroupTable<Place>]) -> Result<Vec<GroupTable<BlockId>>, NoSpace> {
        // Before any allocation, so that none of them is evicted.
        let mut on_host: Vec<(usize, HostBlockId)> = Vec::new();
        for (at, place) in hit.iter().flat_map(|group| (group.holes..).zip(&group.blocks)) {
            match *place {
                Place::Device(block) => self.share(block),
                Place::Host(block) => {
                    self.host.hold(block);
                    on_host.push((at, block));
                }
            }
        }
        let mut tables = Vec::with_capacity(hit.len());
        for group in hit {
            let mut table = GroupTable { holes: group.holes, blocks: Vec::with_capacity(group.blocks.len()) };
            for place in &group.blocks {
                table.blocks.push(match *place {
                    Place::Device(block) => block,
                    Place::Host(src) => {
                        let dst = self.allocate()?;
                        self.memory_ops.push_back(MemOp::SwapIn { src, dst });
                        self.counters.loaded += 1;
                        dst
                    }
                });
            }
            tables.push(table);
        }
        // The end of a sequence is useless without its beginning, so it is evicted first.
        on_host.sort_by_key(|(at, _)| Reverse(*at));
        on_host.into_iter().for_each(|(_, block)| self.host.let_go(block));
        Ok(tables)
    }

    /// Removes a free host block from the prefix index, if it is cached, and moves it to the front of the free list.
    pub(crate) fn uncache_host(&mut self, block: HostBlockId) {
        if self.drop_entry(Place::Host(block), false) {
            self.host.num_cached -= 1;
            self.host.hold(block);
            self.host.free_block(block);
        }
    }
}
