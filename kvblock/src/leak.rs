//! Leak detection: block tables that are dropped instead of released.
//!
//! Every table has a channel to the pool that opened it. Dropping it sends the blocks that it still owns over the
//! channel. The pool frees them when the next table is opened, or in
//! [`BlockPool::take_leaks`](crate::BlockPool::take_leaks). In debug builds the opening panics and names the line that
//! opened the leaked table; in release builds the leak is counted in [`Counters::leaked_tables`](crate::Counters). A
//! table that outlives its pool is not a leak.

use std::fmt::{Display, Formatter};
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::group_table::GroupTable;
use crate::ids::{BlockId, HostBlockId};

/// A table, or a swapped sequence, that was dropped before its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leak {
    /// The line that opened, forked, or swapped it.
    pub opened: &'static Location<'static>,
    /// Number of blocks that it owned.
    pub blocks: usize,
}

impl Display for Leak {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Leak { opened, blocks } = self;
        write!(f, "a table with {blocks} blocks that was opened at {opened} was dropped; give it to BlockPool::release")
    }
}

/// The blocks of a dropped owner.
pub(crate) enum Leaked {
    Table { groups: Vec<GroupTable<BlockId>>, opened: &'static Location<'static> },
    Swapped { blocks: Vec<HostBlockId>, opened: &'static Location<'static> },
}

/// Identifies the pool of a table, and reports leaks to it.
#[derive(Clone, Debug)]
pub(crate) struct PoolRef {
    pool: u64,
    leaked: Sender<Leaked>,
}

impl PoolRef {
    /// Creates the reference to a new pool, and the pool's end of the channel.
    pub fn new() -> (PoolRef, Receiver<Leaked>) {
        static LAST_POOL: AtomicU64 = AtomicU64::new(0);
        let (leaked, receiver) = channel();
        (PoolRef { pool: LAST_POOL.fetch_add(1, Ordering::Relaxed), leaked }, receiver)
    }

    /// Reports a leak. Sending fails if the pool has been dropped too, and then nothing is leaked.
    pub fn report(&self, leaked: Leaked) {
        let _ = self.leaked.send(leaked);
    }
}

impl PartialEq for PoolRef {
    fn eq(&self, other: &PoolRef) -> bool {
        self.pool == other.pool
    }
}
