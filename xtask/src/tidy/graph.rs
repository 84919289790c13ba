//! The crate graph is the one that the crate table of ARCHITECTURE.md shows.
//!
//! The last column of the table is compared with `cargo metadata` in both directions: it names crates in backticks, or says "all of
//! the above". `testkit` is a dependency of tests and of `xtask` only, and no crate depends on `xtask`.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;
use testkit::markdown;

use super::{File, Finding, Tree};
use crate::cargo;

const PAGE: &str = "ARCHITECTURE.md";
/// The table as a picture, without the Python package and the crates that only tests and developers use.
const DIAGRAM: &str = "docs/diagrams/crates.svg";

/// A crate of the workspace, as `cargo metadata` describes it. Its folder has its name.
#[derive(Clone, Debug, Deserialize)]
pub struct Package {
    /// Name of the crate.
    pub name: String,
    /// What its manifest lists, for every target and kind.
    pub dependencies: Vec<Dependency>,
}

/// One entry of a manifest's dependency tables.
#[derive(Clone, Debug, Deserialize)]
pub struct Dependency {
    /// Name of the crate.
    pub name: String,
    /// `None` for a normal dependency, else `"dev"` or `"build"`.
    pub kind: Option<String>,
}

/// Returns the crates of the workspace.
pub(crate) fn packages(root: &Path) -> Result<Vec<Package>, String> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let text = cargo::run(root, &["metadata", "--no-deps", "--offline", "--format-version", "1"])?;
    let read: Result<Metadata, _> = serde_json::from_str(&text);
    read.map(|metadata| metadata.packages).map_err(|error| format!("cargo metadata: {error}"))
}

/// A row of the crate table.
struct Row<'a> {
    /// Index of its line.
    index: usize,
    name: &'a str,
    uses: Vec<&'a str>,
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings: Vec<Finding> = tree.packages.iter().flat_map(test_crates).collect();
    // `docs` reports a missing page and missing rows.
    let Some(page) = tree.get(PAGE) else { return findings };
    let table = table(page, &tree.crates());
    for (position, row) in table.iter().enumerate() {
        let name = row.name;
        let found: Vec<&str> = normal(tree.packages.iter().filter(|package| package.name == name)).collect();
        for used in row.uses.iter().filter(|used| !table[..position].iter().any(|above| above.name == **used)) {
            findings.push(page.at(
                row.index,
                format!(
                    "found {used} in the row of {name}, but not above it; reverse the dependency or reorder the rows"
                ),
            ));
        }
        for used in row.uses.iter().filter(|used| !found.contains(used)) {
            findings.push(page.at(
                row.index,
                format!("found {used} in the row of {name}, which does not depend on it; remove it from the row"),
            ));
        }
        for used in found.iter().filter(|used| tree.crates().contains(used) && !row.uses.contains(used)) {
            findings.push(manifest(
                name,
                format!("found a dependency on {used}, which {PAGE} does not show; remove it, or add it to the row of {name}"),
            ));
        }
    }
    findings.extend(diagram(tree, &table));
    findings
}

/// Differences between the table and the diagram, in which Graphviz writes an edge as the title `a&#45;&gt;b`.
fn diagram(tree: &Tree, table: &[Row<'_>]) -> Option<Finding> {
    let svg = tree.get(DIAGRAM)?;
    let product = table.iter().filter(|row| !["python", "testkit", "xtask"].contains(&row.name));
    let edges = product.flat_map(|row| row.uses.iter().map(|used| format!("{}->{used}", row.name)));
    let expected: BTreeSet<String> = edges.collect();
    let text = svg.text.replace("&#45;", "-").replace("&gt;", ">");
    let titles = text.split("<title>").filter_map(|rest| rest.split_once("</title>").map(|(title, _)| title));
    let found: BTreeSet<String> = titles.filter(|title| title.contains("->")).map(str::to_string).collect();
    let different = found.symmetric_difference(&expected).next()?;
    Some(svg.at(0, format!("found another set of edges than in {PAGE}, different in {different}; change crates.dot and run cargo xtask docs")))
}

/// Names of the crates that these packages depend on outside of their tests.
fn normal<'a>(packages: impl Iterator<Item = &'a Package>) -> impl Iterator<Item = &'a str> {
    let dependencies = packages.flat_map(|package| &package.dependencies);
    dependencies.filter(|used| used.kind.as_deref() != Some("dev")).map(|used| used.name.as_str())
}

/// What is wrong with a package's dependencies on the crates that are not part of the product.
fn test_crates(package: &Package) -> Vec<Finding> {
    let mut findings = Vec::new();
    if package.dependencies.iter().any(|used| used.name == "xtask") {
        findings.push(manifest(
            &package.name,
            "found a dependency on xtask; nothing may depend on it: move what is shared to testkit".into(),
        ));
    }
    if package.name != "xtask" && normal(std::iter::once(package)).any(|used| used == "testkit") {
        findings.push(manifest(
            &package.name,
            "found testkit under [dependencies], expected it under [dev-dependencies] only; move it there".into(),
        ));
    }
    findings
}

fn manifest(name: &str, message: String) -> Finding {
    Finding { path: format!("{name}/Cargo.toml"), line: None, message }
}

fn table<'a>(page: &'a File, crates: &[&str]) -> Vec<Row<'a>> {
    let mut table: Vec<Row<'a>> = Vec::new();
    for row in markdown::rows(&page.text) {
        let Some(name) =
            row.code(0).next().and_then(|folder| folder.strip_suffix('/')).filter(|name| crates.contains(name))
        else {
            continue;
        };
        let uses = match row.cells.last() {
            Some(cell) if cell.contains("all of the above") => table.iter().map(|above| above.name).collect(),
            _ => row.code(row.cells.len() - 1).filter(|name| crates.contains(name)).collect(),
        };
        table.push(Row { index: row.index, name, uses });
    }
    table
}
