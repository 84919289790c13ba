//! `cargo xtask ci` and its parts: the checks that a change must pass, one after the other, each timed.
//!
//! A run stops at the first failure and says how to run that check alone. The test command is that of the README, so a newcomer and
//! CI run the same one. The end of a run lists what did not run, and the parts that took longest.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use testkit::capability::{AARCH64, AARCH64_LINKER, Capability};
use testkit::not_run::{self, Required};

use crate::parts::{self, Part};
use crate::{tidy, workspace};

/// One check of CI.
struct Step {
    title: &'static str,
    /// The command; words are separated by spaces.
    command: String,
    /// Environment variables for this command.
    variables: Vec<(&'static str, String)>,
    /// What the machine must have; without it the step is reported as not run.
    needs: Option<Capability>,
}

impl Step {
    fn new(title: &'static str, command: impl Into<String>) -> Step {
        Step { title, command: command.into(), variables: Vec::new(), needs: None }
    }

    fn with(mut self, name: &'static str, value: impl Into<String>) -> Step {
        self.variables.push((name, value.into()));
        self
    }

    fn needs(self, capability: Capability) -> Step {
        Step { needs: Some(capability), ..self }
    }

    /// Returns the line for a shell that runs this step alone.
    fn typed(&self) -> String {
        let variables = self.variables.iter().map(|(name, value)| format!("{name}='{value}' "));
        variables.collect::<String>() + &self.command
    }

    fn run(&self, root: &Path) -> Result<(), String> {
        if let Some(missing) = self.needs.filter(|needed| !needed.is_present()) {
            return not_run::check(missing, &format!("{} needs it", self.title));
        }
        // Tidy is a function of this program, so cargo need not start it.
        if self.command == "cargo xtask tidy" {
            return tidy::run(root);
        }
        let mut words = self.command.split_whitespace();
        let program = words.next().unwrap_or_default();
        // The cargo that started this program, whatever PATH says.
        let cargo = std::env::var_os("CARGO").filter(|_| program == "cargo");
        let mut command = Command::new(cargo.unwrap_or_else(|| program.into()));
        match command.args(words).envs(self.variables.iter().cloned()).current_dir(root).status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(status.to_string()),
            Err(error) => Err(format!("{program} did not start: {error}")),
        }
    }
}

/// Runs all checks, or all except the tests, whose output is then in the file `tests_log`.
///
/// # Errors
/// The first check that failed, and how to run it alone.
pub fn run(root: &Path, skip_tests: bool, tests_log: Option<&Path>) -> Result<(), String> {
    let log =
        tests_log.map(|path| std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display())));
    let parts = parts::of_log(&log.transpose()?.unwrap_or_default());
    let mut steps = vec![
        Step::new("format", "cargo fmt --all --check"),
        Step::new("lints", "cargo clippy --workspace --all-targets --locked -- -D warnings"),
        thread_sanitizer_step(),
        Step::new("documentation", "cargo doc --workspace --no-deps --locked").with("RUSTDOCFLAGS", "-D warnings"),
        // The engine and all below it: ring, which the downloads need, wants a C compiler for the target.
        Step::new("NEON", format!("cargo check -p engine --locked --target {AARCH64}")).needs(Capability::Aarch64),
        neon_step(root),
        Step::new("licences", "cargo deny --locked check --hide-inclusion-graph bans licenses sources")
            .needs(Capability::CargoDeny),
        Step::new("kernels by nvcc", "cargo xtask build-kernels --check").needs(Capability::Nvcc),
        Step::new("MPI", "cargo xtask test-mpi --quick"),
        Step::new("tidy", "cargo xtask tidy"),
        page_step(None),
    ];
    if !skip_tests {
        not_run::clear(root)?;
        steps.insert(0, Step::new("tests", test_command(root)?));
    }
    run_all(root, &steps, parts)
}

/// Runs the README's test command with `QUIRE_TEST_ALL=1`, which tests all combinations of settings instead of all pairs, and the soak.
///
/// # Errors
/// The tests failed, or the README has no test command.
pub fn test_all(root: &Path) -> Result<(), String> {
    not_run::clear(root)?;
    let all = Step::new("all tests", test_command(root)?).with("QUIRE_TEST_ALL", "1");
    run_all(root, &[all, thread_sanitizer_step().with("QUIRE_TEST_ALL", "1"), soak_step()], Vec::new())
}

/// Runs the soak test of the server for `QUIRE_SOAK_SECONDS` or two minutes.
///
/// # Errors
/// It failed.
pub fn soak(root: &Path) -> Result<(), String> {
    run_all(root, &[soak_step()], Vec::new())
}

