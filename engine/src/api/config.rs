//! How an engine is set up, and what it says of itself.

use std::path::PathBuf;
use std::sync::Arc;

use attention_kernels::Dtype;
use device::gemm::Quantization;
use models::Pooling;
use serde::{Deserialize, Serialize};

use super::KvCacheDtype;

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
    /// answers. See [`Recording`](crate::Recording).
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
