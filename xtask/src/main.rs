//! The command `cargo xtask`; every task is a module of the library of this crate.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::{bench, ci, doctor, kernels, tidy, workspace};

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
    /// Write a model with random weights in a known shape: a checkpoint folder, and GGUF files of the same weights
    BenchModel {
        /// m135 (SmolLM2-135M) or q05 (Qwen2.5-0.5B)
        shape: String,
        /// Where
        folder: PathBuf,
        /// Of the weights
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Quire and llama.cpp by turns on the same weights and bits: a table of tokens a second
    BenchCpu {
        /// Shapes
        #[arg(long, value_delimiter = ',', default_value = "m135,q05")]
        models: Vec<String>,
        /// Where the models are, and are made where they are missing [default: bench-models/ in the target folder]
        #[arg(long)]
        folder: Option<PathBuf>,
        /// The Python that has llama-cpp-python
        #[arg(long, default_value = "python3")]
        python: PathBuf,
        /// Runs of each side for a line
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Threads of each side
        #[arg(long, default_value_t = kernels::cores())]
        threads: usize,
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
        Task::BenchModel { shape, folder, seed } => {
            bench::Shape::named(&shape).and_then(|shape| bench::write(&shape, &folder, seed))
        }
        Task::BenchCpu { models, folder, python, rounds, threads } => {
            let folder = folder.unwrap_or_else(|| kernels::target(&root).join("bench-models"));
            bench::compare(&root, &bench::Options { models, folder, python, rounds, threads })
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