/// Tests the web page in a browser. With `screenshot`, also writes a PNG of the page under load, as the README shows it.
///
/// # Errors
/// A test failed.
pub fn page_test(root: &Path, screenshot: Option<&Path>) -> Result<(), String> {
    run_all(root, &[page_step(screenshot)], Vec::new())
}

fn page_step(screenshot: Option<&Path>) -> Step {
    let command = "cargo test -p xtask --test page --locked -- --ignored --test-threads=1";
    let step = match screenshot.and_then(|path| std::path::absolute(path).ok()) {
        Some(path) => Step::new("page", command).with("QUIRE_SCREENSHOT", path.to_string_lossy()),
        None => Step::new("page", format!("{command} --skip a_picture")),
    };
    step.needs(Capability::Chromium)
}

/// The kernels under the thread sanitizer. Building them for it takes too long for every run of the tests.
fn thread_sanitizer_step() -> Step {
    let packages = "-p attention-kernels -p models -p sampling";
    let command = format!("cargo test {packages} --test all --locked -- --ignored the_thread_sanitizer");
    Step::new("thread sanitizer", command).needs(Capability::Tsan)
}

/// The CPU tests of `device` on an emulated 64-bit ARM CPU with all extensions. Its reports of x86 units are not counted: they go to
/// a folder of their own.
fn neon_step(root: &Path) -> Step {
    let reports = testkit::kernels::target(root).join("emulated");
    let runner = format!("qemu-aarch64 -L /usr/aarch64-linux-gnu -E CARGO_TARGET_DIR={}", reports.display());
    Step::new("NEON tests", format!("cargo test -p device --test all --locked --target {AARCH64} cpu::"))
        .with("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", AARCH64_LINKER)
        .with("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner)
        .with("QUIRE_REQUIRE", "neon,neon-dotprod,neon-i8mm")
        .needs(Capability::QemuAarch64)
}

fn soak_step() -> Step {
    let step = Step::new("soak", "cargo test -p server --test soak --locked -- --nocapture");
    if std::env::var_os("QUIRE_SOAK_SECONDS").is_some() { step } else { step.with("QUIRE_SOAK_SECONDS", "120") }
}

fn test_command(root: &Path) -> Result<String, String> {
    let readme = std::fs::read_to_string(root.join("README.md")).map_err(|error| format!("README.md: {error}"))?;
    workspace::test_command(&readme)
}

/// Runs the steps; `parts` are those that ran before.
fn run_all(root: &Path, steps: &[Step], mut parts: Vec<Part>) -> Result<(), String> {
    Required::from_environment()?;
    let start = Instant::now();
    let mut done = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        println!("\n== {}/{} {}: {}", index + 1, steps.len(), step.title, step.typed());
        let began = Instant::now();
        let outcome = step.run(root);
        let seconds = began.elapsed().as_secs_f64();
        outcome.map_err(|problem| {
            let (title, typed) = (step.title, step.typed());
            format!("{title} failed after {seconds:.1} s ({problem}); to run it alone: {typed}")
        })?;
        println!("== {}: {seconds:.1} s", step.title);
        done.push(format!("{} {seconds:.1} s", step.title));
        parts.push(Part { name: step.title.to_owned(), seconds });
    }
    let not_run = not_run::reports(root);
    print!("\n{}\nThe longest parts:\n{}", not_run::summary(&not_run), parts::table(parts, 10));
    let count =
        if not_run.is_empty() { String::new() } else { format!(", {} tests or parts of tests NOT RUN", not_run.len()) };
    println!("\nxtask: passed in {:.1} s{count}: {}", start.elapsed().as_secs_f64(), done.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_needs_what_the_machine_lacks_is_reported_and_passed() {
        // `false` would fail.
        let Some(missing) = Capability::ALL.into_iter().find(|capability| !capability.is_present()) else {
            panic!("found a machine with every CPU");
        };
        let (step, root) = (Step::new("absent", "false").needs(missing), testkit::workspace::root());
        match Required::from_environment() {
            Ok(required) if required.has(missing) => assert!(step.run(&root).is_err()),
            _ => assert_eq!(step.run(&root), Ok(())),
        }
    }

    #[test]
    fn a_failure_stops_the_run_and_says_how_to_repeat_it() {
        let steps = [
            Step::new("first", "true"),
            Step::new("second", "false with words").with("NAME", "a b"),
            Step::new("third", "no-such-program"),
        ];
        let problem = run_all(&testkit::workspace::root(), &steps, Vec::new()).err().unwrap_or_default();
        assert!(problem.starts_with("second failed after "), "{problem}");
        assert!(problem.ends_with("to run it alone: NAME='a b' false with words"), "{problem}");
    }
}
