//! `cargo xtask flakes`: runs the test programs many times, on a quiet machine and beside busy loops, and names every test that
//! failed at least once. It takes hours, so CI does not run it.
//!
//! The programs are built once and started as cargo starts them: in the folder of their package, with its name in the environment.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::cargo::{self, TestProgram};

/// Numbers of runs, and the load beside them.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Runs without other load.
    pub quiet: usize,
    /// Runs beside the busy loops.
    pub busy: usize,
    /// Threads of the load.
    pub loops: usize,
}

/// Number of failures of each test: in quiet runs, in busy runs.
pub type Failures = BTreeMap<String, [usize; 2]>;

/// Builds all test programs and runs them.
///
/// # Errors
/// They do not build, or a test failed at least once.
pub fn run(root: &Path, options: Options) -> Result<(), String> {
    let programs = cargo::test_programs(root, &["--workspace"])?;
    let mut failures = Failures::new();
    let kinds = [("quiet", options.quiet, 0), ("busy", options.busy, options.loops)];
    for (kind, (name, runs, loops)) in kinds.into_iter().enumerate() {
        for run in 1..=runs {
            let began = Instant::now();
            let failed = beside(loops, || programs.iter().map(failed_tests).collect::<Result<Vec<_>, _>>())?.concat();
            println!("{name} run {run} of {runs}: {} failed, {:.0} s", failed.len(), began.elapsed().as_secs_f64());
            for test in failed {
                println!("  {test}");
                failures.entry(test).or_default()[kind] += 1;
            }
        }
    }
    print!("{}", table(&failures, options));
    match failures.len() {
        0 => Ok(()),
        count => Err(format!("flakes: {count} tests failed at least once; the table above names them")),
    }
}

/// Returns the table of failures.
pub fn table(failures: &Failures, options: Options) -> String {
    let (quiet, busy, loops) = (options.quiet, options.busy, options.loops);
    let mut text = format!("failed in {quiet} quiet runs, in {busy} runs beside {loops} busy loops, test\n");
    for (test, [alone, beside]) in failures {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{alone:>5} {beside:>5}  {test}");
    }
    text
}

/// Does the work while `loops` threads keep cores busy.
pub fn beside<T>(loops: usize, work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..loops {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let outcome = work();
        done.store(true, Ordering::Relaxed);
        outcome
    })
}

/// Runs a program once and returns its failed tests, each after the name of the program.
pub fn failed_tests(program: &TestProgram) -> Result<Vec<String>, String> {
    let mut command = Command::new(&program.file);
    command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder);
    let output = command.env("CARGO_PKG_NAME", &program.package).output();
    let output = output.map_err(|error| format!("{}: {error}", program.file.display()))?;
    let name = format!("{} {}", program.package, program.target);
    let printed = String::from_utf8_lossy(&output.stdout);
    let tests = printed.lines().filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"));
    let mut failed: Vec<String> = tests.map(|test| format!("{name}: {test}")).collect();
    if failed.is_empty() && !output.status.success() {
        failed.push(format!("{name}: the program ended with {}", output.status));
    }
    Ok(failed)
}
