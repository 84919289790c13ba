//! The thread that owns the engine: it applies commands, runs steps while there is work, and sends events to requests.
//!
//! While it is idle it waits for commands. If several ranks compute the model, it then asks them for a sign of life from time to time, so
//! that one that hangs is found before the next request.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{self as commands, RecvTimeoutError};
use std::time::{Duration, Instant};

use sampling::Constraint;
use sched::RequestId;
use tokio::sync::watch;

use crate::api::{Event, GenerationRequest, SleepError, SleepLevel};
use crate::error::SubmitError;
use crate::serve::adapters::AdapterList;
use crate::serve::channel::{Command, SnapshotPublisher, Submission, UnloadReply};
use crate::serve::outbox::{BatchSender, Outbox};
use crate::serve::sleep::Reload;
use crate::serve::status::{Alive, EngineStatus, Panics};
use crate::serve::text_engine::{NextStep, TextEngine};
use crate::serve::wakers::Wakers;
use crate::step::LoadId;
use crate::watch::Snapshot;

/// Time between two looks at requests that wait for blocks of other replicas, while nothing else happens.
const LOOK_AT_WAITS: Duration = Duration::from_millis(10);
/// Time for handing over blocks to store before the thread ends.
const LAST_EXPORTS: Duration = Duration::from_secs(10);

/// State of the engine thread.
pub(super) struct EngineThread {
    /// Dropped first.
    _panics: Panics,
    engine: TextEngine,
    receiver: commands::Receiver<Command>,
    outbox: Outbox,
    /// Events of the current step, and whether each is its request's last. Reused by every step.
    events: Vec<(RequestId, Event, bool)>,
    status: Arc<EngineStatus>,
    max_queued_requests: usize,
    snapshots: SnapshotPublisher,
    /// For handles.
    adapters: AdapterList,
    /// Who waits for which adapter to be gone.
    unloads: Vec<(String, UnloadReply)>,
    /// After how much idle time the ranks are probed; `None`: never.
    probes: Option<Duration>,
    /// Requests that wait for blocks of other replicas.
    waiting: HashMap<LoadId, Submission>,
    /// At which level the engine sleeps, if it does.
    sleeps: Option<SleepLevel>,
    reload: Reload,
}

impl EngineThread {
    pub fn new(
        engine: TextEngine,
        receiver: commands::Receiver<Command>,
        status: Arc<EngineStatus>,
        (snapshots, wakers): (watch::Sender<Arc<Snapshot>>, Arc<Wakers>),
        (adapters, max_queued_requests): (AdapterList, usize),
        reload: Reload,
    ) -> EngineThread {
        EngineThread {
            _panics: Panics(status.clone()),
            engine,
            receiver,
            outbox: Outbox::new(wakers),
            events: Vec::new(),
            status,
            max_queued_requests,
            snapshots: SnapshotPublisher { sink: snapshots, last: Instant::now(), requested: false },
            adapters,
            unloads: Vec::new(),
            probes: None,
            waiting: HashMap::new(),
            sleeps: None,
            reload,
        }
    }

    /// Runs until the last handle is gone or the engine is shut down. Only then, with everything that the thread owned gone too, it counts
    /// as ended.
    pub fn run(self) {
        let _alive = Alive(self.status.clone());
        self.serve();
    }

    fn serve(mut self) {
        while self.take_commands() {
            if self.engine.has_work() {
                self.step(NextStep::Planned);
            }
            if self.engine.is_lost() {
                return self.give_up();
            }
        }
        if self.engine.has_exports() {
            self.finish_exports();
        }
    }

