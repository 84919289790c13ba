//! The engine on a thread of its own, and a handle on it that any number of tasks may clone.
//!
//! The engine thread owns all state. Handles send it commands, and it sends the events of each stream through that stream's
//! channel. Dropping the receiver of a channel cancels its requests.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc as commands;
use std::time::{Duration, Instant};

use collective::Collective;
use models::GenerationDefaults;
use sched::RequestId;
use text::{ChatTemplate, Grammars, Tokenizer};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::api::{AdapterInfo, EngineConfig, GenerationRequest, ModelInfo, SleepError, SleepLevel};
use crate::error::{AdapterError, EngineError, SubmitError};
use crate::serve::adapters::AdapterAccess;
use crate::serve::channel::{Command, OutputStream, Submission, Watcher};
use crate::serve::constraint::GrammarConstraint;
use crate::serve::outbox::BatchSender;
use crate::serve::sleep::Reload;
use crate::serve::status::EngineStatus;
use crate::serve::text_engine::TextEngine;
use crate::serve::thread::EngineThread;
use crate::serve::wakers::Wakers;
use crate::start::{LoadOn, Loaded, Progress, load};
use crate::step::Engine;
use crate::watch::Snapshot;

struct Shared {
    info: ModelInfo,
    tokenizer: Arc<Tokenizer>,
    grammars: Arc<Grammars>,
    chat_template: Option<Arc<ChatTemplate>>,
    defaults: GenerationDefaults,
    status: Arc<EngineStatus>,
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

/// Statistics, progress and health of the engine.
impl Deref for AsyncEngine {
    type Target = EngineStatus;

    fn deref(&self) -> &EngineStatus {
        &self.shared.status
    }
}

impl AsyncEngine {
    /// Loads the model and starts the engine thread. Blocks until the model is ready.
    ///
    /// # Errors
    /// The configuration cannot be used, or the model cannot be loaded.
    pub fn start(config: EngineConfig, progress: Progress<'_>) -> Result<AsyncEngine, EngineError> {
        AsyncEngine::run(&config, load(&config, LoadOn::Configured, progress)?)
    }

    /// Starts the engine thread over a model that is [loaded](crate::load).
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn run(config: &EngineConfig, loaded: Loaded) -> Result<AsyncEngine, EngineError> {
        let reload = Reload::new(config, &loaded);
        let engine = TextEngine::new(Engine::new(loaded.parts)?, loaded.tokenizer.clone());
        let status = Arc::new(EngineStatus::new(&engine));
        let adapters = AdapterAccess::new(engine.adapter_store().cloned());
        let (sender, receiver) = commands::channel();
        // The handle's own receiver only serves to be cloned.
        let (sink, snapshots) = watch::channel(Arc::new(Snapshot::default()));
        let wakers = Arc::new(Wakers::default());
        let thread = EngineThread::new(
            engine,
            receiver,
            status.clone(),
            (sink, wakers.clone()),
            (adapters.list.clone(), config.max_queued_requests),
            reload,
        );
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
            unenforced: BTreeSet::new(),
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
            let (id, unenforced) = self.submit_one(request, events).await?;
            output.ids.push(id);
            output.unenforced.extend(unenforced.iter().cloned());
        }
        Ok(output)
    }

    /// Submits a request. Returns its id, and the keywords of its JSON schemas that are not enforced.
    async fn submit_one(
        &self,
        request: GenerationRequest,
        events: BatchSender,
    ) -> Result<(RequestId, Arc<[String]>), SubmitError> {
        if self.is_draining() {
            return Err(SubmitError::Closed);
        }
        let (constraint, unenforced) = match &request.params.structured_outputs {
            Some(wanted) => {
                let matcher = self.shared.grammars.compile(&wanted.grammar).await;
                let matcher = matcher.map_err(|problem| SubmitError::invalid(wanted.param, problem))?;
                let unenforced = matcher.unenforced().clone();
                (Some(Box::new(GrammarConstraint(matcher)) as _), unenforced)
            }
            None => (None, [].into()),
        };
        // Compiling may have taken a while.
        if self.is_draining() {
            return Err(SubmitError::Closed);
        }
        let (reply, answer) = oneshot::channel();
        self.commands
            .send(Command::Submit {
                request: Submission { request: Box::new(request), constraint, events, reply },
                commands: self.commands.clone(),
            })
            .map_err(|_| SubmitError::Closed)?;
        let id = answer.await.map_err(|_| SubmitError::Closed)??;
        Ok((id, unenforced))
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

    /// Gives memory back until [`AsyncEngine::wake`]. New requests are refused meanwhile. Unfinished ones are an error, unless `abort` is
    /// set, which ends them. Afterwards, equal requests have equal tokens.
    ///
    /// # Errors
    /// Requests are unfinished, or this engine cannot sleep at this level.
    pub async fn sleep(&self, level: SleepLevel, abort: bool) -> Result<(), SleepError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Sleep { level, abort, reply }).map_err(|_| SleepError::Closed)?;
        answer.await.map_err(|_| SleepError::Closed)?
    }

    /// Takes the memory again. Does nothing if the engine is awake.
    ///
    /// # Errors
    /// Memory cannot be allocated, or the weights cannot be read. The engine sleeps on.
    pub async fn wake(&self) -> Result<(), SleepError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Wake { reply }).map_err(|_| SleepError::Closed)?;
        answer.await.map_err(|_| SleepError::Closed)?
    }

    /// Starts watching the engine: the result yields a [`Snapshot`] now, and more while steps run, until it is dropped.
    pub fn watch(&self) -> Watcher {
        let mut snapshots = self.shared.snapshots.clone();
        snapshots.mark_unchanged();
        let watcher = Watcher { snapshots, commands: self.commands.clone() };
        watcher.look();
        watcher
    }

    /// Whether the engine thread runs and [`EngineStatus::step_age`] is at most `limit`.
    pub fn is_healthy(&self, limit: Duration) -> bool {
        self.is_alive() && self.step_age().is_none_or(|age| age <= limit)
    }

    /// From now on, asks the ranks that compute the model for a sign of life whenever the engine has been idle for `interval`. Until all
    /// have answered, [`EngineStatus::step_age`] is the time since they last did. Does nothing if there is one rank.
    pub fn probe_ranks(&self, interval: Duration) {
        if self.shared.ranks.is_some() {
            let _ = self.commands.send(Command::ProbeRanks(interval));
        }
    }

    /// Aborts the group of ranks, so that ranks that wait for each other fail. Returns `false` with one rank. Call it when the engine
    /// makes no progress.
    pub fn end_group(&self, reason: &str) -> bool {
        self.shared.ranks.as_ref().inspect(|ranks| ranks.abort(reason)).is_some()
    }

    /// Wakes the readers of streams until the engine ends. Without it, the engine's thread wakes them, which takes time of each step.
    pub fn wake_readers(&self) -> impl Future<Output = ()> + Send + 'static {
        self.shared.wakers.task()
    }

    /// Cancels all requests and ends the engine thread.
    pub fn shutdown(&self) {
        self.drain();
        let _ = self.commands.send(Command::Shutdown);
    }

    /// Like [`AsyncEngine::shutdown`], and waits until the thread has ended, at most for `limit`. A process that ends earlier takes the
    /// thread with it, and a launcher of ranks then kills the others, which are still leaving their group.
    pub fn end(&self, limit: Duration) {
        self.shutdown();
        let since = Instant::now();
        while self.is_alive() && since.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
