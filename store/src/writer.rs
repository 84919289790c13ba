//! The thread that writes. What waits while it commits is the next commit.
//!
//! A failed write leaves the database unusable until it is opened again. The writer does that at once, and otherwise before the next
//! changes or after the next read; meanwhile reads fail too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

use tokio::sync::{mpsc, oneshot};

use crate::error::StoreError;
use crate::record::Change;
use crate::tables::{Tables, Totals, guarded};
use crate::{Clock, Limits, Opener, Stats};

/// Lists of changes in one commit.
const GROUP: usize = 256;
/// Bytes in one commit, after which no further list joins it.
const GROUP_BYTES: usize = 8 << 20;

/// What the writer is asked for.
pub(crate) enum Command {
    Apply {
        changes: Vec<Change>,
        reply: oneshot::Sender<Result<(), StoreError>>,
    },
    Sweep {
        reply: oneshot::Sender<Result<bool, StoreError>>,
    },
    /// Open the database again if its last write failed: someone wants to read.
    Reopen,
    /// The store is closed: look at [`Shared`].
    Close,
}

/// What handles and the writer share.
pub(crate) struct Shared {
    /// `None` while it is opened again, and at the end.
    tables: RwLock<Option<Tables>>,
    stats: Mutex<Stats>,
    evicted_until: AtomicU64,
    is_closed: AtomicBool,
}

impl Shared {
    pub fn new(tables: Tables) -> Result<Shared, StoreError> {
        let shared = Shared {
            stats: Mutex::default(),
            evicted_until: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            tables: RwLock::new(None),
        };
        shared.note(&tables.totals()?, |_| {});
        *shared.tables.write().unwrap_or_else(PoisonError::into_inner) = Some(tables);
        Ok(shared)
    }

    /// Reads. A panic of redb over a damaged page is an error.
    pub fn read<T>(&self, read: impl FnOnce(&Tables) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
        match &*tables {
            Some(tables) => guarded(|| read(tables)),
            None if self.is_closed.load(Ordering::Acquire) => Err(StoreError::Closed),
            None => Err(StoreError::Io("its last write failed".to_string())),
        }
    }

    /// Whether the database must be opened again.
    pub fn is_lost(&self) -> bool {
        self.tables.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    pub fn stats(&self) -> Stats {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn evicted_until(&self) -> u64 {
        self.evicted_until.load(Ordering::Acquire)
    }

    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    fn note(&self, totals: &Totals, more: impl FnOnce(&mut Stats)) {
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        totals.fill(&mut stats);
        more(&mut stats);
        self.evicted_until.store(totals.evicted_until, Ordering::Release);
    }
}

/// State of the thread.
pub(crate) struct Writer {
    queue: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    opener: Opener,
    limits: Limits,
    clock: Clock,
}

impl Writer {
    pub fn new(
        queue: mpsc::Receiver<Command>,
        shared: Arc<Shared>,
        opener: Opener,
        limits: Limits,
        clock: Clock,
    ) -> Writer {
        Writer { queue, shared, opener, limits, clock }
    }

    /// Writes until the last handle is dropped or the store is closed.
    pub fn run(mut self) {
        while let Some(first) = self.queue.blocking_recv() {
            let (mut next, mut lists, mut replies, mut bytes) = (Some(first), Vec::new(), Vec::new(), 0);
            let mut rest = None;
            while let Some(command) = next.take() {
                match command {
                    Command::Apply { changes, reply } => {
                        bytes += changes.iter().map(Change::num_bytes).sum::<usize>();
                        lists.push(changes);
                        replies.push(reply);
                    }
                    other => {
                        rest = Some(other);
                        break;
                    }
                }
                if lists.len() < GROUP && bytes < GROUP_BYTES {
                    next = self.queue.try_recv().ok();
                }
            }
            if !lists.is_empty() {
                self.commit(&lists, replies);
            }
            if let Some(Command::Reopen) = rest {
                let _ = self.with(|_, _| Ok(()));
            }
            if let Some(Command::Sweep { reply }) = rest {
                let now = (self.clock)();
                let swept = self.with(|tables, limits| tables.sweep(limits, now));
                let swept = swept.map(|(more, totals)| {
                    self.shared.note(&totals, |_| {});
                    more
                });
                // The caller may have stopped waiting.
                let _ = reply.send(swept);
            }
            if self.shared.is_closed.load(Ordering::Acquire) {
                break;
            }
        }
        self.queue.close();
        self.shared.close();
        // Ends with the state of the allocator in the file, so that the next start need not repair it.
        *self.shared.tables.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn commit(&self, lists: &[Vec<Change>], replies: Vec<oneshot::Sender<Result<(), StoreError>>>) {
        let now = (self.clock)();
        match self.with(|tables, limits| tables.write(lists, limits, now)) {
            Ok((results, totals, evicted)) => {
                self.shared.note(&totals, |stats| {
                    stats.commits += 1;
                    stats.changes += lists.iter().map(|changes| changes.len() as u64).sum::<u64>();
                    stats.evicted += evicted;
                });
                for (reply, result) in replies.into_iter().zip(results) {
                    let _ = reply.send(result);
                }
            }
            Err(error) => {
                for reply in replies {
                    let _ = reply.send(Err(copy(&error)));
                }
            }
        }
    }

    /// Runs `work` on the database. If that fails, the database is opened again.
    fn with<T>(&self, work: impl FnOnce(&Tables, &Limits) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let is_open = self.shared.tables.read().unwrap_or_else(PoisonError::into_inner).is_some();
        if !is_open {
            self.reopen()?;
        }
        let done = self.shared.read(|tables| work(tables, &self.limits));
        if done.is_err() {
            self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner).failures += 1;
            // If this fails, the next changes try again.
            let _ = self.reopen();
        }
        done
    }

    fn reopen(&self) -> Result<(), StoreError> {
        let mut tables = self.shared.tables.write().unwrap_or_else(PoisonError::into_inner);
        // The lock of the file is free once the database is gone.
        *tables = None;
        let (opened, _) = Tables::open(&*self.opener)?;
        self.shared.note(&opened.totals()?, |_| {});
        *tables = Some(opened);
        Ok(())
    }
}

/// An error for each of those that share a commit.
fn copy(error: &StoreError) -> StoreError {
    match error {
        StoreError::Damaged(what) => StoreError::Damaged(what.clone()),
        StoreError::Locked => StoreError::Locked,
        other => StoreError::Io(match other {
            StoreError::Io(what) => what.clone(),
            other => other.to_string(),
        }),
    }
}
