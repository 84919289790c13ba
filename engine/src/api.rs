//! What a caller says to the engine and what it hears back: plain values.

use std::path::PathBuf;
use std::sync::Arc;

use attention_kernels::Dtype;
use device::gemm::Quantization;
use models::Pooling;
use sampling::{SamplingParams, TokenLogprobs};
use serde::{Deserialize, Serialize};

use crate::grammar::StructuredOutput;
use crate::kv_cache::KvCacheDtype;

/// How one request wants to be continued. Clones share the long lists, so that requests of one call hold them once.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationParams {
    /// What shapes each draw.
    pub sampling: SamplingParams,
    /// Sequences to make from the one prompt; their prompt blocks are shared.
    pub n: usize,
    /// Samples to make instead of `n`, at least `n`: the `n` of the highest mean log-probability per token (of the raw
    /// logits, the ending token included; equal ones in the order of their seeds) become the answer, best first. Nothing
    /// is heard of any before all have ended.
    pub best_of: Option<usize>,
    /// Search for the likeliest continuations instead of sampling; the `n` best become the answer, best first, at the end.
    pub beam: Option<BeamSearch>,
    /// Greatest number of tokens per sequence; `None` fills the context. `0` only scores the prompt.
    pub max_tokens: Option<usize>,
    /// End-of-sequence tokens do not end a sequence.
    pub ignore_eos: bool,
    /// A sequence ends right before the first of these texts.
    pub stop: Arc<[String]>,
    /// A sequence ends with any of these tokens.
    pub stop_token_ids: Vec<u32>,
    /// Leave the matched stop string in the text.
    pub include_stop_str_in_output: bool,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
    /// Log-probabilities of the prompt's own tokens, with this many alternatives each.
    pub prompt_logprobs: Option<usize>,
    /// Make an embedding of the prompt instead of a continuation; see [`GenerationParams::embedding`].
    pub pooling: Option<Pooling>,
    /// What each text must match as a whole. It may end only where the match is whole, and ends where nothing can follow,
    /// before `min_tokens` if it must; not together with a beam search.
    pub structured_outputs: Option<Arc<StructuredOutput>>,
}

impl Default for GenerationParams {
    fn default() -> Self {
        GenerationParams {
            sampling: SamplingParams::default(),
            n: 1,
            best_of: None,
            beam: None,
            max_tokens: Some(16),
            ignore_eos: false,
            stop: Arc::default(),
            stop_token_ids: Vec::new(),
            include_stop_str_in_output: false,
            skip_special_tokens: true,
            prompt_logprobs: None,
            pooling: None,
            structured_outputs: None,
        }
    }
}

impl GenerationParams {
    /// The embedding of the prompt and no token: hidden states behind the final norm, pooled, of length 1. A mean needs
    /// the states of all tokens, so it computes also what the prefix cache knows.
    pub fn embedding(pooling: Pooling) -> GenerationParams {
        GenerationParams { pooling: Some(pooling), max_tokens: Some(0), ..GenerationParams::default() }
    }
}

/// A beam search: in each step the `width` likeliest unfinished continuations live on.
///
/// Likely by the logits after allowed ids, bad words, `min_tokens`, bias and penalties. Temperature, the filters of
/// [`SamplingParams`] and its seed do not apply; stop strings are refused, as hypotheses end by tokens. Where fewer than
/// `n` continuations exist (few allowed ids, few tokens), the rest of the answer is empty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamSearch {
    /// Hypotheses that live at once, at least `n`. They share the blocks of what they have in common.
    pub width: usize,
    /// A finished hypothesis is scored by the sum of its log-probabilities over the number of its tokens to this power
    /// (Hugging Face's definition; the ending token counts): above 0 favours long ones, below 0 short ones. Finite.
    pub length_penalty: f32,
    /// End as soon as `width` hypotheses have finished, instead of when no other can become one of the best.
    pub early_stopping: bool,
}

impl BeamSearch {
    /// A search of this width with a length penalty of 1, which ends when the best are certain.
    pub fn new(width: usize) -> BeamSearch {
        BeamSearch { width, length_penalty: 1.0, early_stopping: false }
    }
}

