//! Statistics of an engine.

use sched::{PrefixStats, SchedulerStats, SpecStats};

/// Statistics for `/metrics`: gauges, and counters since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Requests, blocks, preemptions and the prefix cache.
    pub scheduler: SchedulerStats,
    /// Lookups in the prefix cache, and the causes of misses.
    pub prefix_lookups: PrefixStats,
    /// Prompt tokens looked up in the host tier of the prefix cache; 0 without one.
    pub host_prefix_queries: u64,
    /// Verification of drafts.
    pub spec_decode: SpecStats,
    /// Tokens drawn.
    pub generation_tokens: u64,
    /// Steps that computed something and were committed. Failed steps do not count.
    pub steps: u64,
    /// Steps that failed.
    pub failed_steps: u64,
    /// Number of tokens computed per step.
    pub step_tokens: StepTokens,
    /// Requests whose tokens are drawn on the host because they exceed a limit of the device's sampler (alternatives, lengths of
    /// lists). While one runs, no step is planned ahead.
    pub requests_drawn_on_host: u64,
    /// Greatest number of prompt tokens of the last step that was planned.
    pub prompt_budget: usize,
    /// Seconds between two tokens of a sequence that this number was chosen for; 0 without a target.
    pub itl_target: f64,
    /// Steps whose KV events were dropped, because the publisher's queue was full.
    pub kv_event_steps_dropped: u64,
    /// Messages with KV events that a subscriber did not get because it read too slowly.
    pub kv_event_messages_dropped: u64,
}

/// A histogram of the number of tokens per step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTokens {
    /// Number of steps with at most [`StepTokens::BOUNDS`]`[i]` tokens and more than the previous bound; the last count has no
    /// upper bound.
    pub counts: [u64; StepTokens::BOUNDS.len() + 1],
    /// Number of tokens of all steps.
    pub sum: u64,
}

impl StepTokens {
    /// Upper bounds, as in vLLM's `iteration_tokens_total`.
    pub const BOUNDS: [u64; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

    /// Counts a step of `tokens` tokens.
    pub(crate) fn count(&mut self, tokens: usize) {
        let tokens = tokens as u64;
        self.counts[StepTokens::BOUNDS.partition_point(|bound| *bound < tokens)] += 1;
        self.sum += tokens;
    }
}
