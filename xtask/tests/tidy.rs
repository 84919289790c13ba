//! The workspace keeps the rules of its house; what fails here is printed with how to mend it.

use testkit::workspace;
use xtask::tidy::Tree;

#[test]
fn the_workspace_is_tidy() {
    let findings: Vec<String> =
        Tree::read(&workspace::root()).unwrap().findings().iter().map(ToString::to_string).collect();
    assert!(findings.is_empty(), "{} things to mend:\n{}", findings.len(), findings.join("\n"));
}

#[test]
fn the_tree_that_is_checked_is_the_whole_workspace() {
    let tree = Tree::read(&workspace::root()).unwrap();
    for path in [
        "Cargo.toml",
        "kvblock/src/lib.rs",
        "cli/src/main.rs",
        "xtask/tests/tidy.rs",
        ".ci/run",
        "docs/configuration.md",
    ] {
        assert!(tree.files.iter().any(|file| file.path == path), "{path} was not read");
    }
}
