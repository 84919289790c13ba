//! The commands, and the flags of those that serve, generate and explain. Names and meanings are those of vLLM where it has the same.

use std::path::PathBuf;

use ::bench::top::TopArgs;
use clap::{Args, Parser, Subcommand};
use engine::Pooling;
use engine::text::{ReasoningFormat, ToolFormat};

use crate::args::{EngineArgs, SamplingArgs};
use crate::bench::BenchArgs;
use crate::convert::ConvertArgs;
use crate::limits::LimitArgs;
use crate::log::LogArgs;
use crate::profile::ProfileArgs;
use crate::replay::{RecordArgs, ReplayArgs};
use crate::shared::Shared;
use crate::values;
use crate::vllm::VllmArgs;

/// Quire: an LLM inference engine.
#[derive(Debug, Parser)]
#[command(name = "quire", version, arg_required_else_help = true, disable_help_subcommand = true, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve the OpenAI API over HTTP
    Serve(Box<ServeArgs>),
    /// Chat with a model in the terminal
    Chat(ChatArgs),
    /// Complete a prompt, or a file of prompts
    Generate(GenerateArgs),
    /// Show the memory that a model needs and how much fits, without loading its weights
    Plan(PlanArgs),
    /// List the kernels, their support on this machine, and the chosen ones
    Kernels(KernelsArgs),
    /// Measure speed
    Bench(BenchArgs),
    /// Monitor a running server
    Top(TopArgs),
    /// Quantise a checkpoint once, to a folder that can be served
    Convert(ConvertArgs),
    /// Repeat a recorded run and compare every output
    Replay(ReplayArgs),
}

impl Command {
    pub fn shared(&self) -> Shared<'_> {
        let (engine, record, profile) = match self {
            Command::Serve(args) => (&args.engine, Some(&args.record), Some(&args.profile)),
            Command::Chat(args) => (&args.engine, Some(&args.record), None),
            Command::Generate(args) => (&args.engine, Some(&args.record), Some(&args.profile)),
            Command::Plan(args) => (&args.engine, None, None),
            Command::Kernels(args) => (&args.engine, None, None),
            Command::Bench(args) => return args.shared(),
            Command::Top(_) | Command::Replay(_) | Command::Convert(_) => return Shared::default(),
        };
        Shared { engine: Some(engine), record, profile }
    }

    pub fn log(&self) -> Option<&LogArgs> {
        match self {
            Command::Replay(args) => Some(&args.log),
            other => other.shared().engine.map(|args| &args.log),
        }
    }
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1", env = "QUIRE_HOST")]
    pub host: String,
    /// Port to listen on; 0 selects a free one
    #[arg(long, default_value_t = 8000, value_parser = values::whole::<u16>, env = "QUIRE_PORT")]
    pub port: u16,
    /// Name of the model in the API; several can follow, of which answers and metrics have the first [default: the name of its
    /// folder]
    #[arg(long, value_name = "NAME", num_args = 1.., value_parser = values::filled, env = "QUIRE_SERVED_MODEL_NAME")]
    pub served_model_name: Vec<String>,
    /// Owner of the models in /v1/models, by which some routers tell engines apart
    #[arg(long, value_name = "NAME", default_value = "quire", value_parser = values::filled, env = "QUIRE_OWNED_BY")]
    pub owned_by: String,
    /// LoRA adapters: NAME=FOLDER, or JSON with "name" and "path"; several can follow, or the flag is repeated
    #[arg(long, value_name = "NAME=FOLDER", num_args = 1.., value_parser = values::lora_module, requires = "enable_lora",
          env = "QUIRE_LORA_MODULES")]
    pub lora_modules: Vec<values::LoraModule>,
    /// Let clients load and unload adapters from folders of this machine [default: true on a loopback address]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = clap::builder::BoolishValueParser::new(), env = "VLLM_ALLOW_RUNTIME_LORA_UPDATING")]
    pub allow_runtime_lora_updating: Option<bool>,
    /// Let clients reset the prefix cache [default: true on a loopback address]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = clap::builder::BoolishValueParser::new(), env = "VLLM_SERVER_DEV_MODE")]
    pub server_dev_mode: Option<bool>,
    /// Format of the model's tool calls, by vLLM's name of its parser [default: that of its chat template]
    #[arg(long, value_name = "FORMAT", env = "QUIRE_TOOL_CALL_PARSER")]
    pub tool_call_parser: Option<ToolFormat>,
    /// Format of the model's reasoning: none, or vLLM's name of its parser [default: that of its chat template]
    #[arg(long, value_name = "NAME", env = "QUIRE_REASONING_PARSER")]
    pub reasoning_parser: Option<ReasoningFormat>,
    /// Pooling of hidden states for /v1/embeddings: last or mean [default: that of the checkpoint, otherwise last]
    #[arg(long, value_name = "TYPE", env = "QUIRE_POOLING_TYPE")]
    pub pooling_type: Option<Pooling>,
    /// Seconds in which running requests may finish after the first Ctrl-C or SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = values::whole::<u64>, env = "QUIRE_SHUTDOWN_TIMEOUT")]
    pub shutdown_timeout: u64,
    /// Log the prompts of requests, up to --max-log-len characters each, at level info
    #[arg(long, env = "QUIRE_ENABLE_LOG_REQUESTS")]
    pub enable_log_requests: bool,
    /// Maximum number of characters of a prompt in the log
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = values::whole::<usize>, env = "QUIRE_MAX_LOG_LEN")]
    pub max_log_len: usize,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub vllm: VllmArgs,
    #[command(flatten)]
    pub profile: ProfileArgs,
    #[command(flatten)]
    pub record: RecordArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Flags of `quire chat`. Without sampling flags, the model's `generation_config.json` decides, otherwise decoding is greedy.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub record: RecordArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
pub struct KernelsArgs {
    /// Also print the capabilities of each kernel
    #[arg(long)]
    pub verbose: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "verbose")]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Print the layers of the checkpoint instead, with names, shapes and forms of their weights
    #[arg(long)]
    pub decoder: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Flags of `quire generate`. Decoding is greedy without sampling flags.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The prompt
    #[arg(short, long, value_name = "TEXT", conflicts_with = "input")]
    pub prompt: Option<String>,
    /// File of prompts, one {"prompt": "..."} per line; "-" reads standard input. All prompts run together. Prints one JSON
    /// record per prompt, in order
    #[arg(long, value_name = "FILE.jsonl")]
    pub input: Option<PathBuf>,
    /// Print a JSON record with token ids instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub profile: ProfileArgs,
    #[command(flatten)]
    pub record: RecordArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}
