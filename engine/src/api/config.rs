//! The configuration of an engine, and facts about the model it serves.

use std::path::PathBuf;
use std::sync::Arc;

use attention_kernels::Dtype;
use kvevents::KvEventsConfig;
use linear::Quantization;
use models::{Pooler, RoundActivations};
use serde::{Deserialize, Serialize};

use super::{GenerationConfig, HfOverrides, ItlTarget, KvCacheDtype, ParallelConfig};
use crate::connector::KvTransferConfig;
use crate::speculate::SpeculativeConfig;

/// Where weights, tokenizer and chat template come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelSource {
    /// The small model included in the binary.
    #[default]
    Demo,
    /// A checkpoint folder in Hugging Face layout.
    Folder(PathBuf),
}

/// Everything an engine needs to start. `Default` serves the demo model on the CPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineConfig {
    /// The checkpoint.
    pub model: ModelSource,
    /// Chat template to use instead of the checkpoint's: a file, a name, or a template, which has a `{`. A recording does not contain it.
    #[serde(skip)]
    pub chat_template: Option<PathBuf>,
    /// Folder of the tokenizer and its chat template; `None`: the checkpoint has them. A recording does not contain it.
    #[serde(skip)]
    pub tokenizer: Option<PathBuf>,
    /// Where sampling defaults come from. A recording does not contain it.
    #[serde(skip)]
    pub generation_config: GenerationConfig,
    /// `"auto"` (a GPU that has passed the tests, else the CPU), `"cpu"`, `"cuda"` or `"cuda-sim"`.
    pub device: String,
    /// Folder of the compiled kernels; `None` looks next to the executable, then in `kernels/` of its cargo target folder.
    pub kernels_dir: Option<PathBuf>,
    /// Tokens per block, a power of two from 8 to 128, or to 4096 for a model with recurrent states, which must fit into a block;
    /// `None`: 16, or the least with which they do.
    pub block_size: Option<usize>,
    /// Greatest number of prompt and output tokens; `None` uses the model's limit, or what the cache holds if that is less.
    pub max_model_len: Option<usize>,
    /// Bytes for keys and values; `None` uses the share `gpu_memory_utilization` of the memory.
    pub kv_cache_memory_bytes: Option<u64>,
    /// Type in which keys and values are stored.
    pub kv_cache_dtype: KvCacheDtype,
    /// Computes the scales of an fp8 cache from the first step that computes tokens, for layers whose scales are not in the
    /// checkpoint. Without it, those scales are 1.
    pub calculate_kv_scales: bool,
    /// Share of a GPU's memory that the engine uses (default 0.9), or of a CPU's free memory that becomes cache (default 0.4),
    /// if `kv_cache_memory_bytes` is `None`.
    pub gpu_memory_utilization: Option<f64>,
    /// Bytes of host memory for the keys and values of preempted requests; 0 for none.
    pub swap_space_bytes: u64,
    /// Bytes of host memory for prefixes that the cache evicts; 0 for none. One pool with `swap_space_bytes`: preempted requests may
    /// take all of it, and evicted prefixes stay in what is left.
    #[serde(default)]
    pub kv_offloading_bytes: u64,
    /// What to do with the keys and values of a preempted request.
    pub preemption_mode: sched::PreemptionMode,
    /// Launches the kernels of decode steps one by one instead of as CUDA graphs.
    pub enforce_eager: bool,
    /// Greatest number of sequences in one step.
    pub max_num_seqs: usize,
    /// Greatest number of tokens in one step.
    pub max_num_batched_tokens: usize,
    /// Cuts prompts into smaller chunks while sequences decode, so that the time between two of their tokens meets this target;
    /// `None`: chunks are as large as `max_num_batched_tokens` allows. A recording does not contain it, because chunks are part of the
    /// recorded steps.
    #[serde(skip)]
    pub itl_target: Option<ItlTarget>,
    /// Shares the blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Computes a long prompt over several steps.
    pub enable_chunked_prefill: bool,
    /// Greatest number of requests in the queue of an [`AsyncEngine`](crate::AsyncEngine). More are refused.
    pub max_queued_requests: usize,
    /// Greatest number of steps of an [`AsyncEngine`](crate::AsyncEngine) whose events a stream may leave unread. If a reader falls
    /// further behind, its requests are cancelled.
    pub max_unread_events: usize,
    /// Greatest size in bytes of a grammar's definition: a JSON schema, a regular expression, a list of choices or a Lark
    /// grammar. Larger ones are refused without compiling them.
    pub max_schema_bytes: usize,
    /// Scheduling policy: first come, first served, or by priority.
    pub policy: sched::Policy,
    /// Records the time of each step by operation and phase, for one engine. While it does, decode steps are not CUDA graphs, and
    /// each step waits for the device.
    #[serde(skip)]
    pub profile: Option<Arc<device::Profile>>,
    /// File to create for a recording of every step: the worker's inputs and outputs, which contain prompts and answers. See
    /// [`Recording`](crate::Recording).
    #[serde(skip)]
    pub record: Option<PathBuf>,
    /// Base from which the seeds of requests without a seed are derived; `None` is random.
    pub seed: Option<u64>,
    /// Number of threads; `None` uses every core.
    pub threads: Option<usize>,
    /// Quantisation of matrices while they are loaded, except for those that the checkpoint stores in fewer bits already; `None`
    /// keeps their type.
    #[serde(with = "by_name")]
    pub quantization: Option<Quantization>,
    /// Which activations are rounded before products with weights that the checkpoint stores in fewer bits.
    pub activations: RoundActivations,
    /// Type of the computation. `None` uses that of the checkpoint on a GPU; on a CPU, bfloat16 for a checkpoint in bfloat16 if the
    /// CPU is faster in it, otherwise float32.
    pub dtype: Option<Dtype>,
    /// The `[kernels]` table: a variant name or `"auto"` for each operation.
    pub kernels: attention_kernels::KernelChoice,
    /// Sizes of the memory for LoRA adapters; `None`: requests cannot use any.
    pub lora: Option<LoraConfig>,
    /// Proposes tokens before they are drawn, without changing any; `None`: no speculation. A recording does not contain it, because
    /// drafts are part of the recorded steps.
    #[serde(skip)]
    pub speculative: Option<SpeculativeConfig>,
    /// The ranks that compute the model together. A recording does not contain it: one rank computes the same bits, and where it would
    /// not, there is no recording.
    #[serde(skip)]
    pub parallel: ParallelConfig,
    /// Announces which prefixes the cache holds; `None`: no events. A recording does not contain it.
    #[serde(skip)]
    pub kv_events: Option<KvEventsConfig>,
    /// Exchanges cached blocks with other replicas; `None`: with none. A recording does not contain it.
    #[serde(skip)]
    pub kv_transfer: Option<KvTransferConfig>,
    /// Keys in place of those of `config.json`.
    #[serde(default)]
    pub hf_overrides: HfOverrides,
    /// Chooses kernels and products such that a row's result depends only on its own sequence and position, not on batch, chunks,
    /// cache hits or preemption. On a CPU this always holds.
    pub deterministic: bool,
}

