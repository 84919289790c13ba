//! Flags that several commands share, with the names and meanings of vLLM where it has the same flag.
//!
//! Every flag is also a key of `quire.toml`, and those of the engine have an environment variable. A flag that is not given is
//! `None`, so that defaults are defined only once: in [`EngineConfig::default`].

mod checkpoint;
mod ranks;
mod sampling;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use engine::kernels::{Device, Options, open_with};
use engine::{
    EngineConfig, GenerationConfig, GenerationOverrides, GenerationSource, HfOverrides, ItlTarget, KvCacheDtype,
    KvEventsConfig, KvTransferConfig, LoraConfig, ModelSource, Policy, PreemptionMode, RoundActivations,
    SpeculativeConfig,
};

use crate::error::CliError;
use crate::log::LogArgs;
use crate::model::{self, HubArgs};
use crate::values;

pub use ranks::RanksArgs;
pub use sampling::SamplingArgs;

/// Flags of all commands that compute.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct CommonArgs {
    /// Settings file, in TOML or YAML; its keys are flags without the leading dashes, and a [kernels] table
    #[arg(long, value_name = "FILE", env = "QUIRE_CONFIG")]
    pub config: Option<PathBuf>,
    /// Device to run on: auto, cpu, cuda or cuda-sim [default: auto]
    ///
    /// `cuda` is an NVIDIA GPU; it requires compute capability 8.0, driver 580, cuBLAS 13 and compiled kernels. `cuda-sim`
    /// runs the CUDA kernels on the host, for tests. `auto` takes a GPU of compute capability 9.0 (H100, H200), which has
    /// passed the tests, for one rank; otherwise it uses the CPU and logs why.
    #[arg(long, env = "QUIRE_DEVICE")]
    pub device: Option<String>,
    /// Folder of compiled kernels [default: next to the program]
    ///
    /// `cargo xtask build-kernels` compiles them. The program also looks in its `target/kernels/`.
    #[arg(long, value_name = "FOLDER", env = "QUIRE_KERNELS_DIR")]
    pub kernels_dir: Option<PathBuf>,
    /// Number of compute threads, at most the number of cores [default: all cores]
    ///
    /// The cores are those that the process may use: its affinity mask and its container's quota. When all are used, each
    /// worker is pinned to its core.
    #[arg(long, value_parser = values::threads, env = "QUIRE_THREADS")]
    pub threads: Option<usize>,
}

impl CommonArgs {
    pub fn open(&self) -> Result<Arc<dyn Device>, CliError> {
        open_with(&self.device_name(), &self.options()).map_err(CliError::failed)
    }

    pub fn device_name(&self) -> String {
        self.device.clone().unwrap_or(EngineConfig::default().device)
    }

