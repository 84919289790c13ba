//! Tables that were dropped instead of released: who leaked them, and their blocks back.
//!
//! Every table knows the channel of the pool that opened it. A drop sends what the table still owned down that
//! channel; the pool takes it back the next time a table is opened, or when [`BlockPool::take_leaks`](crate::BlockPool::take_leaks) asks. So a leak
//! costs at most time: in debug builds the opening panics and names the line, in release builds it is counted
//! ([`Counters::leaked_tables`](crate::Counters)). A pool that is gone itself receives nothing, and that is no leak.

use std::fmt::{Display, Formatter};
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::group_table::GroupTable;
use crate::ids::{BlockId, HostBlockId};

/// A table, or a swapped sequence, that was dropped while its pool lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leak {
    /// Where it was opened, forked, pinned, or swapped.
    pub opened: &'static Location<'static>,
    /// Blocks that it owned.
    pub blocks: usize,
}

impl Display for Leak {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Leak { opened, blocks } = self;
        write!(f, "a table with {blocks} blocks that was opened at {opened} was dropped; give it to BlockPool::release")
    }
}

/// What a dropped owner still owned.
pub(crate) enum Lost {
    Table { groups: Vec<GroupTable<BlockId>>, opened: &'static Location<'static> },
    Swapped { blocks: Vec<HostBlockId>, opened: &'static Location<'static> },
}

/// Which pool an owner belongs to, and the way back to it.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    pool: u64,
    lost: Sender<Lost>,
}

impl Home {
    /// The home of a new pool, and the end at which it receives what was lost.
    pub fn new() -> (Home, Receiver<Lost>) {
        static LAST_POOL: AtomicU64 = AtomicU64::new(0);
        let (lost, receiver) = channel();
        (Home { pool: LAST_POOL.fetch_add(1, Ordering::Relaxed), lost }, receiver)
    }

    /// Reports what was dropped. An error says that the pool is gone too.
    pub fn report(&self, lost: Lost) {
        let _ = self.lost.send(lost);
    }
}

impl PartialEq for Home {
    fn eq(&self, other: &Home) -> bool {
        self.pool == other.pool
    }
}