impl EngineConfig {
    /// Greatest number of drafts of a sequence in a step; 0 without speculation.
    pub(crate) fn most_drafts(&self) -> usize {
        self.speculative.as_ref().map_or(0, |speculative| speculative.num_speculative_tokens)
    }

    /// How to publish KV events, if that is enabled.
    pub(crate) fn enabled_kv_events(&self) -> Option<&KvEventsConfig> {
        self.kv_events.as_ref().filter(|events| events.enabled)
    }
}

/// Sizes of the memory for LoRA adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Greatest number of different adapters in one step.
    pub max_loras: usize,
    /// Greatest rank of an adapter.
    pub max_lora_rank: usize,
    /// Number of adapters in host memory; `None`: as many as in a step. The others are read from their files when they are used.
    pub max_cpu_loras: Option<usize>,
}

impl Default for LoraConfig {
    /// The defaults of vLLM: one adapter at a time, of rank 16.
    fn default() -> Self {
        LoraConfig { max_loras: 1, max_lora_rank: 16, max_cpu_loras: None }
    }
}

impl LoraConfig {
    /// Number of adapters in host memory.
    pub fn num_cpu_loras(&self) -> usize {
        self.max_cpu_loras.unwrap_or(self.max_loras)
    }
}

/// A loaded LoRA adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterInfo {
    /// The name under which requests choose it.
    pub name: String,
    /// Folder of its files.
    pub path: PathBuf,
    /// Greatest rank of a module.
    pub rank: usize,
    /// Size in memory.
    pub bytes: usize,
    /// Its last requests are running, and it takes no new ones.
    pub is_unloading: bool,
}

