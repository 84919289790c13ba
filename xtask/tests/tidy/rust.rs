//! Rules for Rust files.

use super::messages;

/// Returns the findings about one file.
fn of_file(path: &str, text: &str) -> Vec<String> {
    messages(&[(path, text)], &[path])
}

/// Returns the lines of one file that have findings.
fn lines(path: &str, text: &str) -> Vec<usize> {
    let found = of_file(path, text);
    found.iter().filter_map(|finding| finding.split(':').nth(1)?.parse().ok()).collect()
}

#[test]
fn a_file_opens_with_its_docs() {
    assert_eq!(lines("a/tests/b.rs", "use c;\n"), [1]);
    assert_eq!(of_file("a/tests/b.rs", "//! What it is.\nuse c;\n"), [""; 0]);
}

#[test]
fn a_source_file_has_a_greatest_length_and_a_test_file_has_none() {
    let long = "//! Docs.\n".repeat(501);
    assert!(of_file("a/src/b.rs", &long)[0].starts_with("a/src/b.rs: found 501 lines, expected at most 500"));
    assert_eq!(of_file("a/tests/b.rs", &long), [""; 0]);
}

#[test]
fn unfinished_marks_are_found_in_comments() {
    let text = format!("//! D.\nfn f() {{}} // {}: later\n/// {}\n", concat!("FIX", "ME"), concat!("XX", "X"));
    assert_eq!(lines("a/tests/b.rs", &text), [2, 3]);
    assert_eq!(lines("a/tests/b.rs", "//! D.\nlet s = \"XXXX todo!\"; // mktemp.XXXXXX\n"), [0; 0]);
}

#[test]
fn commented_out_code_is_told_from_prose() {
    let is_code = |comment: &str| lines("a/tests/b.rs", &format!("//! D.\n//{comment}\n")) == [2];
    for code in
        ["let a = 1;", " a.push(b);", "use a::b;", "if a > 1 {", "} else {", "#[inline]", "a += 1;", "pub fn f() {"]
    {
        assert!(is_code(code), "{code}");
    }
    for prose in [
        "Use the head first;",
        "for each block; then stop",
        "a = b holds here",
        "the rest (as above)",
        "let it be",
        "see `f();`",
        "if (a, b)",
        "/ f();",
    ] {
        assert!(!is_code(prose), "{prose}");
    }
}

#[test]
fn pure_crates_name_no_lock_and_no_clock() {
    let text = "//! D.\nuse std::sync::Mutex;\n#[cfg(test)]\nmod t { use std::time; }\n";
    let found = of_file("sched/src/plan.rs", text);
    assert!(matches!(&found[..], [one] if one.contains("found Mutex in sched")), "{found:?}");
    assert_eq!(of_file("sched/src/plan.rs", "//! D.\nasync fn f() { std::fs::read(\"std::io\") }\n").len(), 2);
    assert_eq!(of_file("engine/src/handle.rs", text), [""; 0]);
    assert_eq!(of_file("sched/tests/random.rs", text), [""; 0]);
}
