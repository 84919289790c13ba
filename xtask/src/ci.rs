//! `cargo xtask ci` and its parts: the checks that a change must pass, one after the other, each timed. `.ci/run` is the same.
//!
//! A failed step does not stop the run: what a person mends in one round is all that is wrong. Cheap steps come first. A step whose
//! filter leaves a test program without a test fails, since it has checked nothing. The run ends with what did not run, the parts
//! that took longest, and how to repeat each step that failed.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Instant;

use testkit::capability::{AARCH64, AARCH64_LINKER, Capability};
use testkit::not_run::{self, REQUIRE, Required};

use crate::parts::{self, Part};
use crate::tidy::Package;
use crate::{doctor, tidy, workspace};

/// Seed of random tests.
const SEED: &str = "PROPTEST_RNG_SEED";

/// One check of CI.
struct Step {
    title: &'static str,
    /// The command; words are separated by spaces.
    command: String,
    /// Environment variables for this command.
    variables: Vec<(&'static str, String)>,
    /// What the machine must have; without it the step is reported as not run.
    needs: Option<Capability>,
    /// In how many test programs the filter matches, if not in all.
    programs: Option<usize>,
}

impl Step {
    fn new(title: &'static str, command: impl Into<String>) -> Step {
        Step { title, command: command.into(), variables: Vec::new(), needs: None, programs: None }
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
        typed(&self.variables) + &self.command
    }

