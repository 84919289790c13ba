//! Ranks that are threads of this process.
//!
//! In call n of a group, each rank writes what it gives to its slot n mod 2, waits at a barrier, and reads the slots of the others. One
//! barrier per call is enough: a rank that writes slot n + 2 has passed barrier n + 1, which every rank reaches only after it has read
//! the slots of call n.

use std::collections::{HashMap, VecDeque};
use std::hint;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use simd::lock;

use super::{Collective, CollectiveError};

/// Polls of a wait before the thread sleeps. Ranks that compute the same arrive within some microseconds.
const SPINS: u32 = 2000;
/// Longest sleep of a rank. Groups that were split from another end with it, but are not woken.
const LIMIT: Duration = Duration::from_millis(100);

/// Returns the ranks of a group of `size` threads of this process, in their order: one for each thread.
pub fn threads(size: usize) -> Vec<Arc<dyn Collective>> {
    let group = Arc::new(Group::new(size));
    (0..size).map(|rank| Arc::new(Threads::new(group.clone(), rank)) as Arc<dyn Collective>).collect()
}

/// Returns a group of one rank.
pub fn single() -> Arc<dyn Collective> {
    Arc::new(Threads::new(Arc::new(Group::new(1)), 0))
}

/// Messages from one rank to another.
type Messages = VecDeque<Vec<u8>>;
/// A group, and how many ranks have joined it.
type Joined = (Arc<Group>, usize);

struct Threads {
    rank: usize,
    group: Arc<Group>,
    /// Number of calls that all ranks take part in.
    calls: AtomicU64,
}

/// What the ranks share.
struct Group {
    size: usize,
    /// What each rank gives in even and odd calls.
    slots: Vec<[Mutex<Slot>; 2]>,
    barrier: Barrier,
    /// What was sent and not received, by sender and receiver.
    mail: Mutex<HashMap<(usize, usize), Messages>>,
    arrived: Condvar,
    /// Groups that a split is making, by call and color.
    splits: Mutex<HashMap<(u64, usize), Joined>>,
    stop: Arc<Stop>,
}

/// What one rank gives in one call.
#[derive(Default)]
struct Slot {
    call: &'static str,
    bytes: Vec<u8>,
}

/// The end of a group and of all groups that were split from it.
#[derive(Default)]
struct Stop {
    is_set: AtomicBool,
    reason: Mutex<String>,
}

#[derive(Default)]
struct Barrier {
    waiting: Mutex<usize>,
    /// Number of times that all ranks have arrived.
    opened: AtomicU64,
    open: Condvar,
}

impl Stop {
    fn check(&self) -> Result<(), CollectiveError> {
        match self.is_set.load(Ordering::Acquire) {
            true => Err(CollectiveError::Aborted(lock(&self.reason).clone())),
            false => Ok(()),
        }
    }
}

impl Barrier {
    /// Waits until all ranks have called this.
    fn wait(&self, size: usize, stop: &Stop) -> Result<(), CollectiveError> {
        let before = self.opened.load(Ordering::Acquire);
        {
            let mut waiting = lock(&self.waiting);
            *waiting += 1;
            if *waiting == size {
                *waiting = 0;
                self.opened.store(before + 1, Ordering::Release);
                self.open.notify_all();
                return Ok(());
            }
        }
        // A rank that has what it needs goes on: its own error says more than the reason why another one has ended the group.
        let has_opened = || self.opened.load(Ordering::Acquire) != before;
        let is_open = || has_opened() || stop.is_set.load(Ordering::Acquire);
        let outcome = || if has_opened() { Ok(()) } else { stop.check() };
        for spin in 0..SPINS {
            if is_open() {
                return outcome();
            }
            if spin % 64 == 63 { std::thread::yield_now() } else { hint::spin_loop() }
        }
        let mut waiting = lock(&self.waiting);
        while !is_open() {
            waiting = self.open.wait_timeout(waiting, LIMIT).unwrap_or_else(PoisonError::into_inner).0;
        }
        outcome()
    }
}

impl Group {
    fn new(size: usize) -> Group {
        Group::with_stop(size, Arc::default())
    }

    fn with_stop(size: usize, stop: Arc<Stop>) -> Group {
        Group {
            size,
            slots: (0..size).map(|_| Default::default()).collect(),
            barrier: Barrier::default(),
            mail: Mutex::default(),
            arrived: Condvar::new(),
            splits: Mutex::default(),
            stop,
        }
    }

    fn stop(&self, reason: &str) {
        {
            let mut first = lock(&self.stop.reason);
            if !self.stop.is_set.load(Ordering::Acquire) {
                *first = reason.to_string();
                self.stop.is_set.store(true, Ordering::Release);
            }
        }
        self.wake();
    }

