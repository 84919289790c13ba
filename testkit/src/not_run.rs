//! Tests that cannot run on this machine: named at once, counted when a run of CI ends, and failures where `QUIRE_REQUIRE` says so.
//!
//! The test harness hides what a passing test prints. So the line goes to standard error past the harness, and to a file
//! under `target/not-run/` until the [`summary`] of CI has counted it. `QUIRE_REQUIRE` is a list of names of [`Capability`],
//! separated by commas, or `all`: a test that reports one of them fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::capability::Capability;
use crate::{kernels, workspace};

/// The variable that names what must not be missing.
pub const REQUIRE: &str = "QUIRE_REQUIRE";

/// Capabilities whose absence is a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Required(Vec<Capability>);

impl Required {
    /// Reads names separated by commas, or `all`. An empty text requires nothing.
    ///
    /// # Errors
    /// A name is unknown; says which one is nearest.
    pub fn parse(text: &str) -> Result<Required, String> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let read = |name| match name {
            "all" => Ok(Capability::ALL.to_vec()),
            _ => Capability::named(name).map(|one| vec![one]).map_err(|problem| format!("{REQUIRE}: {problem}")),
        };
        Ok(Required(names.map(read).collect::<Result<Vec<_>, _>>()?.concat()))
    }

    /// What the environment of this process requires.
    ///
    /// # Errors
    /// As [`Required::parse`].
    pub fn from_environment() -> Result<Required, String> {
        Required::parse(&std::env::var(REQUIRE).unwrap_or_default())
    }

    /// Whether a report of this capability is a failure.
    pub fn has(&self, capability: Capability) -> bool {
        self.0.contains(&capability)
    }

    /// The failure of `test`, if it is one that it lacks `capability`.
    fn check(&self, capability: Capability, test: &str, reason: &str) -> Result<(), String> {
        if !self.has(capability) {
            return Ok(());
        }
        Err(format!(
            "{test} needs {} ({}), which {REQUIRE} requires: {reason}; {}",
            capability.name(),
            capability.what(),
            capability.how()
        ))
    }
}

/// One test, or part of a test, that did not run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Line {
    /// What it lacks.
    pub capability: Capability,
    /// What was looked for and not found.
    pub reason: String,
    /// Package and name of the test.
    pub test: String,
}

/// Says that the calling test, or a part of it, cannot run here, and why. The line begins with `NOT RUN:`.
///
/// # Panics
/// If `QUIRE_REQUIRE` names the capability, or a capability that does not exist: the test fails.
pub fn report(capability: Capability, reason: &str) {
    if let Err(problem) = check(capability, reason) {
        panic!("{problem}");
    }
}

/// As [`report`], for programs that are no tests.
///
/// # Errors
/// `QUIRE_REQUIRE` names the capability, or one that does not exist.
pub fn check(capability: Capability, reason: &str) -> Result<(), String> {
    let thread = std::thread::current();
    // The harness runs each test on a thread of its name; cargo names the package.
    let test = thread.name().unwrap_or("a test");
    let test = std::env::var("CARGO_PKG_NAME").map_or_else(|_| test.to_owned(), |package| format!("{package} {test}"));
    let line = Line { capability, reason: reason.replace(['\n', '\t'], " "), test };
    Required::from_environment()?.check(line.capability, &line.test, &line.reason)?;
    // A property reports in each of its cases.
    static SAID: Mutex<BTreeSet<Line>> = Mutex::new(BTreeSet::new());
    if !SAID.lock().is_ok_and(|mut said| said.insert(line.clone())) {
        return Ok(());
    }
    let mut errors = std::io::stderr().lock();
    // If standard error is closed, nobody reads the line.
    let _ = writeln!(errors, "NOT RUN: {}: needs {}: {}", line.test, capability.name(), line.reason);
    if let Err(problem) = keep(&folder(&workspace::root()), &line) {
        let _ = writeln!(errors, "NOT RUN: and it will not be counted: {problem}");
    }
    Ok(())
}

/// Writes a line into the folder, once.
fn keep(folder: &Path, line: &Line) -> Result<(), String> {
    let mut hasher = DefaultHasher::new();
    line.hash(&mut hasher);
    let text = format!("{}\t{}\t{}", line.capability.name(), line.reason, line.test);
    let write = || {
        std::fs::create_dir_all(folder)?;
        std::fs::write(folder.join(format!("{:016x}", hasher.finish())), text)
    };
    write().map_err(|error: std::io::Error| format!("{}: {error}", folder.display()))
}

/// Forgets the reports of earlier runs.
///
/// # Errors
/// The folder could not be removed.
pub fn clear(root: &Path) -> Result<(), String> {
    let folder = folder(root);
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {error}", folder.display())),
        _ => Ok(()),
    }
}

/// The reports since the last [`clear`], in order.
pub fn lines(root: &Path) -> Vec<Line> {
    read(&folder(root))
}

