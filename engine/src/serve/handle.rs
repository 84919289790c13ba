//! The engine on a thread of its own, behind a handle that any number of tasks may clone.
//!
//! The thread owns everything; handles send it commands, it sends each request's events through that request's channel.
//! A channel that nobody reads any more is a cancelled request.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc as commands;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use device::Device;
use models::{ChatTemplate, GenerationDefaults, Tokenizer};
use sampling::Constraint;
use sched::RequestId;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::api::{EngineConfig, EngineStats, Event, GenerationRequest, ModelInfo};
use crate::error::{EngineError, SubmitError};
use crate::grammar::Grammars;
use crate::serve::status::{Alive, Status};
use crate::serve::text_engine::TextEngine;
use crate::start::load::{Loaded, Progress, load, load_on};
use crate::step::Engine;
use crate::watch::Snapshot;

/// Time between two snapshots for those who watch.
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

enum Command {
    Submit {
        request: Box<GenerationRequest>,
        constraint: Option<Box<dyn Constraint>>,
        reader: Reader,
        reply: oneshot::Sender<Result<RequestId, SubmitError>>,
    },
    Abort(RequestId),
    /// Somebody watches and wants to see the engine as it is now.
    Look,
    Shutdown,
}

/// An event and the moment at which its step was over.
type Emitted = (Instant, Event);

/// The engine's end of a request's stream.
struct Reader {
    events: mpsc::Sender<Emitted>,
    state: Arc<StreamState>,
}

/// What has become of a request, besides its events.
#[derive(Default)]
struct StreamState {
    scheduled: OnceLock<Instant>,
    fell_behind: AtomicBool,
}

struct Shared {
    info: ModelInfo,
    tokenizer: Arc<Tokenizer>,
    grammars: Arc<Grammars>,
    chat_template: Option<Arc<ChatTemplate>>,
    defaults: GenerationDefaults,
    status: Arc<Status>,
    max_unread_events: usize,
    snapshots: watch::Receiver<Arc<Snapshot>>,
}

/// A cloneable handle on a running engine. The engine ends with [`AsyncEngine::shutdown`] or with its last handle.
#[derive(Clone)]
pub struct AsyncEngine {
    commands: commands::Sender<Command>,
    shared: Arc<Shared>,
}

impl AsyncEngine {
    /// Loads the model and starts the engine thread. Blocks until the model is ready.
    pub fn start(config: EngineConfig, progress: Progress<'_>) -> Result<AsyncEngine, EngineError> {
        let loaded = load(&config, progress)?;
        AsyncEngine::run(&config, loaded)
    }

    /// Like [`AsyncEngine::start`], on a device that the caller has opened; [`EngineConfig::device`] is ignored.
    ///
    /// # Errors
    /// As [`AsyncEngine::start`].
    pub fn start_on(
        config: EngineConfig,
        device: Arc<dyn Device>,
        progress: Progress<'_>,
    ) -> Result<AsyncEngine, EngineError> {
        let loaded = load_on(&config, (device, None), progress)?;
        AsyncEngine::run(&config, loaded)
    }

    fn run(config: &EngineConfig, loaded: Loaded) -> Result<AsyncEngine, EngineError> {
        let engine = TextEngine::new(Engine::new(loaded.parts)?, loaded.tokenizer.clone());
        let status = Arc::new(Status::new(&engine));
        let (sender, receiver) = commands::channel();
        // The handle's own receiver does not watch: it is there to make others.
        let (views, snapshots) = watch::channel(Arc::new(Snapshot::default()));
        let view = View { views, last: Instant::now(), asked: false };
        let worker = Worker {
            engine,
            receiver,
            readers: HashMap::new(),
            events: Vec::new(),
            status: status.clone(),
            view,
            max_queued_requests: config.max_queued_requests,
        };
        std::thread::Builder::new().name("quire-engine".to_string()).spawn(move || worker.run()).map_err(|error| {
            EngineError::Config {
                flag: "--threads",
                found: error.to_string(),
                expected: "that the system lets the engine thread start".to_string(),
            }
        })?;
        let shared = Shared {
            info: loaded.info,
            grammars: Arc::new(Grammars::new(loaded.tokenizer.clone(), config.max_schema_bytes)),
            tokenizer: loaded.tokenizer,
            chat_template: loaded.chat_template.map(Arc::new),
            defaults: loaded.defaults,
            status,
            max_unread_events: config.max_unread_events,
            snapshots,
        };
        Ok(AsyncEngine { commands: sender, shared: Arc::new(shared) })
    }

