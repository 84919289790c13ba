//! The commands, and the flags of those that serve, generate and explain. Names and meanings are those of vLLM where it has the same.

use std::path::PathBuf;

use ::bench::top::TopArgs;
use clap::{Args, Parser, Subcommand};
use engine::EngineConfig;
use server::{ACCESS_AND_LIMITS, ServerOptions};

use crate::args::{EngineArgs, SamplingArgs};
use crate::bench::BenchArgs;
use crate::completions::{CompletionsArgs, ManArgs};
use crate::convert::ConvertArgs;
use crate::listen::ListenArgs;
use crate::log::LogArgs;
use crate::plan::speed;
use crate::profile::ProfileArgs;
use crate::replay::{RecordArgs, ReplayArgs};
use crate::shared::Shared;
use crate::values;

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
    /// Serve with the flags of llama-server, on port 8080
    #[command(name = "llama-server")]
    LlamaServer(Box<ServeArgs>),
    /// Chat with a model in the terminal
    Chat(ChatArgs),
    /// Complete a prompt, or a file of prompts
    Generate(GenerateArgs),
    /// Run a file of requests, as /v1/batches does, without a server
    RunBatch(Box<RunBatchArgs>),
    /// Show the memory that a model needs and how much fits, without its weights
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
    /// Print a script with which a shell completes commands and flags
    Completions(CompletionsArgs),
    /// Write the manual pages to a folder
    Man(ManArgs),
}

impl Command {
    pub fn shared(&self) -> Shared<'_> {
        let (engine, record, profile) = match self {
            Command::Serve(args) | Command::LlamaServer(args) => {
                (&args.engine, Some(&args.record), Some(&args.profile))
            }
            Command::Chat(args) => (&args.engine, Some(&args.record), None),
            Command::Generate(args) => (&args.engine, Some(&args.record), Some(&args.profile)),
            Command::RunBatch(args) => (&args.engine, None, None),
            Command::Plan(args) => (&args.engine, None, None),
            Command::Kernels(args) => (&args.engine, None, None),
            Command::Bench(args) => return args.shared(),
            Command::Top(_) | Command::Replay(_) | Command::Convert(_) => return Shared::default(),
            Command::Completions(_) | Command::Man(_) => return Shared::default(),
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
    #[command(flatten)]
    pub listen: ListenArgs,
    /// LoRA adapters: NAME=FOLDER, or JSON with "name" and "path"; several can follow, or the flag is repeated
    ///
    /// The adapters are loaded at the start. JSON is such as `{"name": "sql", "path": "adapters/sql"}`. Requires
    /// --enable-lora.
    #[arg(long, value_name = "NAME=FOLDER", num_args = 1.., value_parser = values::lora_module, requires = "enable_lora")]
    pub lora_modules: Vec<values::LoraModule>,
    /// Seconds in which running requests may finish after the first Ctrl-C or SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = values::whole::<u64>)]
    pub shutdown_timeout: u64,
    /// Log the prompts of requests, up to --max-log-len characters each, at level info
    ///
    /// Without this flag no prompt appears in any log.
    #[arg(long)]
    pub enable_log_requests: bool,
    /// Maximum number of characters of a prompt in the log
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = values::whole::<usize>)]
    pub max_log_len: usize,
    /// API key that clients must send as a bearer token; can be given several times
    ///
    /// Without a key, every client is served; VLLM_API_KEY is one if there is no other. `/health`, `/ping`, `/version` and `/metrics` never require one.
    #[arg(long, value_name = "KEY", value_parser = values::key, hide_env_values = true, help_heading = ACCESS_AND_LIMITS)]
    pub api_key: Vec<String>,
    /// File with one API key per line; empty lines and lines that begin with # are ignored
    ///
    /// The keys are accepted in addition to those of --api-key. The file is read once, at the start.
    #[arg(long, value_name = "FILE", help_heading = ACCESS_AND_LIMITS)]
    pub api_key_file: Option<PathBuf>,
    #[command(flatten)]
    pub options: ServerOptions,
    /// Maximum number of waiting requests; further ones are answered with 429
    ///
    /// Requests that arrive during one step all count as waiting.
    #[arg(long, value_name = "N", default_value_t = EngineConfig::default().max_queued_requests,
          value_parser = values::whole::<usize>, help_heading = ACCESS_AND_LIMITS)]
    pub max_queued_requests: usize,
    /// Maximum number of steps whose tokens may be unread before the requests of a slow reader are cancelled
    ///
    /// What the network buffers does not count.
    #[arg(long, value_name = "N", default_value_t = EngineConfig::default().max_unread_events,
          value_parser = values::positive, help_heading = ACCESS_AND_LIMITS)]
    pub max_unread_events: usize,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub profile: ProfileArgs,
    #[command(flatten)]
    pub record: RecordArgs,
}

/// Flags of `quire chat`. Without sampling flags, the model's `generation_config.json` decides, otherwise decoding is greedy.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// System message
    ///
    /// The model gets it before the conversation.
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
    /// Also print how fast the model is about and at most, and flags that help
    ///
    /// On a CPU products like those of the model are timed, which takes a few seconds. The
    /// bounds follow from the peak rates of this machine, whose measurement takes another second. Of a hub id they are printed in any
    /// case.
    #[arg(long)]
    pub speed: bool,
    /// Plan for this GPU instead of this machine, such as h100, a100, l40s or rtx4090
    ///
    /// Its memory and its rates are those of its data sheet. Activations are counted as on a CPU.
    #[arg(long, value_name = "NAME", value_parser = speed::parse, conflicts_with = "decoder")]
    pub card: Option<speed::Card>,
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
    ///
    /// The lines have no other keys.
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

/// Flags of `quire run-batch`.
#[derive(Debug, Args)]
pub struct RunBatchArgs {
    /// File of requests, one per line: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}; "-" reads
    /// standard input
    ///
    /// The routes are those of [batches](stored-answers.md#batches). A line that is wrong gets an error as its result.
    #[arg(short, long, value_name = "FILE.jsonl")]
    pub input_file: PathBuf,
    /// File of results, one per line, in the order in which they are complete; "-" writes standard output
    ///
    /// It is overwritten.
    #[arg(short, long, value_name = "FILE.jsonl")]
    pub output_file: PathBuf,
    /// Name of the model in requests [default: the name of its folder]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Vec<String>,
    #[command(flatten)]
    pub engine: EngineArgs,
}