fn read(folder: &Path) -> Vec<Line> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let texts = entries.filter_map(|entry| std::fs::read_to_string(entry.path()).ok());
    let line = |text: String| {
        let mut parts = text.splitn(3, '\t');
        let capability = Capability::named(parts.next()?).ok()?;
        Some(Line { capability, reason: parts.next()?.to_owned(), test: parts.next()?.to_owned() })
    };
    let mut lines: Vec<Line> = texts.filter_map(line).collect();
    lines.sort();
    lines
}

/// What did not run and why, by capability and reason, with counts. Empty if everything ran.
pub fn summary(lines: &[Line]) -> String {
    let mut groups: BTreeMap<Capability, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
    for line in lines {
        groups.entry(line.capability).or_default().entry(&line.reason).or_default().push(&line.test);
    }
    let mut text = String::new();
    // Writing to a String cannot fail.
    for (capability, reasons) in groups {
        let count: usize = reasons.values().map(Vec::len).sum();
        let _ = writeln!(
            text,
            "NOT RUN: {count} × {}, without {}; {}",
            capability.name(),
            capability.what(),
            capability.how()
        );
        for (reason, tests) in reasons {
            let _ = writeln!(text, "  {} × {reason}\n      {}", tests.len(), tests.join(", "));
        }
    }
    text
}

fn folder(root: &Path) -> PathBuf {
    kernels::target(root).join("not-run")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn line(capability: Capability, reason: &str, test: &str) -> Line {
        Line { capability, reason: reason.into(), test: test.into() }
    }

    #[test]
    fn a_required_capability_turns_a_report_into_a_failure() {
        let required = Required::parse("cxx, tsan").unwrap();
        let problem = required.check(Capability::Tsan, "device races", "cannot find -ltsan").unwrap_err();
        assert_eq!(
            problem,
            "device races needs tsan (the thread sanitizer of the C++ compiler), which QUIRE_REQUIRE requires: cannot find -ltsan; install g++ with libtsan (Debian: g++)"
        );
        assert_eq!(required.check(Capability::Asan, "device races", "cannot find -lasan"), Ok(()));
        for capability in Capability::ALL {
            assert!(Required::parse("all").unwrap().check(capability, "a", "b").is_err());
            assert!(Required::parse("").unwrap().check(capability, "a", "b").is_ok());
        }
    }

    #[test]
    fn an_unknown_requirement_is_an_error_that_suggests_a_name() {
        let problem = Required::parse("cxx,asam").unwrap_err();
        assert!(
            problem.starts_with("QUIRE_REQUIRE: found no capability \"asam\"; did you mean \"asan\"?"),
            "{problem}"
        );
    }

    #[test]
    fn the_environment_of_this_run_requires_capabilities_that_exist() {
        assert_eq!(Required::from_environment().err(), None);
    }

    #[test]
    fn reports_are_kept_once_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) =
            (line(Capability::Cxx, "found none", "device one"), line(Capability::Cxx, "found none", "device two"));
        for line in [&b, &a, &a] {
            keep(folder.path(), line).unwrap();
        }
        assert_eq!(read(folder.path()), [a, b]);
    }

    #[test]
    fn the_summary_counts_by_capability_and_reason() {
        assert_eq!(summary(&[]), "");
        let lines = [
            line(Capability::Cxx, "found none", "device one"),
            line(Capability::Cxx, "found none", "engine two"),
            line(Capability::Cxx, "it crashed", "device three"),
            line(Capability::Python3, "found none", "xtask four"),
        ];
        assert_eq!(
            summary(&lines),
            "NOT RUN: 3 × cxx, without a C++ compiler; install g++ or clang++, or name one in CXX\n  \
             2 × found none\n      device one, engine two\n  1 × it crashed\n      device three\n\
             NOT RUN: 1 × python3, without Python 3; install python3\n  1 × found none\n      xtask four\n"
        );
    }

    #[test]
    fn what_cannot_run_is_kept_for_the_summary() {
        // A reason of its own: no other test reports it.
        let reason = format!("this test of reports, process {}", std::process::id());
        if Required::from_environment().unwrap().has(Capability::AnyDevice) {
            return assert!(check(Capability::AnyDevice, &reason).unwrap_err().contains(&reason));
        }
        report(Capability::AnyDevice, &reason);
        let root = workspace::root();
        let found = lines(&root).into_iter().find(|line| line.reason == reason);
        let found = found.unwrap_or_else(|| panic!("{:?}", lines(&root)));
        assert!(found.test.ends_with("what_cannot_run_is_kept_for_the_summary"), "{found:?}");
        // It did run.
        for entry in std::fs::read_dir(folder(&root)).unwrap().flatten() {
            if std::fs::read_to_string(entry.path()).is_ok_and(|text| text.contains(&reason)) {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
    }
}
