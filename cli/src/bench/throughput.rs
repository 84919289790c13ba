//! `quire bench throughput`: runs many prompts together, as in offline use. Flags are those of `vllm bench throughput`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use engine::EngineConfig;
use serde_json::json;

use super::batch::{Batch, Bench};
use super::{rank_0, write_figures};
use crate::args::EngineArgs;
use crate::error::CliError;
use crate::profile::ProfileArgs;
use crate::values;
use ::bench::statistics::percentile;

#[derive(Debug, Args)]
pub struct ThroughputArgs {
    /// Tokens per prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = values::positive)]
    pub input_len: usize,
    /// Tokens to generate per prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = values::positive)]
    pub output_len: usize,
    /// Number of prompts; the engine runs up to --max-num-seqs of them in a step
    ///
    /// All are submitted at once.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = values::positive)]
    pub num_prompts: usize,
    /// Read lengths from this file instead: a line per prompt with its tokens, a space, and the tokens to generate
    #[arg(long, value_name = "FILE")]
    pub lengths: Option<PathBuf>,
    /// Write the figures to this file as JSON; - writes only them, to standard output
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
    #[command(flatten)]
    pub profile: ProfileArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

pub fn run(args: ThroughputArgs, mut config: EngineConfig) -> Result<(), CliError> {
    let (group, results) = rank_0(&args.engine, &mut config, args.output_json.as_deref())?;
    let mut bench = Bench::start_in(&config, group)?;
    let lengths = match &args.lengths {
        Some(file) => read_lengths(file)?,
        None => vec![(args.input_len, args.output_len); args.num_prompts],
    };
    // One short prompt first, so that no allocation is timed.
    bench.run(&Batch { prompts: 1, input_len: args.input_len, output_len: 2 })?;
    let run = bench.run_lengths(&lengths)?;
    let all = run.all;
    let (seconds, share) = (all.seconds, bench.share(&all));
    let (requests, tokens) = (lengths.len() as f64 / seconds, (all.prompt_tokens + all.tokens) as f64 / seconds);
    let output = all.tokens as f64 / seconds;
    let first = |p| percentile(&run.first_tokens, p);
    let figures = json!({
        "num_prompts": lengths.len(),
        "max_num_seqs": config.max_num_seqs,
        "input_len": args.lengths.is_none().then_some(args.input_len),
        "output_len": args.lengths.is_none().then_some(args.output_len),
        "elapsed_time": seconds, "num_requests": lengths.len(), "total_num_tokens": all.prompt_tokens + all.tokens,
        "requests_per_second": requests, "tokens_per_second": tokens, "output_tokens_per_second": output,
        "steps": all.work.steps, "share_of_roofline": share,
        "first_token_seconds": { "50": first(50.0), "95": first(95.0) },
        "roofline": bench.roofline_json(),
    });
    if write_figures(results, &figures)? {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "throughput: {requests:.2} requests/s, {tokens:.1} total tokens/s, {output:.1} output tokens/s; {seconds:.2} s in {} steps",
        all.work.steps
    )?;
    writeln!(
        out,
        "of roofline: {:.0} %; first token after {:.3} s (median), {:.3} s (p95)",
        share * 100.0,
        first(50.0),
        first(95.0)
    )?;
    Ok(writeln!(out, "{}", bench.roofline_line())?)
}

/// Reads a line like `512 128` per prompt.
fn read_lengths(file: &Path) -> Result<Vec<(usize, usize)>, CliError> {
    let wrong = |message: String| CliError::File { flag: "--lengths", path: file.to_owned(), message };
    let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    let positive = |number: &str| number.parse().ok().filter(|number| *number > 0);
    let read = |line: &str| {
        let (input, output) = line.split_once(' ')?;
        Some((positive(input)?, positive(output)?))
    };
    let lengths = text.lines().enumerate().map(|(index, line)| {
        read(line).ok_or_else(|| wrong(format!("line {}: found {line:?}, expected two positive numbers", index + 1)))
    });
    let lengths = lengths.collect::<Result<Vec<_>, _>>()?;
    if lengths.is_empty() { Err(wrong("found no lines, expected one per prompt".into())) } else { Ok(lengths) }
}