/// Facts about the served model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Folder name, or `quire-demo`.
    pub name: String,
    /// `LlamaForCausalLM` and the like.
    pub architecture: String,
    /// Number of parameters.
    pub num_parameters: u64,
    /// Form in which the checkpoint stores most weights: `Q4_K_M`, `GPTQ-Int4`, `BF16`.
    pub stored_as: String,
    /// Greatest number of prompt and output tokens.
    pub max_model_len: usize,
    /// Size of the vocabulary: token ids are below it.
    pub vocab_size: usize,
    /// Greatest number of tokens of a prompt: less by one than `max_model_len` if the model generates.
    pub longest_prompt: usize,
    /// Whether the model has an output layer for tokens. Others serve embeddings or labels of texts.
    pub generates: bool,
    /// Whether pairs of texts are written in the prompt of Qwen3-Reranker.
    pub reranker_prompt: bool,
    /// From hidden states to embeddings or to labels.
    pub pooler: Arc<Pooler>,
    /// Token ids that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Number of blocks in the pool.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Greatest number of sequences in a step.
    pub max_num_seqs: usize,
    /// Maximum number of different LoRA adapters in a step; `None` if the engine takes none.
    pub max_loras: Option<usize>,
    /// Number of ranks that each matrix is cut over.
    pub tensor_parallel_size: usize,
    /// Number of stages that the layers are cut into.
    pub pipeline_parallel_size: usize,
    /// Name of this replica in `kv_transfer_params`; `None` if it has no connector.
    pub kv_engine_id: Option<String>,
    /// Hash of the checkpoint.
    pub fingerprint: u64,
    /// The family of bits in which the engine computes, in words. Engines with equal checkpoints and equal families give a request with
    /// a seed the same tokens and log-probabilities, to the bit; on other kinds of CPUs too.
    pub arithmetic: String,
    /// The choices made at start (device, kernels, memory), one line each, for the log.
    pub notes: Vec<String>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            model: ModelSource::Demo,
            chat_template: None,
            tokenizer: None,
            generation_config: GenerationConfig::default(),
            device: "auto".to_string(),
            kernels_dir: None,
            block_size: None,
            max_model_len: None,
            kv_cache_memory_bytes: None,
            kv_cache_dtype: KvCacheDtype::Auto,
            calculate_kv_scales: false,
            gpu_memory_utilization: None,
            swap_space_bytes: 0,
            kv_offloading_bytes: 0,
            preemption_mode: sched::PreemptionMode::Auto,
            enforce_eager: false,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            itl_target: None,
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
            activations: RoundActivations::default(),
            dtype: None,
            kernels: attention_kernels::KernelChoice::default(),
            lora: None,
            speculative: None,
            parallel: ParallelConfig::default(),
            kv_events: None,
            kv_transfer: None,
            hf_overrides: HfOverrides::default(),
            deterministic: false,
        }
    }
}

/// Serialises a value as its name.
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
