//! The engine on a thread of its own, and a handle on it that any number of tasks may clone.
//!
//! The engine thread owns all state. Handles send it commands, and it sends the events of each stream through that stream's
//! channel. Dropping the receiver of a channel cancels its requests.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc as commands;
use std::time::{Duration, Instant};

use device::{Collective, Device};
use models::{ChatTemplate, GenerationDefaults, Tokenizer};
use sampling::Constraint;
use sched::RequestId;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::api::{AdapterInfo, EngineConfig, EngineStats, Event, GenerationRequest, ModelInfo};
use crate::error::{AdapterError, EngineError, SubmitError};
use crate::grammar::Grammars;
use crate::parallel::Group;
use crate::serve::adapters::{AdapterAccess, AdapterList};
use crate::serve::channel::{Command, OutputStream, SnapshotPublisher, Submission, UnloadReply, Watcher};
use crate::serve::outbox::{BatchSender, Outbox};
use crate::serve::status::{Alive, Status};
use crate::serve::text_engine::{NextStep, TextEngine};
use crate::serve::wakers::Wakers;
use crate::start::load::{Loaded, Progress, load, load_on};
use crate::step::Engine;
use crate::watch::Snapshot;

struct Shared {
    info: ModelInfo,
    tokenizer: Arc<Tokenizer>,
    grammars: Arc<Grammars>,
    chat_template: Option<Arc<ChatTemplate>>,
    defaults: GenerationDefaults,
    status: Arc<Status>,
    max_unread_events: usize,
    /// Number of streams so far.
    streams: AtomicU64,
    wakers: Arc<Wakers>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    adapters: AdapterAccess,
    /// The ranks that compute the model, if there are several.
    ranks: Option<Arc<dyn Collective>>,
}

/// A cloneable handle on a running engine. The engine stops at [`AsyncEngine::shutdown`], or when its last handle is dropped.
#[derive(Clone)]
pub struct AsyncEngine {
    commands: commands::Sender<Command>,
    shared: Arc<Shared>,
}

impl AsyncEngine {
    /// Loads the model and starts the engine thread. Blocks until the model is ready.
    ///
    /// # Errors
    /// The configuration cannot be used, or the model cannot be loaded.
    pub fn start(config: EngineConfig, progress: Progress<'_>) -> Result<AsyncEngine, EngineError> {
        let group = Group::open(&config.parallel)?;
        AsyncEngine::start_in(config, group, progress)
    }

    /// Like [`AsyncEngine::start`], as rank 0 of a group.
    ///
    /// # Errors
    /// As [`AsyncEngine::start`], and what any rank of the group reports.
    pub fn start_in(config: EngineConfig, group: Group, progress: Progress<'_>) -> Result<AsyncEngine, EngineError> {
        let loaded = load(&config, group, progress)?;
        AsyncEngine::run(&config, loaded)
    }

    /// Like [`AsyncEngine::start`], on a device that the caller has opened. [`EngineConfig::device`] is ignored.
    ///
    /// # Errors
    /// As [`AsyncEngine::start`].
    pub fn start_on(
        config: EngineConfig,
        device: Arc<dyn Device>,
        progress: Progress<'_>,
    ) -> Result<AsyncEngine, EngineError> {
        let loaded = load_on(&config, Some(device), Group::open(&config.parallel)?, progress)?;
        AsyncEngine::run(&config, loaded)
    }

