//! The free list: the free blocks, in the order in which they will be allocated.
//!
//! A doubly linked ring through an array indexed by the ids of one tier. A block can leave the middle in O(1), as on a prefix hit
//! on a free block, and no operation allocates memory. A sentinel behind the last block closes the ring. The links of
//! an absent block are [`ABSENT`], so that removing it twice does nothing.

use std::fmt::Display;
use std::marker::PhantomData;

use crate::ids::Id;

/// Link of a block that is not in the list.
const ABSENT: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Links {
    prev: u32,
    next: u32,
}

pub(crate) struct FreeList<B> {
    /// Links of each block, then those of the sentinel.
    links: Box<[Links]>,
    len: usize,
    ids: PhantomData<B>,
}

impl<B: Id + Display> FreeList<B> {
    /// Creates the list of `0..num_blocks`, lowest id first.
    pub fn full(num_blocks: u32) -> FreeList<B> {
        let ring = num_blocks + 1;
        let links = (0..ring).map(|i| Links { prev: (i + ring - 1) % ring, next: (i + 1) % ring }).collect();
        FreeList { links, len: num_blocks as usize, ids: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.links)
    }

    pub fn contains(&self, block: B) -> bool {
        self.links[block.index()].next != ABSENT
    }

    pub fn pop_front(&mut self) -> Option<B> {
        let front = self.links[self.sentinel() as usize].next;
        if front == self.sentinel() {
            return None;
        }
        let block = B::new(front);
        self.remove(block);
        Some(block)
    }

    /// Removes a block; `false` if it was not in the list.
    pub fn remove(&mut self, block: B) -> bool {
        let Links { prev, next } = self.links[block.index()];
        if next == ABSENT {
            return false;
        }
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        self.links[block.index()] = Links { prev: ABSENT, next: ABSENT };
        self.len -= 1;
        true
    }

    /// Adds an absent block to the end that is allocated first.
    pub fn push_front(&mut self, block: B) {
        let front = self.links[self.sentinel() as usize].next;
        self.insert_between(self.sentinel(), block, front);
    }

    /// Adds an absent block to the end that is allocated last.
    pub fn push_back(&mut self, block: B) {
        let back = self.links[self.sentinel() as usize].prev;
        self.insert_between(back, block, self.sentinel());
    }

    pub fn iter(&self) -> impl Iterator<Item = B> + '_ {
        let mut at = self.sentinel();
        std::iter::from_fn(move || {
            at = self.links[at as usize].next;
            (at != self.sentinel()).then(|| B::new(at))
        })
    }

    fn sentinel(&self) -> u32 {
        (self.links.len() - 1) as u32
    }

    fn insert_between(&mut self, prev: u32, block: B, next: u32) {
        debug_assert!(!self.contains(block), "{block} is already on the free list");
        self.links[block.index()] = Links { prev, next };
        let id = block.index() as u32;
        self.links[prev as usize].next = id;
        self.links[next as usize].prev = id;
        self.len += 1;
    }
}