    pub fn options(&self) -> Options {
        Options { threads: self.threads, kernels: self.kernels_dir.clone(), ..Options::default() }
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Checkpoint folder in Hugging Face layout, .gguf file, or hub id such as Qwen/Qwen3-0.6B or ORG/NAME:FILE.gguf
    /// [default: the built-in demo model]
    #[arg(value_name = "MODEL", help_heading = "Arguments")]
    pub model_path: Option<PathBuf>,
    /// MODEL as a flag; the argument takes precedence [default: the built-in demo model]
    ///
    /// A folder in Hugging Face layout, a `.gguf` file, or [a hub id](#hugging-face-hub).
    #[arg(long, value_name = "MODEL", env = "QUIRE_MODEL")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub common: CommonArgs,
    /// Quantise weights while loading: q8 or q4 (8 or 4 bits); or the method of the checkpoint, such as awq or gptq
    /// [default: as in the checkpoint]
    ///
    /// A method is compared with that of the checkpoint, and has no other effect.
    /// All matrices are quantised, except for those that the checkpoint stores in fewer bits already (8.5 or 4.5 bits per
    /// weight including the scales). Activations are quantised to 8 bits before each product on a CPU, and not on `cuda`
    /// and `cuda-sim`, which need float16 or bfloat16 for it. Results differ slightly from those of the original weights
    /// (see [the figures](benchmarks/cpu-notes.md#accuracy-of-quantised-weights)), and are as independent of batch and
    /// threads as without quantisation.
    #[arg(long, value_name = "FORM", value_parser = values::quantization, env = "QUIRE_QUANTIZATION")]
    pub quantization: Option<values::Weights>,
    /// Activations before products with quantised checkpoints: float; int8, which is faster; or auto, as the checkpoint says
    /// [default: auto]
    ///
    /// It concerns GPTQ, AWQ, compressed-tensors, FP8, GGUF and others. `auto` rounds activations where the checkpoint says
    /// so (W8A8, FP8), and as it says; `float` never rounds them; `int8` rounds them to 8 bits with a scale for each 32,
    /// which is two to three times as fast with several rows and changes results slightly, only on a CPU. `cuda` and
    /// `cuda-sim` do not round them for FP8 with scales of blocks, and for stacked experts.
    #[arg(long, value_name = "FORM", value_parser = values::activations, env = "QUIRE_ACTIVATIONS")]
    pub activations: Option<RoundActivations>,
    /// Type of the computation: auto, float32, float16 or bfloat16 [default: auto]
    ///
    /// On a GPU `auto` is the checkpoint's type. On a CPU it is bfloat16 for a checkpoint in bfloat16 if the CPU is faster
    /// in it (AMD with AVX512-BF16, Intel with AMX), and with AMX for one in float16 or in quantised weights as well, which
    /// the log says, otherwise float32. On a CPU, bfloat16 rounds activations where they are multiplied with weights (of
    /// quantised ones with those of AMX alone), and attention multiplies in it too, with sums in float32; other CPUs emulate
    /// it with the same bits, slowly. A CPU refuses float16.
    #[arg(long, value_parser = values::dtype, env = "QUIRE_DTYPE")]
    pub dtype: Option<values::DtypeChoice>,
    /// Chat template instead of that of the checkpoint: a file in Jinja, a name, or the template itself
    /// [default: that of the checkpoint]
    ///
    /// What has a `{` is a template. Names are those of the checkpoint's templates, such as tool_use or rag, and chatml, deepseek_v32 and mistral. A base model has none.
    #[arg(long, value_name = "TEMPLATE", value_parser = values::file, env = "QUIRE_CHAT_TEMPLATE")]
    pub chat_template: Option<PathBuf>,
    /// Folder of another tokenizer and its chat template [default: that of the checkpoint]
    ///
    /// The model itself may be named too. A GGUF file has its own.
    #[arg(long, value_name = "FOLDER", env = "QUIRE_TOKENIZER")]
    pub tokenizer: Option<PathBuf>,
    /// Sampling defaults: auto, those of the checkpoint's generation_config.json; vllm, none; or a folder with such a file
    /// [default: auto]
    ///
    /// Tokens that end a sequence are those of the checkpoint with `vllm` too.
    #[arg(long, value_name = "SOURCE", env = "QUIRE_GENERATION_CONFIG")]
    pub generation_config: Option<GenerationSource>,
    /// Sampling defaults in place of those of the checkpoint, as a JSON object such as {"temperature": 0.6, "top_p": 0.95}
    /// [default: none]
    ///
    /// Keys are `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and `max_new_tokens`. A request can override
    /// each.
    #[arg(long, value_name = "JSON", env = "QUIRE_OVERRIDE_GENERATION_CONFIG")]
    pub override_generation_config: Option<GenerationOverrides>,
    /// Maximum length of prompt plus output, or auto [default: that of the model, or of the cache if smaller]
    ///
    /// A number of tokens such as 32768, `32K` (32768) or `32k` (32000).
    #[arg(long, value_name = "TOKENS", value_parser = values::context, env = "QUIRE_MAX_MODEL_LEN")]
    pub max_model_len: Option<values::Tokens>,
    /// Tokens per cache block: 8, 16, 32, 64 or 128; more, up to 4096, where recurrent states need it [default: 16]
    ///
    /// The states of recurrent layers must fit into a block: for such a model the default is the next power of two with
    /// which they do, and a smaller value is refused.
    #[arg(long, value_name = "TOKENS", value_parser = values::whole::<usize>, env = "QUIRE_BLOCK_SIZE")]
    pub block_size: Option<usize>,
    /// Size of the key/value cache, such as 512M or 2G [default: a fraction of the free memory]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes::<u64>, env = "QUIRE_KV_CACHE_MEMORY_BYTES")]
    pub kv_cache_memory_bytes: Option<u64>,
    /// Fraction of the device's memory to use, 0 to 1 [default: 0.9 on a GPU, otherwise 0.4 of the free memory]
    ///
    /// On a GPU: fraction of the total memory that weights, the buffers of a step, other programs and the cache may use
    /// together. Elsewhere: fraction of the memory left free by the weights that becomes cache. --kv-cache-memory-bytes
    /// takes precedence.
    #[arg(long, value_name = "FRACTION", env = "QUIRE_GPU_MEMORY_UTILIZATION")]
    pub gpu_memory_utilization: Option<f64>,
    /// Type of cached keys and values: auto (the type of the computation), float32, float16, bfloat16, fp8 (e4m3), fp8_e5m2
    /// or int8 [default: auto]
    ///
    /// `fp8` and `fp8_e5m2` use the checkpoint's `k_scale` and `v_scale`, otherwise those of --calculate-kv-scales,
    /// otherwise scale 1, where numbers above 448 (57344) are clamped; latents use `k_scale` alone. `int8` has one scale per token and head computed
    /// from that row alone (4 more bytes per head). With each of them, tokens are as independent of batch, threads and
    /// chunks as with `auto` ([accuracy of each type](benchmarks/kv-cache.md)). `cuda` and `cuda-sim` support the type of
    /// the computation, fp8 and int8.
    #[arg(long, value_name = "DTYPE", env = "QUIRE_KV_CACHE_DTYPE")]
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Compute the scales of an fp8 cache in the first step if the checkpoint has none
    ///
    /// A scale per layer and head is calibrated from the greatest magnitude in the first step that computes tokens. The
    /// scales allow four times that magnitude, and larger numbers are clamped. Only layers for which the checkpoint has no
    /// scales are calibrated. The scales never change afterwards, so later results depend on the first step: the same
    /// requests in another order may give other tokens. Not for models with latent attention.
    #[arg(long, env = "QUIRE_CALCULATE_KV_SCALES")]
    pub calculate_kv_scales: bool,
    /// Maximum number of sequences per step
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>, env = "QUIRE_MAX_NUM_SEQS")]
    pub max_num_seqs: Option<usize>,
    /// Maximum number of tokens per step, greater than --max-num-seqs; auto: the default, and fewer prompt tokens while sequences
    /// decode, so that a step takes 2.2 times as long as if all only decoded
    ///
    /// With `auto`, a step still computes at least 16 prompt tokens ([figures](benchmarks/itl.md)). It needs chunked
    /// prefill.
    #[arg(long, value_name = "TOKENS", value_parser = values::tokens_or_auto, env = "QUIRE_MAX_NUM_BATCHED_TOKENS")]
    pub max_num_batched_tokens: Option<values::Tokens>,
    /// Target in milliseconds for the time between two tokens of a sequence: steps compute fewer prompt tokens while sequences decode
    /// [default: none]
    ///
    /// From 1 to 60000; like --max-num-batched-tokens=auto, with this time instead of a multiple. With a number as
    /// --max-num-batched-tokens, steps have at most that many tokens; without, or with `auto`, at most 2048. If decodes
    /// alone take longer than the target, a step still computes 16 prompt tokens. The time is that of a step in the engine,
    /// to which HTTP adds; no token depends on it.
    #[arg(long, value_name = "MS", value_parser = values::itl_target, env = "QUIRE_ITL_TARGET_MS")]
    pub itl_target_ms: Option<ItlTarget>,
    /// Share cache blocks between requests with equal prefixes [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          overrides_with = "no_enable_prefix_caching", env = "QUIRE_ENABLE_PREFIX_CACHING")]
    pub enable_prefix_caching: Option<bool>,
    /// Disable prefix caching
    ///
    /// Every prompt is computed from scratch.
    #[arg(long, overrides_with = "enable_prefix_caching")]
    pub no_enable_prefix_caching: bool,
    /// Allow splitting a prompt over several steps [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          overrides_with = "no_enable_chunked_prefill", env = "QUIRE_ENABLE_CHUNKED_PREFILL")]
    pub enable_chunked_prefill: Option<bool>,
    /// Disable chunked prefill: compute each prompt in one step
    #[arg(long, overrides_with = "enable_chunked_prefill")]
    pub no_enable_chunked_prefill: bool,
    /// Launch kernels one by one instead of running decode steps as CUDA graphs [default: false]
    ///
    /// Graphs are made for 1, 2, 4, 8 and multiples of 16 sequences up to --max-num-seqs, with speculation also for 2 to 64
    /// rows with drafts and for more if there may be more sequences, all at the start; the largest are measured first, and
    /// memory for all of them is reserved. `cuda-sim` captures each at its first use. The CPU has no graphs.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          env = "QUIRE_ENFORCE_EAGER")]
    pub enforce_eager: Option<bool>,
    /// Order of requests: fcfs (first come, first served), or priority as set by the requests [default: fcfs]
    ///
    /// Lower values of the priority come first.
    #[arg(long, value_name = "POLICY", value_parser = values::policy, env = "QUIRE_SCHEDULING_POLICY")]
    pub scheduling_policy: Option<Policy>,
    /// Host memory in GiB for the keys and values of preempted requests [default: 0]
    ///
    /// On the CPU a larger cache is better, because the cache and the swap space are the same memory.
    #[arg(long, value_name = "GIB", value_parser = values::gib, env = "QUIRE_SWAP_SPACE")]
    pub swap_space: Option<u64>,
    /// Host memory in GiB for prefixes that the cache evicts, in one pool with --swap-space [default: 0]
    ///
    /// A request with [such a prefix](internals.md#the-host-tier) copies it back instead of computing it. The pool has the
    /// size of both: preempted requests may take all of it, and evicted prefixes stay in what is left. On the CPU a larger
    /// cache is better.
    #[arg(long, value_name = "GIB", value_parser = values::gib, env = "QUIRE_KV_OFFLOADING_SIZE")]
    pub kv_offloading_size: Option<u64>,
    /// What to do with a preempted request: recompute, swap, or auto (whichever is cheaper) [default: auto]
    ///
    /// A request is preempted when blocks run out. `recompute` drops its keys and values and computes them again; `swap`
    /// moves them to the swap space and back; `auto` swaps if several sequences share them or if recomputing would take
    /// longer.
    #[arg(long, value_name = "MODE", value_parser = values::preemption_mode, env = "QUIRE_PREEMPTION_MODE")]
    pub preemption_mode: Option<PreemptionMode>,
    /// Serve LoRA adapters beside the model
    ///
    /// See [LoRA adapters](lora.md).
    #[arg(long, env = "QUIRE_ENABLE_LORA")]
    pub enable_lora: bool,
    /// Maximum number of different adapters in a step [default: 1]
    ///
    /// 1 to 1024; requests of others wait their turn.
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>, env = "QUIRE_MAX_LORAS")]
    pub max_loras: Option<usize>,
    /// Maximum rank of an adapter [default: 16]
    ///
    /// 1 to 512; together with the two numbers of adapters it determines their memory.
    #[arg(long, value_name = "RANK", value_parser = values::whole::<usize>, env = "QUIRE_MAX_LORA_RANK")]
    pub max_lora_rank: Option<usize>,
    /// Number of adapters in host memory, at least --max-loras; others are read again when used [default: --max-loras]
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>, env = "QUIRE_MAX_CPU_LORAS")]
    pub max_cpu_loras: Option<usize>,
    /// Speculative decoding as a JSON object with vLLM's keys, such as {"method": "ngram", "num_speculative_tokens": 4}; methods:
    /// ngram, suffix, draft_model, eagle3 and mtp [default: off]
    ///
    /// In a settings file also a table `[speculative_config]`. No token changes ([speculative decoding](speculation.md)).
    #[arg(long, value_name = "JSON", env = "QUIRE_SPECULATIVE_CONFIG")]
    pub speculative_config: Option<SpeculativeConfig>,
    /// Announce cached prefixes to routers, as a JSON object with vLLM's keys, such as {"enable_kv_cache_events": true,
    /// "endpoint": "tcp://*:5557"} [default: off]
    ///
    /// In a settings file also a table `[kv_events_config]` ([KV events](kv-events.md)).
    #[arg(long, value_name = "JSON", env = "QUIRE_KV_EVENTS_CONFIG")]
    pub kv_events_config: Option<KvEventsConfig>,
    /// Exchange cached blocks with other replicas, as a JSON object with vLLM's keys, such as {"kv_connector": "SharedFolder",
    /// "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": "/mnt/blocks"}} [default: off]
    ///
    /// Prompts that one replica has computed can be continued on another ([KV transfer](kv-transfer.md)). It needs
    /// --kv-offloading-size. In a settings file also a table `[kv_transfer_config]`.
    #[arg(long, value_name = "JSON", env = "QUIRE_KV_TRANSFER_CONFIG")]
    pub kv_transfer_config: Option<KvTransferConfig>,
    /// Keys in place of those of config.json, as a JSON object, such as {"classifier_from_token": ["no", "yes"],
    /// "is_original_qwen3_reranker": true} [default: none]
    ///
    /// vLLM takes any key, Quire those of rerankers and embeddings: `classifier_from_token`, `is_original_qwen3_reranker`,
    /// `is_matryoshka`, `matryoshka_dimensions` ([encoders and rerankers](models.md#encoders-embeddings-and-rerankers)).
    #[arg(long, value_name = "JSON", env = "QUIRE_HF_OVERRIDES")]
    pub hf_overrides: Option<HfOverrides>,
    /// Seed from which seeds of requests without one are derived [default: random]
    #[arg(long, value_parser = values::whole::<u64>, env = "QUIRE_SEED")]
    pub seed: Option<u64>,
    /// Make the results of a request independent of other requests, to the bit (always the case on a CPU)
    ///
    /// A request gets the same bits in every batch, and with any chunking, cache hits and preemptions: decode and prefill
    /// use attention kernels of one family, and matrix products use one order of summation for every number of rows. It is
    /// an error if no such set of kernels exists. On a GPU this reduces speed ([how to measure
    /// it](benchmarks/kv-cache.md#deterministic)).
    #[arg(long, env = "QUIRE_DETERMINISTIC")]
    pub deterministic: bool,
    #[command(flatten)]
    pub hub: HubArgs,
    #[command(flatten)]
    pub ranks: RanksArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

