//! Rules for pages: lengths, tables, links, names of tests and variables.

use super::messages;

#[test]
fn the_crate_table_names_exactly_the_crates() {
    let check = |text: &str| {
        let files = [("README.md", text), ("kvblock/src/lib.rs", ""), ("docs/a.md", "")];
        messages(&files, &["no row for", "no such folder"])
    };
    assert_eq!(
        check("| `kvblock/` | a |\n| `sched/` | b |\n"),
        ["README.md:2: found `sched/` in a table, but no such folder; correct or remove the row"]
    );
    assert_eq!(check("| `kvblock/` | a |\n| `docs/` | b |\n").len(), 1, "sched has no row");
    assert_eq!(check("| feature | x |\n| `sched` | `kvblock/` |\n").len(), 2);
    assert_eq!(check("| `kvblock/`, `docs/` | a |\n").len(), 1, "a row may name several folders");
}

#[test]
fn a_readme_that_is_too_long_is_found() {
    assert_eq!(messages(&[("README.md", &"\n".repeat(121))], &["found 121 lines"]).len(), 1);
    assert_eq!(messages(&[("README.md", &"\n".repeat(120))], &["lines, expected"]), [""; 0]);
}

#[test]
fn the_docs_of_a_crate_have_an_example() {
    let lib = |text: &str| messages(&[("kvblock/src/lib.rs", text)], &["kvblock/src/lib.rs: found no example"]).len();
    assert_eq!(lib("//! A.\n//! ```\n//! a::b();\n//! ```\n"), 0);
    assert_eq!(lib("//! ```text\n//! picture\n//! ```\n//! ```no_run\n//! a();\n//! ```\n"), 0);
    assert_eq!(lib("//! ```text\n//! picture\n//! ```\n"), 1);
    assert_eq!(lib("//! ```ignore\n//! a();\n//! ```\n"), 1);
}

#[test]
fn paths_of_one_machine_are_found() {
    let lines = |text: &str| messages(&[("a.md", text)], &["of one machine"]).len();
    let path = |folder: &str| format!("/{folder}/x");
    assert_eq!(lines(&format!("see {}\n\"{}\"\n", path("home"), path("root"))), 2);
    assert_eq!(lines(&format!("https://a.example{} and art{}\n", path("home"), path("work"))), 0);
}

#[test]
fn links_lead_to_files_and_folders() {
    let text = "[a](b.md) [c](../x/y.rs#z) [d](https://e.example) [f](#g) [h](../x) [i](gone.md)";
    let found = messages(&[("docs/a.md", text), ("docs/b.md", ""), ("x/y.rs", "")], &["link"]);
    assert_eq!(found, ["docs/a.md:1: found a link to gone.md, which does not exist; correct the link"]);
}

#[test]
fn tests_and_the_table_of_ids_are_compared_both_ways() {
    let code = "#[test]\nfn b1_cold_warm() {}\n#[test]\nfn b10_two_duplicates() {}\nfn b2_of_a(b: u8) {}\n";
    let check = |page: &str| messages(&[("kvblock/tests/a.rs", code), ("docs/routers.md", page)], &["the test `"]);
    assert_eq!(check("| b1 | a | `b1_cold_warm` |\n| b10 | b | `b10_two_duplicates`, `kvblock` |\n"), [""; 0]);
    assert_eq!(
        check("| b1 | a | `b1_cold_worm` |\n| b10 | `b10_two_duplicate` | `b10_two_duplicates` |\n"),
        [
            "docs/routers.md: found the test `b1_cold_warm` in the code, but in no table; add it to the row of its id",
            "docs/routers.md:1: found the test `b1_cold_worm`, which does not exist; correct the name or remove it"
        ]
    );
}

#[test]
fn the_status_table_of_the_readme_names_tests_that_exist() {
    let readme = "| feature | `max_num_seqs` | test |\n| a | yes | `a_is_so` |\n| b | yes | `b_is_so` |\n| `kvblock/` | `num_blocks` |\n";
    let found = messages(
        &[("kvblock/tests/a.rs", "#[test]\nfn a_is_so() {}\nfn b_is_so() {}"), ("README.md", readme)],
        &["the test `"],
    );
    assert_eq!(found, ["README.md:3: found the test `b_is_so`, which does not exist; correct the name or remove it"]);
}

#[test]
fn the_configuration_page_lists_exactly_the_variables_of_the_code() {
    let code = "env(\"QUIRE_LOG\"); \"QUIRE_x\"; \"a QUIRE_B\"; #[arg(long, env = \"QUIRE_PORT\")]";
    let check = |page: &str| {
        let files = [("cli/src/log.rs", code), ("xtask/src/a.rs", "\"QUIRE_OWN\""), ("docs/configuration.md", page)];
        messages(&files, &["the variable"])
    };
    assert_eq!(check("| `--port` | `QUIRE_PORT` | |\n| `QUIRE_LOG` | warn |\n"), [""; 0]);
    let found = check("| `--port` | `QUIRE_PORT` | |\n| `QUIRE_LOGS` | warn |\n");
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("found the variable `QUIRE_LOG` in the code"), "{found:?}");
    assert!(found[1].starts_with("docs/configuration.md:2: found the variable `QUIRE_LOGS`, which"), "{found:?}");
}
