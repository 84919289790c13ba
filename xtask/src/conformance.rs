//! `cargo xtask conformance DIR`: runs a black-box suite of the API, which is not part of this tree, against our server.
//!
//! The suite is a folder of pytest files that use HTTP only and find the server through environment variables:
//! `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `MODEL_DIR`, `SERVER_CMD`, `LOGPROB_TOL`. A server is built and started with a key on a free
//! port, for the model `tiny-chat/` of the suite if there is one, and pytest runs in the folder. The suite writes its results by
//! case (`--conf-json`). The summary counts them, and names the cases whose id no test of ours claims in [`CASES`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde::Deserialize;
use testkit::kernels;

use crate::cargo;
use crate::server::Server;

/// Lists our tests for each case of the suite: an id, then names of tests, in each line.
pub const CASES: &str = "server/tests/conformance.txt";

/// API key of the server, so that the cases about keys run.
const KEY: &str = "sk-conformance";

/// What the suite imports apart from the standard library.
const MODULES: &str = "import pytest, httpx, openai, prometheus_client, jsonschema";

/// The results that the suite writes.
#[derive(Debug, Deserialize)]
pub struct Report {
    /// By id, with the parameter in brackets.
    results: BTreeMap<String, CaseResult>,
}

#[derive(Debug, Deserialize)]
struct CaseResult {
    outcome: String,
}

/// Runs the suite in `dir` with the interpreter `python` and further arguments for pytest.
///
/// # Errors
/// One line: Python or a module is missing, the server does not build or start, or cases failed.
pub fn run(root: &Path, dir: &Path, python: &Path, pytest: &[String]) -> Result<(), String> {
    let dir = dir.canonicalize().map_err(|error| format!("{}: {error}", dir.display()))?;
    check_python(python, &dir)?;
    let program = cargo::build_quire(root, "dev")?;
    let model = Some(dir.join("tiny-chat")).filter(|model| model.is_dir());
    let model_name = model.as_ref().map(|model| model.to_string_lossy());
    let mut server = Server::start(&program, model_name.as_deref().into_iter().chain(["--api-key", KEY]))?;
    let results = kernels::target(root).join("conformance.json");
    // The results of an earlier run must not be taken for those of this one.
    let _ = std::fs::remove_file(&results);
    let mut command = Command::new(python);
    command.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--conf-json"]).arg(&results).args(pytest);
    command
        .current_dir(&dir)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("OPENAI_BASE_URL", format!("{}/v1", server.url))
        .env("OPENAI_API_KEY", KEY)
        // Both the reference and Quire sum in float32.
        .env("LOGPROB_TOL", "0.01")
        .env("SERVER_CMD", format!("{} serve {{model}} --port {{port}} {{args}}", program.display()));
    if let Some(model) = &model {
        command.env("MODEL_DIR", model);
    }
    let status = command.status().map_err(|error| format!("{}: {error}", python.display()))?;
    let is_running = server.is_running();
    drop(server);
    let text = std::fs::read_to_string(&results)
        .map_err(|error| format!("the suite wrote no results ({status}): {}: {error}", results.display()))?;
    let report: Report = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", results.display()))?;
    let claimed = std::fs::read_to_string(root.join(CASES)).map_err(|error| format!("{CASES}: {error}"))?;
    println!("{}", report.summary(&claimed));
    if !is_running {
        return Err("the server ended while the suite ran; its messages are above".to_string());
    }
    if status.success() { Ok(()) } else { Err(format!("pytest ended with {status}; its messages are above")) }
}

/// Checks that the interpreter starts and has the modules of the suite in `dir`.
///
/// # Errors
/// One line that says what to install.
pub fn check_python(python: &Path, dir: &Path) -> Result<(), String> {
    let python_name = python.display();
    let output = Command::new(python).args(["-c", MODULES]).output();
    let output =
        output.map_err(|error| format!("{python_name}: {error}; the suite needs Python 3, name one with --python"))?;
    if output.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let reason = errors.lines().last().unwrap_or("no message");
    let requirements = dir.join("requirements.txt");
    Err(format!(
        "{python_name} lacks modules of the suite ({reason}); run {python_name} -m pip install -r {}",
        requirements.display()
    ))
}

impl Report {
    /// Returns counts, then the cases that failed, then the ids that [`CASES`] does not have.
    pub fn summary(&self, claimed: &str) -> String {
        let with = |outcome: &str| -> Vec<&str> {
            self.results.iter().filter(|(_, result)| result.outcome == outcome).map(|(id, _)| id.as_str()).collect()
        };
        let (passed, failed, skipped) = (with("passed"), with("failed"), with("skipped"));
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