impl EngineArgs {
    pub fn model(&self) -> Option<&PathBuf> {
        self.model_path.as_ref().or(self.model.as_ref())
    }

    /// Puts the path of the model into the configuration, after a download if it is a hub id. A command calls this when its other
    /// arguments are checked.
    pub fn fetch(&self, config: &mut EngineConfig) -> Result<(), CliError> {
        self.fetch_by(config, &mut model::locate)
    }

    /// Like [`fetch`](EngineArgs::fetch), with a function that returns the path of a model.
    pub fn fetch_by(
        &self,
        config: &mut EngineConfig,
        locate: &mut dyn FnMut(&Path, &HubArgs) -> Result<PathBuf, CliError>,
    ) -> Result<(), CliError> {
        match (self.model(), &self.hub.revision) {
            (Some(model), _) => config.model = ModelSource::Folder(locate(model, &self.hub)?),
            (None, None) => {}
            (None, Some(revision)) => {
                return Err(CliError::Usage(format!(
                    "--revision: found {revision:?} without a model, expected a hub id too"
                )));
            }
        }
        checkpoint::check(self, config)?;
        if let Some(draft) = config.speculative.as_mut().and_then(|speculative| speculative.checkpoint_mut()) {
            let HubArgs { hf_token, download_dir, .. } = &self.hub;
            let revision = draft.revision.take();
            let hub = HubArgs { revision, hf_token: hf_token.clone(), download_dir: download_dir.clone() };
            draft.model = locate(&draft.model, &hub)?;
        }
        Ok(())
    }

