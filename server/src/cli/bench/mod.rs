//! `quire bench`: one file or folder per subcommand.

mod serve;

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
    /// Load any OpenAI server with requests and time its answers
    Serve(serve::ServeBenchArgs),
}

/// Runs one.
pub fn run(args: BenchArgs, _config: EngineConfig) -> Result<(), CliError> {
    match args.command {
        BenchCommand::Serve(args) => serve::run(&args),
    }
}