    /// Hands over the blocks of requests that have ended, which other replicas may wait for, and cancels the others.
    fn finish_exports(&mut self) {
        let since = Instant::now();
        self.engine.step(NextStep::None, |_, _, _| {});
        self.engine.abort_all();
        while self.engine.has_exports() && since.elapsed() < LAST_EXPORTS {
            self.engine.step(NextStep::None, |_, _, _| {});
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
        self.advance_exchange();
        if !self.engine.has_work() {
            // The last step may have cancelled a request whose reader fell behind.
            self.publish_status();
            let until_probe = self.probes.map(|interval| interval.saturating_sub(self.status.progress_age()));
            let until_look = (!self.waiting.is_empty()).then_some(LOOK_AT_WAITS);
            let command = match until_probe.into_iter().chain(until_look).min() {
                None => self.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(limit) => self.receiver.recv_timeout(limit),
            };
            let goes_on = match command {
                Ok(command) => self.apply(command),
                Err(RecvTimeoutError::Timeout) => {
                    if self.probes.is_some_and(|interval| self.status.progress_age() >= interval) {
                        self.status.probe(|| self.engine.probe());
                    }
                    self.advance_exchange();
                    true
                }
                Err(RecvTimeoutError::Disconnected) => false,
            };
            if !goes_on {
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

    fn publish_status(&self) {
        self.status.publish(&self.engine, self.waiting.len());
    }

    fn publish(&mut self) {
        self.publish_status();
        self.snapshots.publish(&mut self.engine);
    }

    fn apply(&mut self, command: Command) -> bool {
        match command {
            Command::Submit { request, commands } => self.begin(request, commands),
            Command::AdvanceExchange => {}
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
            Command::Sleep { level, abort, reply } => drop(reply.send(self.sleep(level, abort))),
            Command::Wake { reply } => drop(reply.send(self.wake())),
            Command::Snapshot => self.snapshots.requested = true,
            Command::ProbeRanks(interval) => self.probes = Some(interval),
            Command::Shutdown => return false,
        }
        self.advance_exchange();
        true
    }

    /// Gives memory back. `abort` ends unfinished requests first.
    fn sleep(&mut self, level: SleepLevel, abort: bool) -> Result<(), SleepError> {
        self.reload.check(level)?;
        if let Some(before) = self.sleeps {
            // A deeper level is reached by way of the other.
            return if before >= level { Ok(()) } else { self.wake().and_then(|()| self.sleep(level, abort)) };
        }
        if abort {
            self.outbox.ids().into_iter().for_each(|id| self.abort(id));
            for (load, _) in self.waiting.drain() {
                self.engine.cancel_load(load);
            }
        }
        self.step(NextStep::None);
        if !self.waiting.is_empty() {
            return Err(SleepError::Busy(self.waiting.len()));
        }
        self.engine.sleep(level)?;
        self.sleeps = Some(level);
        self.status.set_sleeping(self.sleeps);
        Ok(())
    }

    /// Takes the memory again.
    fn wake(&mut self) -> Result<(), SleepError> {
        let Some(level) = self.sleeps else { return Ok(()) };
        self.engine.wake(level, || self.reload.worker())?;
        self.sleeps = None;
        self.status.set_sleeping(None);
        Ok(())
    }

    /// Submits a request, after blocks of other replicas have been loaded for it if it wants some.
    fn begin(&mut self, request: Submission, commands: commands::Sender<Command>) {
        if self.sleeps.is_some() {
            return self.accept(request);
        }
        let notify = move || {
            // The engine's thread may have ended.
            let _ = commands.send(Command::AdvanceExchange);
        };
        match self.engine.begin_load(&request.request, notify) {
            Some(load) => {
                self.waiting.insert(load, request);
                self.status.count_requests(&self.engine, self.waiting.len());
            }
            None => self.accept(request),
        }
    }

    /// Advances the exchange of blocks: submits the requests whose wait has ended, and forgets those whose callers have gone.
    fn advance_exchange(&mut self) {
        for (load, _) in self.waiting.extract_if(|_, request| request.reply.is_closed()) {
            self.engine.cancel_load(load);
        }
        for load in self.engine.ended_loads() {
            if let Some(request) = self.waiting.remove(&load) {
                self.accept(request);
            }
        }
    }

    /// Submits a request and tells its caller.
    fn accept(&mut self, request: Submission) {
        let Submission { request, constraint, events, reply } = request;
        let result = self.submit(*request, constraint, events);
        // Counted before the reply, so that a caller who drains the engine next finds the request unfinished.
        self.status.count_requests(&self.engine, self.waiting.len());
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
        if self.sleeps.is_some() {
            return Err(SubmitError::Asleep);
        }
        let (waiting, limit) = (self.engine.stats().scheduler.num_waiting, self.max_queued_requests);
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
