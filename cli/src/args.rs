//! The command line, declared. Names and meanings are vLLM's where the thing is the same.
//!
//! Every flag here is also a key of `quire.toml`; the flags of the engine and of the server have an environment variable
//! each. What is not given stays `None`, so that there is one place for defaults: [`EngineConfig::default`].

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand};
use engine::kernels::{Device, Options, open_with};
use engine::text::ToolFormat;
use engine::{EngineConfig, KvCacheDtype, ModelSource, Policy, Pooling, PreemptionMode, Quantization};

use super::bench::BenchArgs;
use super::error::CliError;
use super::limits::LimitArgs;
use super::log::LogArgs;
use super::profile::ProfileArgs;
use super::replay::{RecordArgs, ReplayArgs};
use super::values;
use ::bench::top::TopArgs;
use server::Reasoning;

/// Quire: an LLM inference engine.
#[derive(Debug, Parser)]
#[command(name = "quire", version, arg_required_else_help = true, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve the OpenAI API over HTTP
    Serve(Box<ServeArgs>),
    /// Talk to a model in the terminal
    Chat(ChatArgs),
    /// Complete one prompt, or a file of prompts
    Generate(GenerateArgs),
    /// Say what a model needs and how much fits, without loading its weights
    Plan(PlanArgs),
    /// List the kernels, what each can do here, and which ones are chosen
    Kernels(KernelsArgs),
    /// Measure speed
    Bench(BenchArgs),
    /// Watch a running server
    Top(TopArgs),
    /// Compute a recorded run again and compare every output
    Replay(ReplayArgs),
}

impl Command {
    /// The part that all subcommands have which start an engine.
    pub fn engine(&self) -> Option<&EngineArgs> {
        match self {
            Command::Serve(args) => Some(&args.engine),
            Command::Chat(args) => Some(&args.engine),
            Command::Generate(args) => Some(&args.engine),
            Command::Plan(args) => Some(&args.engine),
            Command::Kernels(args) => Some(&args.engine),
            Command::Bench(args) => args.engine(),
            Command::Top(_) | Command::Replay(_) => None,
        }
    }

    /// What is logged, and how.
    pub fn log(&self) -> Option<&LogArgs> {
        match self {
            Command::Replay(args) => Some(&args.log),
            other => other.engine().map(|args| &args.log),
        }
    }

    /// The file that the run is to be recorded in.
    pub fn record(&self) -> Option<&PathBuf> {
        match self {
            Command::Serve(args) => args.record.record.as_ref(),
            Command::Chat(args) => args.record.record.as_ref(),
            Command::Generate(args) => args.record.record.as_ref(),
            _ => None,
        }
    }

    /// Of those that can be profiled, the flag for it.
    pub fn profile(&self) -> Option<(&ProfileArgs, &EngineArgs)> {
        match self {
            Command::Serve(args) => Some((&args.profile, &args.engine)),
            Command::Generate(args) => Some((&args.profile, &args.engine)),
            Command::Bench(args) => args.profile(),
            Command::Chat(_) | Command::Plan(_) | Command::Kernels(_) | Command::Top(_) | Command::Replay(_) => None,
        }
    }
}

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

/// `quire serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1", env = "QUIRE_HOST")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000, value_parser = values::whole::<u16>, env = "QUIRE_PORT")]
    pub port: u16,
    /// The model's name in the API [default: the folder's name]
    #[arg(long, value_name = "NAME", value_parser = values::filled, env = "QUIRE_SERVED_MODEL_NAME")]
    pub served_model_name: Option<String>,
    /// How the model writes tool calls: hermes, llama3_json or mistral [default: as its chat template has them]
    #[arg(long, value_name = "FORMAT", value_parser = values::tool_format, env = "QUIRE_TOOL_CALL_PARSER")]
    pub tool_call_parser: Option<ToolFormat>,
    /// How thoughts are split off the answer: none, qwen3 or deepseek_r1 [default: as its chat template has them]
    #[arg(long, value_name = "NAME", value_parser = values::reasoning, env = "QUIRE_REASONING_PARSER")]
    pub reasoning_parser: Option<Reasoning>,
    /// How /v1/embeddings makes a vector of a text: last or mean [default: as the checkpoint says, else last]
    #[arg(long, value_name = "TYPE", value_parser = values::pooling, env = "QUIRE_POOLING_TYPE")]
    pub pooling_type: Option<Pooling>,
    /// Seconds that running requests get to finish after the first Ctrl-C or SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = values::whole::<u64>, env = "QUIRE_SHUTDOWN_TIMEOUT")]
    pub shutdown_timeout: u64,
    /// Log the prompt of each request, up to --max-log-len characters, where the level shows requests (info)
    #[arg(long, env = "QUIRE_ENABLE_LOG_REQUESTS")]
    pub enable_log_requests: bool,
    /// Characters of a prompt in the log
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = values::whole::<usize>, env = "QUIRE_MAX_LOG_LEN")]
    pub max_log_len: usize,
    /// Who may use the server, and how much of it.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Where the time goes.
    #[command(flatten)]
    pub profile: ProfileArgs,
    /// What was done.
    #[command(flatten)]
    pub record: RecordArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
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

/// `quire chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Sampling; without flags, as the model's generation_config.json says, else greedy.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// What was done.
    #[command(flatten)]
    pub record: RecordArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `quire kernels`.
#[derive(Debug, Args)]
pub struct KernelsArgs {
    /// Also print what each kernel can do
    #[arg(long)]
    pub verbose: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "verbose")]
    pub json: bool,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `quire plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Print what the checkpoint declares instead: its layers, with names, shapes and forms of their weights
    #[arg(long)]
    pub decoder: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `quire generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The prompt
    #[arg(short, long, value_name = "TEXT", conflicts_with = "input")]
    pub prompt: Option<String>,
    /// A file of prompts, one {"prompt": "..."} per line; "-" reads standard input. All run at once; writes one JSON
    /// record per prompt, in order
    #[arg(long, value_name = "FILE.jsonl")]
    pub input: Option<PathBuf>,
    /// Write a JSON record with token ids instead of text
    #[arg(long)]
    pub json: bool,
    /// Sampling; greedy without flags.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Where the time goes.
    #[command(flatten)]
    pub profile: ProfileArgs,
    /// What was done.
    #[command(flatten)]
    pub record: RecordArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}