    /// Facts about the served model.
    pub fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.shared.tokenizer
    }

    /// The model's chat template, where it has one.
    pub fn chat_template(&self) -> Option<&Arc<ChatTemplate>> {
        self.shared.chat_template.as_ref()
    }

    /// Sampling defaults of `generation_config.json`.
    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.shared.defaults
    }

    /// Hands a request over. Everything that can be refused is refused here, before any output.
    pub async fn submit(&self, request: GenerationRequest) -> Result<OutputStream, SubmitError> {
        if self.shared.status.is_draining() {
            return Err(SubmitError::Closed);
        }
        let prompt_len = request.prompt.len();
        let constraint = match &request.params.structured_outputs {
            Some(wanted) => Some(self.shared.grammars.compile(wanted).await?),
            None => None,
        };
        // To compile may have taken a while.
        if self.shared.status.is_draining() {
            return Err(SubmitError::Closed);
        }
        let params = &request.params;
        // Sequences that end together are told of together, so there is a place for one event of each, and for two more.
        let sequences = params.best_of.unwrap_or(params.n).max(params.n);
        let capacity = sequences.saturating_mul(self.shared.max_unread_events).saturating_add(2);
        let (events, receiver) = mpsc::channel(capacity.min(Semaphore::MAX_PERMITS));
        let state = Arc::new(StreamState::default());
        let reader = Reader { events, state: state.clone() };
        let (reply, answer) = oneshot::channel();
        // Before the engine can have made an event.
        let last_event = Instant::now();
        self.commands
            .send(Command::Submit { request: Box::new(request), constraint, reader, reply })
            .map_err(|_| SubmitError::Closed)?;
        let id = answer.await.map_err(|_| SubmitError::Closed)??;
        let commands = self.commands.clone();
        Ok(OutputStream { id, events: receiver, commands, prompt_len, state, last_event })
    }

    /// The latest numbers.
    pub fn stats(&self) -> EngineStats {
        self.shared.status.stats()
    }

    /// Begins to watch: a [`Snapshot`] now, and others while steps run, as long as the result lives.
    pub fn watch(&self) -> Watcher {
        let mut snapshots = self.shared.snapshots.clone();
        snapshots.mark_unchanged();
        let watcher = Watcher { snapshots, commands: self.commands.clone() };
        watcher.look();
        watcher
    }

    /// Whether new requests are refused because the engine is to end.
    pub fn is_draining(&self) -> bool {
        self.shared.status.is_draining()
    }

    /// Whether the engine thread lives and [`AsyncEngine::step_age`] is at most `limit`.
    pub fn is_healthy(&self, limit: Duration) -> bool {
        let status = &self.shared.status;
        status.is_alive() && status.step_age().is_none_or(|age| age <= limit)
    }

    /// Whether the engine thread lives.
    pub fn is_alive(&self) -> bool {
        self.shared.status.is_alive()
    }

    /// Time without a completed step: since the last one while requests are unfinished, and from the first to the last step
    /// that failed since. `None` where neither is the case.
    pub fn step_age(&self) -> Option<Duration> {
        self.shared.status.step_age()
    }

    /// Waits until the engine thread has died of a panic; for ever if it lives or ends by [`AsyncEngine::shutdown`].
    pub async fn death(&self) {
        self.shared.status.death().await;
    }

    /// Several lines that help to see why nothing moves: the thread, queues, pool, and the plan of the step under way.
    pub fn dump(&self) -> String {
        self.shared.status.dump()
    }

    /// Refuses new requests from now on; those running go on.
    pub fn drain(&self) {
        self.shared.status.drain();
    }

    /// Requests that have not ended yet (waiting and running).
    pub fn num_unfinished(&self) -> usize {
        self.shared.status.num_unfinished()
    }

    /// Cancels everything and ends the engine thread.
    pub fn shutdown(&self) {
        self.drain();
        let _ = self.commands.send(Command::Shutdown);
    }
}

/// The events of one request. Dropping it before the end cancels the request and frees its blocks.
pub struct OutputStream {
    id: RequestId,
    events: mpsc::Receiver<Emitted>,
    commands: commands::Sender<Command>,
    prompt_len: usize,
    state: Arc<StreamState>,
    last_event: Instant,
}

impl OutputStream {
    /// The next event; `None` after every sequence has finished (or if the engine has died, or this reader
    /// [fell behind](OutputStream::fell_behind): then a finish is missing).
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

    /// When the engine had the event that [`OutputStream::next`] gave last, however late it is read; before the first, when
    /// the request was taken in.
    pub fn last_event(&self) -> Instant {
        self.last_event
    }

    /// When the first step with some of this request began, which is when it left the queue.
    pub fn scheduled(&self) -> Option<Instant> {
        self.state.scheduled.get().copied()
    }

    /// The request was cancelled because more events were unread than
    /// [`max_unread_events`](EngineConfig::max_unread_events) allows.
    pub fn fell_behind(&self) -> bool {
        self.state.fell_behind.load(Ordering::Acquire)
    }

    /// Tokens in the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        // Of a request that has ended, nothing is left to cancel: the engine ignores it.
        let _ = self.commands.send(Command::Abort(self.id));
    }
}

/// Somebody who watches the engine. It holds nobody up: who looks late sees the latest and misses what was between.
pub struct Watcher {
    snapshots: watch::Receiver<Arc<Snapshot>>,
    commands: commands::Sender<Command>,
}

