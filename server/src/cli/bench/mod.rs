//! `quire bench`: one file per subcommand.

mod kernels;
mod roofline;

use clap::{Args, Subcommand};
use engine::EngineConfig;

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
    /// Time every kernel over a grid of shapes, with its error and its share of what the machine can do
    Kernels(Box<kernels::KernelArgs>),
    /// What this machine can do at best: memory bandwidth and operations a second
    Roofline(roofline::RooflineArgs),
}

/// Runs one.
pub fn run(args: BenchArgs, config: EngineConfig) -> Result<(), CliError> {
    match args.command {
        BenchCommand::Kernels(args) => kernels::run(*args, &config),
        BenchCommand::Roofline(args) => roofline::run(args),
    }
}
