//! The scheduler's configuration, and the configurations that it refuses.

use kvblock::CacheGroup;
use serde::{Deserialize, Serialize};

/// In which order requests are admitted and, from the other end, preempted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// First come, first served; a request's priority is ignored.
    #[default]
    Fcfs,
    /// Lower [`Request::priority`](crate::Request::priority) first, then first come.
    Priority,
}

/// What to do with the keys and values of a preempted request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreemptionMode {
    /// Swapped where several live sequences share them, or where computing them again would cost more; else
    /// dropped.
    #[default]
    Auto,
    /// Dropped, and computed again.
    Recompute,
    /// Moved to host memory and back, while that has room.
    Swap,
}

/// Sizes and choices that hold for the scheduler's life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedConfig {
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Greatest number of live sequences that run at once.
    pub max_num_seqs: usize,
    /// Greatest number of tokens in one step.
    pub max_num_batched_tokens: usize,
    /// Greatest number of prompt and output tokens of a sequence.
    pub max_model_len: usize,
    /// Share the blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Let a prompt be computed over several steps. Without it, a prompt waits for a step that has room for
    /// the whole of it.
    pub enable_chunked_prefill: bool,
    /// Order of admission and preemption.
    pub policy: Policy,
    /// Key of the prefix hash; `None` takes the process's randomness.
    pub hash_seed: Option<u64>,
    /// Greatest number of tokens that one sequence's prefill takes of a step, so that a long prompt leaves
    /// room for those behind it; 0 is no limit.
    pub long_prefill_token_threshold: usize,
    /// Greatest number of running requests whose prompt is computed in part. The head of the queue waits
    /// while it would be one more.
    pub max_num_partial_prefills: usize,
    /// Groups of layers with a block table each; all draw from the one pool.
    pub groups: Vec<CacheGroup>,
    /// Blocks of host memory that preempted requests may be swapped to; 0 for none.
    pub host_blocks: usize,
    /// How to preempt: recompute or swap.
    pub preemption_mode: PreemptionMode,
    /// What moving a block to the host and back costs, in tokens of prefill that take as long. About 2 for blocks
    /// of 16 tokens of an 8B model in 16 bits: 2 MB twice over 50 GB/s, against 16 GFLOP a token at 400 TFLOP/s.
    pub swap_cost: usize,
    /// Steps that may be planned and not yet committed: 1 plans after each commit; 2 plans a step while the
    /// one before it runs, so that the device does not wait for the host.
    pub max_in_flight: usize,
}

/// A configuration under which some request could wait for ever.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A size that must be at least one is zero.
    #[error("{flag}: found 0, expected at least 1")]
    Zero {
        /// The flag as typed on the command line.
        flag: &'static str,
    },
    /// Running sequences could take the whole step, so that no prompt is ever computed.
    #[error(
        "--max-num-batched-tokens {max_num_batched_tokens} must be greater than --max-num-seqs {max_num_seqs}, \
         or running sequences leave no token for prompts: raise the former or lower the latter"
    )]
    NoShareForPrefill {
        /// `--max-num-batched-tokens` as found.
        max_num_batched_tokens: usize,
        /// `--max-num-seqs` as found.
        max_num_seqs: usize,
    },
    /// Chunked prefill is off and the longest prompt does not fit a step.
    #[error(
        "--max-num-batched-tokens {max_num_batched_tokens} is less than --max-model-len {max_model_len}: without \
         --enable-chunked-prefill a prompt must fit one step; raise the former, lower the latter or turn \
         chunked prefill on"
    )]
    PromptExceedsStep {
        /// `--max-num-batched-tokens` as found.
        max_num_batched_tokens: usize,
        /// `--max-model-len` as found.
        max_model_len: usize,
    },
    /// A limit on chunks, but no chunks.
    #[error(
        "--long-prefill-token-threshold {threshold} needs --enable-chunked-prefill: turn it on, or set the \
         threshold to 0"
    )]
    ThresholdWithoutChunks {
        /// `--long-prefill-token-threshold` as found.
        threshold: usize,
    },
    /// Steps can be planned after one another, or one ahead.
    #[error("max_in_flight: found {found}, expected 1 or 2 steps")]
    InFlight {
        /// What the configuration says.
        found: usize,
    },
    /// The block pool cannot be built.
    #[error(transparent)]
    Pool(#[from] kvblock::PoolError),
}

impl SchedConfig {
    /// A pool of this size and, for the rest, vLLM's defaults: 256 sequences, 2,048 tokens a step, prefix
    /// caching, chunked prefill without further limits, first come first served, one step at a time. One group
    /// of layers, no host blocks. Contexts may fill the pool.
    pub fn new(num_blocks: usize, block_size: usize) -> SchedConfig {
        SchedConfig {
            block_size,
            num_blocks,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_model_len: num_blocks.saturating_mul(block_size),
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            policy: Policy::Fcfs,
            hash_seed: None,
            long_prefill_token_threshold: 0,
            max_num_partial_prefills: usize::MAX,
            groups: vec![CacheGroup::Full],
            host_blocks: 0,
            preemption_mode: PreemptionMode::Auto,
            swap_cost: 2,
            max_in_flight: 1,
        }
    }

    /// Most blocks that a sequence owns in a group of layers while its prompt is computed; `None`: those of all its tokens.
    pub(crate) fn peak(&self, group: CacheGroup) -> Option<usize> {
        let CacheGroup::Sliding { window } = group else { return None };
        let in_flight = self.chunk(usize::MAX, self.max_num_batched_tokens) * self.max_in_flight;
        Some(window.saturating_add(in_flight).div_ceil(self.block_size) + 1)
    }

    /// Whether every request that this configuration accepts can make progress.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let &SchedConfig { max_num_seqs, max_num_batched_tokens, max_model_len, .. } = self;
        for (flag, value) in [
            ("--max-num-seqs", max_num_seqs),
            ("--max-model-len", max_model_len),
            ("--max-num-partial-prefills", self.max_num_partial_prefills),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { flag });
            }
        }
        if max_num_batched_tokens <= max_num_seqs {
            return Err(ConfigError::NoShareForPrefill { max_num_batched_tokens, max_num_seqs });
        }
        if !self.enable_chunked_prefill && max_num_batched_tokens < max_model_len {
            return Err(ConfigError::PromptExceedsStep { max_num_batched_tokens, max_model_len });
        }
        if !self.enable_chunked_prefill && self.long_prefill_token_threshold > 0 {
            return Err(ConfigError::ThresholdWithoutChunks { threshold: self.long_prefill_token_threshold });
        }
        if !(1..=2).contains(&self.max_in_flight) {
            return Err(ConfigError::InFlight { found: self.max_in_flight });
        }
        Ok(())
    }

    /// Tokens of a prefill of `pending` tokens that a step with this budget left computes.
    pub(crate) fn chunk(&self, pending: usize, budget: usize) -> usize {
        let limit = match self.long_prefill_token_threshold {
            0 => usize::MAX,
            threshold => threshold,
        };
        pending.min(budget).min(limit)
    }

    /// Blocks that an admission leaves alone while others run, so that they do not preempt it in the very next step.
    pub(crate) fn watermark(&self) -> usize {
        self.num_blocks / 100
    }
}
