//! Rules for Rust files: module docs first, a greatest length, no unfinished or commented-out code, no effects in pure crates.
//!
//! Lints of the workspace hold `unwrap`, `expect`, `todo!`, `unimplemented!` and `dbg!` out of libraries.

use super::{File, Finding, Tree, tokens};

/// Longest file under `src/`, in lines, including its tests.
const MAX_LINES: usize = 500;

/// Words of a comment that mark unfinished work.
const MARKS: [&str; 2] = [concat!("FIX", "ME"), concat!("XX", "X")];

/// Crates of pure logic, and what they must not name.
const PURE: [&str; 2] = ["kvblock", "sched"];
const IMPURE: [&str; 9] =
    ["Mutex", "RwLock", "Condvar", "std::thread", "std::fs", "std::io", "std::net", "std::time", "async fn"];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.files.iter().filter(|file| file.is_rust()).flat_map(check_file).collect()
}

fn check_file(file: &File) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !file.text.starts_with("//!") {
        findings.push(file.at(0, "found no module docs, expected `//!` in the first line; say what the file owns"));
    }
    let length = file.text.lines().count();
    if file.is_source() && length > MAX_LINES {
        let message = format!("found {length} lines, expected at most {MAX_LINES}; split it by reason to change");
        findings.push(file.finding(message));
    }
    for (index, line) in file.text.lines().enumerate() {
        let comment = line.split_once("//").map_or("", |(_, comment)| comment);
        if let Some(mark) = MARKS.into_iter().find(|mark| words(comment).any(|word| word == *mark)) {
            findings.push(file.at(index, format!("found {mark} in a comment; finish the work, or open an issue")));
        }
        if line.trim_start().strip_prefix("//").is_some_and(is_code) {
            findings.push(file.at(index, "found commented-out code; delete it, git keeps it"));
        }
    }
    if PURE.contains(&file.top()) && file.is_source() {
        let code = tokens::code(tokens::without_tests(tokens::read(file)).into_iter().collect());
        findings.extend(IMPURE.into_iter().filter(|name| code.contains(name)).map(|name| {
            let message =
                format!("found {name} in {}, which is pure logic; move what needs it to the engine", file.top());
            file.finding(message)
        }));
    }
    findings
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// Returns whether an ordinary comment looks like a statement or the head of a block.
fn is_code(comment: &str) -> bool {
    let text = comment.trim();
    let begins = |words: &[&str]| words.iter().any(|word| text.starts_with(word));
    let statement = text.ends_with(';')
        && (text.ends_with(");")
            || (begins(&["let ", "const ", "static "]) && text.contains('='))
            || (begins(&["use ", "pub use "]) && text.contains("::"))
            || begins(&["mod ", "pub mod ", "return;", "break;", "continue;"])
            || ["= ", " += ", " -= "].iter().any(|operator| text.contains(operator)));
    let block = text.ends_with('{')
        && begins(&[
            "fn ", "pub ", "impl ", "impl<", "struct ", "enum ", "mod ", "if ", "} else", "for ", "while ", "loop ",
            "match ", "let ",
        ]);
    !begins(&["/", "!"]) && (statement || block || (text.starts_with("#[") && text.ends_with(']')))
}