/// One prompt and what to do with it.
#[derive(Clone, Debug, Default)]
pub struct GenerationRequest {
    /// Prompt as token ids, at least one.
    pub prompt: Vec<u32>,
    /// How to continue it.
    pub params: GenerationParams,
    /// Lower runs first (only under the priority policy).
    pub priority: i32,
    /// Requests share cached prompt blocks only under the same salt.
    pub cache_salt: Option<String>,
}

/// Why a sequence ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// The token limit or the context was reached.
    Length,
    /// An end-of-sequence token (`None`), a stop token or a stop string.
    Stop(Option<StopCause>),
    /// The grammar that held the sequence can not be followed further: it is too complex, or leads nowhere.
    Grammar(String),
    /// The step that held the request failed.
    Error(String),
}

/// What ended a sequence early.
#[derive(Clone, Debug, PartialEq)]
pub enum StopCause {
    /// One of `stop_token_ids`.
    Token(u32),
    /// One of `stop`.
    Text(String),
    /// Nothing can follow by the grammar of `structured_outputs`. The last token is a part of the text.
    Complete,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOutput {
    /// Its id.
    pub id: u32,
    /// Its log-probability and the best alternatives, when asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Offset in characters of this token's text in the sequence's output text (as `text_offset` of the completions API).
    pub text_offset: usize,
}

/// News of one sequence of a request: what a step (or several) added to it.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Delta {
    /// Which of the `n` sequences.
    pub index: u32,
    /// Text that is final: no half characters, nothing that may still become a stop string.
    pub text: String,
    /// Tokens of this delta; their text may arrive in a later delta.
    pub tokens: Vec<TokenOutput>,
    /// Set on the last delta of the sequence.
    pub finish: Option<FinishReason>,
}

impl Delta {
    /// Appends what comes after it in the same sequence.
    pub fn extend(&mut self, later: Delta) {
        self.text.push_str(&later.text);
        self.tokens.extend(later.tokens);
        self.finish = later.finish.or(self.finish.take());
    }
}

/// What a request's stream carries.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Log-probabilities of the prompt, one entry per prompt token (`None` for the first); comes first, only when asked for.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// The embedding of the prompt, `[hidden_size]`, of length 1; only when asked for.
    Embedding(Vec<f32>),
    /// The prompt has been computed; this many of its tokens came from the prefix cache.
    Started {
        /// Prompt tokens that were not recomputed.
        cached_tokens: usize,
    },
    /// News of a sequence.
    Delta(Delta),
}

/// Where weights, tokenizer and template come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelSource {
    /// The small model inside the binary.
    Demo,
    /// A folder in Hugging Face layout.
    Folder(PathBuf),
}

