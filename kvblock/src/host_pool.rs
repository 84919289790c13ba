//! The blocks of host memory.

use std::collections::BTreeSet;

use crate::free_list::FreeList;
use crate::ids::{BlockId, HostBlockId};

pub(crate) struct HostPool {
    pub free: FreeList,
    pub num_blocks: usize,
    /// Blocks in use with wrong contents, because a copy into them failed.
    pub invalid: BTreeSet<HostBlockId>,
}

impl HostPool {
    pub fn new(num_blocks: u32) -> HostPool {
        HostPool { free: FreeList::full(num_blocks), num_blocks: num_blocks as usize, invalid: BTreeSet::new() }
    }

    pub fn free_block(&mut self, block: HostBlockId) {
        self.invalid.remove(&block);
        self.free.push_front(BlockId(block.0));
    }

    pub fn allocate(&mut self) -> Option<HostBlockId> {
        self.free.pop_front().map(|block| HostBlockId(block.0))
    }
}