    fn run(config: &EngineConfig, loaded: Loaded) -> Result<AsyncEngine, EngineError> {
        let engine = TextEngine::new(Engine::new(loaded.parts)?, loaded.tokenizer.clone());
        let status = Arc::new(Status::new(&engine));
        let adapters = AdapterAccess::new(engine.adapter_store().cloned());
        let (sender, receiver) = commands::channel();
        // The handle's own receiver only serves to be cloned.
        let (sink, snapshots) = watch::channel(Arc::new(Snapshot::default()));
        let snapshots_out = SnapshotPublisher { sink, last: Instant::now(), requested: false };
        let wakers = Arc::new(Wakers::default());
        let thread = EngineThread {
            engine,
            receiver,
            outbox: Outbox::new(wakers.clone()),
            events: Vec::new(),
            status: status.clone(),
            snapshots: snapshots_out,
            adapters: adapters.list.clone(),
            unloads: Vec::new(),
            max_queued_requests: config.max_queued_requests,
        };
        std::thread::Builder::new().name("quire-engine".to_string()).spawn(move || thread.run()).map_err(|error| {
            EngineError::Config {
                flag: "--threads",
                found: error.to_string(),
                expected: "that the system can start the engine thread; raise its limit of threads".to_string(),
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
            streams: AtomicU64::new(0),
            wakers,
            snapshots,
            adapters,
            ranks: loaded.ranks,
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

    /// The model's chat template, if it has one.
    pub fn chat_template(&self) -> Option<&Arc<ChatTemplate>> {
        self.shared.chat_template.as_ref()
    }

    /// Sampling defaults of `generation_config.json`.
    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.shared.defaults
    }

    /// Submits a request.
    ///
    /// # Errors
    /// The request is refused. All checks are made here, before any output.
    pub async fn submit(&self, request: GenerationRequest) -> Result<OutputStream, SubmitError> {
        self.submit_all(vec![request]).await
    }

    /// Submits requests whose events are read from one stream.
    ///
    /// # Errors
    /// A request is refused. Those before it are cancelled.
    pub async fn submit_all(&self, requests: Vec<GenerationRequest>) -> Result<OutputStream, SubmitError> {
        let (sender, batches) = mpsc::channel(self.shared.max_unread_events.clamp(1, Semaphore::MAX_PERMITS));
        let fell_behind = Arc::new(AtomicBool::new(false));
        let stream = self.shared.streams.fetch_add(1, Ordering::Relaxed);
        let mut output = OutputStream {
            ids: Vec::with_capacity(requests.len()),
            batches,
            commands: self.commands.clone(),
            fell_behind: fell_behind.clone(),
            unread: Vec::new().into_iter(),
            // Taken before the engine can emit an event.
            last_event: Instant::now(),
            scheduled: None,
            wakers: self.shared.wakers.clone(),
            reader: None,
        };
        for (index, request) in requests.into_iter().enumerate() {
            let events =
                BatchSender { stream, request: index, sender: sender.clone(), fell_behind: fell_behind.clone() };
            output.ids.push(self.submit_one(request, events).await?);
        }
        Ok(output)
    }

    async fn submit_one(&self, request: GenerationRequest, events: BatchSender) -> Result<RequestId, SubmitError> {
        if self.shared.status.is_draining() {
            return Err(SubmitError::Closed);
        }
        let constraint = match &request.params.structured_outputs {
            Some(wanted) => Some(self.shared.grammars.compile(wanted).await?),
            None => None,
        };
        // Compiling may have taken a while.
        if self.shared.status.is_draining() {
            return Err(SubmitError::Closed);
        }
        let (reply, answer) = oneshot::channel();
        self.commands
            .send(Command::Submit {
                request: Submission { request: Box::new(request), constraint, events, reply },
                commands: self.commands.clone(),
            })
            .map_err(|_| SubmitError::Closed)?;
        answer.await.map_err(|_| SubmitError::Closed)?
    }

    /// Reads the LoRA adapter in a folder and gives it a name, which requests then may use. With `replace`, it takes the place of
    /// another of this name, which the requests that were submitted before keep. One adapter is read at a time.
    ///
    /// # Errors
    /// The engine takes no adapters, the name is taken, or the adapter cannot be used.
    pub async fn load_adapter(&self, name: &str, path: PathBuf, replace: bool) -> Result<(), AdapterError> {
        let adapters = &self.shared.adapters;
        let known = adapters.list().into_iter().find(|info| info.name == name);
        if known.is_some_and(|info| !replace && !info.is_unloading) {
            return Err(AdapterError::AlreadyLoaded(name.to_string()));
        }
        let loaded = adapters.read(path).await?;
        let (name, (reply, answer)) = (name.to_string(), oneshot::channel());
        self.commands.send(Command::AddAdapter { name, loaded, replace, reply }).map_err(|_| AdapterError::Closed)?;
        answer.await.map_err(|_| AdapterError::Closed)?
    }

    /// Refuses new requests for an adapter, waits for those that use it, and removes it.
    ///
    /// # Errors
    /// No adapter has this name.
    pub async fn unload_adapter(&self, name: &str) -> Result<(), AdapterError> {
        let (name, (reply, answer)) = (name.to_string(), oneshot::channel());
        self.commands.send(Command::UnloadAdapter { name, reply }).map_err(|_| AdapterError::Closed)?;
        answer.await.map_err(|_| AdapterError::Closed)?
    }

    /// The LoRA adapters, in the order of their names.
    pub fn adapters(&self) -> Vec<AdapterInfo> {
        self.shared.adapters.list()
    }

    /// Empties the prefix cache. Returns whether it did: it does nothing while a request owns blocks, unless `reset_running` is set.
    /// Then the steps in flight are completed first, and running requests are computed again, with the same tokens. `None`
    /// if the engine has ended.
    pub async fn reset_prefix_cache(&self, reset_running: bool) -> Option<bool> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::ResetPrefixCache { reset_running, reply }).ok()?;
        answer.await.ok()
    }

    /// Statistics as of the last step.
    pub fn stats(&self) -> EngineStats {
        self.shared.status.stats()
    }

    /// Starts watching the engine: the result yields a [`Snapshot`] now, and more while steps run, until it is dropped.
    pub fn watch(&self) -> Watcher {
        let mut snapshots = self.shared.snapshots.clone();
        snapshots.mark_unchanged();
        let watcher = Watcher { snapshots, commands: self.commands.clone() };
        watcher.look();
        watcher
    }

    /// Whether new requests are refused because the engine is shutting down.
    pub fn is_draining(&self) -> bool {
        self.shared.status.is_draining()
    }

    /// Whether the engine thread runs and [`AsyncEngine::step_age`] is at most `limit`.
    pub fn is_healthy(&self, limit: Duration) -> bool {
        let status = &self.shared.status;
        status.is_alive() && status.step_age().is_none_or(|age| age <= limit)
    }

    /// Whether the engine thread runs.
    pub fn is_alive(&self) -> bool {
        self.shared.status.is_alive()
    }

    /// Time without a completed step: the time since the last completed step while requests are unfinished, and the time between
    /// the first and the last failed step since then. `None` if neither applies.
    pub fn step_age(&self) -> Option<Duration> {
        self.shared.status.step_age()
    }

    /// Ends the group of ranks that compute the model, if there are several: what waits for another rank fails. Returns whether there
    /// are. For a caller that sees that the engine makes no progress.
    pub fn end_group(&self, reason: &str) -> bool {
        self.shared.ranks.as_ref().inspect(|ranks| ranks.abort(reason)).is_some()
    }

    /// Waits until the engine thread has panicked or lost its worker; never returns if it ends by [`AsyncEngine::shutdown`].
    pub async fn death(&self) {
        self.shared.status.death().await;
    }

    /// Returns a report for debugging an engine that makes no progress: the thread, the queues, the pool, and the plan of the
    /// current step.
    pub fn dump(&self) -> String {
        self.shared.status.dump()
    }

    /// Wakes the readers of streams until the engine ends. Without it, the engine's thread wakes them, which takes time of each step.
    pub fn wake_readers(&self) -> impl Future<Output = ()> + Send + 'static {
        self.shared.wakers.task()
    }

