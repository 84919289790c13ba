//! Flags that several commands share. Names and meanings are vLLM's where the thing is the same.
//!
//! Every flag here is also a key of `quire.toml`; the flags of the engine and of the server have an environment variable
//! each. What is not given stays `None`, so that there is one place for defaults: [`EngineConfig::default`].

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use engine::kernels::{Device, Options, open_with};
use engine::{EngineConfig, KvCacheDtype, ModelSource, Policy, PreemptionMode, Quantization};

use super::error::CliError;
use super::log::LogArgs;
use super::values;

/// What every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct CommonArgs {
    /// Settings file: keys are flags without the dashes, and a [kernels] table
    #[arg(long, value_name = "FILE", env = "QUIRE_CONFIG")]
    pub config: Option<PathBuf>,
    /// Where to run: auto, cpu, cuda or cuda-sim [default: auto]
    #[arg(long, env = "QUIRE_DEVICE")]
    pub device: Option<String>,
    /// Folder of compiled kernels [default: beside the program]
    #[arg(long, value_name = "FOLDER", env = "QUIRE_KERNELS_DIR")]
    pub kernels_dir: Option<PathBuf>,
    /// Threads that compute, at most one for each core [default: every core]
    #[arg(long, value_parser = values::threads, env = "QUIRE_THREADS")]
    pub threads: Option<usize>,
}

impl CommonArgs {
    /// The device that they name.
    pub fn open(&self) -> Result<Arc<dyn Device>, CliError> {
        let default = EngineConfig::default().device;
        let name = self.device.as_deref().unwrap_or(&default);
        let options = Options { threads: self.threads, kernels: self.kernels_dir.clone(), ..Options::default() };
        open_with(name, &options).map_err(CliError::bench)
    }
}

/// What an engine needs to start.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Folder in Hugging Face layout [default: the built-in demo model]
    #[arg(value_name = "MODEL", help_heading = "Arguments")]
    pub model_path: Option<PathBuf>,
    /// The same as a flag; MODEL goes before it
    #[arg(long, value_name = "MODEL", env = "QUIRE_MODEL")]
    pub model: Option<PathBuf>,
    /// Where, and with what settings.
    #[command(flatten)]
    pub common: CommonArgs,
    /// q8 or q4: weights in 8 or 4 bits, made while they are loaded [default: as in the checkpoint]
    #[arg(long, value_name = "FORM", value_parser = values::quantization, env = "QUIRE_QUANTIZATION")]
    pub quantization: Option<Quantization>,
    /// Type of the computation: auto, float32, float16 or bfloat16 [default: auto]
    #[arg(long, value_parser = values::dtype, env = "QUIRE_DTYPE")]
    pub dtype: Option<values::DtypeChoice>,
    /// Longest prompt plus output in tokens, or auto [default: the model's, or what the cache holds]
    #[arg(long, value_name = "TOKENS", value_parser = values::max_model_len, env = "QUIRE_MAX_MODEL_LEN")]
    pub max_model_len: Option<values::Length>,
    /// Tokens per block of the cache: 8, 16, 32, 64 or 128 [default: 16]
    #[arg(long, value_name = "TOKENS", value_parser = values::whole::<usize>, env = "QUIRE_BLOCK_SIZE")]
    pub block_size: Option<usize>,
    /// Bytes for keys and values, as 512M or 2G [default: a share of free memory]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_KV_CACHE_MEMORY_BYTES")]
    pub kv_cache_memory_bytes: Option<u64>,
    /// Share of the device's memory that may be used, 0 to 1 [default: 0.9 on a GPU, else 0.4 of the free memory]
    #[arg(long, value_name = "SHARE", env = "QUIRE_GPU_MEMORY_UTILIZATION")]
    pub gpu_memory_utilization: Option<f64>,
    /// How keys and values are kept: auto (as they are computed), float32, float16, bfloat16, fp8 (e4m3), fp8_e5m2 or int8
    /// [default: auto]
    #[arg(long, value_name = "DTYPE", value_parser = values::kv_cache_dtype, env = "QUIRE_KV_CACHE_DTYPE")]
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Make the scales of an fp8 cache of the first step, where the checkpoint has none
    #[arg(long, env = "QUIRE_CALCULATE_KV_SCALES")]
    pub calculate_kv_scales: bool,
    /// Sequences in one step
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>, env = "QUIRE_MAX_NUM_SEQS")]
    pub max_num_seqs: Option<usize>,
    /// Tokens in one step; more than --max-num-seqs
    #[arg(long, value_name = "TOKENS", value_parser = values::whole::<usize>, env = "QUIRE_MAX_NUM_BATCHED_TOKENS")]
    pub max_num_batched_tokens: Option<usize>,
    /// Share the blocks of equal prefixes [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          overrides_with = "no_enable_prefix_caching", env = "QUIRE_ENABLE_PREFIX_CACHING")]
    pub enable_prefix_caching: Option<bool>,
    /// Compute every prompt anew
    #[arg(long, overrides_with = "enable_prefix_caching")]
    pub no_enable_prefix_caching: bool,
    /// Let a prompt be computed over several steps [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          overrides_with = "no_enable_chunked_prefill", env = "QUIRE_ENABLE_CHUNKED_PREFILL")]
    pub enable_chunked_prefill: Option<bool>,
    /// Compute each prompt in one step
    #[arg(long, overrides_with = "enable_chunked_prefill")]
    pub no_enable_chunked_prefill: bool,
    /// Give kernels to a GPU one by one; else decode steps are CUDA graphs [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          env = "QUIRE_ENFORCE_EAGER")]
    pub enforce_eager: Option<bool>,
    /// fcfs, or priority as requests state it [default: fcfs]
    #[arg(long, value_name = "POLICY", value_parser = values::policy, env = "QUIRE_SCHEDULING_POLICY")]
    pub scheduling_policy: Option<Policy>,
    /// GiB of host memory for the keys and values of preempted requests [default: 0]
    #[arg(long, value_name = "GIB", value_parser = values::swap_space, env = "QUIRE_SWAP_SPACE")]
    pub swap_space: Option<u64>,
    /// What to do with a preempted request: recompute, swap, or auto (whichever is cheaper) [default: auto]
    #[arg(long, value_name = "MODE", value_parser = values::preemption_mode, env = "QUIRE_PREEMPTION_MODE")]
    pub preemption_mode: Option<PreemptionMode>,
    /// Base of the seeds of requests that bring none [default: random]
    #[arg(long, value_parser = values::whole::<u64>, env = "QUIRE_SEED")]
    pub seed: Option<u64>,
    /// The same bits for a request whatever else runs; on a CPU always so
    #[arg(long, env = "QUIRE_DETERMINISTIC")]
    pub deterministic: bool,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
    /// Flags that so far have one value.
    #[command(flatten)]
    pub fixed: FixedArgs,
}

