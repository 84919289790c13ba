//! `quire bench sweep`: times decode steps of full batches and single prompts for many shapes, in one loaded engine.
//!
//! A line of JSON is written as soon as its shape has been measured, so an interrupted sweep loses nothing. A shape that does not fit
//! gets a line with the reason, and the sweep continues.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use engine::EngineConfig;
use serde_json::{Value, json};

use super::batch::{Batch, Bench, Phase};
use crate::args::EngineArgs;
use crate::error::CliError;
use crate::values;
use ::bench::results::Results;
use ::bench::statistics::median_and_spread;

#[derive(Debug, Args)]
pub struct SweepArgs {
    /// Numbers of sequences that decode together
    ///
    /// Only steps that include all of them are timed.
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,8,64,256", value_parser = values::positive)]
    pub batch_size: Vec<usize>,
    /// Prompt lengths of these sequences
    ///
    /// In tokens, before the first generated token.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "512,4096", value_parser = values::positive)]
    pub context: Vec<usize>,
    /// Number of timed decode steps
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = values::positive)]
    pub steps: usize,
    /// Lengths of prompts whose prefill is timed alone; 0 for none
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "2048,16384", value_parser = values::whole::<usize>)]
    pub prefill: Vec<usize>,
    /// Write a line of JSON per shape to this file
    ///
    /// It must be a path, and a line is written as soon as a shape has been measured.
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Prompts per length; the first one is not timed.
const PREFILLS: usize = 4;

pub fn run(args: SweepArgs, mut config: EngineConfig) -> Result<(), CliError> {
    let mut lines = Lines(Results::open("--output-json", args.output_json.as_deref())?);
    // No prompt is timed beside decodes.
    config.itl_target = None;
    args.engine.fetch(&mut config)?;
    let mut bench = Bench::start(&config)?;
    println!("{}", bench.roofline_line());
    println!("{:<8} {:>6} {:>8} {:>12} {:>12} {:>13}", "", "batch", "tokens", "tokens/s", "ms", "of roofline");
    for &input_len in args.prefill.iter().filter(|&&tokens| tokens > 0) {
        let measured = prefill(&mut bench, input_len);
        lines.write(&bench, "prefill", (1, input_len), measured)?;
    }
    for &context in &args.context {
        for &batch in &args.batch_size {
            let measured = bench.decode(batch, context, args.steps);
            lines.write(&bench, "decode", (batch, context), measured)?;
        }
    }
    Ok(())
}

/// The median prefill of prompts that run alone.
fn prefill(bench: &mut Bench, input_len: usize) -> Result<Phase, CliError> {
    let batch = Batch { prompts: 1, input_len, output_len: 1 };
    let mut runs = (0..PREFILLS).map(|_| bench.run(&batch).map(|run| run.first)).collect::<Result<Vec<_>, _>>()?;
    let seconds = median_and_spread(runs.drain(1..).map(|phase| phase.seconds).collect()).0;
    Ok(Phase { seconds, ..runs.remove(0) })
}

/// The file for the lines of JSON; each line also goes to standard output as text.
struct Lines(Option<Results>);

impl Lines {
    fn write(
        &mut self,
        bench: &Bench,
        kind: &str,
        (batch, tokens): (usize, usize),
        measured: Result<Phase, CliError>,
    ) -> Result<(), CliError> {
        let mut line = json!({ "kind": kind, "batch": batch, "tokens": tokens });
        let mut out = io::stdout().lock();
        match measured {
            Ok(phase) => {
                let counted = if kind == "prefill" { phase.prompt_tokens } else { phase.tokens };
                let (rate, ms) = (counted as f64 / phase.seconds, phase.seconds * 1e3 / phase.work.steps.max(1) as f64);
                let share = bench.share(&phase);
                writeln!(out, "{kind:<8} {batch:>6} {tokens:>8} {rate:>12.1} {ms:>12.3} {:>11.0} %", share * 100.0)?;
                merge(&mut line, figures(bench, &phase, rate));
            }
            Err(error) => {
                writeln!(out, "{kind:<8} {batch:>6} {tokens:>8} not run: {error}")?;
                merge(&mut line, json!({ "error": error.to_string() }));
            }
        }
        if let Some(file) = &mut self.0 {
            file.write(format_args!("{line}\n"))?;
        }
        Ok(())
    }
}

/// Time of a phase, and the bytes and operations that it needs at least.
fn figures(bench: &Bench, phase: &Phase, rate: f64) -> Value {
    let (roofline, work) = (&bench.roofline, &phase.work);
    json!({
        "seconds": phase.seconds,
        "steps": work.steps,
        "tokens_per_second": rate,
        "share_of_roofline": bench.share(phase),
        "bytes": work.steps * roofline.weight_bytes + work.context * roofline.kv_bytes_per_token,
        "operations": work.tokens * roofline.layer_operations + work.logits * roofline.logit_operations,
        "roofline": bench.roofline_json(),
    })
}

fn merge(line: &mut Value, more: Value) {
    if let (Value::Object(line), Value::Object(more)) = (line, more) {
        line.extend(more);
    }
}
