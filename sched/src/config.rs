//! The scheduler's configuration, and its validation.

use kvblock::CacheGroup;
use serde::{Deserialize, Serialize};

/// Greatest number of stages of a pipeline.
const MOST_STAGES: usize = 64;

/// The order in which requests are admitted. They are preempted in the reverse order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// First come, first served. Ignores the priority of requests, except for [`BACKGROUND`](crate::BACKGROUND).
    #[default]
    Fcfs,
    /// Lower [`Request::priority`](crate::Request::priority) first, then first come, first served.
    Priority,
}

/// Treatment of the keys and values of a preempted request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreemptionMode {
    /// Swap if several live sequences share them, or if computing them again would cost more; else recompute.
    #[default]
    Auto,
    /// Discard them and compute them again.
    Recompute,
    /// Move them to host memory and back, while host blocks are free; else recompute.
    Swap,
}

/// Configuration of a [`Scheduler`](crate::Scheduler).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedConfig {
    /// Number of tokens per block.
    pub block_size: usize,
    /// Number of blocks in the pool.
    pub num_blocks: usize,
    /// Greatest number of sequences that run at once.
    pub max_num_seqs: usize,
    /// Greatest number of tokens in one step.
    pub max_num_batched_tokens: usize,
    /// Greatest number of prompt and output tokens of a sequence.
    pub max_model_len: usize,
    /// Whether to share the blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Whether a prompt may be computed over several steps. If not, it waits until all of it fits one step.
    pub enable_chunked_prefill: bool,
    /// Order of admission and preemption.
    pub policy: Policy,
    /// Seed of the prefix hash's key; `None` draws a random one.
    pub hash_seed: Option<u64>,
    /// The cache groups: groups of layers with one block table each, all in one pool.
    pub groups: Vec<CacheGroup>,
    /// Number of blocks of host memory; 0 for none. Preempted requests are swapped out to them.
    pub host_blocks: usize,
    /// Whether host blocks that no swapped request needs keep prefixes that the pool evicts.
    #[serde(default)]
    pub host_caching: bool,
    /// Treatment of preempted requests: recompute, swap, or whichever is cheaper.
    pub preemption_mode: PreemptionMode,
    /// Whether accepted drafts are computed again as known tokens, before drafts that follow them. For models with
    /// recurrent states: the executor computes drafts on a copy of the state, so their rows leave no trace in the cache.
    #[serde(default)]
    pub recompute_drafts: bool,
    /// Cost of moving a block to the host and back, as the number of prefill tokens that take as long. About 2 for
    /// blocks of 16 tokens of an 8B model in 16 bits: 2 MB twice over 50 GB/s, against 16 GFLOP a token at 400 TFLOP/s.
    pub swap_cost: usize,
    /// Greatest number of different [adapters](crate::Request::adapter) of running requests, at least 1; `usize::MAX` is
    /// no limit.
    pub max_loras: usize,
    /// Whether to record changes of the prefix cache for
    /// [`drain_block_events`](crate::Scheduler::drain_block_events), which then has to be called after every step.
    #[serde(default)]
    pub block_events: bool,
    /// Greatest number of steps planned and not yet committed. 1 plans after each commit; 2 plans a step while the one
    /// before it runs, so that the device does not wait for the host; with `pipeline`, the number of stages, 1 to 64.
    pub max_in_flight: usize,
    /// Whether the layers are divided into the stages of a pipeline, and each step in flight is in another stage. Then a
    /// token is known to later steps only when its step is committed: no span [awaits](crate::Span::awaits) one, and the
    /// sequences are divided over the steps.
    #[serde(default)]
    pub pipeline: bool,
}

/// Why a [`SchedConfig`] is invalid: under it some request could wait forever, or no pool can be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A limit that must be at least 1 is 0.
    #[error("{flag}: found 0, expected at least 1")]
    Zero {
        /// The flag as typed on the command line.
        flag: &'static str,
    },
    /// Running sequences could use the whole budget of every step, so that no prompt is ever computed.
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
    /// Without chunked prefill the longest prompt does not fit a step.
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
    /// `max_in_flight` is 0 or too great.
    #[error("max_in_flight: found {found}, expected {} steps",
            match .most { 2 => "1 or 2".into(), most => format!("1 to {most}") })]
    InFlight {
        /// The configured value.
        found: usize,
        /// The greatest allowed value: 2, in a pipeline 64.
        most: usize,
    },
    /// The configuration of the block pool is invalid.
    #[error(transparent)]
    Pool(#[from] kvblock::PoolError),
}

impl SchedConfig {
    /// Creates a configuration with a pool of this size and otherwise vLLM's defaults: 256 sequences, 2,048 tokens a
    /// step, prefix caching, chunked prefill, first come first served, one step at a time, one
    /// full group, no host blocks, no caching in them. `max_model_len` is the size of the pool.
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
            max_loras: usize::MAX,
            groups: vec![CacheGroup::Full],
            host_blocks: 0,
            host_caching: false,
            preemption_mode: PreemptionMode::Auto,
            recompute_drafts: false,
            swap_cost: 2,
            block_events: false,
            max_in_flight: 1,
            pipeline: false,
        }
    }

    /// Greatest number of blocks that a sequence owns in a cache group while its prompt is computed: in a sliding group
    /// those of the window and the chunks in flight. `None` in a full group: the blocks of all its tokens.
    pub(crate) fn most_blocks_in_flight(&self, group: CacheGroup) -> Option<usize> {
        let CacheGroup::Sliding { window } = group else { return None };
        let tokens = self.max_num_batched_tokens.saturating_mul(self.max_in_flight);
        Some(window.saturating_add(tokens).div_ceil(self.block_size) + 1)
    }

    /// Checks that every request that the scheduler accepts can make progress.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let &SchedConfig { max_num_seqs, max_num_batched_tokens, max_model_len, .. } = self;
        for (flag, value) in
            [("--max-num-seqs", max_num_seqs), ("--max-model-len", max_model_len), ("--max-loras", self.max_loras)]
        {
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
        let most = if self.pipeline { MOST_STAGES } else { 2 };
        if !(1..=most).contains(&self.max_in_flight) {
            return Err(ConfigError::InFlight { found: self.max_in_flight, most });
        }
        Ok(())
    }

    /// Number of blocks that an admission leaves free while others run, so that they do not preempt it in the next
    /// step.
    pub(crate) fn watermark(&self) -> usize {
        self.num_blocks / 100
    }
}
