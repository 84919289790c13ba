//! `quire bench throughput`: many prompts at once, as offline work has them. Flags are those of `vllm bench throughput`.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use engine::EngineConfig;
use serde_json::json;

use super::super::args::EngineArgs;
use super::super::error::CliError;
use super::super::profile::ProfileArgs;
use super::super::values;
use super::batch::{Batch, Bench, percentile, write_json};

/// `quire bench throughput`.
#[derive(Debug, Args)]
pub struct ThroughputArgs {
    /// Tokens of each prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = values::positive)]
    pub input_len: usize,
    /// Tokens to generate for each
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = values::positive)]
    pub output_len: usize,
    /// Prompts; the engine runs up to --max-num-seqs of them in a step
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = values::positive)]
    pub num_prompts: usize,
    /// Write the figures to this file; - is standard output, and nothing else then
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
    /// Where the time goes.
    #[command(flatten)]
    pub profile: ProfileArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Measures and prints.
pub fn run(args: ThroughputArgs, config: EngineConfig) -> Result<(), CliError> {
    let mut bench = Bench::start(&config)?;
    // One short prompt, so that memory is there before the clock counts.
    bench.run(&Batch { prompts: 1, input_len: args.input_len, output_len: 2 })?;
    let batch = Batch { prompts: args.num_prompts, input_len: args.input_len, output_len: args.output_len };
    let run = bench.run(&batch)?;
    let all = run.first.and(run.rest);
    let (seconds, share) = (all.seconds, bench.share(&all));
    let (requests, tokens) = (args.num_prompts as f64 / seconds, (all.prompt_tokens + all.tokens) as f64 / seconds);
    let output = all.tokens as f64 / seconds;
    let first = |p| percentile(&run.first_tokens, p);
    let figures = json!({
        "num_prompts": args.num_prompts, "input_len": args.input_len, "output_len": args.output_len,
        "elapsed_time": seconds, "num_requests": args.num_prompts, "total_num_tokens": all.prompt_tokens + all.tokens,
        "requests_per_second": requests, "tokens_per_second": tokens, "output_tokens_per_second": output,
        "steps": all.work.steps, "share_of_floor": share,
        "first_token_seconds": { "50": first(0.5), "95": first(0.95) },
        "floors": bench.floors_json(),
    });
    if let Some(path) = &args.output_json {
        write_json(path, &figures)?;
        if path.as_os_str() == "-" {
            return Ok(());
        }
    }
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "throughput: {requests:.2} requests/s, {tokens:.1} total tokens/s, {output:.1} output tokens/s; {seconds:.2} s in {} steps",
        all.work.steps
    )?;
    writeln!(
        out,
        "of the floor: {:.0} %; first token after {:.3} s (median), {:.3} s (p95)",
        share * 100.0,
        first(0.5),
        first(0.95)
    )?;
    Ok(writeln!(out, "{}", bench.floors())?)
}
