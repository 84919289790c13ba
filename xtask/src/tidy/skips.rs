//! No test skips in silence: a test that may end early, or that looks for what a machine may lack, reports what it leaves out.
//!
//! A function of a test *reports* if it names [`testkit::not_run`], or calls a function of the tests that does. The call graph is by
//! name: coarse, but a skip without any report is found. What `cfg` leaves out of a platform does not exist there and is not a skip.

use std::collections::BTreeSet;

use super::source::{self, Line};
use super::{File, Finding, Tree};

/// What ends a test early.
const ENDS: [&str; 6] = ["return;", "return,", "return }", "return println!", "return eprintln!", "return Ok(())"];
/// What asks whether a machine has something.
const PROBES: [&str; 6] = [
    "is_x86_feature_detected!",
    "is_aarch64_feature_detected!",
    ".is_available()",
    "on_path(",
    "host::compiler(",
    "toolkit::find(",
];
/// What the functions that report lead to.
const REPORT: &str = "not_run";
/// The one place that prints these words.
const PLACE: &str = "testkit/src/not_run.rs";
const WORDS: &str = concat!("NOT ", "RUN");

/// What the tests of several crates take in by its path.
const SHARED: &str = "device/tests/support/";

/// One function of a file.
struct Function<'a> {
    file: &'a File,
    /// Index of the line with its name.
    index: usize,
    name: String,
    /// Whether it is marked as a test.
    is_test: bool,
    /// Whether it is part of a test program.
    of_tests: bool,
    /// Its code, without comments and the contents of strings.
    code: String,
}

impl<'a> Function<'a> {
    /// Its name, and the crate that can call it; "" where tests of all crates can.
    fn key(&self) -> (&'a str, String) {
        let is_shared = !self.of_tests || self.file.path.starts_with(SHARED);
        (if is_shared { "" } else { self.file.top() }, self.name.clone())
    }
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let files: Vec<(&File, Vec<Line>)> =
        tree.files.iter().filter(|file| file.is_rust()).map(|file| (file, source::lines(&file.text))).collect();
    let functions: Vec<Function<'_>> = files.iter().flat_map(|(file, lines)| functions(file, lines)).collect();
    let reporting = reporting(&functions);
    let mut findings: Vec<Finding> = files.iter().flat_map(|(file, lines)| said(file, lines)).collect();
    for function in functions.iter().filter(|function| function.of_tests && !reporting.contains(&function.key())) {
        let finding = |message: String| function.file.at(function.index, message);
        if let Some(end) = ENDS.into_iter().find(|end| function.is_test && function.code.contains(end)) {
            findings.push(finding(format!(
                "the test {} may end at `{end}` without a report; call testkit::not_run::report, or let it fail",
                function.name
            )));
        }
        if let Some(probe) = PROBES.into_iter().find(|probe| function.code.contains(probe)) {
            findings.push(finding(format!(
                "{} asks `{probe}` and reports nothing; call testkit::not_run::report where the answer is no",
                function.name
            )));
        }
    }
    findings
}

/// Words that only [`PLACE`] says, and tests that nothing starts.
fn said(file: &File, lines: &[Line]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for ((index, line), text) in lines.iter().enumerate().zip(file.text.lines()) {
        let prints =
            ["print!", "println!", "eprint!", "eprintln!", "writeln!"].iter().any(|call| line.code.contains(call));
        if file.path != PLACE && prints && text.contains(WORDS) {
            findings.push(
                file.at(index, format!("prints {WORDS} by itself, which nobody counts; call testkit::not_run::report")),
            );
        }
        let ignored = line.code.contains("#[ignore") && (line.test || !file.is_source());
        if ignored && !text.contains("#[ignore = \"only ") {
            findings.push(file.at(
                index,
                "an ignored test is a skip that nobody counts; report what it needs, or say `#[ignore = \"only …\"]` and start it from another test",
            ));
        }
    }
    findings
}

/// Functions that lead to a report, each with the crate that can call it by that name; "" for all crates.
fn reporting<'a>(functions: &[Function<'a>]) -> BTreeSet<(&'a str, String)> {
    let mut known: BTreeSet<(&str, String)> = BTreeSet::new();
    loop {
        let leads = |function: &&Function<'a>| {
            let calls =
                |word: &str| ["", function.file.top()].iter().any(|scope| known.contains(&(*scope, word.to_owned())));
            function.code.contains(REPORT) || called(&function.code).any(|name| name != function.name && calls(name))
        };
        let found: BTreeSet<_> = functions.iter().filter(leads).map(Function::key).collect();
        if found == known {
            return known;
        }
        known = found;
    }
}

/// The functions of a file that tests may call: those of test programs, of test modules, and those that are named for tests.
fn functions<'a>(file: &'a File, lines: &[Line]) -> Vec<Function<'a>> {
    let mut found: Vec<Function<'a>> = Vec::new();
    let mut is_test = false;
    let mut index = 0;
    while index < lines.len() {
        let line = &lines[index];
        is_test |= line.code.contains("#[test]");
        let Some(name) = name(&line.code) else {
            index += 1;
            continue;
        };
        let of_tests = line.test || !file.is_source();
        let end = end(lines, index);
        if of_tests || name.ends_with("for_tests") {
            let code = lines[index..=end].iter().map(|line| line.code.as_str()).collect::<Vec<_>>().join("\n");
            found.push(Function { file, index, name, is_test, of_tests, code });
        }
        is_test = false;
        index = end + 1;
    }
    found
}

