//! `quire bench`: the subcommands that measure an engine in this process, one file each. `quire bench serve` is in the crate `bench`.

mod batch;
mod counted;
mod kernels;
mod latency;
mod lora;
mod roofline;
mod steady;
mod sweep;
mod throughput;

use std::path::Path;

use ::bench::results::Results;
use clap::{Args, Subcommand};
use engine::{EngineConfig, Group};
use serde_json::Value;

use crate::args::EngineArgs;
use crate::error::CliError;
use crate::session;
use crate::shared::Shared;

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Time or count every kernel over a grid of shapes, with its error and its fraction of the peak rate
    Kernels(Box<kernels::KernelArgs>),
    /// Measure the peak rates of this machine: memory bandwidth and operations per second
    Roofline(roofline::RooflineArgs),
    /// Time one batch repeatedly: prefill, decode, and their fraction of the possible speed
    Latency(latency::LatencyArgs),
    /// Time decode steps of full batches and single prompts for many shapes
    Sweep(Box<sweep::SweepArgs>),
    /// Time many prompts that are submitted together
    Throughput(throughput::ThroughputArgs),
    /// Time decode steps of sequences with LoRA adapters, beside those of sequences without
    Lora(Box<lora::LoraArgs>),
    /// Send requests to any OpenAI server and measure its latencies and throughput
    Serve(::bench::serve::ServeBenchArgs),
}

impl BenchArgs {
    pub fn shared(&self) -> Shared<'_> {
        let (engine, profile) = match &self.command {
            BenchCommand::Latency(args) => (&args.engine, Some(&args.profile)),
            BenchCommand::Throughput(args) => (&args.engine, Some(&args.profile)),
            // A sweep has no profile, which would slow its steps down.
            BenchCommand::Sweep(args) => (&args.engine, None),
            BenchCommand::Lora(args) => (&args.engine, None),
            BenchCommand::Kernels(_) | BenchCommand::Roofline(_) | BenchCommand::Serve(_) => return Shared::default(),
        };
        Shared { engine: Some(engine), record: None, profile }
    }
}

/// Opens the group of ranks and the file of `--output-json`, and finds the model. Only rank 0 returns and prints a report; the others
/// compute until it ends.
fn rank_0(
    engine: &EngineArgs,
    config: &mut EngineConfig,
    output_json: Option<&Path>,
) -> Result<(Group, Option<Results>), CliError> {
    let group = session::open_group(config)?;
    if group.rank() > 0 {
        let fetched = engine.fetch(config);
        match session::follow(config, group, fetched)? {}
    }
    let results = Results::open("--output-json", output_json).inspect_err(|error| group.refuse(error))?;
    engine.fetch(config).inspect_err(|error| group.refuse(error))?;
    Ok((group, results))
}

/// Writes figures to the file of `--output-json`, if given. Returns whether that was standard output, which has no tables then.
fn write_figures(results: Option<Results>, figures: &Value) -> Result<bool, CliError> {
    let Some(mut results) = results else { return Ok(false) };
    results.value(figures)?;
    Ok(results.is_standard_output())
}

pub fn run(args: BenchArgs, config: EngineConfig) -> Result<(), CliError> {
    match args.command {
        BenchCommand::Kernels(args) => kernels::run(*args, &config),
        BenchCommand::Roofline(args) => roofline::run(args),
        BenchCommand::Latency(args) => latency::run(args, config),
        BenchCommand::Throughput(args) => throughput::run(args, config),
        BenchCommand::Sweep(args) => sweep::run(*args, config),
        BenchCommand::Lora(args) => lora::run(*args, config),
        BenchCommand::Serve(args) => Ok(::bench::serve::run(&args)?),
    }
}
