//! `cargo xtask conformance DIR`: a black-box suite of the API, kept outside of this tree, against our server.
//!
//! The suite is a folder of pytest files that only speak HTTP and find the server through environment variables:
//! `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `MODEL_DIR`, `SERVER_CMD`, `LOGPROB_TOL`. Here a server is built and started
//! with a key on a free port, for the model `tiny-chat/` of the suite where it has one, and pytest runs in the folder.
//! The suite writes its results by case (`--conf-json`); the summary counts them, and names those whose id no test of
//! ours claims in [`CASES`]. What is started here ends here.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

use serde::Deserialize;

use testkit::kernels;

/// Which of our own tests covers which case of the suite: an id, then the names of tests, in each line.
pub const CASES: &str = "server/tests/conformance.txt";

/// Guards the server, so that the cases about keys run.
const KEY: &str = "sk-conformance";

/// What the suite imports beside the standard library.
const MODULES: &str = "import pytest, httpx, openai, prometheus_client, jsonschema";

/// What the suite says of its cases.
#[derive(Debug, Deserialize)]
struct Report {
    /// By id, with the parameter in brackets.
    results: BTreeMap<String, CaseResult>,
}

#[derive(Debug, Deserialize)]
struct CaseResult {
    outcome: String,
}

/// Runs the suite in `dir` with `python`; `pytest` are further words for it.
///
/// # Errors
/// One line: Python or a module is missing, the server did not build or start, or cases failed.
pub fn run(root: &Path, dir: &Path, python: &Path, pytest: &[String]) -> Result<(), String> {
    let dir = dir.canonicalize().map_err(|error| format!("{}: {error}", dir.display()))?;
    check_python(python, &dir)?;
    let program = build(root)?;
    let model = Some(dir.join("tiny-chat")).filter(|model| model.is_dir());
    let mut server = Server::start(&program, model.as_deref())?;
    let results = kernels::target(root).join("conformance.json");
    // Of an earlier run, or none: what is read below is what this run wrote.
    let _ = std::fs::remove_file(&results);
    let mut command = Command::new(python);
    command.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--conf-json"]).arg(&results).args(pytest);
    command
        .current_dir(&dir)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("OPENAI_BASE_URL", format!("{}/v1", server.url))
        .env("OPENAI_API_KEY", KEY)
        // The reference of the sums is float32, and so is ours.
        .env("LOGPROB_TOL", "0.01")
        .env("SERVER_CMD", format!("{} serve {{model}} --port {{port}} {{args}}", program.display()));
    if let Some(model) = &model {
        command.env("MODEL_DIR", model);
    }
    let status = command.status().map_err(|error| format!("{}: {error}", python.display()))?;
    let alive = server.child.try_wait().is_ok_and(|ended| ended.is_none());
    drop(server);
    let text = std::fs::read_to_string(&results)
        .map_err(|error| format!("the suite wrote no results ({status}): {}: {error}", results.display()))?;
    let report: Report = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", results.display()))?;
    let claimed = std::fs::read_to_string(root.join(CASES)).map_err(|error| format!("{CASES}: {error}"))?;
    let summary = report.summary(&claimed);
    println!("{summary}");
    if !alive {
        return Err("the server ended while the suite ran".to_string());
    }
    if status.success() { Ok(()) } else { Err(format!("pytest: {status}")) }
}

fn check_python(python: &Path, dir: &Path) -> Result<(), String> {
    let output = Command::new(python).args(["-c", MODULES]).output();
    let output = output
        .map_err(|error| format!("{}: {error}; the suite needs Python 3, name one with --python", python.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let reason = errors.lines().last().unwrap_or("it does not say why");
    Err(format!(
        "{} lacks what the suite imports ({reason}): {} -m pip install -r {}",
        python.display(),
        python.display(),
        dir.join("requirements.txt").display()
    ))
}

/// The binary, built from the tree as it is.
fn build(root: &Path) -> Result<PathBuf, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo).args(["build", "--package", "cli", "--locked"]).current_dir(root).status();
    match status {
        Ok(status) if status.success() => Ok(kernels::target(root).join("debug").join("quire")),
        Ok(status) => Err(format!("cargo build --package server: {status}")),
        Err(error) => Err(format!("cargo did not start: {error}")),
    }
}

