//! Statistics of an engine.

use serde::{Serialize, Serializer};

use crate::speculate::MAX_SPECULATIVE_TOKENS;

/// Statistics for `/metrics`: gauges, and counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Number of requests that own blocks.
    pub num_running: usize,
    /// Number of requests that wait for blocks.
    pub num_waiting: usize,
    /// Number of requests in host memory.
    pub num_swapped: usize,
    /// Share of the blocks that live sequences own, 0 to 1.
    pub kv_cache_usage: f64,
    /// Share of the blocks that are kept only for their cached prefix, 0 to 1.
    pub kv_cache_cached: f64,
    /// Prompt tokens of admitted requests, computed or cached.
    pub prompt_tokens: u64,
    /// Tokens drawn.
    pub generation_tokens: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Prompt tokens found in the prefix cache, in either tier.
    pub prefix_cache_hits: u64,
    /// Prompt tokens looked up in the host tier of the prefix cache; 0 without one.
    pub host_prefix_cache_queries: u64,
    /// Number of the found tokens that were in host memory alone.
    pub host_prefix_cache_hits: u64,
    /// Blocks copied to host memory because their prefix was evicted.
    pub blocks_offloaded: u64,
    /// Blocks copied back from host memory because a request has their prefix.
    pub blocks_loaded: u64,
    /// Preemptions: a request lost its blocks, to be computed again or swapped in later.
    pub num_preemptions: u64,
    /// Preemptions by swapping to host memory.
    pub num_swap_preemptions: u64,
    /// Share of the host blocks that swapped requests own, 0 to 1.
    pub host_cache_usage: f64,
    /// Number of host blocks that swapped requests own.
    pub host_blocks_in_use: usize,
    /// Number of other host blocks, which cache a prefix.
    pub host_blocks_cached: usize,
    /// Number of all host blocks.
    pub host_blocks_total: usize,
    /// Greatest number of blocks that were in use at the same time.
    pub blocks_peak: usize,
    /// Blocks copied on write, because a sequence wrote to a shared block.
    pub blocks_copied: u64,
    /// Steps that computed something and were committed. Failed steps do not count.
    pub steps: u64,
    /// Number of blocks that live sequences own.
    pub blocks_in_use: usize,
    /// Number of blocks kept only for their cached prefix.
    pub blocks_cached: usize,
    /// Number of unused blocks.
    pub blocks_free: usize,
    /// Number of all blocks: the sum of the three.
    pub blocks_total: usize,
    /// Computed tokens that preemptions discarded. Some may still be in the prefix cache.
    pub tokens_lost: u64,
    /// Steps whose KV events were dropped, because the publisher's queue was full.
    pub kv_event_steps_dropped: u64,
    /// Messages with KV events that a subscriber did not get because it read too slowly.
    pub kv_event_messages_dropped: u64,
    /// Preemptions in favour of a request of higher priority. The others were caused by a lack of blocks.
    pub preemptions_by_priority: u64,
    /// Lookups in the prefix cache, and the causes of misses.
    pub prefix_lookups: sched::PrefixStats,
    /// Steps that failed.
    pub failed_steps: u64,
    /// Requests whose tokens are drawn on the host because they exceed a limit of the device's sampler (alternatives, lengths of
    /// lists). While one runs, no step is planned ahead.
    pub requests_drawn_on_host: u64,
    /// Number of tokens computed per step.
    pub step_tokens: StepTokens,
    /// Greatest number of prompt tokens of the last step that was planned.
    pub prompt_budget: usize,
    /// Seconds between two tokens of a sequence that this number was chosen for; 0 without a target.
    pub itl_target: f64,
    /// Verification of drafts.
    pub spec_decode: SpecDecodeStats,
}

/// Numbers of drafts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SpecDecodeStats {
    /// Verifications: spans with drafts.
    pub num_drafts: u64,
    /// Draft tokens in them.
    pub num_draft_tokens: u64,
    /// Draft tokens that became output.
    pub num_accepted_tokens: u64,
    /// The same by position among the drafts of a span. Zeros at the end are not serialised.
    #[serde(serialize_with = "without_last_zeros")]
    pub accepted_per_pos: [u64; MAX_SPECULATIVE_TOKENS],
}

fn without_last_zeros<S: Serializer>(counts: &[u64], to: S) -> Result<S::Ok, S::Error> {
    let used = counts.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
    counts[..used].serialize(to)
}

impl From<&sched::SpecStats> for SpecDecodeStats {
    fn from(stats: &sched::SpecStats) -> SpecDecodeStats {
        let mut accepted_per_pos = [0; MAX_SPECULATIVE_TOKENS];
        accepted_per_pos.iter_mut().zip(&stats.accepted_per_position).for_each(|(to, from)| *to = *from);
        SpecDecodeStats {
            num_drafts: stats.num_drafts,
            num_draft_tokens: stats.num_draft_tokens,
            num_accepted_tokens: stats.num_accepted_tokens,
            accepted_per_pos,
        }
    }
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
