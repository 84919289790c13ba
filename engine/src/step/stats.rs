//! What an engine tells about itself: statistics, invariants, a snapshot.

use simd::lock;

use super::Engine;
use super::prompt_budget::PromptBudget;
use super::request::EngineRequest;
use crate::api::EngineStats;
use crate::error::AuditError;
use crate::watch::{self, Snapshot};

impl Engine {
    /// Current statistics.
    pub fn stats(&self) -> EngineStats {
        let scheduler = self.scheduler.stats();
        let dropped = self.kv_events.as_ref().map_or((0, 0), |events| events.publisher().num_dropped());
        EngineStats {
            scheduler,
            prefix_lookups: *self.scheduler.prefix_stats(),
            host_prefix_queries: if self.scheduler.caches_on_host() { scheduler.prefix_queries } else { 0 },
            spec_decode: self.scheduler.spec_stats().clone(),
            generation_tokens: self.generation_tokens,
            steps: self.completed_steps,
            failed_steps: self.failed_steps,
            step_tokens: self.step_tokens,
            requests_drawn_on_host: self.requests_drawn_on_host,
            prompt_budget: self.scheduler.prompt_budget(),
            itl_target: self.prompt_budget.as_ref().map_or(0.0, PromptBudget::target),
            kv_event_steps_dropped: dropped.0,
            kv_event_messages_dropped: dropped.1,
        }
    }

    /// Checks the engine's invariants: the block pool agrees with all block tables, and once no work is left, no block is in
    /// use, no step is in flight, and neither the engine nor the worker keeps state of any request, blocks to store included.
    ///
    /// Costs a pass over all tokens of live requests. Use it in tests and for debugging.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn audit(&self) -> Result<(), AuditError> {
        self.scheduler.audit()?;
        if self.has_work() {
            return Ok(());
        }
        let (stats, exchange) = (self.scheduler.stats(), self.exchange.as_ref());
        let kept = [
            ("blocks in use", stats.blocks_in_use),
            ("requests in the scheduler", stats.num_running + stats.num_waiting + stats.num_swapped),
            ("requests in the engine", self.requests.len()),
            ("sequences in the worker", self.worker.num_sequences()),
            ("prompts to store", exchange.map_or(0, |it| it.to_store.len())),
            ("prompts to hand over", exchange.map_or(0, |it| it.exports.len())),
            ("steps in flight", usize::from(lock(&self.current_step).is_some())),
        ];
        match kept.into_iter().find(|(_, count)| *count > 0) {
            Some((what, count)) => Err(AuditError::Leftover { what, count }),
            None => Ok(()),
        }
    }

    /// Takes a snapshot of blocks, requests and speed. Costs a pass over the block tables ([details](watch)).
    pub fn snapshot(&mut self) -> Snapshot {
        let stats = self.stats();
        let Engine { scheduler, recent, requests, .. } = self;
        let age = |id| requests.get(&id).map_or(0.0, |request: &EngineRequest| request.arrived.elapsed().as_secs_f64());
        watch::snapshot(scheduler, stats, recent, age)
    }
}
