//! `quire bench`: one file per subcommand.

mod batch;
mod latency;
mod throughput;

use clap::{Args, Subcommand};
use engine::EngineConfig;

use super::args::EngineArgs;
use super::error::CliError;

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
    /// Time one batch again and again: prefill, decode, and their share of what the machine can do
    Latency(latency::LatencyArgs),
    /// Time many prompts that come at once
    Throughput(throughput::ThroughputArgs),
}

impl BenchArgs {
    /// The engine that is measured.
    pub fn engine(&self) -> &EngineArgs {
        match &self.command {
            BenchCommand::Latency(args) => &args.engine,
            BenchCommand::Throughput(args) => &args.engine,
        }
    }
}

/// Runs one.
pub fn run(args: BenchArgs, config: EngineConfig) -> Result<(), CliError> {
    match args.command {
        BenchCommand::Latency(args) => latency::run(args, config),
        BenchCommand::Throughput(args) => throughput::run(args, config),
    }
}
