//! The longest parts of a CI run: its steps, and the test programs with the times that they print.
//!
//! The stable test harness does not time single tests, but each program ends with `finished in 1.23s`, and cargo prints which program
//! it starts. A log with both in order is enough.

/// A part and its duration.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// What ran.
    pub name: String,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Returns the parts in the output of `cargo test --workspace`: the build, and each test program.
pub fn of_log(log: &str) -> Vec<Part> {
    let mut parts = Vec::new();
    // Packages run in the order of their names. The first, attention-kernels, has no unit tests of a library that would name it.
    let (mut package, mut program) = ("attention-kernels".to_owned(), String::new());
    for line in log.lines().map(str::trim) {
        if let Some(started) = line.strip_prefix("Running ") {
            // unittests src/lib.rs (target/debug/deps/device-0123456789abcdef)
            let (target, file) = started.split_once(" (").unwrap_or((started, ""));
            let stem = file.rsplit(['/', '\\']).next().unwrap_or_default();
            let stem = stem.rsplit_once('-').map_or(stem, |(stem, _)| stem);
            program = match target.strip_prefix("unittests ") {
                Some("src/lib.rs") => {
                    package = stem.replace('_', "-");
                    format!("{package}, unit tests")
                }
                Some(_) => format!("{stem}, unit tests"),
                // Cargo runs the integration tests of a package after the unit tests of its library.
                None => format!("{package}, {target}"),
            };
        } else if let Some(name) = line.strip_prefix("Doc-tests ") {
            program = format!("{}, examples in docs", name.replace('_', "-"));
        } else if let Some(seconds) = line.split_once("; finished in ").and_then(|(_, rest)| seconds(rest)) {
            parts.push(Part { name: program.clone(), seconds });
        } else if line.starts_with("Finished `test` profile")
            && let Some(seconds) = line.rsplit_once(" in ").and_then(|(_, rest)| seconds(rest))
        {
            parts.push(Part { name: "building the tests".into(), seconds });
        }
    }
    parts
}

/// Checks that every program with a filter has run a test: a filter that matches nothing passes.
///
/// # Errors
/// Names the first program that left all of its tests out.
pub fn ran_some(log: &str) -> Result<(), String> {
    let mut program = "";
    for line in log.lines().map(str::trim) {
        program = line.strip_prefix("Running ").unwrap_or(program);
        let ran_none = line.contains(". 0 passed; 0 failed; ") && !line.contains("; 0 filtered out; ");
        if ran_none && line.starts_with("test result: ") {
            return Err(format!(
                "{program}: found no test that the filter matches, expected one; a test or module has another name now"
            ));
        }
    }
    Ok(())
}

/// Returns the seconds of `13m 26s` or `0.75s`.
fn seconds(text: &str) -> Option<f64> {
    let word = |word: &str| match word.strip_suffix('m') {
        Some(minutes) => minutes.parse::<f64>().ok().map(|minutes| 60.0 * minutes),
        None => word.strip_suffix('s')?.parse().ok(),
    };
    text.split_whitespace().map(word).sum()
}

/// Returns the longest parts, longest first, one per line.
pub fn table(mut parts: Vec<Part>, rows: usize) -> String {
    parts.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    parts.iter().take(rows).map(|part| format!("{:>8.1} s  {}\n", part.seconds, part.name)).collect()
}
