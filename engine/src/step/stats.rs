//! What an engine tells about itself: statistics, invariants, a snapshot.

use super::Engine;
use super::in_flight::lock;
use super::prompt_budget::PromptBudget;
use super::request::LiveRequest;
use crate::api::EngineStats;
use crate::error::AuditError;
use crate::watch::{self, Snapshot};

impl Engine {
    /// Current statistics.
    pub fn stats(&self) -> EngineStats {
        let stats = self.scheduler.stats();
        let dropped = self.kv_events.as_ref().map_or((0, 0), |events| events.publisher().num_dropped());
        let share = |blocks: usize| blocks as f64 / stats.blocks_total.max(1) as f64;
        EngineStats {
            num_running: stats.num_running,
            num_waiting: stats.num_waiting,
            num_swapped: stats.num_swapped,
            kv_cache_usage: share(stats.blocks_in_use),
            kv_cache_cached: share(stats.blocks_cached),
            prompt_tokens: stats.prompt_tokens,
            generation_tokens: self.generation_tokens,
            prefix_cache_queries: stats.prefix_queries,
            prefix_cache_hits: stats.prefix_hits,
            host_prefix_cache_queries: if self.scheduler.caches_on_host() { stats.prefix_queries } else { 0 },
            host_prefix_cache_hits: stats.host_prefix_hits,
            blocks_offloaded: stats.blocks_offloaded,
            blocks_loaded: stats.blocks_loaded,
            num_preemptions: stats.preemptions,
            num_swap_preemptions: stats.swap_preemptions,
            host_cache_usage: stats.host_cache_usage(),
            host_blocks_in_use: stats.host_blocks_in_use,
            host_blocks_cached: stats.host_blocks_cached,
            host_blocks_total: stats.host_blocks_total,
            blocks_peak: stats.blocks_peak,
            blocks_copied: stats.blocks_copied,
            steps: self.completed_steps,
            blocks_in_use: stats.blocks_in_use,
            blocks_cached: stats.blocks_cached,
            blocks_free: stats.blocks_free,
            blocks_total: stats.blocks_total,
            tokens_lost: stats.tokens_lost,
            kv_event_steps_dropped: dropped.0,
            kv_event_messages_dropped: dropped.1,
            preemptions_by_priority: stats.preemptions_by_priority,
            prefix_lookups: *self.scheduler.prefix_stats(),
            failed_steps: self.failed_steps,
            requests_drawn_on_host: self.requests_drawn_on_host,
            step_tokens: self.step_tokens,
            prompt_budget: self.scheduler.prompt_budget(),
            itl_target: self.prompt_budget.as_ref().map_or(0.0, PromptBudget::target),
            spec_decode: self.scheduler.spec_stats().into(),
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
        let (stats, transfers) = (self.scheduler.stats(), self.kv_transfers.as_ref());
        let kept = [
            ("blocks in use", stats.blocks_in_use),
            ("requests in the scheduler", stats.num_running + stats.num_waiting + stats.num_swapped),
            ("requests in the engine", self.requests.len()),
            ("sequences in the worker", self.worker.num_sequences()),
            ("prompts to store", transfers.map_or(0, |it| it.sources.len())),
            ("prompts to hand over", transfers.map_or(0, |it| it.exports.len())),
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
        let age = |id| requests.get(&id).map_or(0.0, |request: &LiveRequest| request.arrived.elapsed().as_secs_f64());
        watch::snapshot(scheduler, &stats, recent, age)
    }
}
