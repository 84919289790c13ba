//! The numbers of an engine.

/// Numbers for `/metrics`: gauges are now, counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Requests that hold blocks.
    pub num_running: usize,
    /// Requests that wait for them.
    pub num_waiting: usize,
    /// Requests that wait in host memory.
    pub num_swapped: usize,
    /// Blocks owned by live sequences / all blocks.
    pub kv_cache_usage: f64,
    /// Blocks kept only for their cached prefix / all blocks.
    pub kv_cache_cached: f64,
    /// Prompt tokens computed or found, counted at admission.
    pub prompt_tokens: u64,
    /// Tokens drawn.
    pub generation_tokens: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Prompt tokens found there.
    pub prefix_cache_hits: u64,
    /// Requests that gave their blocks back, to start over or to come back from host memory.
    pub num_preemptions: u64,
    /// Those of them that went to host memory.
    pub num_swap_preemptions: u64,
    /// Host blocks of swapped requests / all host blocks.
    pub host_cache_usage: f64,
    /// Most blocks that were ever in use at once.
    pub blocks_peak: usize,
    /// Blocks copied because a sequence wrote to one that it shared.
    pub blocks_copied: u64,
    /// Steps that computed something and completed: their results were taken and committed. A failed step does not count.
    pub steps: u64,
    /// Blocks owned by live sequences.
    pub blocks_in_use: usize,
    /// Blocks kept only for their cached prefix.
    pub blocks_cached: usize,
    /// Blocks that hold nothing.
    pub blocks_free: usize,
    /// All blocks: the sum of the three.
    pub blocks_total: usize,
    /// Computed tokens that preemption threw away; some may still be found in the prefix cache.
    pub tokens_lost: u64,
    /// Preemptions by a request of higher priority; the others were for want of blocks.
    pub preemptions_by_priority: u64,
    /// Lookups in the prefix cache, and why those that missed did.
    pub prefix_lookups: sched::PrefixStats,
    /// Steps that failed, with the requests in them.
    pub failed_steps: u64,
    /// Requests whose tokens are drawn on the host because they ask for more than a slot of the device's sampler holds (more
    /// alternatives, longer lists). While one runs, no step is planned ahead.
    pub requests_drawn_on_host: u64,
    /// Tokens computed per step.
    pub step_tokens: StepTokens,
}

/// A histogram of the tokens that steps computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTokens {
    /// Steps with at most [`StepTokens::BOUNDS`]`[i]` tokens and more than the bound before; the last is for all beyond.
    pub counts: [u64; StepTokens::BOUNDS.len() + 1],
    /// Tokens in all.
    pub sum: u64,
}

impl StepTokens {
    /// Upper bounds, those of vLLM's `iteration_tokens_total`.
    pub const BOUNDS: [u64; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

    /// Counts a step of so many tokens.
    pub(crate) fn count(&mut self, tokens: usize) {
        let tokens = tokens as u64;
        self.counts[StepTokens::BOUNDS.partition_point(|bound| *bound < tokens)] += 1;
        self.sum += tokens;
    }
}