/// Flags of vLLM whose other values are not built yet. They are checked while they are parsed; there is nothing to read.
#[derive(Debug, Args)]
#[command(next_help_heading = "Accepted with one value")]
pub struct FixedArgs {
    /// Devices that share a layer: 1
    #[arg(long, value_name = "N", value_parser = values::tensor_parallel_size, env = "QUIRE_TENSOR_PARALLEL_SIZE")]
    pub tensor_parallel_size: Option<String>,
}

impl EngineArgs {
    /// The model that was named, if any.
    pub fn model(&self) -> Option<&PathBuf> {
        self.model_path.as_ref().or(self.model.as_ref())
    }

    /// The engine's configuration: its defaults where nothing was said.
    pub fn to_config(&self) -> EngineConfig {
        let default = EngineConfig::default();
        let switch = |on: Option<bool>, off: bool, default: bool| !off && on.unwrap_or(default);
        EngineConfig {
            model: self.model().map_or(ModelSource::Demo, |path| ModelSource::Folder(path.clone())),
            device: self.common.device.clone().unwrap_or(default.device),
            kernels_dir: self.common.kernels_dir.clone(),
            block_size: self.block_size.unwrap_or(default.block_size),
            max_model_len: self.max_model_len.and_then(|length| length.0).or(default.max_model_len),
            kv_cache_memory_bytes: self.kv_cache_memory_bytes.or(default.kv_cache_memory_bytes),
            kv_cache_dtype: self.kv_cache_dtype.unwrap_or(default.kv_cache_dtype),
            calculate_kv_scales: self.calculate_kv_scales,
            gpu_memory_utilization: self.gpu_memory_utilization.or(default.gpu_memory_utilization),
            enforce_eager: self.enforce_eager.unwrap_or(default.enforce_eager),
            max_num_seqs: self.max_num_seqs.unwrap_or(default.max_num_seqs),
            max_num_batched_tokens: self.max_num_batched_tokens.unwrap_or(default.max_num_batched_tokens),
            enable_prefix_caching: switch(
                self.enable_prefix_caching,
                self.no_enable_prefix_caching,
                default.enable_prefix_caching,
            ),
            enable_chunked_prefill: switch(
                self.enable_chunked_prefill,
                self.no_enable_chunked_prefill,
                default.enable_chunked_prefill,
            ),
            policy: self.scheduling_policy.unwrap_or(default.policy),
            swap_space_bytes: self.swap_space.unwrap_or(default.swap_space_bytes),
            preemption_mode: self.preemption_mode.unwrap_or(default.preemption_mode),
            profile: default.profile,
            record: default.record,
            seed: self.seed.or(default.seed),
            max_queued_requests: default.max_queued_requests,
            max_unread_events: default.max_unread_events,
            max_schema_bytes: default.max_schema_bytes,
            threads: self.common.threads.or(default.threads),
            quantization: self.quantization.or(default.quantization),
            dtype: self.dtype.and_then(|dtype| dtype.0).or(default.dtype),
            kernels: default.kernels,
            deterministic: self.deterministic,
        }
    }
}

/// How tokens are chosen, for `chat` and `generate`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Most tokens to generate [default: up to the end of the context]
    #[arg(long, value_name = "TOKENS", value_parser = values::whole::<usize>)]
    pub max_tokens: Option<usize>,
    /// 0 takes the likeliest token each time
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Keep the likeliest tokens up to this probability
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Keep this many of the likeliest tokens; 0 keeps all
    #[arg(long, value_parser = values::whole::<u32>)]
    pub top_k: Option<u32>,
    /// Drop tokens below this share of the likeliest one's probability
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Push tokens down that have come before; 1 is off
    #[arg(long)]
    pub repetition_penalty: Option<f32>,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = values::filled)]
    pub stop: Vec<String>,
    /// Go on after the end-of-sequence token
    #[arg(long)]
    pub ignore_eos: bool,
}
