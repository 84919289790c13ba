//! `docs/scenarios.md` names tests that exist, and every test that carries the id of a scenario.

use super::markdown;
use super::{File, Finding, Tree};

const PAGE: &str = "docs/scenarios.md";

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let page = match tree.require(PAGE) {
        Ok(page) => page,
        Err(missing) => return vec![missing],
    };
    let functions: Vec<&str> = tree.files.iter().filter(|file| file.is_rust()).flat_map(functions).collect();
    let rows = markdown::rows(&page.text);
    let listed: Vec<(usize, &str)> =
        rows.iter().flat_map(|row| row.code(2).map(|name| (row.index, name))).filter(|(_, name)| is_test_name(name)).collect();
    let gone = listed.iter().filter(|(_, name)| !functions.contains(name));
    let mut findings: Vec<Finding> =
        gone.map(|(index, name)| page.at(*index, format!("there is no test `{name}`; mend the name or remove it"))).collect();
    let missing = functions.iter().filter(|name| has_id(name) && !listed.iter().any(|(_, listed)| listed == *name));
    findings.extend(missing.map(|name| page.finding(format!("the test `{name}` is missing; add it to the row of its scenario"))));
    findings
}

fn functions(file: &File) -> Vec<&str> {
    let names = file.text.split("fn ").skip(1);
    names.filter_map(|rest| rest.split_once('(').map(|(name, _)| name)).filter(|name| is_test_name(name)).collect()
}

/// A sentence in snake case.
fn is_test_name(text: &str) -> bool {
    text.contains('_') && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Whether it begins with the id of a scenario: `c1_`, `c10b_`, `s14_`.
fn has_id(name: &str) -> bool {
    let id = name.split('_').next().unwrap_or_default().trim_end_matches(|c: char| c.is_ascii_lowercase());
    let number = id.strip_prefix(['c', 's']).unwrap_or_default();
    !number.is_empty() && number.chars().all(|c| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_and_table_are_compared_both_ways() {
        let code = "#[test]\nfn c1_cold_warm() {}\nfn c10b_duplicates() {}\nfn chars_of_a(b: u8) {}\n";
        let tree = |page: &str| Tree { files: vec![File::new("kvblock/tests/a.rs", code), File::new(PAGE, page)] };
        let messages = |page: &str| check(&tree(page)).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(messages("| C1 | a | `c1_cold_warm` |\n| C10b | b | `c10b_duplicates`, `kvblock` |\n"), [""; 0]);
        assert_eq!(
            messages("| C1 | a | `c1_cold_worm` |\n| C10b | `c10b_duplicate` | `c10b_duplicates` |\n"),
            [
                "docs/scenarios.md:1: there is no test `c1_cold_worm`; mend the name or remove it",
                "docs/scenarios.md: the test `c1_cold_warm` is missing; add it to the row of its scenario"
            ]
        );
    }
}
