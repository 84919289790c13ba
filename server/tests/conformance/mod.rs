//! The cases of a black-box suite of the API, which is not in the tree, tested here with another client.
//!
//! `../conformance.txt` lists the tests for each case of the suite; the test below checks that they exist.

mod client;
mod effects;
mod equal;
mod load;
mod streams;

use std::collections::BTreeSet;
use std::path::Path;

/// Groups of the suite with their number of cases.
const GROUPS: [(&str, usize); 19] = [
    ("AUT", 5),
    ("CHT", 28),
    ("CMP", 30),
    ("DET", 8),
    ("EMB", 1),
    ("ERR", 21),
    ("FUZ", 3),
    ("LIF", 8),
    ("LOD", 8),
    ("LPB", 15),
    ("MET", 10),
    ("SMP", 23),
    ("SRV", 7),
    ("SSE", 8),
    ("STP", 12),
    ("STR", 12),
    ("TOK", 10),
    ("TOO", 8),
    ("UTF", 7),
];

#[test]
fn every_case_of_the_suite_is_covered_by_a_test_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut ids = BTreeSet::new();
    for line in include_str!("../conformance.txt").lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let id = words.next().unwrap();
        assert!(ids.insert(id.to_string()), "{id} twice");
        let tests: Vec<&str> = words.collect();
        assert!(!tests.is_empty(), "{id} has no test");
        for test in tests {
            let (file, name) = test.split_once("::").unwrap();
            let source = std::fs::read_to_string(root.join(format!("server/tests/{file}.rs")))
                .or_else(|_| std::fs::read_to_string(root.join(format!("{file}.rs"))))
                .unwrap_or_else(|error| panic!("{id}: {file}: {error}"));
            assert!(source.contains(&format!("fn {name}()")), "{id}: {file} has no test {name}");
            // Tables name the cases of their rows.
            if file.starts_with("conformance/") {
                assert!(source.contains(id), "{id}: not named in {file}");
            }
        }
    }
    let expected = GROUPS.iter().flat_map(|(group, count)| (1..=*count).map(move |n| format!("{group}-{n:03}")));
    assert_eq!(ids, expected.collect::<BTreeSet<_>>());
}
