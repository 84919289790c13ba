//! The command `cargo xtask`; every task is a module of the library of this crate.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::{ci, doctor, tidy, workspace};

/// Every chore of the workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// All that must pass: tests, format, lints, documentation, tidy
    Ci {
        /// Leave the tests out; .ci/run has run them already
        #[arg(long)]
        skip_tests: bool,
    },
    /// The tests with the full product of settings, where ci takes all pairs
    TestAll,
    /// The rules of the house that no compiler checks
    Tidy,
    /// What this machine has, and what that means for Quire
    Doctor,
}

fn main() -> ExitCode {
    let root = workspace::root();
    let outcome = match Cli::parse().task {
        Task::Ci { skip_tests } => ci::run(&root, skip_tests),
        Task::TestAll => ci::test_all(&root),
        Task::Tidy => tidy::run(&root),
        Task::Doctor => {
            print!("{}", doctor::report(&root));
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("xtask: {problem}");
            ExitCode::FAILURE
        }
    }
}
