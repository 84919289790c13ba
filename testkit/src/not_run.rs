//! Tests that cannot run on this machine: reported at once, counted at the end of a CI run, and failures if `QUIRE_REQUIRE` says so.
//!
//! The test harness hides what a passing test prints. So a report goes directly to standard error, and to a file under
//! `target/not-run/` that the [`summary`] of CI counts. `QUIRE_REQUIRE` is a list of names of [`Capability`], separated by commas, or
//! `all`: a test that reports one of them fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::capability::Capability;
use crate::{at, kernels, workspace};

/// Name of the environment variable that lists the required capabilities.
pub const REQUIRE: &str = "QUIRE_REQUIRE";

/// Capabilities whose absence is a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Required(Vec<Capability>);

impl Required {
    /// Reads names separated by commas, or `all`. An empty text requires nothing.
    ///
    /// # Errors
    /// A name is unknown; suggests the nearest one.
    pub fn parse(text: &str) -> Result<Required, String> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let read = |name| match name {
            "all" => Ok(Capability::ALL.to_vec()),
            _ => Capability::named(name).map(|one| vec![one]).map_err(|problem| format!("{REQUIRE}: {problem}")),
        };
        Ok(Required(names.map(read).collect::<Result<Vec<_>, _>>()?.concat()))
    }

    /// Reads the environment of this process.
    ///
    /// # Errors
    /// The errors of [`Required::parse`].
    pub fn from_environment() -> Result<Required, String> {
        Required::parse(&std::env::var(REQUIRE).unwrap_or_default())
    }

    /// Returns whether a report of this capability is a failure.
    pub fn has(&self, capability: Capability) -> bool {
        self.0.contains(&capability)
    }

    /// Checks that this report is not a failure.
    ///
    /// # Errors
    /// The capability is required; names the test, the reason and how to get the capability.
    pub fn check(&self, report: &Report) -> Result<(), String> {
        let Report { capability, reason, test } = report;
        if !self.has(*capability) {
            return Ok(());
        }
        let (name, what, how) = (capability.name(), capability.what(), capability.how());
        Err(format!("{test} needs {name} ({what}), which {REQUIRE} requires: {reason}; {how}"))
    }

    /// Reports what the calling test, or a step of CI, lacks.
    ///
    /// # Errors
    /// The capability is required.
    pub fn report(&self, capability: Capability, reason: &str) -> Result<(), String> {
        let reason = reason.replace(['\n', '\t'], " ");
        let report = Report { capability, reason, test: reporter(capability) };
        self.check(&report)?;
        print(&report);
        Ok(())
    }
}

/// A test, or part of a test, that did not run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Report {
    /// What the machine lacks.
    pub capability: Capability,
    /// What was looked for and not found.
    pub reason: String,
    /// Package and name of the test.
    pub test: String,
}

/// Reports that the calling test, or a part of it, cannot run here. The line begins with `NOT RUN:`.
///
/// # Panics
/// If `QUIRE_REQUIRE` names the capability, or a capability that does not exist: the test fails.
pub fn report(capability: Capability, reason: &str) {
    if let Err(problem) = check(capability, reason) {
        panic!("{problem}");
    }
}

/// Does what [`report`] does, for programs that are not tests.
///
/// # Errors
/// `QUIRE_REQUIRE` names the capability, or one that does not exist.
pub fn check(capability: Capability, reason: &str) -> Result<(), String> {
    Required::from_environment()?.report(capability, reason)
}

/// Returns what reports name as the test. One line for each program says that the machine lacks a device: its tests run on the others.
fn reporter(capability: Capability) -> String {
    // The harness runs each test on a thread with the name of the test. Cargo sets the name of the package.
    let thread = std::thread::current();
    let test = if capability.is_device() { None } else { Some(thread.name().unwrap_or("a test")) };
    let words: Vec<String> = std::env::var("CARGO_PKG_NAME").into_iter().chain(test.map(str::to_owned)).collect();
    words.join(" ")
}

/// Prints and keeps a report, once in each program.
fn print(report: &Report) {
    // A property test reports in each of its cases.
    static PRINTED: Mutex<BTreeSet<Report>> = Mutex::new(BTreeSet::new());
    if !PRINTED.lock().is_ok_and(|mut printed| printed.insert(report.clone())) {
        return;
    }
    let mut errors = std::io::stderr().lock();
    // If standard error is closed, nobody reads the line.
    let _ = writeln!(errors, "NOT RUN: {}: needs {}: {}", report.test, report.capability.name(), report.reason);
    if let Err(problem) = keep(&folder(&workspace::root()), report) {
        let _ = writeln!(errors, "NOT RUN: this report cannot be counted: {problem}");
    }
}

/// Writes a report to a file in the folder. Equal reports have the same file.
fn keep(folder: &Path, report: &Report) -> Result<(), String> {
    let mut hasher = DefaultHasher::new();
    report.hash(&mut hasher);
    let text = format!("{}\t{}\t{}", report.capability.name(), report.reason, report.test);
    std::fs::create_dir_all(folder).map_err(at(folder))?;
    std::fs::write(folder.join(format!("{:016x}", hasher.finish())), text).map_err(at(folder))
}

/// Deletes the reports of earlier runs.
///
/// # Errors
/// The folder cannot be removed.
pub fn clear(root: &Path) -> Result<(), String> {
    let folder = folder(root);
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(at(&folder)(error)),
        _ => Ok(()),
    }
}

/// Returns the reports since the last [`clear`], sorted.
pub fn reports(root: &Path) -> Vec<Report> {
    let entries = std::fs::read_dir(folder(root)).into_iter().flatten().flatten();
    let texts = entries.filter_map(|entry| std::fs::read_to_string(entry.path()).ok());
    let report = |text: String| {
        let mut parts = text.splitn(3, '\t');
        let capability = Capability::named(parts.next()?).ok()?;
        Some(Report { capability, reason: parts.next()?.to_owned(), test: parts.next()?.to_owned() })
    };
    let mut reports: Vec<Report> = texts.filter_map(report).collect();
    reports.sort();
    reports
}

/// Returns the reports as text, grouped and counted by capability and reason; empty if there are none.
pub fn summary(reports: &[Report]) -> String {
    let mut groups: BTreeMap<Capability, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
    for report in reports {
        groups.entry(report.capability).or_default().entry(&report.reason).or_default().push(&report.test);
    }
    let mut text = String::new();
    // Writing to a String cannot fail.
    for (capability, reasons) in groups {
        let count: usize = reasons.values().map(Vec::len).sum();
        let (name, what, how) = (capability.name(), capability.what(), capability.how());
        let _ = writeln!(text, "NOT RUN: {count} × {name}, without {what}; {how}");
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

    #[test]
    fn a_missing_device_is_one_report_for_a_program_and_anything_else_one_for_each_test() {
        assert_eq!([Capability::Cuda, Capability::Neon, Capability::Avx512].map(reporter), ["testkit"; 3]);
        let test =
            "testkit not_run::tests::a_missing_device_is_one_report_for_a_program_and_anything_else_one_for_each_test";
        assert_eq!([Capability::Cxx, Capability::Nvcc].map(reporter), [test; 2]);
    }

    #[test]
    fn equal_reports_have_one_file() {
        let folder = tempfile::tempdir().unwrap();
        for test in ["device one", "device one", "device two"] {
            let report = Report { capability: Capability::Cxx, reason: "found none".into(), test: test.into() };
            keep(folder.path(), &report).unwrap();
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