/// Everything an engine needs to start. `Default` serves the demo model on the CPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineConfig {
    /// The checkpoint.
    pub model: ModelSource,
    /// `"auto"`, which takes the CPU, or `"cpu"`, `"cuda"` (no card has run it yet) or `"cuda-sim"`.
    pub device: String,
    /// The folder of compiled kernels; `None`: beside the executable, else `kernels/` of its cargo target folder.
    pub kernels_dir: Option<PathBuf>,
    /// Tokens per block: a power of two, 8 to 128.
    pub block_size: usize,
    /// Longest prompt plus output; `None` takes the model's own, or what the cache holds if that is less.
    pub max_model_len: Option<usize>,
    /// Bytes for keys and values; `None` takes `gpu_memory_utilization` of what is free beside the weights.
    pub kv_cache_memory_bytes: Option<u64>,
    /// How keys and values are kept.
    pub kv_cache_dtype: KvCacheDtype,
    /// Make the scales of an fp8 cache of the first step that computes tokens, in layers for which the checkpoint has none;
    /// else those are 1.
    pub calculate_kv_scales: bool,
    /// Share of the device's free memory that becomes cache when `kv_cache_memory_bytes` is not given.
    pub gpu_memory_utilization: Option<f64>,
    /// Bytes of host memory that the keys and values of preempted requests may be moved to; 0 for none.
    pub swap_space_bytes: u64,
    /// What becomes of a preempted request's keys and values.
    pub preemption_mode: sched::PreemptionMode,
    /// Give kernels to a GPU one by one, where decode steps would be CUDA graphs else. A CPU has no graphs.
    pub enforce_eager: bool,
    /// Sequences in one step.
    pub max_num_seqs: usize,
    /// Tokens in one step.
    pub max_num_batched_tokens: usize,
    /// Share blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Let a prompt be computed over several steps.
    pub enable_chunked_prefill: bool,
    /// Requests that may wait for their turn in an [`AsyncEngine`](crate::AsyncEngine); more are refused.
    pub max_queued_requests: usize,
    /// Events per sequence that wait in an [`AsyncEngine`](crate::AsyncEngine) for a reader; one who falls further behind
    /// loses the request.
    pub max_unread_events: usize,
    /// Greatest size in bytes of a grammar's definition: a JSON schema, a regular expression, a list of choices or a Lark
    /// grammar. Larger ones are refused before they are compiled.
    pub max_schema_bytes: usize,
    /// First come first served, or by priority.
    pub policy: sched::Policy,
    /// Where the time of each step is recorded, by operation and phase, if it is; of one engine. Decode steps are not CUDA graphs
    /// then, and each step waits for the device.
    #[serde(skip)]
    pub profile: Option<Arc<device::Profile>>,
    /// A file to be made, which takes down every step: what the worker was given, and what came of it. It holds prompts and
    /// answers. See [`Recording`](crate::worker::record::Recording).
    #[serde(skip)]
    pub record: Option<PathBuf>,
    /// Base of the seeds of requests that bring none; random if `None`.
    pub seed: Option<u64>,
    /// Worker threads; `None` uses every core.
    pub threads: Option<usize>,
    /// What the matrices of the checkpoint are made into while they are read; `None` keeps their type.
    #[serde(with = "by_name")]
    pub quantization: Option<Quantization>,
    /// Type that the model is computed in; `None`: that of the checkpoint on a GPU, float32 on a CPU, which has no other.
    pub dtype: Option<Dtype>,
    /// `[kernels]`: operation to variant name or `"auto"`.
    pub kernels: attention_kernels::KernelChoice,
    /// A row's results depend on nothing but its own sequence and position, not on batch, chunks, cache hits or preemption:
    /// kernels and products are chosen for that. On a CPU it is so in any case.
    pub deterministic: bool,
}

/// Facts about the model that is being served.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Folder name, or `quire-demo`.
    pub name: String,
    /// `LlamaForCausalLM` and the like.
    pub architecture: String,
    /// Parameters in all.
    pub num_parameters: u64,
    /// Longest prompt plus output in tokens.
    pub max_model_len: usize,
    /// Rows of the output projection; token ids must be less.
    pub vocab_size: usize,
    /// Elements of an embedding.
    pub hidden_size: usize,
    /// How the checkpoint wants embeddings to be made; `None` if in a way that is not built.
    pub pooling: Option<Pooling>,
    /// Ids that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Device and kernels in words, one line each, for the start-up log.
    pub notes: Vec<String>,
}

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

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            model: ModelSource::Demo,
            device: "auto".to_string(),
            kernels_dir: None,
            block_size: 16,
            max_model_len: None,
            kv_cache_memory_bytes: None,
            kv_cache_dtype: KvCacheDtype::Auto,
            calculate_kv_scales: false,
            gpu_memory_utilization: None,
            swap_space_bytes: 0,
            preemption_mode: sched::PreemptionMode::Auto,
            enforce_eager: false,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            max_queued_requests: 4096,
            max_unread_events: 4096,
            max_schema_bytes: 512 << 10,
            policy: sched::Policy::Fcfs,
            profile: None,
            record: None,
            seed: None,
            threads: None,
            quantization: None,
            dtype: None,
            kernels: attention_kernels::KernelChoice::default(),
            deterministic: false,
        }
    }
}

/// A value that has a name, as that.
mod by_name {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    pub fn serialize<T: Display, S: Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
        value.as_ref().map(T::to_string).serialize(serializer)
    }

    pub fn deserialize<'de, T: FromStr<Err = &'static str>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<T>, D::Error> {
        let name: Option<String> = Option::deserialize(deserializer)?;
        name.map(|name| name.parse().map_err(D::Error::custom)).transpose()
    }
}
