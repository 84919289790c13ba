//! `quire bench`: one file per subcommand that measures an engine of this process. `quire bench serve` is the crate `bench`.

mod batch;
mod kernels;
mod latency;
mod roofline;
mod steady;
mod sweep;
mod throughput;

use clap::{Args, Subcommand};
use engine::EngineConfig;

use crate::args::EngineArgs;
use crate::error::CliError;
use crate::profile::ProfileArgs;

/// `quire bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Time every kernel over a grid of shapes, with its error and its share of what the machine can do
    Kernels(Box<kernels::KernelArgs>),
    /// What this machine can do at best: memory bandwidth and operations a second
    Roofline(roofline::RooflineArgs),
    /// Time one batch again and again: prefill, decode, and their share of what the machine can do
    Latency(latency::LatencyArgs),
    /// Time decode steps of full batches and prompts alone, for many shapes in one loaded engine
    Sweep(Box<sweep::SweepArgs>),
    /// Time many prompts that come at once
    Throughput(throughput::ThroughputArgs),
    /// Load any OpenAI server with requests and time its answers
    Serve(::bench::serve::ServeBenchArgs),
}

impl BenchArgs {
    /// The engine that is measured, where one is.
    pub fn engine(&self) -> Option<&EngineArgs> {
        match &self.command {
            BenchCommand::Latency(args) => Some(&args.engine),
            BenchCommand::Throughput(args) => Some(&args.engine),
            BenchCommand::Sweep(args) => Some(&args.engine),
            BenchCommand::Kernels(_) | BenchCommand::Roofline(_) | BenchCommand::Serve(_) => None,
        }
    }

    /// The flag that profiles it.
    pub fn profile(&self) -> Option<(&ProfileArgs, &EngineArgs)> {
        match &self.command {
            BenchCommand::Latency(args) => Some((&args.profile, &args.engine)),
            BenchCommand::Throughput(args) => Some((&args.profile, &args.engine)),
            // Its decode figures are of steps that nothing else slows down.
            BenchCommand::Sweep(_) => None,
            BenchCommand::Kernels(_) | BenchCommand::Roofline(_) | BenchCommand::Serve(_) => None,
        }
    }
}

/// Runs one.
pub fn run(args: BenchArgs, config: EngineConfig) -> Result<(), CliError> {
    match args.command {
        BenchCommand::Kernels(args) => kernels::run(*args, &config),
        BenchCommand::Roofline(args) => roofline::run(args),
        BenchCommand::Latency(args) => latency::run(args, config),
        BenchCommand::Throughput(args) => throughput::run(args, config),
        BenchCommand::Sweep(args) => sweep::run(*args, config),
        BenchCommand::Serve(args) => Ok(::bench::serve::run(&args)?),
    }
}
