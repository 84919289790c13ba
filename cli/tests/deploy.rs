//! What `deploy/` says of the program is true: flags exist, ports and probes meet, and whoever stops it waits long enough.

use std::process::Command;

use crate::common::Server;

const DOCKERFILE: &str = include_str!("../../deploy/Dockerfile");
const UNIT: &str = include_str!("../../deploy/systemd/quire.service");
const MANIFEST: &str = include_str!("../../deploy/kubernetes/quire.yaml");
const PATCHES: [&str; 2] =
    [include_str!("../../deploy/kubernetes/llm-d.yaml"), include_str!("../../deploy/kubernetes/aibrix.yaml")];
const ADAPTER: &str = include_str!("../../deploy/kubernetes/adapter.yaml");

fn help() -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_quire")).args(["serve", "--help"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// The value of the first line that begins with `key` and a separator, comments aside.
fn value<'a>(text: &'a str, key: &str) -> &'a str {
    let lines = text.lines().map(|line| line.trim().trim_start_matches("- "));
    let found = lines.filter_map(|line| line.strip_prefix(key)?.strip_prefix([':', '='])).next();
    found.unwrap_or_else(|| panic!("no {key}")).trim().trim_matches('"')
}

fn number(text: &str, key: &str) -> u64 {
    value(text, key).parse().unwrap_or_else(|_| panic!("{key}: {}", value(text, key)))
}

/// Failures after which a probe acts: Kubernetes' default of 3 where its block says nothing.
fn failures(probe: &str) -> u64 {
    let block: Vec<&str> = probe.lines().skip(1).take_while(|line| line.starts_with("            ")).collect();
    if block.iter().any(|line| line.contains("failureThreshold")) {
        number(&block.join("\n"), "failureThreshold")
    } else {
        3
    }
}

#[test]
fn every_flag_and_variable_in_deploy_exists() {
    let help = help();
    let mut seen = 0;
    let command = UNIT.lines().find(|line| line.starts_with("ExecStart=")).unwrap();
    let flags = command.split(' ').chain(MANIFEST.lines().map(|line| line.trim().trim_start_matches("- ")));
    for flag in flags
        .filter(|word| word.starts_with("--") && !word.starts_with("---"))
        .map(|word| word.split('=').next().unwrap())
    {
        let known = help.split(|c: char| !(c.is_alphanumeric() || c == '-')).any(|word| word == flag);
        assert!(known, "{flag} is no flag of quire serve");
        seen += 1;
    }
    for variable in
        DOCKERFILE.split([' ', '\n']).filter_map(|word| word.split('=').next()).filter(|w| w.starts_with("QUIRE"))
    {
        assert!(help.contains(variable), "{variable}");
        seen += 1;
    }
    assert!(seen >= 17, "{seen} were looked at");
}