    /// Refuses new requests from now on. Requests that were accepted continue.
    pub fn drain(&self) {
        self.shared.status.drain();
    }

    /// Number of requests that have not ended (waiting and running).
    pub fn num_unfinished(&self) -> usize {
        self.shared.status.num_unfinished()
    }

    /// Cancels all requests and ends the engine thread.
    pub fn shutdown(&self) {
        self.drain();
        let _ = self.commands.send(Command::Shutdown);
    }
}

/// State of the engine thread.
struct EngineThread {
    engine: TextEngine,
    receiver: commands::Receiver<Command>,
    outbox: Outbox,
    /// Events of the current step, and whether each is its request's last. Reused by every step.
    events: Vec<(RequestId, Event, bool)>,
    status: Arc<Status>,
    max_queued_requests: usize,
    snapshots: SnapshotPublisher,
    /// For handles.
    adapters: AdapterList,
    /// Who waits for which adapter to be gone.
    unloads: Vec<(String, UnloadReply)>,
}

impl EngineThread {
    fn run(mut self) {
        let _alive = Alive(self.status.clone());
        while self.take_commands() {
            if self.engine.has_work() {
                self.step(NextStep::Planned);
            }
            if self.engine.is_lost() {
                return self.give_up();
            }
        }
    }

    /// Ends all requests with an error: the worker can compute nothing more.
    fn give_up(&mut self) {
        self.status.drain();
        while self.engine.has_work() {
            self.step(NextStep::Planned);
        }
        self.status.fail();
    }

