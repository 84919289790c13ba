//! `cargo xtask test-names`: the tests that the sources and the pages name are in the test programs.
//!
//! A test that no program has never runs and never fails: one in a file without a `mod`, or in a library with `test = false`. The
//! programs themselves say what they have (`--list`), so this needs them built; `cargo xtask ci` runs it after the tests.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::cargo;
use crate::tidy::{self, Tree};

/// Compares the tree under `root` with the lists of its test programs.
///
/// # Errors
/// They do not build or start, or a test is missing; each is printed.
pub fn run(root: &Path) -> Result<(), String> {
    let mut tests = BTreeSet::new();
    for program in cargo::test_programs(root, &["--workspace"])? {
        let output = Command::new(&program.file).args(["--list", "--format", "terse"]).output();
        let output = output.map_err(|error| format!("{}: {error}", program.file.display()))?;
        let listed = String::from_utf8_lossy(&output.stdout);
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test")?.rsplit("::").next());
        tests.extend(names.map(|name| (program.package.clone(), name.to_owned())));
    }
    let tree = Tree::read(root)?;
    tidy::print(&tree.findings_about_tests(&tests))?;
    println!("test-names: {} names of tests, no findings", tests.len());
    Ok(())
}
