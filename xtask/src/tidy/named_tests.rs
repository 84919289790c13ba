//! Tables that show by which test a claim is kept name tests that exist: the status tables of the README and of
//! `docs/status.md`, `docs/scenarios.md` and `docs/pains.md`. The latter two name every test that carries one of their ids.

use testkit::markdown::{self, Row};

use super::{File, Finding, Tree};

/// A page of tests by id, and the letters with which its ids begin.
const PAGES: [(&str, [char; 2]); 2] = [("docs/scenarios.md", ['c', 's']), ("docs/pains.md", ['p', 'p'])];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    // The texts of this crate's own tests hold names that are no tests.
    let functions: Vec<&str> =
        tree.files.iter().filter(|file| file.is_rust() && file.top() != "xtask").flat_map(functions).collect();
    // That the README must exist is said where its table of crates is checked.
    let status = ["README.md", "docs/status.md"].into_iter().filter_map(|page| tree.get(page));
    let mut findings: Vec<Finding> =
        status.flat_map(|page| gone(page, &listed(page, |row| row.cells.len() - 1), &functions)).collect();
    for (path, letters) in PAGES {
        let page = match tree.require(path) {
            Ok(page) => page,
            Err(missing) => {
                findings.push(missing);
                continue;
            }
        };
        let listed = listed(page, |_| 2);
        findings.extend(gone(page, &listed, &functions));
        let missing =
            functions.iter().filter(|name| has_id(name, letters) && !listed.iter().any(|(_, listed)| listed == *name));
        findings.extend(
            missing.map(|name| page.finding(format!("the test `{name}` is missing; add it to the row of its id"))),
        );
    }
    findings
}

/// Names in a page's tables that no test has.
fn gone(page: &File, listed: &[(usize, &str)], functions: &[&str]) -> Vec<Finding> {
    let gone = listed.iter().filter(|(_, name)| !functions.contains(name));
    gone.map(|(index, name)| page.at(*index, format!("there is no test `{name}`; mend the name or remove it")))
        .collect()
}

/// The tests that one column of a page's tables names, with the index of the line.
fn listed(page: &File, column: impl Fn(&Row<'_>) -> usize) -> Vec<(usize, &str)> {
    let rows = markdown::rows(&page.text);
    let named = rows.iter().flat_map(|row| row.code(column(row)).map(move |name| (row.index, name)));
    named.filter(|(_, name)| is_test_name(name)).collect()
}

fn functions(file: &File) -> Vec<&str> {
    let names = file.text.split("fn ").skip(1);
    names.filter_map(|rest| rest.split_once('(').map(|(name, _)| name)).filter(|name| is_test_name(name)).collect()
}

/// A sentence in snake case: three words or more.
fn is_test_name(text: &str) -> bool {
    text.matches('_').count() > 1 && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Whether it begins with one of the letters and a number: `c1_`, `c10b_`, `s14_`, `p08_`.
fn has_id(name: &str, letters: [char; 2]) -> bool {
    let id = name.split('_').next().unwrap_or_default().trim_end_matches(|c: char| c.is_ascii_lowercase());
    let number = id.strip_prefix(letters).unwrap_or_default();
    !number.is_empty() && number.chars().all(|c| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_and_table_are_compared_both_ways() {
        let code = "#[test]\nfn c1_cold_warm() {}\nfn c10b_two_duplicates() {}\nfn chars_of_a(b: u8) {}\nfn p08_too_large() {}\n";
        let tree = |page: &str| Tree {
            files: vec![
                File::new("kvblock/tests/a.rs", code),
                File::new("docs/scenarios.md", page),
                File::new("docs/pains.md", "| p08 | a | `p08_too_large` |\n"),
            ],
            ..Tree::default()
        };
        let messages = |page: &str| check(&tree(page)).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(messages("| C1 | a | `c1_cold_warm` |\n| C10b | b | `c10b_two_duplicates`, `kvblock` |\n"), [""; 0]);
        assert_eq!(
            messages("| C1 | a | `c1_cold_worm` |\n| C10b | `c10b_two_duplicate` | `c10b_two_duplicates` |\n"),
            [
                "docs/scenarios.md:1: there is no test `c1_cold_worm`; mend the name or remove it",
                "docs/scenarios.md: the test `c1_cold_warm` is missing; add it to the row of its id"
            ]
        );
    }

    #[test]
    fn the_status_table_of_the_readme_names_tests_that_exist() {
        let readme = "| feature | `max_num_seqs` | test |\n| a | yes | `a_is_so` |\n| b | yes | `b_is_so` |\n| `kvblock/` | `num_blocks` |\n";
        let files = [
            ("kvblock/tests/a.rs", "fn a_is_so() {}"),
            ("README.md", readme),
            ("docs/scenarios.md", ""),
            ("docs/pains.md", ""),
        ];
        let tree = Tree { files: files.map(|(path, text)| File::new(path, text)).to_vec(), ..Tree::default() };
        let found: Vec<String> = check(&tree).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["README.md:3: there is no test `b_is_so`; mend the name or remove it"]);
    }
}