#[test]
fn ports_and_probes_meet_the_program() {
    assert_eq!(number(MANIFEST, "containerPort"), number(MANIFEST, "--port"));
    assert_eq!(number(MANIFEST, "prometheus.io/port"), number(MANIFEST, "--port"));
    assert!(DOCKERFILE.contains("QUIRE_PORT=8000") && DOCKERFILE.contains("EXPOSE 8000"));
    let server = Server::start();
    let paths: Vec<&str> = MANIFEST.lines().filter_map(|line| line.trim().strip_prefix("path: ")).collect();
    assert_eq!(paths.len(), 3, "a start-up, a readiness and a liveness probe");
    for path in paths.into_iter().chain([value(MANIFEST, "prometheus.io/path")]) {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    let page = server.get("/metrics").body;
    assert!(ADAPTER.contains("vllm:num_requests_waiting") && page.contains("\nvllm:num_requests_waiting{"));
    assert_eq!(value(ADAPTER, "as"), "quire_requests_waiting");
    assert!(MANIFEST.contains("name: quire_requests_waiting"));
}

#[test]
fn the_patches_for_routers_have_labels_and_kv_events_that_the_program_accepts() {
    for (patch, labels) in PATCHES.iter().zip([
        &["llm-d.ai/engine-type: vllm", "llm-d.ai/role: both"][..],
        &["model.aibrix.ai/engine: vllm", "model.aibrix.ai/port: \"8000\"", "kv-events-enabled: \"true\""],
    ]) {
        labels.iter().for_each(|label| assert!(patch.contains(label), "{label}"));
        assert!(patch.contains("name: QUIRE_KV_EVENTS_CONFIG") && help().contains("QUIRE_KV_EVENTS_CONFIG"));
        let config = patch.lines().find_map(|line| line.trim().strip_prefix("value: '")?.strip_suffix('\'')).unwrap();
        for port in [5557, 5558] {
            assert!(
                config.contains(&format!(":{port}")) && patch.contains(&format!("containerPort: {port}")),
                "{port}"
            );
        }
        let plan =
            Command::new(env!("CARGO_BIN_EXE_quire")).args(["plan", "--kv-events-config", config]).output().unwrap();
        assert!(plan.status.success(), "{config}: {}", String::from_utf8_lossy(&plan.stderr));
    }
    assert!(DOCKERFILE.contains("ln -s quire /out/vllm"));
}

#[test]
fn whoever_stops_the_program_waits_longer_than_it_takes() {
    let pre_stop = number(MANIFEST, "seconds");
    assert!(number(MANIFEST, "terminationGracePeriodSeconds") > pre_stop + number(MANIFEST, "--shutdown-timeout") + 2);
    let command = UNIT.lines().find(|line| line.starts_with("ExecStart=")).unwrap();
    let timeout: u64 = command.rsplit("--shutdown-timeout ").next().unwrap().parse().unwrap();
    assert!(number(UNIT, "TimeoutStopSec") > timeout + 2);
    // The program calls an engine stuck before the requests that wait for it are given up on at a stop.
    assert!(number(MANIFEST, "--engine-iteration-timeout") <= number(MANIFEST, "--shutdown-timeout"));
    // Each probe has an answer, or has given up, when the next one starts.
    let probe = |name: &str| MANIFEST.split_once(&format!("{name}:")).unwrap().1;
    for name in ["readinessProbe", "livenessProbe"] {
        assert!(number(probe(name), "timeoutSeconds") < number(probe(name), "periodSeconds"), "{name}");
    }
    // Who cannot answer gets no requests before it is started anew.
    let patience = |name: &str| number(probe(name), "periodSeconds") * failures(probe(name));
    assert!(patience("readinessProbe") < patience("livenessProbe"));
}

#[test]
fn nothing_runs_as_root_or_with_more_rights_than_it_needs() {
    for line in
        ["runAsNonRoot: true", "allowPrivilegeEscalation: false", "readOnlyRootFilesystem: true", "drop: [\"ALL\"]"]
    {
        assert!(MANIFEST.contains(line), "{line}");
    }
    for line in ["DynamicUser=yes", "NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet=\n"] {
        assert!(UNIT.contains(line), "{line}");
    }
    assert!(DOCKERFILE.contains("\nUSER 65532:65532\n") && DOCKERFILE.contains(":nonroot AS cpu"));
    assert_eq!(value(MANIFEST, "runAsUser"), "65532", "the user of the image");
}

#[test]
fn examples_of_several_ranks_start_as_many_as_their_flags_say() {
    let help = help();
    for (name, text) in [
        ("sbatch", include_str!("../../deploy/slurm/quire.sbatch")),
        ("leaderworkerset", include_str!("../../deploy/kubernetes/leaderworkerset.yaml")),
        ("mpijob", include_str!("../../deploy/kubernetes/mpijob.yaml")),
    ] {
        let (_, command) = text.split_once("quire serve ").or_else(|| text.split_once("- serve\n")).unwrap();
        let words: Vec<&str> = command.split([' ', '\n', '"']).filter(|word| !word.is_empty()).collect();
        let value = |flag: &str| words.iter().find_map(|word| word.strip_prefix(flag)?.strip_prefix('=')?.parse().ok());
        let ranks: usize =
            value("--tensor-parallel-size").unwrap_or(1) * value("--pipeline-parallel-size").unwrap_or(1);
        let (_, count) =
            text.split_once("--ntasks=").or_else(|| text.split_once("-n 4").map(|it| (it.0, "4"))).unwrap_or(("", "2"));
        assert!(count.starts_with(&ranks.to_string()), "{name}: {ranks} ranks");
        // What follows belongs to others.
        let of_quire = words.iter().take_while(|word| !word.starts_with("ports:") && !word.starts_with("Worker:"));
        for flag in of_quire.filter(|word| word.starts_with("--")) {
            let flag = flag.split('=').next().unwrap();
            assert!(help.contains(&format!("{flag} ")), "{name}: {flag}");
        }
    }
}
