//! `cargo xtask fuzz`: builds every fuzz target for libFuzzer and runs each for a while, with a limit of memory.
//!
//! A target is a binary of a package in a folder `fuzz`. It is compiled with LLVM's coverage, which the stable compiler has too, so
//! neither a nightly compiler nor cargo-fuzz is needed. Dependencies have the versions of the workspace: its `Cargo.lock` is copied to
//! the package, where git ignores it. Inputs that found new paths stay in `target/fuzz/corpus/`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use testkit::kernels;

use crate::ci::logged;
use crate::{cargo, workspace};

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Names of targets; all if there are none.
    pub targets: Vec<String>,
    /// Seconds of each.
    pub seconds: u64,
}

/// Greatest resident memory of a target, in MiB. A reader may not take much more than its input, which has at most 4 KiB.
const MEMORY: usize = 1024;
/// Most seconds for one input.
const INPUT_SECONDS: usize = 20;
/// Marks each edge of the code, and the operands of comparisons, for libFuzzer.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";

/// Builds and runs the targets, each although others fail.
///
/// # Errors
/// No target has such a name, one does not build, or one failed; the last line says where its input is.
pub fn run(root: &Path, options: &Options) -> Result<(), String> {
    let packages = workspace::files(root).into_iter().filter(|path| format!("/{path}").ends_with("/fuzz/Cargo.toml"));
    let built: Vec<Vec<PathBuf>> = packages.map(|manifest| build(root, &manifest)).collect::<Result<_, _>>()?;
    let programs: Vec<(String, PathBuf)> = built
        .into_iter()
        .flatten()
        .map(|file| (file.file_name().unwrap_or_default().to_string_lossy().into_owned(), file))
        .collect();
    let names: Vec<&str> = programs.iter().map(|(name, _)| name.as_str()).collect();
    let unknown = options.targets.iter().find(|target| !names.contains(&target.as_str()));
    if let Some(unknown) = unknown.map(String::as_str).or(names.is_empty().then_some("no target")) {
        return Err(format!("fuzz: found {unknown}, expected some of {}", names.join(", ")));
    }
    let wanted = |name: &String| options.targets.is_empty() || options.targets.contains(name);
    let outcomes = programs.iter().filter(|(name, _)| wanted(name)).map(|(name, file)| fuzz(root, name, file, options));
    let failed: Vec<String> = outcomes.filter_map(Result::err).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// Returns the executables of a package.
fn build(root: &Path, manifest: &str) -> Result<Vec<PathBuf>, String> {
    let lock = root.join(manifest).with_file_name("Cargo.lock");
    std::fs::copy(root.join("Cargo.lock"), &lock).map_err(|error| format!("{}: {error}", lock.display()))?;
    let mut command = cargo::command(root);
    command.args(["build", "--bins", "--message-format=json-render-diagnostics", "--manifest-path", manifest]);
    // With a target, programs that run while others are built are compiled without the coverage.
    command.args(["--target", "host-tuple"]).env("RUSTFLAGS", COVERAGE);
    let messages = cargo::output(command.env("CARGO_TARGET_DIR", kernels::target(root).join("fuzz")))?;
    Ok(cargo::executables(&messages).map(|(_, file)| file).collect())
}

fn fuzz(root: &Path, name: &str, program: &Path, options: &Options) -> Result<(), String> {
    let folder = kernels::target(root).join("fuzz");
    let (corpus, input) = (folder.join("corpus").join(name), folder.join(format!("{name}-")));
    std::fs::create_dir_all(&corpus).map_err(|error| format!("{}: {error}", corpus.display()))?;
    println!("\n== fuzz {name}: {} s", options.seconds);
    let mut command = Command::new(program);
    command.arg(format!("-max_total_time={}", options.seconds)).arg(format!("-rss_limit_mb={MEMORY}"));
    command.arg(format!("-timeout={INPUT_SECONDS}")).arg(format!("-artifact_prefix={}", input.display()));
    // Some targets write files.
    command.arg(&corpus).stdin(Stdio::null()).current_dir(root);
    let (status, log, _) = logged(&mut command).map_err(|error| format!("{}: {error}", program.display()))?;
    let runs = log.lines().find_map(|line| line.strip_prefix("Done ")?.split_whitespace().next()?.parse::<u64>().ok());
    match (status.success(), runs) {
        (true, Some(1..)) => Ok(()),
        (true, _) => Err(format!("the target {name} ran no input")),
        _ => Err(format!("the target {name} failed ({status}); its input is {}…", input.display())),
    }
}
