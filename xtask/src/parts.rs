//! The longest parts of a run of CI: steps, and programs of tests as their own output times them.
//!
//! The stable test harness does not time single tests, but each program ends with `finished in 1.23s`, and cargo says which
//! program it starts. A log with both in order, as `.ci/run` keeps, is enough.

/// A part and its seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// What it is.
    pub name: String,
    /// How long it took.
    pub seconds: f64,
}

/// The parts of the output of `cargo test --workspace`: the build, and each program of tests.
pub fn of_log(log: &str) -> Vec<Part> {
    let mut parts = Vec::new();
    // The packages come by name: the first is attention-kernels, whose library has no unit tests to name it.
    let (mut package, mut program) = (FIRST.to_owned(), String::new());
    for line in log.lines().map(str::trim) {
        if let Some(started) = line.strip_prefix("Running ") {
            // unittests src/lib.rs (target/debug/deps/device-0123456789abcdef)
            let (target, file) = started.split_once(" (").unwrap_or((started, ""));
            let stem = file.trim_end_matches(')').rsplit(['/', '\\']).next().unwrap_or_default();
            let stem = stem.rsplit_once('-').map_or(stem, |(stem, _)| stem);
            if target == "unittests src/lib.rs" {
                package = stem.replace('_', "-");
            }
            program = match target.strip_prefix("unittests ") {
                Some("src/lib.rs") => format!("{package}, unit tests"),
                Some(_) => format!("{stem}, unit tests"),
                // Cargo runs the tests of a package behind the unit tests of its library.
                None => format!("{package}, {target}"),
            };
        } else if let Some(name) = line.strip_prefix("Doc-tests ") {
            program = format!("{}, examples in docs", name.replace('_', "-"));
        } else if let Some(seconds) = line.split_once("; finished in ").and_then(|(_, rest)| seconds(rest)) {
            parts.push(Part { name: program.clone(), seconds });
        } else if let Some(seconds) = finished_build(line) {
            parts.push(Part { name: "building the tests".into(), seconds });
        }
    }
    parts
}

const FIRST: &str = "attention-kernels";

/// ``Finished `test` profile [optimized] target(s) in 13m 26s``.
fn finished_build(line: &str) -> Option<f64> {
    let rest = line.strip_prefix("Finished `test` profile")?.rsplit_once(" in ")?.1;
    let mut total = 0.0;
    for word in rest.split_whitespace() {
        total += match word.strip_suffix('m') {
            Some(minutes) => 60.0 * minutes.parse::<f64>().ok()?,
            None => seconds(word)?,
        };
    }
    Some(total)
}

fn seconds(text: &str) -> Option<f64> {
    text.strip_suffix('s')?.parse().ok()
}

/// The longest parts, longest first, one a line.
pub fn table(mut parts: Vec<Part>, rows: usize) -> String {
    parts.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    parts.iter().take(rows).map(|part| format!("{:>8.1} s  {}\n", part.seconds, part.name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "   Compiling device v0.1.0\n    Finished `test` profile [optimized] target(s) in 1m 02.50s\n     \
        Running tests/all.rs (/t/debug/deps/all-9f)\n\
        test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 12.00s\n     \
        Running unittests src/lib.rs (/t/debug/deps/device-0a1b)\n\nrunning 2 tests\ntest a ... ok\n\n\
        test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 3.25s\n\n     \
        Running unittests src/main.rs (/t/debug/deps/quire-77)\n\
        test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n   \
        Doc-tests attention_kernels\n\
        test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.75s\n";

    #[test]
    fn a_log_is_taken_apart_by_program() {
        let found = of_log(LOG).into_iter().map(|part| (part.name, part.seconds)).collect::<Vec<_>>();
        let want = [
            ("building the tests", 62.5),
            ("attention-kernels, tests/all.rs", 12.0),
            ("device, unit tests", 3.25),
            ("quire, unit tests", 0.0),
            ("attention-kernels, examples in docs", 0.75),
        ];
        assert_eq!(found, want.map(|(name, seconds)| (name.to_owned(), seconds)));
    }

    #[test]
    fn the_table_has_the_longest_first() {
        let expected = "    62.5 s  building the tests\n    12.0 s  attention-kernels, tests/all.rs\n";
        assert_eq!(table(of_log(LOG), 2), expected);
    }
}
