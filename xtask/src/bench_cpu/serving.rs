//! Workloads over HTTP: each server stays up, and its prefix cache is emptied before each run.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use testkit::kernels;

use super::{DTYPES, Form, Options, Pythons, Series, Subject, VLLM_SETTINGS, add, shown, times};
use crate::http::{Client, Service, free_port};

/// Files of requests with prompts of token ids below 49152: 64 of mixed lengths (8,434 tokens in, 8,501 out), and 32 that share 512
/// tokens.
const WORKLOADS: [&str; 2] = ["workload64", "prefix32"];

/// Requests at a time.
const CONCURRENCY: &str = "16";

/// Fields of the output of `quire bench serve`.
const FIELDS: [&str; 4] = ["output_throughput", "p50_ttft_ms", "p50_itl_ms", "p99_itl_ms"];

/// A server that is running.
struct Running {
    name: String,
    url: String,
    /// Runs as long as this exists.
    _service: Service,
}

pub(super) fn run(
    root: &Path,
    quire: &Path,
    options: &Options,
    subjects: &[Subject],
    forms: &[&Form],
    pythons: &Pythons,
) -> Result<(), String> {
    let threads = options.threads.to_string();
    let results = kernels::target(root).join("bench-cpu.json");
    println!();
    println!("| model | form | workload | | output tokens/s | first token, p50 ms | between tokens, p50 ms | p99 ms |");
    println!("|---|---|---|---|---|---|---|---|");
    for subject in subjects {
        for form in subject.forms(forms) {
            let mut servers = Vec::new();
            if let (Some(python), Some(dtype)) = (&pythons.vllm, form.vllm) {
                let mut command = Command::new(python);
                command.args(["-m", "vllm.entrypoints.openai.api_server", "--model"]).arg(&subject.model);
                command.args(["--dtype", dtype, "--max-num-seqs", CONCURRENCY]);
                // In this mode the server has the route that empties the prefix cache.
                command.envs(VLLM_SETTINGS).env("OMP_NUM_THREADS", &threads).env("VLLM_SERVER_DEV_MODE", "1");
                servers.push(start("vLLM".to_owned(), command)?);
            }
            for (dtype, _) in DTYPES {
                let mut command = Command::new(quire);
                command.arg("serve").arg(&subject.model).args(["--dtype", dtype]);
                form.add_to(&mut command);
                command.args(["--max-num-seqs", CONCURRENCY, "--threads", &threads]);
                servers.push(start(format!("Quire, {dtype}"), command)?);
            }
            for workload in WORKLOADS {
                let mut figures: Vec<Series> = servers.iter().map(|_| Series::default()).collect();
                for _ in 0..options.rounds {
                    for (server, figures) in servers.iter().zip(&mut figures) {
                        Client::new(&server.url).post("/reset_prefix_cache", &Value::Null)?;
                        let dataset = root.join("xtask/workloads").join(workload).with_extension("json");
                        let mut command = Command::new(quire);
                        command
                            .args(["bench", "serve", "--ignore-eos", "--base-url", &server.url, "--json"])
                            .arg(&results);
                        command.args(["--max-concurrency", CONCURRENCY, "--dataset"]).arg(dataset);
                        add(&server.name, &figures_of(command, &results)?, &FIELDS, figures)?;
                    }
                }
                let peers: Vec<(&str, &[f64])> = servers
                    .iter()
                    .zip(&figures)
                    .filter(|(server, _)| server.name == "vLLM")
                    .map(|(server, figures)| (server.name.as_str(), &figures[0][..]))
                    .collect();
                for (server, [tokens, first, between, worst]) in servers.iter().zip(&figures) {
                    let times = if server.name == "vLLM" { String::new() } else { times(tokens, &peers) };
                    println!(
                        "| {} | {} | {workload} | {} | {}{times} | {} | {} | {} |",
                        subject.name,
                        form.name,
                        server.name,
                        shown(tokens),
                        shown(first),
                        shown(between),
                        shown(worst)
                    );
                }
            }
        }
    }
    Ok(())
}

/// Runs a command that writes JSON to a file.
fn figures_of(mut command: Command, file: &Path) -> Result<Value, String> {
    let output = command.output().map_err(|error| format!("quire did not start: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "quire bench serve ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    let text = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", file.display()))
}

/// Starts a server on a free port, and waits until it answers.
fn start(name: String, mut command: Command) -> Result<Running, String> {
    let port = free_port()?;
    command.args(["--port", &port.to_string()]);
    let url = format!("http://127.0.0.1:{port}");
    let log = kernels::target(&testkit::workspace::root()).join(format!("bench-cpu-{port}.log"));
    let client = Client::new(&url);
    let service = Service::start(command, &log, || client.metric("up").is_ok())?;
    Ok(Running { name, url, _service: service })
}