/// The name of the function that a line declares.
fn name(code: &str) -> Option<String> {
    let rest = code.trim_start().split_once("fn ").filter(|(before, _)| {
        before
            .split_whitespace()
            .all(|word| ["const", "async", "unsafe", "extern"].contains(&word) || word.starts_with("pub"))
    });
    let name: String = rest?.1.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!name.is_empty()).then_some(name)
}

/// Index of the line that closes the function which begins there.
fn end(lines: &[Line], begin: usize) -> usize {
    let mut depth = 0usize;
    for (index, line) in lines.iter().enumerate().skip(begin) {
        for c in line.code.chars() {
            match c {
                '{' => depth += 1,
                '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 && (c == '}' || c == ';') {
                return index;
            }
        }
    }
    lines.len() - 1
}

/// Names before an opening parenthesis, but for those of the probes: functions of tests have the same names.
fn called(code: &str) -> impl Iterator<Item = &str> {
    let before = code.match_indices('(').map(|(at, _)| &code[..at]);
    let calls =
        before.filter(|before| !PROBES.iter().any(|probe| before.ends_with(probe.trim_end_matches(['(', ')']))));
    calls.filter_map(|before| before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        let tree =
            Tree { files: files.iter().map(|(path, text)| File::new(*path, *text)).collect(), ..Tree::default() };
        check(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_test_that_may_end_early_leads_to_a_report() {
        let support = "fn compiler() -> Option<C> {\n find().map_err(|m| not_run::report(Cxx, m)).ok()\n}\n";
        let good = "#[test]\nfn a() {\n let Some(c) = compiler() else { return };\n}\n";
        let deep = "fn sim() -> Option<D> { compiler().map(open) }\n#[test]\nfn b() {\n let Some(d) = sim() else { return };\n}\n";
        let bad = "#[test]\nfn c() {\n let Some(c) = somewhere() else { return };\n}\n";
        assert_eq!(
            messages(&[("x/tests/a.rs", good), ("x/tests/b.rs", deep), ("x/tests/support.rs", support)]),
            [""; 0]
        );
        let found = messages(&[("x/tests/a.rs", bad), ("x/tests/support.rs", support)]);
        assert_eq!(
            found,
            [
                "x/tests/a.rs:2: the test c may end at `return }` without a report; call testkit::not_run::report, or let it fail"
            ]
        );
        let unit = format!("fn f() {{ return; }}\n#[cfg(test)]\nmod tests {{\n{bad}}}\n");
        assert_eq!(messages(&[("x/src/a.rs", &unit)]).len(), 1);
    }

    #[test]
    fn a_test_that_prints_that_it_skips_is_found() {
        let text = format!("#[test]\nfn a() {{\n if no() {{ return println!(\"{WORDS}: none\"); }}\n}}\n");
        let found = messages(&[("x/tests/a.rs", &text)]);
        assert_eq!(found.len(), 2);
        assert!(found[0].starts_with("x/tests/a.rs:3: prints ") && found[1].contains("`return println!`"), "{found:?}");
    }

    #[test]
    fn a_probe_is_no_report_though_a_helper_has_its_name() {
        let support = "fn compiler() -> Option<C> {\n host::compiler().map_err(|m| not_run::report(Cxx, m)).ok()\n}\n";
        let bad = "#[test]\nfn a() {\n let Ok(compiler) = host::compiler() else { return };\n}\n";
        assert_eq!(messages(&[("x/tests/a.rs", bad), ("x/tests/support.rs", support)]).len(), 2);
        assert_eq!(messages(&[("x/tests/a.rs", &bad.replace("host::", "")), ("x/tests/support.rs", support)]), [""; 0]);
    }

    #[test]
    fn a_probe_in_a_helper_of_tests_leads_to_a_report() {
        let bad = "fn isas() -> impl Iterator<Item = Isa> {\n ALL.into_iter().filter(|isa| isa.is_available())\n}\n";
        assert!(messages(&[("x/tests/a.rs", bad)])[0].contains("isas asks `.is_available()` and reports nothing"));
        assert_eq!(messages(&[("x/src/a.rs", bad)]), [""; 0]);
        let good = bad.replace("ALL.", "not_run::report(a, b); ALL.");
        assert_eq!(messages(&[("x/tests/a.rs", &good)]), [""; 0]);
    }

    #[test]
    fn an_ignored_test_says_who_starts_it() {
        let ignored =
            |why: &str| messages(&[("x/tests/a.rs", &format!("#[test]\n#[ignore{why}]\nfn a() {{}}\n"))]).len();
        assert_eq!([ignored(""), ignored(" = \"slow\""), ignored(" = \"only as a program of its own\"")], [1, 1, 0]);
    }
}
