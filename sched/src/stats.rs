//! Statistics for metrics.

use serde::Serialize;

/// Statistics of a [`Scheduler`](crate::Scheduler). Gauges are current values, counters count since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SchedulerStats {
    /// Requests that own blocks and run.
    pub num_running: usize,
    /// Requests that wait, including those that were preempted and will be computed again.
    pub num_waiting: usize,
    /// Requests in host memory, or about to be swapped out.
    pub num_swapped: usize,
    /// Steps that are planned and not committed.
    pub num_in_flight: usize,
    /// Blocks that live sequences own, or that a step in flight writes to.
    pub blocks_in_use: usize,
    /// Blocks without owners that cache a prefix.
    pub blocks_cached: usize,
    /// Blocks without contents.
    pub blocks_free: usize,
    /// All blocks: the sum of the three gauges above.
    pub blocks_total: usize,
    /// Host blocks of swapped requests.
    pub host_blocks_in_use: usize,
    /// Other host blocks, which cache a prefix.
    pub host_blocks_cached: usize,
    /// All host blocks.
    pub host_blocks_total: usize,
    /// Greatest number of blocks in use at once.
    pub blocks_peak: usize,
    /// Blocks copied on write.
    pub blocks_copied: u64,
    /// Blocks of preempted requests copied to the host.
    pub blocks_swapped_out: u64,
    /// Blocks of preempted requests copied back from the host.
    pub blocks_swapped_in: u64,
    /// Blocks copied to the host because their prefix was evicted.
    pub blocks_offloaded: u64,
    /// Blocks copied back from the host because an admitted request has their prefix.
    pub blocks_loaded: u64,
    /// Steps planned with at least one span.
    pub steps: u64,
    /// Prompt tokens of admitted requests, counted once per request.
    pub prompt_tokens: u64,
    /// Prompt tokens that went through the model, recomputed ones included.
    pub prompt_tokens_computed: u64,
    /// Tokens looked up in the prefix cache at first admissions.
    pub prefix_queries: u64,
    /// Number of those tokens that were found, on the device or on the host.
    pub prefix_hits: u64,
    /// Number of the found tokens that were on the host alone.
    pub host_prefix_hits: u64,
    /// Tokens looked up at later admissions of preempted requests.
    pub resumed_prefix_queries: u64,
    /// Number of those tokens that were found.
    pub resumed_prefix_hits: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Preemptions by swapping.
    pub swap_preemptions: u64,
    /// Preemptions while a request of higher priority ran.
    pub preemptions_by_priority: u64,
    /// Plans that left out spans because steps in flight still wrote to the blocks that they needed.
    pub deferrals: u64,
    /// Computed tokens discarded by preemptions. Some may still be in the prefix cache.
    pub tokens_lost: u64,
}

/// Statistics of draft verification since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SpecStats {
    /// Spans with drafts.
    pub num_drafts: u64,
    /// Draft tokens in them.
    pub num_draft_tokens: u64,
    /// Draft tokens that were right and became output.
    pub num_accepted_tokens: u64,
    /// The same by position among the drafts of a span, up to the last that was ever right.
    pub accepted_per_pos: Vec<u64>,
}

impl SpecStats {
    /// Counts a span with `drafts` drafts, of which the first `accepted` were right.
    pub(crate) fn count(&mut self, drafts: usize, accepted: usize) {
        self.num_drafts += 1;
        self.num_draft_tokens += drafts as u64;
        self.num_accepted_tokens += accepted as u64;
        let positions = self.accepted_per_pos.len().max(accepted);
        self.accepted_per_pos.resize(positions, 0);
        self.accepted_per_pos[..accepted].iter_mut().for_each(|n| *n += 1);
    }
}

impl SchedulerStats {
    /// Returns the fraction of blocks that live sequences own.
    pub fn kv_cache_usage(&self) -> f64 {
        self.blocks_in_use as f64 / self.blocks_total.max(1) as f64
    }

    /// Returns the fraction of blocks that are kept only for their cached prefix.
    pub fn kv_cache_cached(&self) -> f64 {
        self.blocks_cached as f64 / self.blocks_total.max(1) as f64
    }

    /// Returns the fraction of host blocks that swapped requests own.
    pub fn host_cache_usage(&self) -> f64 {
        self.host_blocks_in_use as f64 / self.host_blocks_total.max(1) as f64
    }
}
