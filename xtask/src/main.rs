//! The command `cargo xtask`; every task is a module of the library of this crate.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::{bundle, ci, doctor, kernels, tidy, workspace};

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
    /// Compile the CUDA sources of every crate into target/kernels/ and print what each kernel needs
    BuildKernels {
        /// One architecture only, and no files: whether it compiles
        #[arg(long, conflicts_with = "sim")]
        check: bool,
        /// The host library that runs the kernels without a GPU, with the C++ compiler of this machine
        #[arg(long)]
        sim: bool,
        /// Where no nvcc is found, download the pinned one with pip into target/cuda-toolkit/
        #[arg(long)]
        fetch: bool,
        /// Compilers that run at once [default: one for each core]
        #[arg(long)]
        jobs: Option<usize>,
    },
    /// One folder under target/ that proves and times the CUDA kernels on a GPU machine without toolchain or network
    GpuBundle {
        /// Architectures to compile for, as nvcc names them without sm_ [default: 90a]
        #[arg(long, value_delimiter = ',')]
        arch: Vec<String>,
        /// Where no nvcc is found, download the pinned one with pip into target/cuda-toolkit/
        #[arg(long)]
        fetch: bool,
        /// Compilers that run at once [default: one for each core]
        #[arg(long)]
        jobs: Option<usize>,
    },
    /// What this machine has, and what that means for Quire
    Doctor,
}

fn main() -> ExitCode {
    let root = workspace::root();
    let outcome = match Cli::parse().task {
        Task::Ci { skip_tests } => ci::run(&root, skip_tests),
        Task::TestAll => ci::test_all(&root),
        Task::Tidy => tidy::run(&root),
        Task::BuildKernels { check, sim, fetch, jobs } => {
            let jobs = jobs.unwrap_or_else(kernels::cores);
            kernels::run(&root, kernels::Options { check, sim, fetch, jobs })
        }
        Task::GpuBundle { arch, fetch, jobs } => {
            let jobs = jobs.unwrap_or_else(kernels::cores);
            bundle::run(&root, &bundle::Options { architectures: arch, fetch, jobs }).map(|_| ())
        }
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