/// A server that ends when this is dropped.
struct Server {
    child: Child,
    /// Without a path.
    url: String,
}

impl Server {
    fn start(program: &Path, model: Option<&Path>) -> Result<Server, String> {
        let mut child = Command::new(program)
            .arg("serve")
            .args(model)
            .args(["--port", "0"])
            .env("QUIRE_API_KEY", KEY)
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        let stderr = child.stderr.take();
        let mut server = Server { child, url: String::new() };
        match stderr.map(BufReader::new).and_then(|mut lines| Some((address(&mut lines)?, lines))) {
            Some((url, lines)) => {
                server.url = url;
                // A full pipe would stop the server.
                std::thread::spawn(move || lines.lines().map_while(Result::ok).for_each(|line| eprintln!("{line}")));
                Ok(server)
            }
            None => Err("the server ended before it listened".to_string()),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The address that the server says it listens on; what it says before goes to our own standard error.
fn address(lines: &mut BufReader<ChildStderr>) -> Option<String> {
    let mut line = String::new();
    while lines.read_line(&mut line).ok()? > 0 {
        if let Some(rest) = line.trim_start().strip_prefix("listening on ") {
            return Some(rest.split(',').next()?.trim_end().to_string());
        }
        eprint!("{line}");
        line.clear();
    }
    None
}

impl Report {
    /// Counts, then the cases that failed, then ids that [`CASES`] does not know.
    fn summary(&self, claimed: &str) -> String {
        let of = |outcome: &str| -> Vec<&str> {
            self.results.iter().filter(|(_, result)| result.outcome == outcome).map(|(id, _)| id.as_str()).collect()
        };
        let (passed, failed, skipped) = (of("passed"), of("failed"), of("skipped"));
        let mut text = format!(
            "conformance: {} passed, {} failed, {} skipped of {} cases",
            passed.len(),
            failed.len(),
            skipped.len(),
            self.results.len()
        );
        let known: BTreeSet<&str> = claimed.lines().filter_map(|line| line.split_whitespace().next()).collect();
        let ids: BTreeSet<&str> = self.results.keys().map(|id| id.split('[').next().unwrap_or(id)).collect();
        let unknown: Vec<&str> = ids.difference(&known).copied().collect();
        for (what, list) in [("failed", failed), (&*format!("not in {CASES}"), unknown)] {
            if !list.is_empty() {
                text += &format!("\n{what}: {}", list.join(", "));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_python_that_is_not_there_is_told_with_what_to_do() {
        let problem = check_python(Path::new("no-such-python"), Path::new("suite")).unwrap_err();
        assert!(problem.starts_with("no-such-python: ") && problem.ends_with("--python"), "{problem}");
    }

    #[test]
    fn a_module_that_is_missing_is_told_with_the_command_that_brings_it() {
        // Any program that fails stands for a Python without the modules.
        let problem = check_python(Path::new("false"), Path::new("suite")).unwrap_err();
        assert!(problem.contains("pip install -r suite/requirements.txt"), "{problem}");
    }

    #[test]
    fn the_summary_counts_cases_and_names_what_failed_and_what_nobody_claims() {
        let json = r#"{"total": {}, "results": {"A-001": {"outcome": "passed"}, "A-002[x]": {"outcome": "failed"},
            "A-002[y]": {"outcome": "passed"}, "B-001": {"outcome": "skipped", "reason": "no key"}}}"#;
        let report: Report = serde_json::from_str(json).unwrap();
        assert_eq!(
            report.summary("A-001 errors::first\nA-002 errors::second\n"),
            format!("conformance: 2 passed, 1 failed, 1 skipped of 4 cases\nfailed: A-002[x]\nnot in {CASES}: B-001")
        );
    }
}