    /// Wakes the ranks that sleep, so that they see the end.
    fn wake(&self) {
        drop(lock(&self.barrier.waiting));
        self.barrier.open.notify_all();
        drop(lock(&self.mail));
        self.arrived.notify_all();
    }
}

impl Threads {
    fn new(group: Arc<Group>, rank: usize) -> Threads {
        Threads { rank, group, calls: AtomicU64::new(0) }
    }

    /// Gives bytes to the other ranks and passes what each rank gave to `read`.
    fn exchange(
        &self,
        call: &'static str,
        give: impl FnOnce(&mut Vec<u8>),
        mut read: impl FnMut(usize, &[u8]) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        self.group.stop.check()?;
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let slot_of = |rank: usize| &self.group.slots[rank][(number % 2) as usize];
        {
            let mut slot = lock(slot_of(self.rank));
            slot.call = call;
            slot.bytes.clear();
            give(&mut slot.bytes);
        }
        self.group.barrier.wait(self.group.size, &self.group.stop)?;
        let outcome = (0..self.group.size).try_for_each(|rank| {
            let slot = lock(slot_of(rank));
            if slot.call != call {
                let reason = format!("rank {} called {call}, rank {rank} {}", self.rank, slot.call);
                return Err(CollectiveError::Aborted(reason));
            }
            read(rank, &slot.bytes)
        });
        // The other ranks may have succeeded, and would wait for this one in the next call.
        outcome.inspect_err(|error| self.group.stop(&error.to_string()))
    }
}

impl Collective for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.size
    }

    fn carrier(&self) -> &'static str {
        "threads"
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Collective>, CollectiveError> {
        let call = self.calls.load(Ordering::Relaxed);
        let mut colors = Vec::new();
        let give = |bytes: &mut Vec<u8>| bytes.extend_from_slice(&color.to_le_bytes());
        self.exchange("split", give, |_, bytes| {
            colors.extend(bytes.as_chunks().0.iter().map(|bytes| usize::from_le_bytes(*bytes)));
            Ok(())
        })?;
        let size = colors.iter().filter(|other| **other == color).count();
        let rank = colors[..self.rank].iter().filter(|other| **other == color).count();
        let mut splits = lock(&self.group.splits);
        let fresh = || (Arc::new(Group::with_stop(size, self.group.stop.clone())), 0);
        let (group, joined) = splits.entry((call, color)).or_insert_with(fresh);
        *joined += 1;
        let (group, is_last) = (group.clone(), *joined == size);
        if is_last {
            splits.remove(&(call, color));
        }
        Ok(Arc::new(Threads::new(group, rank)))
    }

    fn broadcast(&self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        CollectiveError::check_rank(root, self.group.size)?;
        let length = if self.rank == root { bytes.len() } else { 0 };
        CollectiveError::check_broadcast(self.rank, length)?;
        let own = std::mem::take(bytes);
        let give = |slot: &mut Vec<u8>| slot.extend_from_slice(if self.rank == root { &own } else { &[] });
        self.exchange("broadcast", give, |rank, given| {
            if rank == root {
                bytes.extend_from_slice(given);
            }
            Ok(())
        })
    }

    fn all_gather(&self, own: &[u8], rows: usize, widths: &[usize], all: &mut [u8]) -> Result<(), CollectiveError> {
        let sizes = (own.len(), all.len());
        let width = CollectiveError::check_gather(self.rank, self.group.size, sizes, rows, widths)?;
        let mut at = 0;
        self.exchange(
            "all_gather",
            |slot| slot.extend_from_slice(own),
            |from, given| {
                let part = widths[from];
                CollectiveError::check(from, "rows given to all_gather", given.len(), rows * part)?;
                super::place_columns(given, part, all, width, at);
                at += part;
                Ok(())
            },
        )
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<(), CollectiveError> {
        CollectiveError::check_rank(to, self.group.size)?;
        self.group.stop.check()?;
        lock(&self.group.mail).entry((self.rank, to)).or_default().push_back(bytes.to_vec());
        self.group.arrived.notify_all();
        Ok(())
    }

    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<(), CollectiveError> {
        CollectiveError::check_rank(from, self.group.size)?;
        let mut mail = lock(&self.group.mail);
        loop {
            self.group.stop.check()?;
            if let Some(given) = mail.get_mut(&(from, self.rank)).and_then(VecDeque::pop_front) {
                CollectiveError::check(self.rank, "a message", given.len(), bytes.len())?;
                bytes.copy_from_slice(&given);
                return Ok(());
            }
            mail = self.group.arrived.wait_timeout(mail, LIMIT).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn abort(&self, reason: &str) {
        self.group.stop(reason);
    }
}
