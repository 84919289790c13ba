//! The engine on a thread of its own, behind a handle that any number of tasks may clone.
//!
//! The thread owns everything; handles send it commands, it sends each request's events through that request's channel.
//! A channel that nobody reads any more is a cancelled request.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc as commands;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use models::{ChatTemplate, GenerationDefaults, Tokenizer};
use sampling::Constraint;
use sched::RequestId;
use tokio::sync::{mpsc, oneshot, watch};

use crate::api::{EngineConfig, EngineStats, Event, GenerationRequest, ModelInfo};
use crate::error::{EngineError, SubmitError};
use crate::grammar::Grammars;
use crate::load::{Progress, load};
use crate::publish::TextEngine;
use crate::watch::Snapshot;

/// Time between two snapshots for those who watch.
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

enum Command {
    Submit {
        request: Box<GenerationRequest>,
        constraint: Option<Box<dyn Constraint>>,
        events: mpsc::UnboundedSender<Event>,
        reply: oneshot::Sender<Result<RequestId, SubmitError>>,
    },
    Abort(RequestId),
    /// Somebody watches and wants to see the engine as it is now.
    Look,
    Shutdown,
}

/// What the engine thread lets others see.
struct Status {
    stats: Mutex<EngineStats>,
    /// When the last step ended, or when work began after a pause.
    last_progress: Mutex<Instant>,
    unfinished: AtomicUsize,
    alive: AtomicBool,
    draining: AtomicBool,
}

impl Status {
    fn publish(&self, engine: &TextEngine) {
        *lock(&self.stats) = engine.stats();
        *lock(&self.last_progress) = Instant::now();
        self.unfinished.store(engine.num_unfinished(), Ordering::Release);
    }
}

/// Plain numbers stay right even if a thread died while it held them.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Shared {
    info: ModelInfo,
    tokenizer: Arc<Tokenizer>,
    grammars: Arc<Grammars>,
    chat_template: Option<Arc<ChatTemplate>>,
    defaults: GenerationDefaults,
    status: Arc<Status>,
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
        let engine = TextEngine::new(loaded.engine, loaded.tokenizer.clone());
        let status = Arc::new(Status {
            stats: Mutex::new(engine.stats()),
            last_progress: Mutex::new(Instant::now()),
            unfinished: AtomicUsize::new(0),
            alive: AtomicBool::new(true),
            draining: AtomicBool::new(false),
        });
        let (sender, receiver) = commands::channel();
        // The handle's own receiver does not watch: it is there to make others.
        let (views, snapshots) = watch::channel(Arc::new(Snapshot::default()));
        let view = View { views, last: Instant::now(), asked: false };
        let streams = HashMap::new();
        let worker = Worker { engine, receiver, streams, events: Vec::new(), status: status.clone(), view };
        std::thread::Builder::new().name("quire-engine".to_string()).spawn(move || worker.run()).map_err(|error| {
            EngineError::Config {
                flag: "--threads",
                found: error.to_string(),
                expected: "that the system lets the engine thread start".to_string(),
            }
        })?;
        let shared = Shared {
            info: loaded.info,
            grammars: Arc::new(Grammars::new(loaded.tokenizer.clone())),
            tokenizer: loaded.tokenizer,
            chat_template: loaded.chat_template.map(Arc::new),
            defaults: loaded.defaults,
            status,
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
        if self.shared.status.draining.load(Ordering::Acquire) {
            return Err(SubmitError::Closed);
        }
        let prompt_len = request.prompt.len();
        let constraint = match &request.params.structured_outputs {
            Some(wanted) => Some(self.shared.grammars.compile(wanted).await?),
            None => None,
        };
        let (events, receiver) = mpsc::unbounded_channel();
        let (reply, answer) = oneshot::channel();
        self.commands
            .send(Command::Submit { request: Box::new(request), constraint, events, reply })
            .map_err(|_| SubmitError::Closed)?;
        let id = answer.await.map_err(|_| SubmitError::Closed)??;
        Ok(OutputStream { id, events: receiver, commands: self.commands.clone(), prompt_len })
    }

    /// The latest numbers.
    pub fn stats(&self) -> EngineStats {
        *lock(&self.shared.status.stats)
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
        self.shared.status.draining.load(Ordering::Acquire)
    }

    /// Whether the engine thread lives and, while work is pending, has finished a step within `limit`.
    pub fn is_healthy(&self, limit: Duration) -> bool {
        let status = &self.shared.status;
        let busy = status.unfinished.load(Ordering::Acquire) > 0;
        status.alive.load(Ordering::Acquire) && (!busy || lock(&status.last_progress).elapsed() <= limit)
    }

    /// Refuses new requests from now on; those running go on.
    pub fn drain(&self) {
        self.shared.status.draining.store(true, Ordering::Release);
    }

    /// Requests that have not ended yet (waiting and running).
    pub fn num_unfinished(&self) -> usize {
        self.shared.status.unfinished.load(Ordering::Acquire)
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
    events: mpsc::UnboundedReceiver<Event>,
    commands: commands::Sender<Command>,
    prompt_len: usize,
}

impl OutputStream {
    /// The next event; `None` after every sequence has finished (or if the engine has died: then a finish is missing).
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Like [`OutputStream::next`] for callers without an async runtime.
    ///
    /// # Panics
    /// If called from within an async task.
    pub fn next_blocking(&mut self) -> Option<Event> {
        self.events.blocking_recv()
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
    streams: HashMap<RequestId, mpsc::UnboundedSender<Event>>,
    /// Of the step under way: whose, what, and whether it is the request's last. Reused.
    events: Vec<(RequestId, Event, bool)>,
    status: Arc<Status>,
    view: View,
}

/// Says that the thread is gone, also if it went by a panic.
struct Alive(Arc<Status>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Release);
    }
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
            Command::Submit { request, constraint, events, reply } => {
                let result = self.engine.submit(*request, constraint);
                if let Ok(id) = &result {
                    self.streams.insert(*id, events);
                }
                // Before the answer: whoever stops the engine upon it must find the request counted.
                self.status.unfinished.store(self.engine.num_unfinished(), Ordering::Release);
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

    fn abort(&mut self, id: RequestId) {
        if self.streams.remove(&id).is_some() {
            self.engine.abort(id);
        }
    }

    /// One step. Its events leave when it is over and its numbers are published, so that whoever has an answer finds
    /// its blocks free and its tokens counted.
    fn step(&mut self) {
        let Worker { engine, events, .. } = self;
        engine.step(|id, event, last| events.push((id, event, last)));
        self.publish();
        let mut events = std::mem::take(&mut self.events);
        for (id, event, last) in events.drain(..) {
            let heard = self.streams.get(&id).is_some_and(|stream| stream.send(event).is_ok());
            if last {
                self.streams.remove(&id);
            } else if !heard {
                self.abort(id);
            }
        }
        self.events = events;
    }
}
