//! The longest parts of a CI run: its steps, the test programs with the times that they print, and their tests.
//!
//! The stable test harness does not time single tests, but each program ends with `finished in 1.23s`, and cargo prints which program
//! it starts. Tests start in the order of their names, each when another ends, and a line is printed when a test ends: so the times of
//! the lines are enough to tell how long each took.

/// A part and its duration.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// What ran.
    pub name: String,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Returns the parts in the output of `cargo test --workspace`: the build, each test program, and each test of more than a second.
/// `times` are the seconds at which the lines were printed, and `threads` the number of tests that run at once.
pub fn of_log(log: &str, times: &[f64], threads: usize) -> Vec<Part> {
    let mut parts = Vec::new();
    // When the tests of the program began, and the names and ends of those that have ended.
    let (mut began, mut ended) = (0.0, Vec::new());
    // Packages run in the order of their names. The first, attention-kernels, has no unit tests of a library that would name it.
    let (mut package, mut program) = ("attention-kernels".to_owned(), String::new());
    for (line, time) in log.lines().map(str::trim).zip(times.iter().copied().chain(std::iter::repeat(0.0))) {
        if line.starts_with("running ") {
            (began, ended) = (time, Vec::new());
        } else if let Some((name, _)) = line.strip_prefix("test ").and_then(|test| test.split_once(" ... ")) {
            ended.push((name, time));
        } else if let Some(started) = line.strip_prefix("Running ") {
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
            let ends: Vec<f64> = ended.iter().map(|(_, end)| *end).collect();
            ended.sort_by_key(|(name, _)| *name);
            let starts = std::iter::repeat_n(began, threads).chain(ends);
            let tests = ended.drain(..).zip(starts).map(|((name, end), start)| (name, end - start));
            let long = tests.filter(|(_, seconds)| *seconds > 1.0);
            parts.extend(long.map(|(name, seconds)| Part { name: format!("{program}: {name}"), seconds }));
        } else if line.starts_with("Finished `test` profile")
            && let Some(seconds) = line.rsplit_once(" in ").and_then(|(_, rest)| seconds(rest))
        {
            parts.push(Part { name: "building the tests".into(), seconds });
        }
    }
    parts
}

/// Checks that a filter matches: every program with one has run a test, or `programs` of them have. A filter that matches nothing passes.
///
/// # Errors
/// Names the first program that left all of its tests out, or how many have run one.
pub fn ran_some(log: &str, programs: Option<usize>) -> Result<(), String> {
    let (mut program, mut ran) = ("", 0);
    for line in log.lines().map(str::trim) {
        program = line.strip_prefix("Running ").unwrap_or(program);
        if !line.starts_with("test result: ") {
            continue;
        }
        let ran_none = line.contains(". 0 passed; 0 failed; ");
        ran += usize::from(!ran_none);
        if ran_none && programs.is_none() && !line.contains("; 0 filtered out; ") {
            return Err(format!(
                "{program}: found no test that the filter matches, expected one; a test or module has another name now"
            ));
        }
    }
    match programs.filter(|programs| *programs != ran) {
        None => Ok(()),
        Some(programs) => Err(format!(
            "found tests that the filter matches in {ran} programs, expected {programs}; a test or module has another name now"
        )),
    }
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
