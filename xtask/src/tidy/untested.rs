//! Every test is part of a test program: none is in a target with `test = false`, and, as the programs themselves say, none is in a
//! file that no `mod` names.

use std::collections::BTreeSet;

use super::skips::{self, Function};
use super::{Finding, Tree};

pub(super) fn check(tree: &Tree, functions: &[Function<'_>]) -> Vec<Finding> {
    let manifests = tree.files.iter().filter(|file| has_target_without_tests(&file.text));
    let folders: BTreeSet<String> = manifests
        .filter_map(|file| file.path.strip_suffix("Cargo.toml").map(|folder| format!("{folder}src/")))
        .collect();
    let tests = functions.iter().filter(|function| function.is_test);
    let lost = tests.filter(|test| folders.iter().any(|folder| test.file.path.starts_with(folder)));
    lost.map(|test| {
        let name = &test.name;
        test.file.at(
            test.index,
            format!("found the test {name} in a target with `test = false`, which never runs it; move it to tests/"),
        )
    })
    .collect()
}

/// Returns whether a manifest has `test = false` for its library or a binary.
fn has_target_without_tests(manifest: &str) -> bool {
    let mut section = "";
    manifest.lines().map(str::trim).any(|line| {
        if line.starts_with('[') {
            section = line;
        }
        line == "test = false" && ["[lib]", "[[bin]]"].contains(&section)
    })
}

/// Returns a finding for each test of the workspace's crates that is not among `tests`: their packages and names.
pub(super) fn unlisted(tree: &Tree, tests: &BTreeSet<(String, String)>) -> Vec<Finding> {
    let crates = tree.crates();
    let functions = skips::functions(tree);
    // Tests with a `cfg` of their own are for other machines.
    let own = functions.iter().filter(|function| function.is_test && !function.is_conditional);
    let own = own.filter(|function| crates.contains(&function.file.top()));
    let lost = own.filter(|test| !tests.contains(&(test.file.top().to_owned(), test.name.clone())));
    lost.map(|test| {
        let message = format!(
            "found the test {} in no test program; name its file in a `mod`, or let its target run tests",
            test.name
        );
        test.file.at(test.index, message)
    })
    .collect()
}