    /// Runs the step with further variables. Adds the programs of its tests to `parts`.
    fn run(&self, root: &Path, shared: &[(&'static str, String)], parts: &mut Vec<Part>) -> Result<(), String> {
        if let Some(missing) = self.needs.filter(|needed| !needed.is_present()) {
            let required = shared.iter().find(|(name, _)| *name == REQUIRE).map_or("", |(_, names)| names);
            return Required::parse(required)?.report(missing, &format!("{} needs it", self.title));
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
        command.args(words).envs(shared.iter().chain(&self.variables).cloned()).current_dir(root);
        let failed = |error: std::io::Error| format!("{program} did not start: {error}");
        let status = if self.command.starts_with("cargo test ") {
            let (status, log, times) = logged(&mut command).map_err(failed)?;
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            parts.extend(parts::of_log(&log, &times, threads));
            // A program that fails says so itself.
            if status.success() {
                parts::ran_some(&log, self.programs)?;
            }
            status
        } else {
            command.status().map_err(failed)?
        };
        if status.success() { Ok(()) } else { Err(status.to_string()) }
    }
}

/// Runs a command, prints what it prints, and returns it: its standard output and errors in the order in which they come, and the
/// seconds after which each line came.
pub(crate) fn logged(command: &mut Command) -> std::io::Result<(ExitStatus, String, Vec<f64>)> {
    let start = Instant::now();
    let (reader, writer) = std::io::pipe()?;
    let mut child = command.stdout(writer.try_clone()?).stderr(writer).spawn()?;
    // The command holds copies of the writer, with which the pipe would never end.
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let (mut log, mut times, mut line, mut reader) = (String::new(), Vec::new(), Vec::new(), BufReader::new(reader));
    while reader.read_until(b'\n', &mut line)? > 0 {
        std::io::stdout().write_all(&line)?;
        log += &String::from_utf8_lossy(&line);
        times.push(start.elapsed().as_secs_f64());
        line.clear();
    }
    Ok((child.wait()?, log, times))
}

fn typed(variables: &[(&'static str, String)]) -> String {
    variables.iter().map(|(name, value)| format!("{name}='{value}' ")).collect()
}

/// Runs all checks.
///
/// # Errors
/// The checks that failed, and how to run each alone.
pub fn run(root: &Path) -> Result<(), String> {
    not_run::clear(root)?;
    run_all(root, &of_ci(root))
}

fn of_ci(root: &Path) -> Vec<Step> {
    vec![
        format_step(),
        tidy_step(),
        Step::new("licences", "cargo deny --locked check --hide-inclusion-graph bans licenses sources")
            .needs(Capability::CargoDeny),
        lints_step("--workspace"),
        Step::new("documentation", "cargo doc --workspace --no-deps --locked").with("RUSTDOCFLAGS", "-D warnings"),
        // The engine and all below it: ring, which the downloads need, wants a C compiler for the target.
        Step::new("NEON", format!("cargo check -p engine --locked --target {AARCH64}")).needs(Capability::Aarch64),
        // It installs MPI, which tests of other packages use.
        Step::new("MPI", "cargo xtask test-mpi --quick"),
        tests_step("tests"),
        // It builds the workspace with the features of one package.
        Step::new("Python package", "cargo xtask python"),
        Step::new("names of tests", "cargo xtask test-names"),
        thread_sanitizer_step(),
        neon_step(root),
        Step::new("kernels by nvcc", "cargo xtask build-kernels --check").needs(Capability::Nvcc),
        page_step(None),
    ]
}

/// Runs the checks of a change that take seconds: format, tidy, and the lints and unit tests of the crates with changed files, or of all
/// crates. Crates that depend on a changed one are left to [`run`], and so are tests of crates that need `linear`, which takes minutes
/// to build.
///
/// # Errors
/// The checks that failed, and how to run each alone; or git does not say what has changed.
pub fn check(root: &Path, all: bool) -> Result<(), String> {
    let changed = if all { Vec::new() } else { workspace::changed(root)? };
    let packages = tidy::packages(root)?;
    let has_changed = |name: &&str| changed.iter().any(|path| path.split('/').next() == Some(*name));
    let crates = packages.iter().map(|package| package.name.as_str()).filter(|name| all || has_changed(name));
    not_run::clear(root)?;
    run_all(root, &of_check(root, &packages, &crates.collect::<Vec<_>>()))
}

fn of_check(root: &Path, packages: &[Package], crates: &[&str]) -> Vec<Step> {
    let select = |crates: &[&str]| crates.iter().map(|name| format!("-p {name}")).collect::<Vec<_>>().join(" ");
    let mut steps = vec![format_step(), tidy_step()];
    if !crates.is_empty() {
        steps.push(lints_step(&select(crates)));
    }
    let mut slow = vec!["linear"];
    let is_slow =
        |package: &Package, slow: &[&str]| package.dependencies.iter().any(|used| slow.contains(&&*used.name));
    while let Some(next) = packages.iter().find(|next| !slow.contains(&&*next.name) && is_slow(next, &slow)) {
        slow.push(&next.name);
    }
    let is_tested = |name: &&str| !slow.contains(name) && has_unit_tests(&root.join(name).join("src"));
    let tested: Vec<&str> = crates.iter().copied().filter(is_tested).collect();
    if !tested.is_empty() {
        steps.push(Step::new("unit tests", format!("cargo test {} --lib --locked", select(&tested))));
    }
    steps
}

/// Returns whether the library in this folder has tests of its own.
fn has_unit_tests(source: &Path) -> bool {
    let mut files = Vec::new();
    workspace::walk(source, "", &mut files);
    let has_test =
        |file: &String| std::fs::read_to_string(source.join(file)).is_ok_and(|text| text.contains("#[test]"));
    source.join("lib.rs").is_file() && files.iter().any(has_test)
}

/// Runs what CI leaves out for its time: the tests with `QUIRE_TEST_ALL=1`, which tests all combinations of settings instead of all
/// pairs, every MPI library in full, the soak, and every fuzz target for a minute.
///
/// # Errors
/// The checks that failed, and how to run each alone.
pub fn test_all(root: &Path) -> Result<(), String> {
    not_run::clear(root)?;
    run_all(root, &of_test_all())
}

fn of_test_all() -> Vec<Step> {
    vec![
        Step::new("MPI", "cargo xtask test-mpi"),
        tests_step("all tests").with("QUIRE_TEST_ALL", "1"),
        thread_sanitizer_step().with("QUIRE_TEST_ALL", "1"),
        // What debug builds refuse with a panic.
        Step::new("release builds", "cargo test -p kvblock --test all --release --locked -- in_release_builds"),
        soak_step(),
        Step::new("fuzz targets", "cargo xtask fuzz"),
    ]
}

/// Runs the soak test of the server for `QUIRE_SOAK_SECONDS` or two minutes.
///
/// # Errors
/// It failed.
pub fn soak(root: &Path) -> Result<(), String> {
    run_all(root, &[soak_step()])
}

/// Tests the web page in a browser. With `screenshot`, also writes a PNG of the page under load, as the README shows it.
///
/// # Errors
/// A test failed.
pub fn page_test(root: &Path, screenshot: Option<&Path>) -> Result<(), String> {
    run_all(root, &[page_step(screenshot)])
}

fn format_step() -> Step {
    Step::new("format", "cargo fmt --all --check")
}

fn tidy_step() -> Step {
    Step::new("tidy", "cargo xtask tidy")
}

fn lints_step(packages: &str) -> Step {
    Step::new("lints", format!("cargo clippy {packages} --all-targets --locked -- -D warnings"))
}

/// The test command of the README. Programs after one that failed run too.
fn tests_step(title: &'static str) -> Step {
    Step::new(title, "cargo test --workspace --locked --no-fail-fast")
}

fn page_step(screenshot: Option<&Path>) -> Step {
    let command = "cargo test -p xtask --test page --locked -- --ignored --test-threads=1";
    let step = match screenshot.and_then(|path| std::path::absolute(path).ok()) {
        Some(path) => Step::new("page", command).with("QUIRE_SCREENSHOT", path.to_string_lossy()),
        None => Step::new("page", format!("{command} --skip a_picture")),
    };
    step.needs(Capability::Chromium)
}

/// The kernels under the thread sanitizer. Building them for it takes too long for every run of the tests. The whole workspace is selected,
/// so that cargo finds the test programs built: with other packages its libraries have other features.
fn thread_sanitizer_step() -> Step {
    let command = "cargo test --workspace --test all --locked --no-fail-fast -- --ignored the_thread_sanitizer";
    Step { programs: Some(3), ..Step::new("thread sanitizer", command).needs(Capability::Tsan) }
}

/// The tests of vectors and matrices on an emulated 64-bit ARM CPU with all extensions. Its reports of x86 units are not counted: they go to
/// a folder of their own.
fn neon_step(root: &Path) -> Step {
    let reports = testkit::kernels::target(root).join("emulated");
    let runner = format!("qemu-aarch64 -L /usr/aarch64-linux-gnu -E CARGO_TARGET_DIR={}", reports.display());
    Step::new(
        "NEON tests",
        format!("cargo test -p simd -p linear --test all --locked --target {AARCH64} -- --skip upload::"),
    )
    .with("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", AARCH64_LINKER)
    .with("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner)
    .with("QUIRE_REQUIRE", "neon,neon-dotprod,neon-i8mm")
    .needs(Capability::QemuAarch64)
}

fn soak_step() -> Step {
    let step = Step::new("soak", "cargo test -p server --test soak --locked -- --nocapture");
    if std::env::var_os("QUIRE_SOAK_SECONDS").is_some() { step } else { step.with("QUIRE_SOAK_SECONDS", "120") }
}

/// Returns the seed of random tests, which depends on the Rust code only: a failed run can be repeated, and every change draws other
/// cases.
fn seed(root: &Path) -> u64 {
    let files = workspace::files(root)
        .into_iter()
        .filter(|path| [".rs", ".toml", ".lock"].iter().any(|end| path.ends_with(end)));
    let mut hasher = DefaultHasher::new();
    files.for_each(|path| (std::fs::read(root.join(&path)).ok(), path).hash(&mut hasher));
    hasher.finish()
}

/// Returns the variables of every step that the environment of this process does not set: the seed, and what the tests must not leave
/// out, which is what every machine of CI must have and what this one has now.
fn shared(root: &Path) -> Result<Vec<(&'static str, String)>, String> {
    Required::from_environment()?;
    let set =
        |name: &'static str, default: &dyn Fn() -> String| (name, std::env::var(name).unwrap_or_else(|_| default()));
    Ok(vec![set(SEED, &|| seed(root).to_string()), set(REQUIRE, &doctor::require)])
}

fn run_all(root: &Path, steps: &[Step]) -> Result<(), String> {
    let start = Instant::now();
    let (mut done, mut failed, mut parts) = (Vec::new(), Vec::new(), Vec::new());
    let mut variables = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        // Anew for each step, since one may install what a later one needs.
        let found = shared(root)?;
        if found != variables {
            println!("{}", typed(&found));
            variables = found;
        }
        println!("\n== {}/{} {}: {}", index + 1, steps.len(), step.title, step.typed());
        let began = Instant::now();
        let outcome = step.run(root, &variables, &mut parts);
        let seconds = began.elapsed().as_secs_f64();
        parts.push(Part { name: step.title.to_owned(), seconds });
        let (list, line) = match outcome {
            Ok(()) => (&mut done, format!("{} {seconds:.1} s", step.title)),
            Err(problem) => {
                let (title, typed) = (step.title, typed(&variables) + &step.typed());
                (&mut failed, format!("{title} failed after {seconds:.1} s ({problem}); to run it alone: {typed}"))
            }
        };
        println!("== {line}");
        list.push(line);
    }
    let not_run = not_run::reports(root);
    print!("\n{}\nThe longest parts:\n{}", not_run::summary(&not_run), parts::table(parts, 30));
    if !failed.is_empty() {
        return Err(failed.join("\nxtask: "));
    }
    let count =
        if not_run.is_empty() { String::new() } else { format!(", {} tests or parts of tests NOT RUN", not_run.len()) };
    println!("\nxtask: passed in {:.1} s{count}: {}", start.elapsed().as_secs_f64(), done.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use testkit::kernels;

    use super::*;

    fn root() -> std::path::PathBuf {
        testkit::workspace::root()
    }

    #[test]
    fn a_step_that_needs_what_the_machine_lacks_fails_if_that_is_required() {
        let Some(missing) = Capability::ALL.into_iter().find(|capability| !capability.is_present()) else {
            panic!("found a machine with every CPU");
        };
        // Its command would pass.
        let step = Step::new("absent", "true").needs(missing);
        let problem = step.run(&root(), &[(REQUIRE, missing.name().to_owned())], &mut Vec::new());
        assert!(problem.is_err_and(|problem| problem.contains("absent needs it")));
    }

    #[test]
    fn steps_after_a_failure_run_and_each_failure_says_how_to_repeat_it() {
        let folder = kernels::target(&root()).join("steps-of-a-test");
        let steps = [
            Step::new("first", "true"),
            Step::new("second", "false with words").with("NAME", "a b"),
            Step::new("third", format!("mkdir -p {}", folder.display())),
            Step::new("fourth", "no-such-program"),
        ];
        let _ = std::fs::remove_dir(&folder);
        let problem = run_all(&root(), &steps).err().unwrap_or_default();
        assert!(std::fs::remove_dir(&folder).is_ok(), "the third step did not run");
        let [second, fourth] = &problem.lines().collect::<Vec<_>>()[..] else { panic!("{problem}") };
        assert!(
            second.starts_with("second failed after ") && second.ends_with("NAME='a b' false with words"),
            "{second}"
        );
        for name in [SEED, REQUIRE] {
            assert!(second.contains(&format!("{name}='")), "{second}");
        }
        assert!(fourth.contains("no-such-program did not start"), "{fourth}");
    }

    #[test]
    fn a_check_lints_the_crates_that_have_changed_and_runs_the_unit_tests_that_build_in_seconds() -> Result<(), String>
    {
        let packages = tidy::packages(&root())?;
        let commands = |crates: &[&str]| of_check(&root(), &packages, crates).into_iter().map(|step| step.command);
        assert!(commands(&[]).eq(["cargo fmt --all --check", "cargo xtask tidy"]));
        // The server needs `device` through the engine, and `sched` has no unit tests.
        let lints = "cargo clippy -p hub -p sched -p server --all-targets --locked -- -D warnings";
        assert!(commands(&["hub", "sched", "server"]).skip(2).eq([lints, "cargo test -p hub --lib --locked"]));
        Ok(())
    }

    #[test]
    fn every_step_is_locked_and_gets_the_seed_and_what_the_machine_must_have() -> Result<(), String> {
        let expected = doctor::require();
        let found = shared(&root())?;
        let value = |name| found.iter().find(|(found, _)| *found == name).map_or("", |(_, value)| value);
        if std::env::var_os(REQUIRE).is_none() {
            assert_eq!(value(REQUIRE), expected);
        }
        assert!(value(SEED).parse::<u64>().is_ok(), "{found:?}");
        for step in
            of_ci(&root()).iter().chain(&of_test_all()).chain(&of_check(&root(), &tidy::packages(&root())?, &["hub"]))
        {
            let is_cargo = step.command.starts_with("cargo ") && !step.command.starts_with("cargo fmt");
            // The alias of xtask is locked.
            let locked = step.command.contains("--locked") || step.command.starts_with("cargo xtask ");
            assert!(is_cargo <= locked, "{}", step.command);
        }
        let alias = std::fs::read_to_string(root().join(".cargo/config.toml")).map_err(|error| error.to_string())?;
        assert!(alias.contains("run --locked "), "{alias}");
        Ok(())
    }
}
