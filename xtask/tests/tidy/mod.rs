//! `cargo xtask tidy`: the workspace keeps its rules, and each rule finds what it is for.

mod graph;
mod pages;
mod rust;
mod skips;
mod untested;

use testkit::workspace;
use xtask::tidy::{File, Package, Tree};

/// Returns the findings about a tree of these files that contain one of these texts.
fn messages(files: &[(&str, &str)], about: &[&str]) -> Vec<String> {
    let files = files.iter().map(|(path, text)| File::new(*path, *text)).collect();
    let packages = ["kvblock", "sched"].map(|name| Package { name: name.into(), dependencies: Vec::new() });
    about_these(&Tree { files, packages: packages.to_vec() }, about)
}

fn about_these(tree: &Tree, about: &[&str]) -> Vec<String> {
    let findings = tree.findings().into_iter().map(|finding| finding.to_string());
    findings.filter(|finding| about.iter().any(|text| finding.contains(text))).collect()
}

#[test]
fn the_workspace_is_tidy() {
    let findings = about_these(&Tree::read(&workspace::root()).unwrap(), &[""]);
    assert!(findings.is_empty(), "{} findings:\n{}", findings.len(), findings.join("\n"));
}

#[test]
fn the_tree_that_is_checked_is_the_whole_workspace() {
    let tree = Tree::read(&workspace::root()).unwrap();
    for path in [
        "Cargo.toml",
        "kvblock/src/lib.rs",
        "cli/src/main.rs",
        "xtask/tests/tidy/mod.rs",
        ".ci/run",
        "docs/configuration.md",
    ] {
        assert!(tree.files.iter().any(|file| file.path == path), "{path} was not read");
    }
    for name in ["kvblock", "testkit"] {
        assert!(tree.packages.iter().any(|package| package.name == name), "{name} was not read");
    }
    let xtask = tree.packages.iter().find(|package| package.name == "xtask").unwrap();
    assert!(xtask.dependencies.iter().any(|used| used.name == "testkit"));
}
