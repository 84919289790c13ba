//! The blocks of host memory. Swapped requests own some; the others are free, and some of these cache a prefix.

use std::collections::BTreeSet;

use crate::free_list::FreeList;
use crate::ids::HostBlockId;

pub(crate) struct HostPool {
    /// As on the device: blocks that are not cached first, then cached ones, least recently used first.
    pub free: FreeList<HostBlockId>,
    pub num_blocks: usize,
    /// Number of cached blocks, all of which are free.
    pub num_cached: usize,
    /// How often each block was taken for new contents.
    pub taken: Box<[u32]>,
    /// Whether free blocks cache prefixes.
    pub caching: bool,
    /// Blocks in use with wrong contents, because a copy into them failed.
    pub invalid: BTreeSet<HostBlockId>,
}

impl HostPool {
    pub fn new(num_blocks: u32, caching: bool) -> HostPool {
        HostPool {
            free: FreeList::full(num_blocks),
            num_blocks: num_blocks as usize,
            num_cached: 0,
            taken: vec![0; num_blocks as usize].into(),
            caching,
            invalid: BTreeSet::new(),
        }
    }

    pub fn free_block(&mut self, block: HostBlockId) {
        self.invalid.remove(&block);
        self.free.push_front(block);
    }

    /// Returns whether a swapped request or an operation in progress holds the block.
    pub fn is_held(&self, block: HostBlockId) -> bool {
        !self.free.contains(block)
    }

    /// Takes a block off the free list, so that it is not evicted. Returns whether it was there.
    pub fn hold(&mut self, block: HostBlockId) -> bool {
        self.free.remove(block)
    }

    /// Puts a cached block that was held back onto the free list, as the most recently used.
    pub fn let_go(&mut self, block: HostBlockId) {
        self.free.push_back(block);
    }
}
