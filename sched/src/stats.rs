//! Numbers for metrics.

use serde::Serialize;

/// Gauges are now, counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SchedulerStats {
    /// Requests that hold blocks.
    pub num_running: usize,
    /// Requests that wait, those included that were preempted and will be computed again.
    pub num_waiting: usize,
    /// Requests that wait in host memory, or are on their way there.
    pub num_swapped: usize,
    /// Steps planned and not committed.
    pub num_in_flight: usize,
    /// Blocks that live sequences own, or that a step in flight still writes to.
    pub blocks_in_use: usize,
    /// Blocks kept only for their cached prefix.
    pub blocks_cached: usize,
    /// Blocks that hold nothing.
    pub blocks_free: usize,
    /// All blocks: the sum of the three.
    pub blocks_total: usize,
    /// Host blocks of swapped requests.
    pub host_blocks_in_use: usize,
    /// All host blocks.
    pub host_blocks_total: usize,
    /// Most blocks ever in use at once.
    pub blocks_peak: usize,
    /// Blocks copied because a sequence wrote to one that it shared.
    pub blocks_copied: u64,
    /// Blocks copied to the host.
    pub blocks_swapped_out: u64,
    /// Blocks copied back from the host.
    pub blocks_swapped_in: u64,
    /// Steps planned with at least one span.
    pub steps: u64,
    /// Prompt tokens of admitted requests, counted once per request.
    pub prompt_tokens: u64,
    /// Prompt tokens that went through the model, recomputed ones included.
    pub prompt_tokens_computed: u64,
    /// Tokens looked up in the prefix cache at first admissions.
    pub prefix_queries: u64,
    /// Those of them that were found.
    pub prefix_hits: u64,
    /// Tokens looked up when preempted requests came back.
    pub resumed_prefix_queries: u64,
    /// Those of them that were found.
    pub resumed_prefix_hits: u64,
    /// Requests that gave their blocks back and wait again.
    pub preemptions: u64,
    /// Those of them that were swapped out, and so lost nothing.
    pub swap_preemptions: u64,
    /// Those of them that gave way to a request of higher priority; the others lacked space among equals.
    pub preemptions_by_priority: u64,
    /// Times that a plan left work out for a step, because the blocks for it were still written to by another.
    pub deferrals: u64,
    /// Computed tokens that preemption threw away (some may still be found in the prefix cache).
    pub tokens_lost: u64,
}

/// What became of proposed drafts since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SpecStats {
    /// Spans with drafts.
    pub num_drafts: u64,
    /// Drafts in them.
    pub num_draft_tokens: u64,
    /// Those that were right, and so became output.
    pub num_accepted_tokens: u64,
    /// Those by their place among the drafts of their span.
    pub accepted_per_position: Vec<u64>,
}

impl SpecStats {
    /// Counts a span of `drafts` drafts, the first `accepted` of which were right.
    pub(crate) fn count(&mut self, drafts: usize, accepted: usize) {
        self.num_drafts += 1;
        self.num_draft_tokens += drafts as u64;
        self.num_accepted_tokens += accepted as u64;
        let positions = self.accepted_per_position.len().max(drafts);
        self.accepted_per_position.resize(positions, 0);
        self.accepted_per_position[..accepted].iter_mut().for_each(|n| *n += 1);
    }
}

impl SchedulerStats {
    /// Share of the looked-up tokens that first admissions found in the prefix cache, 0 to 1; `None` before
    /// the first lookup.
    pub fn prefix_hit_rate(&self) -> Option<f64> {
        (self.prefix_queries > 0).then(|| self.prefix_hits as f64 / self.prefix_queries as f64)
    }

    /// Share of the blocks that live sequences own, 0 to 1. Blocks kept only for their prefix do not count:
    /// they are there for the taking.
    pub fn cache_usage(&self) -> f64 {
        self.blocks_in_use as f64 / self.blocks_total.max(1) as f64
    }

    /// Share of the host blocks that swapped requests own, 0 to 1.
    pub fn host_cache_usage(&self) -> f64 {
        self.host_blocks_in_use as f64 / self.host_blocks_total.max(1) as f64
    }
}
