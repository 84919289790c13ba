//! A queue of events by time. Those of the near future are in a heap, later ones in unsorted slots, so that a million
//! distant events cost nothing while they wait.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What happens. Events at the same time are in this order, then by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// The next turn of a conversation.
    Turn(u32),
    /// A decode replica has received the cache of a request.
    Received(u32),
    /// A replica ends what it does.
    Wake(u32),
}

/// See the module.
pub struct Queue {
    /// Seconds of a slot.
    width: f64,
    /// The slot whose events are in the heap.
    current: usize,
    /// By the bits of the time, which are in the order of the times because these are positive.
    near: BinaryHeap<Reverse<(u64, Event)>>,
    later: Vec<Vec<(u64, Event)>>,
}

impl Queue {
    pub fn new(width: f64) -> Queue {
        Queue { width, current: 0, near: BinaryHeap::new(), later: Vec::new() }
    }

    pub fn push(&mut self, at: f64, event: Event) {
        let slot = (at / self.width) as usize;
        if slot <= self.current {
            self.near.push(Reverse((at.to_bits(), event)));
            return;
        }
        if slot >= self.later.len() {
            self.later.resize_with(slot + 1, Vec::new);
        }
        self.later[slot].push((at.to_bits(), event));
    }

    /// Removes the first event.
    pub fn pop(&mut self) -> Option<(f64, Event)> {
        while self.near.is_empty() && self.current < self.later.len() {
            self.current += 1;
            if let Some(slot) = self.later.get_mut(self.current) {
                self.near.extend(std::mem::take(slot).into_iter().map(Reverse));
            }
        }
        self.near.pop().map(|Reverse((at, event))| (f64::from_bits(at), event))
    }
}
