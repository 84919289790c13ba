//! Numbers for metrics.

use serde::Serialize;

/// Gauges are now, counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SchedStats {
    /// Requests that hold blocks.
    pub num_running: usize,
    /// Requests that wait, preempted ones included.
    pub num_waiting: usize,
    /// Blocks that live sequences own.
    pub blocks_in_use: usize,
    /// Blocks kept only for their cached prefix.
    pub blocks_cached: usize,
    /// Blocks that hold nothing.
    pub blocks_free: usize,
    /// All blocks: the sum of the three.
    pub blocks_total: usize,
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
    /// Computed tokens that preemption threw away (some may still be found in the prefix cache).
    pub tokens_lost: u64,
}
