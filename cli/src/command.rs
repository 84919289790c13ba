//! The commands, and the flags of those that serve, answer and explain.
//!
//! Names and meanings are vLLM's where the thing is the same.

use std::path::PathBuf;

use ::bench::top::TopArgs;
use clap::{Args, Parser, Subcommand};
use engine::Pooling;
use engine::text::ToolFormat;
use server::Reasoning;

use crate::args::{EngineArgs, SamplingArgs};
use crate::bench::BenchArgs;
use crate::limits::LimitArgs;
use crate::log::LogArgs;
use crate::profile::ProfileArgs;
use crate::replay::{RecordArgs, ReplayArgs};
use crate::values;

/// Quire: an LLM inference engine.
#[derive(Debug, Parser)]
#[command(name = "quire", version, arg_required_else_help = true, disable_help_subcommand = true, max_term_width = 100)]
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
