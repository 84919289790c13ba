//! Tests that never run.

use std::collections::BTreeSet;

use xtask::tidy::{File, Package, Tree};

use super::messages;

const CODE: &str = "fn f() {}\n#[cfg(test)]\nmod tests {\n#[test]\nfn a() {}\n}\n";

#[test]
fn a_test_in_a_target_that_runs_none_is_found() {
    let found =
        |manifest: &str, path: &str| messages(&[("kvblock/Cargo.toml", manifest), (path, CODE)], &["test = false"]);
    let library = "[lib]\nbench = false\ntest = false\n\n[[test]]\nname = \"all\"\n";
    assert_eq!(
        found(library, "kvblock/src/a.rs"),
        [
            "kvblock/src/a.rs:5: found the test a in a target with `test = false`, which never runs it; move it to tests/"
        ]
    );
    assert_eq!(found("[[bin]]\ntest = false\n", "kvblock/src/main.rs").len(), 1);
    assert_eq!(found(library, "kvblock/tests/a.rs"), [""; 0]);
    assert_eq!(found(library, "sched/src/a.rs"), [""; 0]);
    assert_eq!(found("[lib]\n\n[[bench]]\ntest = false\n", "kvblock/src/a.rs"), [""; 0]);
}

#[test]
fn a_test_that_no_program_lists_is_found_and_so_is_its_name_on_a_page() {
    let files = vec![
        File::new("kvblock/tests/a.rs", "#[test]\nfn is_listed_by_one() {}\n"),
        File::new("kvblock/tests/b.rs", "#[test]\nfn is_in_no_module() {}\n"),
        File::new("kvblock/tests/c.rs", "#[test]\n#[cfg(not(debug_assertions))]\nfn is_for_others() {}\n"),
        File::new("README.md", "| a | `is_listed_by_one` |\n| b | `is_in_no_module` |\n"),
    ];
    let packages = vec![Package { name: "kvblock".into(), dependencies: Vec::new() }];
    let tree = Tree { files, packages };
    let found = |package: &str| {
        let tests = BTreeSet::from([(package.to_owned(), "is_listed_by_one".to_owned())]);
        let found = tree.findings_about_tests(&tests).into_iter().map(|finding| finding.to_string());
        found.filter(|finding| finding.contains("found the test")).collect::<Vec<_>>()
    };
    assert_eq!(
        found("kvblock"),
        [
            "README.md:2: found the test `is_in_no_module`, which does not exist; correct the name or remove it",
            "kvblock/tests/b.rs:2: found the test is_in_no_module in no test program; name its file in a `mod`, or let its target run tests",
        ]
    );
    assert_eq!(found("sched").len(), 3, "a test of another package has the same name");
}
