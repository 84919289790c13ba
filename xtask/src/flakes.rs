//! `cargo xtask flakes`: the test programs again and again, on a quiet machine and beside busy loops, and every test that failed
//! at least once. It takes hours, so it is no part of CI.
//!
//! The programs are built once and started as cargo starts them: in the folder of their package, with its name in the environment.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::Value;

/// How often, and beside what.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Runs while nothing else runs.
    pub quiet: usize,
    /// Runs beside the busy loops.
    pub busy: usize,
    /// Threads that do nothing but count.
    pub loops: usize,
}

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Program {
    package: String,
    /// Its target: a library, a binary, or the name of an integration test.
    target: String,
    file: PathBuf,
    /// Of the package's manifest.
    folder: PathBuf,
}

/// How often each test failed: quiet runs, busy runs.
type Failures = BTreeMap<String, [usize; 2]>;

/// Builds all test programs and runs them.
///
/// # Errors
/// They do not build, or a test failed at least once.
pub fn run(root: &Path, options: Options) -> Result<(), String> {
    let programs = build(root)?;
    let mut failures = Failures::new();
    for (kind, (name, runs)) in [("quiet", options.quiet), ("busy", options.busy)].into_iter().enumerate() {
        let loops = if kind == 1 { options.loops } else { 0 };
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
        count => Err(format!("flakes: {count} tests failed at least once")),
    }
}

fn table(failures: &Failures, options: Options) -> String {
    let (quiet, busy, loops) = (options.quiet, options.busy, options.loops);
    let mut text = format!("failed in {quiet} quiet runs, in {busy} runs beside {loops} busy loops, test\n");
    for (test, [alone, beside]) in failures {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{alone:>5} {beside:>5}  {test}");
    }
    text
}

/// Does the work while so many threads keep cores busy.
fn beside<T>(loops: usize, work: impl FnOnce() -> T) -> T {
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

fn build(root: &Path) -> Result<Vec<Program>, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["test", "--workspace", "--no-run", "--locked", "--message-format=json-render-diagnostics"]);
    let output = command.current_dir(root).stderr(std::process::Stdio::inherit()).output();
    let output = output.map_err(|error| format!("cargo: {error}"))?;
    if !output.status.success() {
        return Err("flakes: the tests do not build; see above".into());
    }
    Ok(programs(&String::from_utf8_lossy(&output.stdout)))
}

/// The test programs among cargo's messages.
fn programs(messages: &str) -> Vec<Program> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = |message: Value| {
        let is_test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
        let manifest = Path::new(message["manifest_path"].as_str()?);
        let folder = manifest.parent()?.to_owned();
        Some(Program {
            package: folder.file_name()?.to_string_lossy().into_owned(),
            target: message["target"]["name"].as_str()?.to_owned(),
            file: PathBuf::from(message["executable"].as_str()?),
            folder,
        })
        .filter(|_| is_test)
    };
    messages.filter_map(program).collect()
}

/// The tests of a program that fail in one run, with its name.
fn failed_tests(program: &Program) -> Result<Vec<String>, String> {
    let mut command = Command::new(&program.file);
    command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder);
    let output = command.env("CARGO_PKG_NAME", &program.package).output();
    let output = output.map_err(|error| format!("{}: {error}", program.file.display()))?;
    let name = format!("{} {}", program.package, program.target);
    let said = String::from_utf8_lossy(&output.stdout);
    let mut failed: Vec<String> = failed_lines(&said).map(|test| format!("{name}: {test}")).collect();
    if failed.is_empty() && !output.status.success() {
        failed.push(format!("{name}: the program ended with {}", output.status));
    }
    Ok(failed)
}

/// Names in lines of the form `test name ... FAILED`.
fn failed_lines(said: &str) -> impl Iterator<Item = &str> {
    said.lines().filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn test_programs_are_found_among_the_messages_of_cargo() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","manifest_path":"/q/device/Cargo.toml","target":{"name":"all"},"profile":{"test":true},"executable":"/t/all-1"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/q/cli/Cargo.toml","target":{"name":"quire"},"profile":{"test":false},"executable":"/t/quire"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/q/sched/Cargo.toml","target":{"name":"sched"},"profile":{"test":true},"executable":null}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
            "\n"
        );
        let expected = Program {
            package: "device".into(),
            target: "all".into(),
            file: "/t/all-1".into(),
            folder: "/q/device".into(),
        };
        assert_eq!(programs(messages), [expected]);
    }

    #[cfg(unix)]
    #[test]
    fn a_program_is_run_in_its_folder_and_its_failed_tests_are_named() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let script = |name: &str, text: &str| {
            let file = folder.path().join(name);
            std::fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
            Program { package: "device".into(), target: name.into(), file, folder: folder.path().to_owned() }
        };
        let failing = script("all", "echo \"test a::b ... ok\"; echo \"test c::$CARGO_PKG_NAME ... FAILED\"; exit 101");
        assert_eq!(failed_tests(&failing).unwrap(), ["device all: c::device"]);
        assert_eq!(failed_tests(&script("good", "test -f good")).unwrap(), [""; 0]);
        let crashed = failed_tests(&script("crash", "kill -9 $$")).unwrap();
        assert!(
            matches!(&crashed[..], [one] if one.starts_with("device crash: the program ended with ")),
            "{crashed:?}"
        );
    }

    #[test]
    fn the_table_counts_quiet_and_busy_failures() {
        let failures = Failures::from([("device all: a".into(), [0, 2])]);
        let said = table(&failures, Options { quiet: 10, busy: 5, loops: 3 });
        assert_eq!(said, "failed in 10 quiet runs, in 5 runs beside 3 busy loops, test\n    0     2  device all: a\n");
        assert_eq!(beside(2, || 7), 7);
    }
}