    /// The configuration of the engine, with its defaults for flags that are not given. The model may be a hub id.
    pub fn to_config(&self) -> EngineConfig {
        let default = EngineConfig::default();
        let switch = |on: Option<bool>, off: bool, default: bool| !off && on.unwrap_or(default);
        EngineConfig {
            chat_template: self.chat_template.clone(),
            model: self.model().map_or(ModelSource::Demo, |path| ModelSource::Folder(path.clone())),
            device: self.common.device.clone().unwrap_or(default.device),
            kernels_dir: self.common.kernels_dir.clone(),
            block_size: self.block_size.or(default.block_size),
            max_model_len: self.max_model_len.and_then(|tokens| tokens.0).or(default.max_model_len),
            kv_cache_memory_bytes: self.kv_cache_memory_bytes.or(default.kv_cache_memory_bytes),
            kv_cache_dtype: self.kv_cache_dtype.unwrap_or(default.kv_cache_dtype),
            calculate_kv_scales: self.calculate_kv_scales,
            gpu_memory_utilization: self.gpu_memory_utilization.or(default.gpu_memory_utilization),
            enforce_eager: self.enforce_eager.unwrap_or(default.enforce_eager),
            max_num_seqs: self.max_num_seqs.unwrap_or(default.max_num_seqs),
            max_num_batched_tokens: self
                .max_num_batched_tokens
                .and_then(|tokens| tokens.0)
                .unwrap_or(default.max_num_batched_tokens),
            itl_target: self
                .itl_target_ms
                .or((self.max_num_batched_tokens == Some(values::Tokens(None))).then_some(ItlTarget::Auto)),
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
            kv_offloading_bytes: self.kv_offloading_size.unwrap_or(default.kv_offloading_bytes),
            preemption_mode: self.preemption_mode.unwrap_or(default.preemption_mode),
            seed: self.seed.or(default.seed),
            threads: self.common.threads.or(default.threads),
            quantization: self.quantization.as_ref().and_then(values::Weights::form).or(default.quantization),
            activations: self.activations.unwrap_or(default.activations),
            dtype: self.dtype.and_then(|dtype| dtype.0).or(default.dtype),
            deterministic: self.deterministic,
            lora: self.lora(),
            speculative: self.speculative_config.clone(),
            kv_events: self.kv_events_config.clone(),
            parallel: self.ranks.to_config(),
            kv_transfer: self.kv_transfer_config.clone(),
            hf_overrides: self.hf_overrides.clone().unwrap_or_default(),
            generation_config: GenerationConfig {
                source: self.generation_config.clone().unwrap_or_default(),
                overrides: self.override_generation_config.clone().unwrap_or_default(),
            },
            ..default
        }
    }
}

