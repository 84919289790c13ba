//! Flags of `vllm serve` that command lines and orchestrators such as KServe pass whatever the engine is. Nothing reads them: what has
//! nothing to change here is accepted with a note, and what would be missed is refused.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command};

/// Heading of the flags in the help.
const HEADING: &str = "Accepted for the command lines of vLLM";

/// Short names that have two letters, which clap does not know, and the flags that they stand for.
const SHORT: [(&str, &str); 2] = [("-tp", "--tensor-parallel-size"), ("-pp", "--pipeline-parallel-size")];

#[derive(Debug, Args)]
#[command(next_help_heading = HEADING)]
pub struct VllmArgs {
    /// Accepted without effect: the calls of every chat with tools are parsed
    #[arg(long)]
    pub enable_auto_tool_choice: bool,
    /// Accepted without effect: no code of a checkpoint runs, except its chat template
    ///
    /// The template has no access to files.
    #[arg(long)]
    pub trust_remote_code: bool,
    /// Accepted without effect: every answer says how many tokens of its prompt were cached
    #[arg(long)]
    pub enable_prompt_tokens_details: bool,
    /// Accepted without effect: every answer has the header x-request-id
    #[arg(long)]
    pub enable_request_id_headers: bool,
    /// Accepted without effect: the next step is always prepared while one runs on a GPU
    #[arg(long)]
    pub async_scheduling: bool,
    /// Accepted without effect: there are no statistics in the log
    #[arg(long)]
    pub disable_log_stats: bool,
    /// Accepted without effect: requests are logged only with --enable-log-requests
    #[arg(long)]
    pub disable_log_requests: bool,
    /// Accepted without effect: the format of a checkpoint follows from its files
    #[arg(long, value_name = "FORMAT", value_parser = ["auto", "hf", "safetensors", "gguf"])]
    pub load_format: Option<String>,
    /// Accepted without effect: requests of probes and scrapers are never logged
    #[arg(long, value_name = "PATHS")]
    pub disable_access_log_for_endpoints: Option<String>,
    /// Accepted without effect: there is no access log
    #[arg(long)]
    pub disable_uvicorn_access_log: bool,
    /// Accepted without effect: --log-level sets the level of the log
    #[arg(long, value_name = "LEVEL", value_parser = ["critical", "error", "warning", "info", "debug", "trace"])]
    pub uvicorn_log_level: Option<String>,
    /// Accepted without effect: there are no certificates to load again
    #[arg(long)]
    pub enable_ssl_refresh: bool,
    /// Refused: TLS is the task of a proxy
    ///
    /// A server that was told to use TLS must not serve without it. Let a proxy in front terminate TLS.
    #[arg(long, value_name = "FILE", value_parser = no_tls)]
    pub ssl_certfile: Option<String>,
    /// Refused: TLS is the task of a proxy
    #[arg(long, value_name = "FILE", value_parser = no_tls)]
    pub ssl_keyfile: Option<String>,
    /// Refused: TLS is the task of a proxy
    #[arg(long, value_name = "FILE", value_parser = no_tls)]
    pub ssl_ca_certs: Option<String>,
}

/// Replaces the short names with two letters.
pub fn expand(arguments: &mut [OsString]) {
    for argument in arguments.iter_mut().skip(1) {
        for (short, long) in SHORT {
            let rest = argument.to_str().and_then(|text| text.strip_prefix(short));
            if let Some(rest) = rest.filter(|rest| rest.is_empty() || rest.starts_with('=')) {
                *argument = format!("{long}{rest}").into();
                break;
            }
        }
    }
}

/// A line for each flag of the command line that has no effect.
pub fn notes(command: &Command, given: &ArgMatches) -> Vec<String> {
    let is_given =
        |id: &str| given.try_contains_id(id).is_ok() && given.value_source(id) == Some(ValueSource::CommandLine);
    let flags = command.get_arguments().filter(|arg| arg.get_help_heading() == Some(HEADING));
    let note = |arg: &clap::Arg| {
        let help = arg.get_help()?.to_string();
        Some(format!("--{} has no effect: {}", arg.get_long()?, help.strip_prefix("Accepted without effect: ")?))
    };
    flags.filter(|arg| is_given(arg.get_id().as_str())).filter_map(note).collect()
}

/// A server that was told to use TLS must not serve without it.
fn no_tls(_: &str) -> Result<String, String> {
    Err("expected no such flag: this server speaks HTTP only; remove it and let a proxy in front terminate TLS"
        .to_string())
}
