//! The free list: which blocks can be had, in the order in which they will be.
//!
//! A doubly linked list threaded through an array by block id, so that a block leaves the middle (a prefix
//! hit on a free block) in O(1) and nothing is ever allocated. One sentinel behind the last block closes the
//! ring; an absent block links to itself nowhere ([`ABSENT`]), which makes a double removal a no-op instead
//! of a corrupted list.

use crate::BlockId;

/// Marks the links of a block that is not in the list.
const ABSENT: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Links {
    prev: u32,
    next: u32,
}

/// Blocks that can be had, front first.
pub(crate) struct FreeList {
    /// Links per block, then those of the sentinel.
    links: Box<[Links]>,
    len: usize,
}

impl FreeList {
    /// All of `0..num_blocks`, lowest id first.
    pub fn full(num_blocks: u32) -> FreeList {
        let ring = num_blocks + 1;
        let links = (0..ring).map(|i| Links { prev: (i + ring - 1) % ring, next: (i + 1) % ring }).collect();
        FreeList { links, len: num_blocks as usize }
    }

    /// Blocks in the list.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the links.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.links)
    }

    /// Whether the block is in the list.
    pub fn contains(&self, block: BlockId) -> bool {
        self.links[block.index()].next != ABSENT
    }

    /// Takes the front block.
    pub fn pop_front(&mut self) -> Option<BlockId> {
        let front = self.links[self.sentinel() as usize].next;
        if front == self.sentinel() {
            return None;
        }
        self.remove(BlockId(front));
        Some(BlockId(front))
    }

    /// Takes a block from wherever it is; `false` if it was not there.
    pub fn remove(&mut self, block: BlockId) -> bool {
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

    /// Puts an absent block where it is taken first.
    pub fn push_front(&mut self, block: BlockId) {
        let front = self.links[self.sentinel() as usize].next;
        self.insert_between(self.sentinel(), block, front);
    }

    /// Puts an absent block where it is taken last.
    pub fn push_back(&mut self, block: BlockId) {
        let back = self.links[self.sentinel() as usize].prev;
        self.insert_between(back, block, self.sentinel());
    }

    /// The blocks, front first.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let mut at = self.sentinel();
        std::iter::from_fn(move || {
            at = self.links[at as usize].next;
            (at != self.sentinel()).then_some(BlockId(at))
        })
    }

    fn sentinel(&self) -> u32 {
        (self.links.len() - 1) as u32
    }

    fn insert_between(&mut self, prev: u32, block: BlockId, next: u32) {
        debug_assert!(!self.contains(block), "{block} is on the free list already");
        self.links[block.index()] = Links { prev, next };
        self.links[prev as usize].next = block.0;
        self.links[next as usize].prev = block.0;
        self.len += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(list: &FreeList) -> Vec<u32> {
        list.iter().map(|b| b.0).collect()
    }

    #[test]
    fn popping_gives_the_ids_in_order_until_none_is_left() {
        let mut list = FreeList::full(3);
        assert_eq!(
            (0..4).map(|_| list.pop_front().map(|b| b.0)).collect::<Vec<_>>(),
            [Some(0), Some(1), Some(2), None]
        );
        assert_eq!(list.len(), 0);
    }

    #[test]
    fn a_block_leaves_the_middle_and_both_neighbours_are_linked() {
        let mut list = FreeList::full(5);
        assert!(list.remove(BlockId(2)));
        assert_eq!(ids(&list), [0, 1, 3, 4]);
        assert!(list.remove(BlockId(0)) && list.remove(BlockId(4)));
        assert_eq!((ids(&list), list.len()), (vec![1, 3], 2));
        assert!(!list.contains(BlockId(2)) && list.contains(BlockId(3)));
    }

    #[test]
    fn removing_twice_changes_nothing() {
        let mut list = FreeList::full(3);
        assert!(list.remove(BlockId(1)));
        assert!(!list.remove(BlockId(1)));
        assert_eq!((ids(&list), list.len()), (vec![0, 2], 2));
    }

    #[test]
    fn pushed_blocks_stand_at_the_end_they_were_pushed_to() {
        let mut list = FreeList::full(4);
        while list.pop_front().is_some() {}
        list.push_back(BlockId(3));
        list.push_back(BlockId(0));
        list.push_front(BlockId(1));
        list.push_front(BlockId(2));
        assert_eq!(ids(&list), [2, 1, 3, 0]);
    }
}
