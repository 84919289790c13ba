//! What the engine thread publishes: its statistics, whether it runs and makes progress, and the current step.
//!
//! The engine thread writes it, at most twice per step. No lock is held for longer than it takes to copy a few numbers.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sched::SchedulerStats;
use simd::lock;
use tokio::sync::watch;

use super::text_engine::TextEngine;
use crate::api::{EngineStats, SleepLevel};
use crate::step::CurrentStep;

/// Greatest number of lines of a plan in a report.
const SHOWN_LINES: usize = 40;

/// State of the engine thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thread {
    Running,
    /// It was shut down.
    Ended,
    /// It panicked, or its worker can compute nothing more.
    Failed,
}

/// Statistics of a running engine, whether its thread runs and makes progress, and what it computes.
pub struct EngineStatus {
    stats: Mutex<EngineStats>,
    /// When the last step completed, when all ranks last gave a sign of life, or when work arrived at an idle engine.
    last_progress: Mutex<Instant>,
    /// When the first and the last step failed since the last completed one.
    failing: Mutex<Option<(Instant, Instant)>>,
    /// Number of requests that have not ended, and of those among them that the engine has.
    unfinished: AtomicUsize,
    in_engine: AtomicUsize,
    /// The ranks are asked for a sign of life.
    probing: AtomicBool,
    thread: watch::Sender<Thread>,
    draining: AtomicBool,
    sleeping: Mutex<Option<SleepLevel>>,
    current_step: CurrentStep,
}

impl EngineStatus {
    pub(crate) fn new(engine: &TextEngine) -> EngineStatus {
        EngineStatus {
            stats: Mutex::new(engine.stats()),
            last_progress: Mutex::new(Instant::now()),
            failing: Mutex::new(None),
            unfinished: AtomicUsize::new(0),
            in_engine: AtomicUsize::new(0),
            probing: AtomicBool::new(false),
            thread: watch::Sender::new(Thread::Running),
            draining: AtomicBool::new(false),
            sleeping: Mutex::new(None),
            current_step: engine.current_step(),
        }
    }

    fn end(&self, ended: Thread) {
        self.thread.send_if_modified(|state| {
            let runs = *state == Thread::Running;
            *state = if runs { ended } else { *state };
            runs
        });
    }

    /// Publishes the statistics. Only a completed step, or new work for an idle engine, counts as progress: an engine whose steps
    /// all fail, or that plans steps without computing anything, is as stuck as one that hangs.
    pub(crate) fn publish(&self, engine: &TextEngine, waiting: usize) {
        let stats = engine.stats();
        let (steps, failed_steps) = (stats.steps, stats.failed_steps);
        let before = std::mem::replace(&mut *lock(&self.stats), stats);
        let now = Instant::now();
        if steps != before.steps {
            *lock(&self.failing) = None;
            *lock(&self.last_progress) = now;
        } else if failed_steps != before.failed_steps {
            lock(&self.failing).get_or_insert((now, now)).1 = now;
        }
        self.count_requests(engine, waiting);
    }

    /// Publishes the number of unfinished requests. `waiting` others wait for blocks of other replicas, for which no step can be expected.
    /// The first request of an idle engine restarts the clock of [`EngineStatus::step_age`].
    pub(crate) fn count_requests(&self, engine: &TextEngine, waiting: usize) {
        let in_engine = engine.num_unfinished();
        self.unfinished.store(in_engine + waiting, Ordering::Release);
        if self.in_engine.swap(in_engine, Ordering::AcqRel) == 0 {
            *lock(&self.last_progress) = Instant::now();
        }
    }

    /// Statistics as of the last step.
    pub fn stats(&self) -> EngineStats {
        lock(&self.stats).clone()
    }

