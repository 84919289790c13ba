//! The command `cargo xtask`; every task is a module of the library of this crate.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use testkit::{kernels, model, workspace};
use xtask::{bench, build_kernels, bundle, ci, conformance, doctor, flakes, page_test, tidy};

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
        /// What the tests printed, for the table of the longest parts
        #[arg(long, value_name = "FILE")]
        tests_log: Option<PathBuf>,
    },
    /// The tests with the full product of settings, where ci takes all pairs
    TestAll,
    /// Run the test programs many times and report every test that failed at least once; not in CI
    Flakes {
        /// Runs while nothing else runs
        #[arg(long, default_value_t = 10)]
        quiet: usize,
        /// Runs beside busy loops
        #[arg(long, default_value_t = 5)]
        busy: usize,
        /// Busy loops
        #[arg(long, default_value_t = 3)]
        loops: usize,
    },
    /// The soak test at length: two minutes, or as long as QUIRE_SOAK_SECONDS says
    Soak,
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
    /// The web page in a headless Chromium; not run where there is none
    PageTest {
        /// Write a picture of the page under load
        #[arg(long, value_name = "FILE.png")]
        screenshot: Option<std::path::PathBuf>,
    },
    /// A black-box suite of the API (pytest, as its README says) against a server built from this tree
    Conformance {
        /// Folder of the suite
        dir: PathBuf,
        /// The Python that has what the suite's requirements.txt lists
        #[arg(long, default_value = "python3")]
        python: PathBuf,
        /// More words for pytest, as `-- -k CHT`
        #[arg(last = true)]
        pytest: Vec<String>,
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
    /// Write a model with random weights in a known shape: a checkpoint folder, and GGUF files of the same weights
    BenchModel {
        /// m135 (SmolLM2-135M), q05 (Qwen2.5-0.5B), 1b (Llama 3.2 1B), 8b (Llama 3 8B) or tiny
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
    Doctor {
        /// Print only what CI requires here, as QUIRE_REQUIRE takes it: what every such machine needs, and what this one has besides
        #[arg(long)]
        require: bool,
    },
}

fn main() -> ExitCode {
    let root = workspace::root();
    let outcome = match Cli::parse().task {
        Task::Ci { skip_tests, tests_log } => ci::run(&root, skip_tests, tests_log.as_deref()),
        Task::TestAll => ci::test_all(&root),
        Task::Flakes { quiet, busy, loops } => flakes::run(&root, flakes::Options { quiet, busy, loops }),
        Task::Soak => ci::soak(&root),
        Task::Tidy => tidy::run(&root),
        Task::BuildKernels { check, sim, fetch, jobs } => {
            let jobs = jobs.unwrap_or_else(kernels::cores);
            build_kernels::run(&root, build_kernels::Options { check, sim, fetch, jobs })
        }
        Task::PageTest { screenshot } => page_test::run(&root, screenshot.as_deref()),
        Task::Conformance { dir, python, pytest } => conformance::run(&root, &dir, &python, &pytest),
        Task::GpuBundle { arch, fetch, jobs } => {
            let jobs = jobs.unwrap_or_else(kernels::cores);
            bundle::run(&root, &bundle::Options { architectures: arch, fetch, jobs }).map(|_| ())
        }
        Task::BenchModel { shape, folder, seed } => {
            model::Shape::named(&shape).and_then(|shape| model::write(&shape, &folder, seed))
        }
        Task::BenchCpu { models, folder, python, rounds, threads } => {
            let folder = folder.unwrap_or_else(|| kernels::target(&root).join("bench-models"));
            bench::compare(&root, &bench::Options { models, folder, python, rounds, threads })
        }
        Task::Doctor { require: true } => {
            println!("{}", doctor::require());
            Ok(())
        }
        Task::Doctor { require: false } => {
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
