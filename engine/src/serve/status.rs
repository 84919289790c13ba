//! What the engine thread lets others see: its numbers, whether it lives and moves on, and the step that it is in.
//!
//! Everything here is written by the engine thread, at most twice a step, and read by whoever asks; no lock is held for
//! longer than it takes to copy a few numbers.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::text_engine::TextEngine;
use crate::api::EngineStats;
use crate::step::{StepUnderWay, lock};

/// Spans of a plan that a dump shows.
const SHOWN_LINES: usize = 40;

/// How the engine thread has ended, if it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    NotYet,
    /// It was asked to.
    Asked,
    /// It panicked.
    Died,
}

/// The engine's state as others see it.
pub(crate) struct Status {
    stats: Mutex<EngineStats>,
    /// When the last step completed, or when work began after a pause.
    last_progress: Mutex<Instant>,
    /// When the first and the last step failed since one completed.
    failing: Mutex<Option<(Instant, Instant)>>,
    unfinished: AtomicUsize,
    end: watch::Sender<End>,
    draining: AtomicBool,
    under_way: StepUnderWay,
}

impl Status {
    pub fn new(engine: &TextEngine) -> Status {
        Status {
            stats: Mutex::new(engine.stats()),
            last_progress: Mutex::new(Instant::now()),
            failing: Mutex::new(None),
            unfinished: AtomicUsize::new(0),
            end: watch::Sender::new(End::NotYet),
            draining: AtomicBool::new(false),
            under_way: engine.step_under_way(),
        }
    }

    /// Publishes the numbers. Only a completed step, or the end of a pause, counts as progress: an engine whose every step
    /// fails, or that plans steps without computing anything, is as stuck as one that hangs.
    pub fn publish(&self, engine: &TextEngine) {
        let stats = engine.stats();
        let before = std::mem::replace(&mut *lock(&self.stats), stats);
        let now = Instant::now();
        if stats.steps != before.steps {
            *lock(&self.failing) = None;
            *lock(&self.last_progress) = now;
        } else if stats.failed_steps != before.failed_steps {
            lock(&self.failing).get_or_insert((now, now)).1 = now;
        }
        self.count(engine);
    }

    /// Notes how many requests there are. The first one after a pause starts the clock.
    fn count(&self, engine: &TextEngine) {
        if self.unfinished.swap(engine.num_unfinished(), Ordering::AcqRel) == 0 {
            *lock(&self.last_progress) = Instant::now();
        }
    }

    /// Counts a request at once, before the next [`publish`](Status::publish).
    pub fn admitted(&self, engine: &TextEngine) {
        self.count(engine);
    }

    pub fn stats(&self) -> EngineStats {
        *lock(&self.stats)
    }

    pub fn num_unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Acquire)
    }

    pub fn is_alive(&self) -> bool {
        *self.end.borrow() == End::NotYet
    }

    /// Waits until the thread has died; for ever if it never does, or ends because it was asked to.
    pub async fn death(&self) {
        // The sender is a part of this value, so the channel never closes.
        let _ = self.end.subscribe().wait_for(|end| *end == End::Died).await;
    }

    /// Time without a completed step: since the last one while there is work, and from the first to the last step that
    /// failed, however quickly failures empty the queue. `None` without work and failures.
    pub fn step_age(&self) -> Option<Duration> {
        let waiting = (self.num_unfinished() > 0).then(|| lock(&self.last_progress).elapsed());
        let failing = lock(&self.failing).map(|(first, last)| last - first);
        waiting.max(failing)
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Everything that helps to see why nothing moves: the thread, queues, pool, and the step under way.
    pub fn dump(&self) -> String {
        let (stats, alive) = (self.stats(), if self.is_alive() { "alive" } else { "ended" });
        let mut text = match self.step_age() {
            Some(age) => format!("engine thread {alive}, last step completed {:.1} s ago", age.as_secs_f64()),
            None => format!("engine thread {alive}, no work"),
        };
        let EngineStats { num_running, num_waiting, num_swapped, steps, failed_steps, .. } = stats;
        let _ = write!(
            text,
            "\nqueues: {num_running} running, {num_waiting} waiting, {num_swapped} swapped; {steps} steps completed, \
             {failed_steps} failed"
        );
        let EngineStats { blocks_in_use, blocks_cached, blocks_free, blocks_total, .. } = stats;
        let _ = write!(
            text,
            "\npool: {blocks_in_use} blocks in use, {blocks_cached} cached, {blocks_free} free, {blocks_total} in all; \
             {:.0} % of the swap space in use",
            100.0 * stats.host_cache_usage
        );
        let input = lock(&self.under_way).clone();
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

/// Says that the thread is gone when it is dropped, and whether it went by a panic.
pub(crate) struct Alive(pub Arc<Status>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.end.send_replace(if std::thread::panicking() { End::Died } else { End::Asked });
    }
}