    /// Applies all pending commands; waits for one if there is no work. Returns `false` if the thread is to end.
    fn take_commands(&mut self) -> bool {
        self.finish_unloads();
        if !self.engine.has_work() {
            // The last step may have cancelled a request whose reader fell behind.
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
        self.finish_unloads();
        self.publish();
        true
    }

    fn publish(&mut self) {
        self.status.publish(&self.engine);
        self.snapshots.publish(&mut self.engine);
    }

    fn apply(&mut self, command: Command) -> bool {
        match command {
            Command::Submit { request, commands } => match self.engine.to_fetch(&request.request) {
                Some(fetch) => {
                    self.engine.fetch(fetch, move |source, found| {
                        // The engine's thread may have ended.
                        let _ = commands.send(Command::Fetched { source, found, request });
                    });
                    self.status.count_requests(&self.engine);
                }
                None => self.accept(request),
            },
            Command::Fetched { source, found, request } => {
                self.engine.import(&source, &found);
                self.accept(request);
            }
            Command::Abort(id) => self.abort(id),
            Command::AddAdapter { name, loaded, replace, reply } => {
                let added = self.engine.add_adapter(&name, loaded, replace);
                self.adapters.set(self.engine.adapters());
                // The caller may have stopped waiting for the reply.
                let _ = reply.send(added);
            }
            Command::UnloadAdapter { name, reply } => match self.engine.unload_adapter(&name) {
                Ok(()) => {
                    self.unloads.push((name, reply));
                    self.adapters.set(self.engine.adapters());
                }
                Err(error) => drop(reply.send(Err(error))),
            },
            Command::ResetPrefixCache { reset_running, reply } => {
                if reset_running {
                    self.step(NextStep::None);
                }
                // The caller may have stopped waiting for the reply.
                let _ = reply.send(self.engine.reset_prefix_cache(reset_running));
            }
            Command::Snapshot => self.snapshots.requested = true,
            Command::Shutdown => return false,
        }
        true
    }

    /// Submits a request and tells its caller.
    fn accept(&mut self, request: Submission) {
        let Submission { request, constraint, events, reply } = request;
        let result = self.submit(*request, constraint, events);
        // Counted before the reply, so that a caller who drains the engine next finds the request unfinished.
        self.status.count_requests(&self.engine);
        // The caller may have stopped waiting for the reply.
        if let Err(Ok(id)) = reply.send(result) {
            self.abort(id);
        }
    }

    /// Answers those who wait for adapters that are gone.
    fn finish_unloads(&mut self) {
        if self.unloads.is_empty() {
            return;
        }
        let left = self.engine.adapters();
        self.adapters.set(left.clone());
        let is_gone = |name: &String| !left.iter().any(|info| info.name == *name);
        for (_, reply) in self.unloads.extract_if(.., |(name, _)| is_gone(name)) {
            let _ = reply.send(Ok(()));
        }
    }

    fn submit(
        &mut self,
        request: GenerationRequest,
        constraint: Option<Box<dyn Constraint>>,
        events: BatchSender,
    ) -> Result<RequestId, SubmitError> {
        let (waiting, limit) = (self.engine.stats().num_waiting, self.max_queued_requests);
        if waiting >= limit {
            return Err(SubmitError::QueueFull { waiting, limit });
        }
        let id = self.engine.submit(request, constraint)?;
        self.outbox.open(id, events);
        Ok(id)
    }

    fn abort(&mut self, id: RequestId) {
        if self.outbox.close(id) {
            self.engine.abort(id);
        }
    }

    /// Runs one step, or completes those in flight. The events are sent after the statistics are published, so that whoever has an answer finds its blocks
    /// free and its tokens counted.
    fn step(&mut self, next: NextStep) {
        let began = Instant::now();
        let EngineThread { engine, events, .. } = self;
        engine.step(next, |id, event, last| events.push((id, event, last)));
        self.publish();
        for &id in self.engine.scheduled() {
            self.outbox.scheduled(id, began);
        }
        for (id, event, is_last) in self.events.drain(..) {
            self.outbox.add(id, event, is_last);
        }
        self.outbox.send(Instant::now()).into_iter().for_each(|id| self.abort(id));
    }
}
