//! What passes between handles and the engine's thread: commands to it, and the events of a request and snapshots from it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc as commands;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use sampling::Constraint;
use sched::RequestId;
use tokio::sync::{mpsc, oneshot, watch};

use crate::api::{Event, GenerationRequest};
use crate::connector::Fetched;
use crate::error::{AdapterError, SubmitError};
use crate::step::{LoadedAdapter, TransferSource};
use crate::watch::Snapshot;

/// What a handle asks of the engine's thread.
pub(super) enum Command {
    Submit {
        request: Submission,
        /// Where to send the request on when blocks of other replicas have been loaded for it.
        commands: commands::Sender<Command>,
    },
    /// Blocks of other replicas were loaded for a request.
    Fetched {
        source: TransferSource,
        found: Fetched,
        request: Submission,
    },
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
    pub events: EventSender,
    pub reply: oneshot::Sender<Result<RequestId, SubmitError>>,
}

/// Tells who unloads an adapter that it is gone.
pub(super) type UnloadReply = oneshot::Sender<Result<(), AdapterError>>;

/// An event and the end of its step.
pub(super) type Emitted = (Instant, Event);

/// The engine's end of a request's channel.
pub(super) struct EventSender {
    pub sender: mpsc::Sender<Emitted>,
    pub state: Arc<StreamState>,
}

/// State of a request that both ends of its channel see.
#[derive(Default)]
pub(super) struct StreamState {
    pub scheduled: OnceLock<Instant>,
    fell_behind: AtomicBool,
}

/// The events of one request. Dropping the stream before its end cancels the request and frees its blocks.
pub struct OutputStream {
    pub(super) id: RequestId,
    pub(super) events: mpsc::Receiver<Emitted>,
    pub(super) commands: commands::Sender<Command>,
    pub(super) prompt_len: usize,
    pub(super) state: Arc<StreamState>,
    pub(super) last_event: Instant,
}

impl OutputStream {
    /// Returns the next event; `None` after every sequence has finished. If a finish is missing, the engine thread has ended or
    /// the reader [fell behind](OutputStream::fell_behind).
    pub async fn next(&mut self) -> Option<Event> {
        let emitted = self.events.recv().await;
        self.note(emitted)
    }

    /// Like [`OutputStream::next`] for callers without an async runtime.
    ///
    /// # Panics
    /// If called from within an async task.
    pub fn next_blocking(&mut self) -> Option<Event> {
        let emitted = self.events.blocking_recv();
        self.note(emitted)
    }

    fn note(&mut self, emitted: Option<Emitted>) -> Option<Event> {
        let (at, event) = emitted?;
        self.last_event = at;
        Some(event)
    }

    /// When the engine emitted the event that [`OutputStream::next`] returned last, however late it was read. Before the first
    /// event, when the request was submitted.
    pub fn last_event(&self) -> Instant {
        self.last_event
    }

    /// When the first step of this request began, which is when the request left the queue.
    pub fn scheduled(&self) -> Option<Instant> {
        self.state.scheduled.get().copied()
    }

    /// Whether the request was cancelled because more events were unread than
    /// [`max_unread_events`](crate::EngineConfig::max_unread_events) allows.
    pub fn fell_behind(&self) -> bool {
        self.state.fell_behind.load(Ordering::Acquire)
    }

    /// Number of tokens in the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        // The engine ignores this if the request has ended.
        let _ = self.commands.send(Command::Abort(self.id));
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

impl EventSender {
    /// Sends an event. Returns `false` if the receiver is gone or has fallen behind.
    pub fn send(&self, at: Instant, event: Event) -> bool {
        match self.sender.try_send((at, event)) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.state.fell_behind.store(true, Ordering::Release);
                false
            }
        }
    }
}