impl EngineArgs {
    /// The sizes of the memory for adapters, if they are enabled.
    fn lora(&self) -> Option<LoraConfig> {
        let default = LoraConfig::default();
        self.enable_lora.then(|| LoraConfig {
            max_loras: self.max_loras.unwrap_or(default.max_loras),
            max_lora_rank: self.max_lora_rank.unwrap_or(default.max_lora_rank),
            max_cpu_loras: self.max_cpu_loras,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        engine: EngineArgs,
    }

    #[test]
    fn auto_and_a_target_choose_the_prompt_tokens_of_a_step_and_a_number_bounds_them() {
        let chosen = |flags: &[&str]| {
            let config = Command::parse_from([&["quire"], flags].concat()).engine.to_config();
            (config.max_num_batched_tokens, config.itl_target)
        };
        let (auto, target) = ("--max-num-batched-tokens=auto", "--itl-target-ms=150");
        assert_eq!(chosen(&[]), (2048, None));
        assert_eq!(chosen(&["--max-num-batched-tokens=512"]), (512, None));
        assert_eq!(chosen(&[auto]), (2048, Some(ItlTarget::Auto)));
        assert_eq!(chosen(&[target]), (2048, Some(ItlTarget::Millis(150.0))));
        assert_eq!(chosen(&[auto, target]), (2048, Some(ItlTarget::Millis(150.0))));
        assert_eq!(chosen(&[target, "--max-num-batched-tokens=512"]), (512, Some(ItlTarget::Millis(150.0))));
    }
}
