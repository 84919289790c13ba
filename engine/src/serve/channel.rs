//! What passes between handles and the engine's thread: commands to it, and the events of requests and snapshots from it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc as commands;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use sampling::Constraint;
use sched::RequestId;
use tokio::sync::{mpsc, oneshot, watch};

use crate::api::{Event, GenerationRequest, SleepError, SleepLevel};
use crate::error::{AdapterError, SubmitError};
use crate::serve::outbox::{Batch, BatchSender, Emitted};
use crate::serve::text_engine::TextEngine;
use crate::serve::wakers::{Reader, Wakers};
use crate::step::LoadedAdapter;
use crate::watch::Snapshot;

/// Least time between two snapshots for watchers.
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

/// What a handle asks of the engine's thread.
pub(super) enum Command {
    Submit {
        request: Submission,
        /// Where to say that blocks of other replicas are loaded for it.
        commands: commands::Sender<Command>,
    },
    /// Blocks of other replicas are loaded, so that the exchange can be advanced.
    AdvanceExchange,
    Abort(RequestId),
    AddAdapter {
        name: String,
        loaded: LoadedAdapter,
        replace: bool,
        reply: oneshot::Sender<Result<(), AdapterError>>,
    },
    UnloadAdapter {
        name: String,
        reply: UnloadReply,
    },
    ResetPrefixCache {
        reset_running: bool,
        /// Gets whether the cache was emptied.
        reply: oneshot::Sender<bool>,
    },
    Sleep {
        level: SleepLevel,
        /// End unfinished requests first.
        abort: bool,
        reply: oneshot::Sender<Result<(), SleepError>>,
    },
    Wake {
        reply: oneshot::Sender<Result<(), SleepError>>,
    },
    /// A watcher asks for a snapshot now.
    Snapshot,
    /// Probe the ranks when the engine has been idle for so long.
    ProbeRanks(Duration),
    Shutdown,
}

/// A request on its way to the engine.
pub(super) struct Submission {
    pub request: Box<GenerationRequest>,
    pub constraint: Option<Box<dyn Constraint>>,
    pub events: BatchSender,
    pub reply: oneshot::Sender<Result<RequestId, SubmitError>>,
}

/// Tells who unloads an adapter that it is gone.
pub(super) type UnloadReply = oneshot::Sender<Result<(), AdapterError>>;

/// The events of one or several requests. Dropping the stream before its end cancels the requests and frees their blocks.
pub struct OutputStream {
    pub(super) ids: Vec<RequestId>,
    pub(super) unenforced: BTreeSet<String>,
    pub(super) batches: mpsc::Receiver<Batch>,
    pub(super) commands: commands::Sender<Command>,
    pub(super) fell_behind: Arc<AtomicBool>,
    /// Events of the batch that is being read.
    pub(super) unread: std::vec::IntoIter<Emitted>,
    pub(super) last_event: Instant,
    pub(super) scheduled: Option<Instant>,
    pub(super) wakers: Arc<Wakers>,
    /// The task that polled last, and its waker as a reader.
    pub(super) reader: Option<(Waker, Waker)>,
}

impl OutputStream {
    /// Keywords of JSON schemas that the constraints of the requests do not enforce.
    pub fn unenforced(&self) -> &BTreeSet<String> {
        &self.unenforced
    }

    /// Returns the next event; `None` after every sequence has finished. If a finish is missing, the engine thread has ended or
    /// the reader [fell behind](OutputStream::fell_behind).
    pub async fn next(&mut self) -> Option<Event> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await.map(|(_, event)| event)
    }

    /// Polls for the next event and the index of its request. The events of a step become ready together.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, Event)>> {
        loop {
            if let Some(emitted) = self.unread.next() {
                return Poll::Ready(Some(self.note(emitted)));
            }
            let (_, reader) = match self.reader.take() {
                Some((task, reader)) if task.will_wake(cx.waker()) => self.reader.insert((task, reader)),
                _ => {
                    let task = cx.waker().clone();
                    self.reader.insert((task.clone(), Reader::waker(task, self.wakers.clone())))
                }
            };
            match ready!(self.batches.poll_recv(&mut Context::from_waker(reader))) {
                Some(batch) => self.begin(batch),
                None => return Poll::Ready(None),
            }
        }
    }

    /// Like [`OutputStream::next`] for callers without an async runtime.
    ///
    /// # Panics
    /// If called from within an async task.
    pub fn next_blocking(&mut self) -> Option<Event> {
        loop {
            if let Some(emitted) = self.unread.next() {
                return Some(self.note(emitted).1);
            }
            let batch = self.batches.blocking_recv()?;
            self.begin(batch);
        }
    }

    fn begin(&mut self, batch: Batch) {
        self.last_event = batch.at;
        self.unread = batch.events.into_iter();
    }

    fn note(&mut self, emitted: Emitted) -> (usize, Event) {
        self.scheduled = emitted.scheduled;
        (emitted.request, emitted.event)
    }

    /// When the engine emitted the event that was returned last, however late it was read. Before the first event, when the
    /// requests were submitted.
    pub fn last_event(&self) -> Instant {
        self.last_event
    }

    /// When the first step of the request of the last event began, which is when that request left the queue.
    pub fn scheduled(&self) -> Option<Instant> {
        self.scheduled
    }

    /// Whether the requests were cancelled because the events of more steps were unread than
    /// [`max_unread_events`](crate::EngineConfig::max_unread_events) allows.
    pub fn fell_behind(&self) -> bool {
        self.fell_behind.load(Ordering::Acquire)
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        // The engine ignores those that have ended.
        for &id in &self.ids {
            let _ = self.commands.send(Command::Abort(id));
        }
    }
}

/// Receives snapshots of the engine. A slow watcher delays nothing: it gets the latest snapshot and misses those before.
pub struct Watcher {
    pub(super) snapshots: watch::Receiver<Arc<Snapshot>>,
    pub(super) commands: commands::Sender<Command>,
}

impl Watcher {
    /// Waits for the next snapshot; `None` if the engine has ended. An idle engine takes snapshots only when
    /// [asked](Watcher::look).
    pub async fn next(&mut self) -> Option<Arc<Snapshot>> {
        self.snapshots.changed().await.ok()?;
        Some(self.snapshots.borrow_and_update().clone())
    }

    /// Asks for a snapshot now: after the current step, or at once if no step runs.
    pub fn look(&self) {
        let _ = self.commands.send(Command::Snapshot);
    }
}

/// Publishes snapshots while there are watchers.
pub(super) struct SnapshotPublisher {
    pub sink: watch::Sender<Arc<Snapshot>>,
    pub last: Instant,
    /// A watcher has asked for a snapshot.
    pub requested: bool,
}

impl SnapshotPublisher {
    /// Publishes a snapshot if a watcher has asked for one, or if there are watchers and [`WATCH_INTERVAL`] has passed or work
    /// has ended.
    pub fn publish(&mut self, engine: &mut TextEngine) {
        let due = self.last.elapsed() >= WATCH_INTERVAL || !engine.has_work();
        // One receiver belongs to the handle.
        if self.requested || (due && self.sink.receiver_count() > 1) {
            self.requested = false;
            self.last = Instant::now();
            self.sink.send_replace(Arc::new(engine.snapshot()));
        }
    }
}
