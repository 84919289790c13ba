//! Tables that name the test behind a claim name tests that exist: the status tables of the README and of `docs/status.md`, and
//! `docs/routers.md`, which names every test whose name begins with one of its ids.
//!
//! Tidy compares them with the sources, `cargo xtask test-names` with the test programs.

use std::collections::BTreeSet;

use testkit::markdown::{self, Row};

use super::skips::Function;
use super::{File, Finding, Tree};

/// The page of tests by id.
const ROUTERS: &str = "docs/routers.md";

pub(super) fn check(tree: &Tree, functions: &[Function<'_>]) -> Vec<Finding> {
    against(tree, &functions.iter().filter(|function| function.is_test).map(|function| &*function.name).collect())
}

/// Compares the pages with the names of all tests.
pub(super) fn against(tree: &Tree, tests: &BTreeSet<&str>) -> Vec<Finding> {
    // `docs` reports a missing README.
    let status = ["README.md", "docs/status.md"].into_iter().filter_map(|page| tree.get(page));
    let mut findings: Vec<Finding> =
        status.flat_map(|page| gone(page, &listed(page, |row| row.cells.len() - 1), tests)).collect();
    let routers = match tree.require(ROUTERS) {
        Ok(page) => page,
        Err(missing) => return [findings, vec![missing]].concat(),
    };
    let listed = listed(routers, |_| 2);
    findings.extend(gone(routers, &listed, tests));
    let missing = tests.iter().filter(|name| has_id(name) && !listed.iter().any(|(_, listed)| listed == *name));
    findings.extend(missing.map(|name| {
        routers.finding(format!("found the test `{name}` in the code, but in no table; add it to the row of its id"))
    }));
    findings
}

/// Returns a finding for each name in a page's tables that no test has.
fn gone(page: &File, listed: &[(usize, &str)], tests: &BTreeSet<&str>) -> Vec<Finding> {
    let gone = listed.iter().filter(|(_, name)| !tests.contains(*name));
    gone.map(|(index, name)| {
        page.at(*index, format!("found the test `{name}`, which does not exist; correct the name or remove it"))
    })
    .collect()
}

/// Returns the tests that one column of a page's tables names, with the indices of their lines.
fn listed(page: &File, column: impl Fn(&Row<'_>) -> usize) -> Vec<(usize, &str)> {
    let rows = markdown::rows(&page.text);
    let named = rows.iter().flat_map(|row| row.code(column(row)).map(move |name| (row.index, name)));
    named.filter(|(_, name)| is_test_name(name)).collect()
}

/// Returns whether a text is a sentence in snake case: three words or more.
fn is_test_name(text: &str) -> bool {
    text.matches('_').count() > 1 && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Returns whether a name begins with an id of [`ROUTERS`]: `b1_`, `b38_`.
fn has_id(name: &str) -> bool {
    let number = name.split('_').next().and_then(|id| id.strip_prefix('b')).unwrap_or_default();
    !number.is_empty() && number.chars().all(|c| c.is_ascii_digit())
}