impl Watcher {
    /// The next snapshot that has not been seen; `None` if the engine has ended. An idle engine changes nothing, and makes
    /// one only if it is asked to [look](Watcher::look).
    pub async fn next(&mut self) -> Option<Arc<Snapshot>> {
        self.snapshots.changed().await.ok()?;
        Some(self.snapshots.borrow_and_update().clone())
    }

    /// Asks for a snapshot of now: between two steps, or at once if none runs.
    pub fn look(&self) {
        let _ = self.commands.send(Command::Look);
    }
}

/// Snapshots for those who watch, where there are any.
struct View {
    views: watch::Sender<Arc<Snapshot>>,
    last: Instant,
    /// Somebody has asked since.
    asked: bool,
}

impl View {
    /// Publishes, if somebody watches and it is time: between steps now and then, and always when work ends.
    fn publish(&mut self, engine: &mut TextEngine) {
        let due = self.last.elapsed() >= WATCH_INTERVAL || !engine.has_work();
        // One receiver is the handle's.
        if self.asked || (due && self.views.receiver_count() > 1) {
            self.asked = false;
            self.last = Instant::now();
            self.views.send_replace(Arc::new(engine.snapshot()));
        }
    }
}

/// The engine thread.
struct Worker {
    engine: TextEngine,
    receiver: commands::Receiver<Command>,
    readers: HashMap<RequestId, Reader>,
    /// Of the step under way: whose, what, and whether it is the request's last. Reused.
    events: Vec<(RequestId, Event, bool)>,
    status: Arc<Status>,
    max_queued_requests: usize,
    view: View,
}

impl Worker {
    fn run(mut self) {
        let _alive = Alive(self.status.clone());
        while self.take_commands() {
            if self.engine.has_work() {
                self.step();
            }
        }
    }

    /// Applies all commands that wait, or waits for one when there is nothing else to do. `false` ends the thread.
    fn take_commands(&mut self) -> bool {
        if !self.engine.has_work() {
            // The last step may have ended by cancelling somebody who fell behind.
            self.status.publish(&self.engine);
            let Ok(command) = self.receiver.recv() else { return false };
            if !self.apply(command) {
                return false;
            }
        }
        loop {
            match self.receiver.try_recv() {
                Ok(command) => {
                    if !self.apply(command) {
                        return false;
                    }
                }
                Err(commands::TryRecvError::Empty) => break,
                Err(commands::TryRecvError::Disconnected) => return false,
            }
        }
        self.publish();
        true
    }

    fn publish(&mut self) {
        self.status.publish(&self.engine);
        self.view.publish(&mut self.engine);
    }

    fn apply(&mut self, command: Command) -> bool {
        match command {
            Command::Submit { request, constraint, reader, reply } => {
                let result = self.submit(*request, constraint, reader);
                // Before the answer: whoever stops the engine upon it must find the request counted.
                self.status.admitted(&self.engine);
                // The caller may have gone while it waited for the answer.
                if let Err(Ok(id)) = reply.send(result) {
                    self.abort(id);
                }
            }
            Command::Abort(id) => self.abort(id),
            Command::Look => self.view.asked = true,
            Command::Shutdown => return false,
        }
        true
    }

    fn submit(
        &mut self,
        request: GenerationRequest,
        constraint: Option<Box<dyn Constraint>>,
        reader: Reader,
    ) -> Result<RequestId, SubmitError> {
        let (waiting, limit) = (self.engine.stats().num_waiting, self.max_queued_requests);
        if waiting >= limit {
            return Err(SubmitError::QueueFull { waiting, limit });
        }
        let id = self.engine.submit(request, constraint)?;
        self.readers.insert(id, reader);
        Ok(id)
    }

    fn abort(&mut self, id: RequestId) {
        if self.readers.remove(&id).is_some() {
            self.engine.abort(id);
        }
    }

    /// One step. Its events leave when it is over and its numbers are published, so that whoever has an answer finds
    /// its blocks free and its tokens counted.
    fn step(&mut self) {
        let began = Instant::now();
        let Worker { engine, events, .. } = self;
        engine.step(|id, event, last| events.push((id, event, last)));
        self.publish();
        for reader in self.engine.scheduled().iter().filter_map(|id| self.readers.get(id)) {
            // Nobody else sets it.
            let _ = reader.state.scheduled.set(began);
        }
        let (mut events, over) = (std::mem::take(&mut self.events), Instant::now());
        for (id, event, last) in events.drain(..) {
            let heard = self.readers.get(&id).is_some_and(|reader| reader.tell(over, event));
            if !heard {
                self.abort(id);
            } else if last {
                self.readers.remove(&id);
            }
        }
        self.events = events;
    }
}

impl Reader {
    /// Whether the event will be read.
    fn tell(&self, at: Instant, event: Event) -> bool {
        match self.events.try_send((at, event)) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.state.fell_behind.store(true, Ordering::Release);
                false
            }
        }
    }
}