    /// Number of requests that have not ended (waiting and running).
    pub fn num_unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Acquire)
    }

    /// Whether the engine thread runs.
    pub fn is_alive(&self) -> bool {
        *self.thread.borrow() == Thread::Running
    }

    /// Waits until the engine thread has panicked or lost its worker; never returns if it is shut down.
    pub async fn death(&self) {
        // This value owns the sender, so the channel stays open.
        let _ = self.thread.subscribe().wait_for(|state| *state == Thread::Failed).await;
    }

    /// Says that the thread has failed.
    pub(crate) fn fail(&self) {
        self.thread.send_replace(Thread::Failed);
    }

    /// Runs a probe of an idle engine's ranks, which counts as progress once it returns.
    pub(crate) fn probe(&self, probe: impl FnOnce()) {
        self.probing.store(true, Ordering::Release);
        probe();
        *lock(&self.last_progress) = Instant::now();
        self.probing.store(false, Ordering::Release);
    }

    /// Time since the last progress.
    pub(crate) fn progress_age(&self) -> Duration {
        lock(&self.last_progress).elapsed()
    }

    /// Time without a completed step: the time since the last completed step while requests are unfinished or ranks are
    /// [probed](crate::AsyncEngine::probe_ranks), and the time between the first and the last failed step since then, however quickly
    /// failures empty the queue. `None` if neither applies.
    pub fn step_age(&self) -> Option<Duration> {
        let waits = self.in_engine.load(Ordering::Acquire) > 0 || self.probing.load(Ordering::Acquire);
        let waiting = waits.then(|| self.progress_age());
        let failing = lock(&self.failing).map(|(first, last)| last - first);
        waiting.max(failing)
    }

    /// What the engine has given back, if it sleeps.
    pub fn sleeping(&self) -> Option<SleepLevel> {
        *lock(&self.sleeping)
    }

    /// Says whether the engine sleeps.
    pub(crate) fn set_sleeping(&self, level: Option<SleepLevel>) {
        *lock(&self.sleeping) = level;
    }

    /// Whether new requests are refused because the engine is shutting down.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Refuses new requests from now on. Requests that were accepted continue.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Returns a report for debugging an engine that makes no progress: thread, queues, pool, and the current step.
    pub fn dump(&self) -> String {
        let (stats, alive) = (self.stats(), if self.is_alive() { "alive" } else { "ended" });
        let mut text = match self.step_age() {
            Some(age) if self.probing.load(Ordering::Acquire) => {
                format!("engine thread {alive}, idle, ranks have not answered for {:.1} s", age.as_secs_f64())
            }
            Some(age) => format!("engine thread {alive}, last step completed {:.1} s ago", age.as_secs_f64()),
            None => format!("engine thread {alive}, no work"),
        };
        let EngineStats { scheduler, steps, failed_steps, .. } = stats;
        let SchedulerStats { num_running, num_waiting, num_swapped, .. } = scheduler;
        let _ = write!(
            text,
            "\nqueues: {num_running} running, {num_waiting} waiting, {num_swapped} swapped; {steps} steps completed, \
             {failed_steps} failed"
        );
        let SchedulerStats { blocks_in_use, blocks_cached, blocks_free, blocks_total, .. } = scheduler;
        let _ = write!(
            text,
            "\npool: {blocks_in_use} blocks in use, {blocks_cached} cached, {blocks_free} free, {blocks_total} in all; \
             {:.0} % of the host blocks in use and {} cached",
            100.0 * scheduler.host_cache_usage(),
            scheduler.host_blocks_cached
        );
        let input = lock(&self.current_step).clone();
        match input {
            None => text += "\nno step is under way",
            Some(input) => {
                let lines = input.plan.to_string();
                let count = lines.lines().count();
                let _ = write!(text, "\nunder way: {}", lines.lines().take(SHOWN_LINES).collect::<Vec<_>>().join("\n"));
                if count > SHOWN_LINES {
                    let _ = write!(text, "\n  and {} more", count - SHOWN_LINES);
                }
            }
        }
        text
    }
}

/// Publishes the end of the thread when it is dropped, and whether the thread panicked.
pub(crate) struct Alive(pub Arc<EngineStatus>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.end(if std::thread::panicking() { Thread::Failed } else { Thread::Ended });
    }
}

/// Publishes a panic of the thread when it is dropped, which is before anything that tells callers: whoever sees its stream break finds the
/// engine failed.
pub(crate) struct Panics(pub Arc<EngineStatus>);

impl Drop for Panics {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end(Thread::Failed);
        }
    }
}
