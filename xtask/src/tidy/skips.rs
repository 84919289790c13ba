//! No test skips silently: a test, or a function of tests that checks something, that may end early, or one that asks for something a machine may lack, reports what it leaves out.
//!
//! A function of a test *reports* if it names [`testkit::not_run`], or calls a function of the tests that does. The call graph is
//! by name, which is coarse, but finds a skip without any report. Code that `cfg` removes on a platform is not a skip there.

use std::collections::HashSet;

use proc_macro2::{TokenStream, TokenTree};

use super::tokens::{self, body, ends_item, ident, is_attribute, is_ident};
use super::{File, Finding, Tree};

/// What ends a test early, as [`tokens::code`] writes it.
const ENDS: [&str; 6] = ["return;", "return,", "return}", "return println!", "return eprintln!", "return Ok(())"];
/// How functions begin that tests call to check something.
const CHECKS: [&str; 3] = ["check", "assert", "compare"];
/// What asks whether a machine has something.
const PROBES: [&str; 6] = [
    "is_x86_feature_detected!",
    "is_aarch64_feature_detected!",
    ".is_available()",
    "on_path(",
    "host::compiler(",
    "toolkit::find(",
];
/// The module that reports.
const REPORT: &str = "not_run";
/// The only file that prints [`WORDS`].
const PLACE: &str = "testkit/src/not_run.rs";
const WORDS: &str = concat!("NOT ", "RUN");
/// Included by the tests of several crates with `#[path]`.
const SHARED: [&str; 3] = ["device/tests/support/", "device/tests/backends/fixture.rs", "simd/tests/support/"];

/// A function of a test program, or one of a library that is named for tests.
pub(super) struct Function<'a> {
    pub(super) file: &'a File,
    /// Index of the line with its name.
    pub(super) index: usize,
    pub(super) name: String,
    /// Whether it has `#[test]`.
    pub(super) is_test: bool,
    /// Whether it has a `#[cfg]` of its own.
    pub(super) is_conditional: bool,
    /// Whether it is part of a test program.
    in_tests: bool,
    /// Its body, as [`tokens::code`] writes it.
    code: String,
}

impl Function<'_> {
    /// Returns its name and the crate that can call it; "" if all crates can.
    fn key(&self) -> (&str, &str) {
        let is_shared = !self.in_tests || SHARED.iter().any(|shared| self.file.path.starts_with(shared));
        (if is_shared { "" } else { self.file.top() }, &self.name)
    }
}

/// Returns the functions of test programs, and those of libraries that are named for tests.
pub(super) fn functions(tree: &Tree) -> Vec<Function<'_>> {
    let mut functions = Vec::new();
    for file in tree.files.iter().filter(|file| file.is_rust()) {
        let in_tests = !file.is_source() || file.text.contains("#![cfg(test)]");
        add_functions(file, tokens::read(file), in_tests, &mut functions);
    }
    functions
}

pub(super) fn check(tree: &Tree, functions: &[Function<'_>]) -> Vec<Finding> {
    let files = || tree.files.iter().filter(|file| file.is_rust());
    let reporting = reporting(functions);
    let mut findings: Vec<Finding> = files().flat_map(printed).collect();
    for function in functions.iter().filter(|function| function.in_tests && !reporting.contains(&function.key())) {
        let name = &function.name;
        let finding = |message: String| function.file.at(function.index, message);
        let checks = function.is_test || CHECKS.iter().any(|check| name.starts_with(check));
        if let Some(end) = ENDS.into_iter().find(|end| checks && function.code.contains(end)) {
            findings.push(finding(format!(
                "found `{end}` in {name}, expected a report of what it skips; call testkit::not_run::report, or let it fail"
            )));
        }
        if let Some(probe) = PROBES.into_iter().find(|probe| function.code.contains(probe)) {
            findings.push(finding(format!(
                "found `{probe}` in {name}, expected a report if the answer is no; call testkit::not_run::report"
            )));
        }
    }
    findings
}

/// Lines that print [`WORDS`] without the report, and ignored tests that no other test starts.
fn printed(file: &File) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        if file.path != PLACE
            && ["print!(", "println!(", "writeln!("].iter().any(|call| line.contains(call))
            && line.contains(WORDS)
        {
            findings.push(file.at(
                index,
                format!("found a line that prints {WORDS} and is not counted; call testkit::not_run::report instead"),
            ));
        }
        let attribute = line.trim();
        if attribute.starts_with("#[ignore") && !attribute.starts_with("#[ignore = \"only ") {
            findings.push(file.at(
                index,
                "found an ignored test, which is a skip that is not counted; report what it needs, or write `#[ignore = \"only …\"]` and start it from another test",
            ));
        }
    }
    findings
}

/// Returns the keys of the functions that lead to a report.
fn reporting<'a>(functions: &'a [Function<'_>]) -> HashSet<(&'a str, &'a str)> {
    let (direct, others): (Vec<_>, Vec<_>) = functions.iter().partition(|function| function.code.contains(REPORT));
    let mut known: HashSet<(&str, &str)> = direct.into_iter().map(Function::key).collect();
    let calls = |function: &'a Function<'_>| called(&function.code).filter(|name| *name != function.name).collect();
    let mut others: Vec<(&Function<'_>, Vec<&str>)> = others.into_iter().map(|other| (other, calls(other))).collect();
    loop {
        let before = known.len();
        others.retain(|(function, names)| {
            let scopes = ["", function.file.top()];
            let leads = names.iter().any(|name| scopes.iter().any(|scope| known.contains(&(*scope, *name))));
            if leads {
                known.insert(function.key());
            }
            !leads
        });
        if known.len() == before {
            return known;
        }
    }
}

/// Adds the functions that tests may call; `in_tests` says whether the tokens are part of a test program.
fn add_functions<'a>(file: &'a File, tokens: TokenStream, in_tests: bool, found: &mut Vec<Function<'a>>) {
    let (mut is_test, mut is_for_tests, mut is_conditional) = (false, false, false);
    let mut trees = tokens.into_iter();
    while let Some(tree) = trees.next() {
        is_test |= is_attribute(&tree, "test");
        is_for_tests |= is_attribute(&tree, "cfg(test)");
        is_conditional |= tokens::has_attribute_name(&tree, "cfg");
        let in_tests = in_tests || is_for_tests;
        if is_ident(&tree, "fn") {
            // A function pointer has no name.
            let Some((name, index)) = trees.next().and_then(|tree| Some((ident(&tree)?, tree.span().start().line - 1)))
            else {
                continue;
            };
            let body = trees.by_ref().find(ends_item).as_ref().and_then(body).unwrap_or_default();
            if in_tests || name.ends_with("for_tests") {
                let code = tokens::code(body);
                found.push(Function { file, index, name, is_test, is_conditional, in_tests, code });
            }
            (is_test, is_for_tests, is_conditional) = (false, false, false);
        } else if let TokenTree::Group(group) = &tree {
            add_functions(file, group.stream(), in_tests, found);
        }
        if ends_item(&tree) {
            (is_test, is_for_tests, is_conditional) = (false, false, false);
        }
    }
}

/// Returns the names before opening parentheses, except those of the probes: functions of tests have the same names.
fn called(code: &str) -> impl Iterator<Item = &str> {
    let before = code.match_indices('(').map(|(at, _)| &code[..at]);
    let calls =
        before.filter(|before| !PROBES.iter().any(|probe| before.ends_with(probe.trim_end_matches(['(', ')']))));
    calls.filter_map(|before| before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next())
}
