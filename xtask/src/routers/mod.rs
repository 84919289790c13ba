//! `cargo xtask routers`: two replicas behind routers from PyPI, and NVIDIA's indexer of KV events in front of one.
//!
//! For each router and policy, two servers of the demo model are started, then the router. Conversations show whether all requests
//! succeed and whether the turns of a conversation reach the replica that has its prefix; then one replica is killed under load.
//! Round robin without retries is there to show that both measures can fail. The packages come from the index that pip is configured for, in
//! the versions of `requirements.txt`; what cannot be installed is reported as not run.

mod indexer;
mod load;
mod packages;
mod random;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::cargo;
use crate::http::{Client, Service, free_port};
use crate::server::Server;
use packages::Packages;

/// A router with a policy.
struct Setup {
    package: &'static str,
    /// The program and its first arguments.
    command: &'static [&'static str],
    policy: &'static str,
    /// The router reads the KV events of the replicas.
    reads_events: bool,
    /// It neither keeps conversations on a replica nor sends a failed request to another one.
    is_control: bool,
}

const SETUPS: [Setup; 4] = [
    Setup::new("smg", &["smg", "launch"], "cache_aware"),
    Setup::new("vllm-router", &["vllm-router"], "cache_aware"),
    Setup { reads_events: true, ..Setup::new("vllm-router", &["vllm-router"], "kv_aware") },
    Setup { is_control: true, ..Setup::new("vllm-router", &["vllm-router"], "round_robin") },
];

impl Setup {
    const fn new(package: &'static str, command: &'static [&'static str], policy: &'static str) -> Setup {
        Setup { package, command, policy, reads_events: false, is_control: false }
    }
}

/// Arguments of a router without retries, which finds a dead replica by its probes.
const WITHOUT_RETRIES: [&str; 5] =
    ["--disable-retries", "--health-check-interval-secs", "1", "--health-failure-threshold", "1"];

/// Duration of the load before and after a replica is killed.
const FAILOVER: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(15)];

/// Share of later turns that must reach the replica of their conversation.
const LEAST_AFFINITY: f64 = 0.75;

/// Name of the demo model.
const MODEL: &str = "quire-demo";

/// Package with `dynamo.indexer`.
const INDEXER: &str = "ai-dynamo-runtime";

/// Formats of KV events that the indexer reads.
const FORMATS: [&str; 2] = ["map", "array"];

/// Installs the packages with the interpreter `python`, measures, and prints a table.
///
/// # Errors
/// One line: a program does not start, requests fail, a conversation changes replicas, the indexer is wrong, or a package that
/// `QUIRE_REQUIRE` asks for cannot be installed.
pub fn run(root: &Path, python: &Path) -> Result<(), String> {
    let packages = Packages::install(root, python)?;
    let (planned, mut ran) = (SETUPS.len() + FORMATS.len(), 0);
    let quire = cargo::build_quire(root, "dev")?;
    println!(
        "| router | policy | requests, failed | by replica | affinity | replica killed: requests, failed | until all succeed | longest |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for setup in &SETUPS {
        if let Some(version) = packages.version(setup.package) {
            let name = format!("{} {version}", setup.package);
            let row =
                measure(setup, &quire, &packages).map_err(|problem| format!("{name}, {}: {problem}", setup.policy))?;
            let without = if setup.is_control { ", no retries" } else { "" };
            println!("| {name} | {}{without} | {row} |", setup.policy);
            ran += 1;
        }
    }
    if let Some(version) = packages.version(INDEXER) {
        for format in FORMATS {
            let indexer::Compared { equal, cached, resets } = indexer::compare(&quire, &packages, format)?;
            println!(
                "dynamo.indexer ({INDEXER} {version}), format {format}: equal for {equal} prompts, of which {cached} had a cached prefix, and after {resets} resets"
            );
            ran += 1;
        }
    }
    println!("{ran} of {planned} measurements ran");
    Ok(())
}

/// Starts two replicas and the router, and returns the figures as cells of the table.
fn measure(setup: &Setup, quire: &Path, packages: &Packages) -> Result<String, String> {
    let (mut servers, mut sources) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let [events, replay] = [free_port()?, free_port()?];
        let config = json!({
            "enable_kv_cache_events": setup.reads_events,
            "endpoint": format!("tcp://*:{events}"),
            "replay_endpoint": format!("tcp://*:{replay}"),
        });
        let config = format!("--kv-events-config={config}");
        let server = Server::start(quire, ["--threads=1", "--kv-cache-memory-bytes=64M", &config])?;
        let source = |port: u16| format!("{}=tcp://127.0.0.1:{port}", server.url);
        sources.push([source(events), source(replay)]);
        servers.push(server);
    }
    let replicas: Vec<Client> = servers.iter().map(|server| Client::new(&server.url)).collect();
    let [port, metrics] = [free_port()?, free_port()?].map(|port| port.to_string());
    let mut command = Command::new(packages.program(setup.command[0]));
    command.args(&setup.command[1..]).args(["--host", "127.0.0.1", "--port", &port, "--prometheus-port", &metrics]);
    command.args(["--policy", setup.policy, "--worker-urls"]).args(servers.iter().map(|server| &server.url));
    if setup.reads_events {
        for [events, replay] in &sources {
            command.args(["--kv-event-source", events, "--kv-event-replay-source", replay]);
        }
        command.args(["--kv-event-block-size", "16", "--kv-event-model", MODEL]);
    }
    if setup.is_control {
        command.args(WITHOUT_RETRIES);
    }
    let router = Client::new(format!("http://127.0.0.1:{port}"));
    let first = json!({"model": MODEL, "prompt": "Ready?", "max_tokens": 1});
    let log = packages.log(&format!("{}-{}", setup.package, setup.policy));
    let _router = Service::start(command, &log, || router.post("/v1/completions", &first).is_ok())?;
    let counts = || -> Result<Vec<f64>, String> {
        replicas.iter().map(|replica| replica.metric("vllm:request_success_total")).collect()
    };
    let before = counts()?;
    let affinity = load::conversations(&router)?;
    let by_replica: Vec<f64> = counts()?.iter().zip(before).map(|(after, before)| after - before).collect();
    if by_replica.contains(&0.0) {
        return Err(format!("one replica got all requests ({by_replica:?}), so the affinity says nothing"));
    }
    let share = affinity.share();
    if (share < LEAST_AFFINITY) != setup.is_control {
        let expected = if setup.is_control { "less than" } else { "at least" };
        return Err(format!("found the affinity {share:.2}, expected {expected} {LEAST_AFFINITY}"));
    }
    let failover = load::failover(&router, FAILOVER, || drop(servers.pop()))?;
    if setup.is_control && failover.failed == 0 {
        return Err("no request failed although the router has no retries, so the others prove nothing".into());
    }
    let split: Vec<String> = by_replica.iter().map(|count| format!("{count:.0}")).collect();
    Ok(format!(
        "{}, 0 | {} | {:.0} % | {}, {} | {:.1} s | {:.0} ms",
        affinity.requests,
        split.join(" + "),
        100.0 * share,
        failover.requests,
        failover.failed,
        failover.until_all_succeed.as_secs_f64(),
        failover.longest.as_secs_f64() * 1000.0
    ))
}
