//! Rules for Rust files: docs first, files that fit in the head, no panics in libraries, nothing left behind.

use super::source::{self, Line};
use super::{File, Finding, Tree};

/// Longest file under `src/`, in lines, tests inside it included.
const MAX_LINES: usize = 500;

/// Files that may be longer, each with the reason.
const LONG_FILES: [(&str, &str); 0] = [];

/// Words of a comment that say that something is not finished.
const MARKS: [&str; 2] = [concat!("FIX", "ME"), concat!("XX", "X")];

/// Crates that are pure logic, and what they must not name.
const PURE: [&str; 2] = ["kvblock", "sched"];
const IMPURE: [&str; 9] =
    ["Mutex", "RwLock", "Condvar", "std::thread", "std::fs", "std::io", "std::net", "std::time", "async fn"];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.files.iter().filter(|file| file.is_rust()).flat_map(check_file).collect()
}

fn check_file(file: &File) -> Vec<Finding> {
    let lines = source::lines(&file.text);
    let mut findings = Vec::new();
    if !file.text.starts_with("//!") {
        findings
            .push(file.at(0, "does not open with `//!`; say first what the file owns, its invariants and its costs"));
    }
    let length = file.text.lines().count();
    if file.is_source() && length > MAX_LINES && !LONG_FILES.iter().any(|(path, _)| *path == file.path) {
        let message = format!(
            "{length} lines, at most {MAX_LINES}; split it by reason to change (exceptions: LONG_FILES in {})",
            file!()
        );
        findings.push(file.finding(message));
    }
    let panics = if file.is_source() { panics(&lines) } else { Vec::new() };
    findings.extend(panics.into_iter().map(|(index, call)| {
        file.at(index, format!("{call} in library code; return an error value, or use a form that can not fail"))
    }));
    for (index, line) in lines.iter().enumerate() {
        if let Some(call) = ["todo!", "unimplemented!"].into_iter().find(|call| line.code.contains(call)) {
            findings.push(file.at(index, format!("{call}; build it, or leave it out")));
        }
        if let Some(mark) =
            MARKS.into_iter().find(|mark| words(&line.comment).chain(words(&line.doc)).any(|word| word == *mark))
        {
            findings.push(
                file.at(index, format!("{mark} in a comment; mend it, or open an issue and leave the comment out")),
            );
        }
        if is_code(&line.comment) {
            findings.push(file.at(index, "commented-out code; delete it, git keeps it"));
        }
        if let Some(name) = IMPURE
            .into_iter()
            .find(|name| PURE.contains(&file.top()) && file.is_source() && !line.test && line.code.contains(name))
        {
            findings.push(
                file.at(
                    index,
                    format!("{name} in {}, which is pure logic; move what needs it to the engine", file.top()),
                ),
            );
        }
    }
    findings
}

/// Calls outside of tests that panic on an error value, by index of their line. A method of one's own that is called
/// `expect` is told apart by its second argument.
fn panics(lines: &[Line]) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate().filter(|(_, line)| !line.test) {
        if line.code.contains(".unwrap()") {
            found.push((index, ".unwrap()"));
        }
        for (at, call) in line.code.match_indices(".expect(") {
            let rest = lines[index + 1..].iter().map(|line| line.code.as_str());
            if arguments(std::iter::once(&line.code[at + call.len()..]).chain(rest)) == 1 {
                found.push((index, ".expect()"));
            }
        }
    }
    found
}

/// Arguments of a call, given the code behind its opening parenthesis.
fn arguments<'a>(code: impl Iterator<Item = &'a str>) -> usize {
    let (mut depth, mut count, mut pending) = (1, 0, false);
    for c in code.flat_map(str::chars) {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        if c == ',' && depth == 1 {
            count += 1;
            pending = false;
        } else {
            pending |= !c.is_whitespace();
        }
    }
    count + usize::from(pending)
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// Whether an ordinary comment looks like a statement or the head of a block.
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
    statement || block || (text.starts_with("#[") && text.ends_with(']'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        check_file(&File::new(path, text)).iter().map(ToString::to_string).collect()
    }

    /// The lines that are found fault with.
    fn lines(path: &str, text: &str) -> Vec<usize> {
        check_file(&File::new(path, text)).iter().filter_map(|finding| finding.line).collect()
    }

    #[test]
    fn a_file_opens_with_its_docs() {
        assert_eq!(lines("a/tests/b.rs", "use c;\n"), [1]);
        assert!(messages("a/tests/b.rs", "//! What it is.\nuse c;\n").is_empty());
    }

    #[test]
    fn a_source_file_has_a_greatest_length_and_a_test_file_has_none() {
        let long = "//! Docs.\n".repeat(MAX_LINES + 1);
        assert!(messages("a/src/b.rs", &long)[0].starts_with("a/src/b.rs: 501 lines, at most 500"));
        assert!(messages("a/tests/b.rs", &long).is_empty());
    }

    #[test]
    fn panics_are_found_in_library_code_alone() {
        let text = "//! D.\nfn f() { g().unwrap(); }\nfn h() { g()\n .expect(\n  \"why\",\n ); }\n/// g().unwrap()\n#[cfg(test)]\nmod t { fn i() { g().unwrap(); } }\n";
        assert_eq!(lines("a/src/b.rs", text), [2, 4]);
        assert!(lines("a/tests/b.rs", text).is_empty());
        assert!(
            lines("a/src/b.rs", "//! D.\nfn f() { w.expect(name, &[1, 2])?; w.unwrap_or(\".unwrap()\") }\n").is_empty()
        );
    }

    #[test]
    fn unfinished_marks_are_found_in_code_and_comments() {
        let text = format!("//! D.\nfn f() {{ {}!() }}\n// {}: later\n/// {}\n", "todo", MARKS[0], MARKS[1]);
        assert_eq!(lines("a/tests/b.rs", &text), [2, 3, 4]);
        assert!(lines("a/tests/b.rs", "//! D.\nlet s = \"XXXX todo!\"; // mktemp.XXXXXX\n").is_empty());
    }

    #[test]
    fn commented_out_code_is_told_from_prose() {
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
        ] {
            assert!(!is_code(prose), "{prose}");
        }
    }

    #[test]
    fn pure_crates_name_no_lock_and_no_clock() {
        let text = "//! D.\nuse std::sync::Mutex;\n";
        assert_eq!(lines("sched/src/plan.rs", text), [2]);
        assert!(lines("engine/src/handle.rs", text).is_empty());
        assert!(lines("sched/tests/random.rs", text).is_empty());
    }
}
