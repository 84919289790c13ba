//! `quire bench latency`: runs one batch repeatedly. Flags are those of `vllm bench latency`.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use engine::EngineConfig;
use serde_json::json;

use super::batch::{Batch, Bench, Phase, Run};
use super::{rank_0, write_figures};
use crate::args::EngineArgs;
use crate::error::CliError;
use crate::profile::ProfileArgs;
use crate::values;
use ::bench::statistics::{mean, median_and_spread, percentile};

#[derive(Debug, Args)]
pub struct LatencyArgs {
    /// Tokens per prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = values::positive)]
    pub input_len: usize,
    /// Tokens to generate per prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = values::positive)]
    pub output_len: usize,
    /// Number of prompts in the batch
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = values::positive)]
    pub batch_size: usize,
    /// Number of runs before those that are timed
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::whole::<usize>)]
    pub num_iters_warmup: usize,
    /// Number of timed runs
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = values::positive)]
    pub num_iters: usize,
    /// Write the figures to this file as JSON; - writes only them, to standard output
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
    #[command(flatten)]
    pub profile: ProfileArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

pub fn run(args: LatencyArgs, mut config: EngineConfig) -> Result<(), CliError> {
    let batch = Batch { prompts: args.batch_size, input_len: args.input_len, output_len: args.output_len };
    let (group, results) = rank_0(&args.engine, &mut config, args.output_json.as_deref())?;
    let mut bench = Bench::start_in(&config, group)?;
    for _ in 0..args.num_iters_warmup {
        bench.run(&batch)?;
    }
    let runs: Vec<Run> = (0..args.num_iters).map(|_| bench.run(&batch)).collect::<Result<_, _>>()?;
    let rate = |of: fn(&Run) -> (u64, Phase)| {
        let rates = runs.iter().map(of).map(|(tokens, phase)| tokens as f64 / phase.seconds.max(1e-9));
        let shares = runs.iter().map(of).map(|(_, phase)| bench.share(&phase));
        let (median, spread) = median_and_spread(rates.collect());
        (median, spread, median_and_spread(shares.collect()).0)
    };
    let prefill = rate(|run| (run.first.prompt_tokens, run.first));
    let decode = rate(|run| (run.rest().tokens, run.rest()));
    let mut seconds: Vec<f64> = runs.iter().map(|run| run.all.seconds).collect();
    seconds.sort_by(f64::total_cmp);
    let average = mean(&seconds);
    let figures = json!({
        "batch_size": args.batch_size, "input_len": args.input_len, "output_len": args.output_len,
        "avg_latency": average,
        "latencies": seconds,
        "percentiles": {
            "10": percentile(&seconds, 10.0), "25": percentile(&seconds, 25.0), "50": percentile(&seconds, 50.0),
            "75": percentile(&seconds, 75.0), "90": percentile(&seconds, 90.0), "99": percentile(&seconds, 99.0),
        },
        "prefill_tokens_per_second": prefill.0, "prefill_spread": prefill.1, "prefill_share_of_roofline": prefill.2,
        "decode_tokens_per_second": decode.0, "decode_spread": decode.1, "decode_share_of_roofline": decode.2,
        "roofline": bench.roofline_json(),
    });
    if write_figures(results, &figures)? {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "batch of {} prompts, {} input and {} output tokens each, {} runs",
        args.batch_size, args.input_len, args.output_len, args.num_iters
    )?;
    writeln!(out, "{:<8} {:>14} {:>8} {:>14}", "", "tokens/s", "range", "of roofline")?;
    for (name, (median, spread, share)) in [("prefill", prefill), ("decode", decode)] {
        writeln!(out, "{name:<8} {median:>14.1} {:>6.0} % {:>12.0} %", spread * 100.0, share * 100.0)?;
    }
    let at = |p| percentile(&seconds, p);
    writeln!(out, "latency  {average:.4} s on average; p10 {:.4}, p50 {:.4}, p90 {:.4}", at(10.0), at(50.0), at(90.0))?;
    Ok(writeln!(out, "{}", bench.roofline_line())?)
}
