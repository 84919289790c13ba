//! Models named by a hub id, from a hub on this machine that has the demo model.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::fake_hub::server::Reply;
use crate::fake_hub::{COMMIT, Hub, REPO};
use crate::process::Process;

const FILES: [&str; 5] =
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];

/// A hub with the demo model, which also answers for the branch `other`.
fn hub() -> Hub {
    let folder = testkit::workspace::root().join("models/demo");
    let files: Vec<(&str, Vec<u8>)> =
        FILES.iter().map(|name| (*name, std::fs::read(folder.join(name)).unwrap())).collect();
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    Hub::scripted(&files, |request| {
        let is_other = request.path.ends_with("/revision/other");
        is_other.then(|| crate::fake_hub::listing(FILES))
    })
}

/// Sets the environment of a user of this hub.
fn environment(command: &mut Command, hub: &Hub) {
    let inherited = ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"];
    for name in inherited {
        command.env_remove(name);
    }
    command.env("HF_ENDPOINT", hub.api.url()).env("HF_HOME", hub.home.path());
}

fn quire(hub: &Hub, args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    environment(&mut command, hub);
    command.args(args).envs(variables.iter().copied()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The one line with which a command fails.
#[track_caller]
fn refusal(output: &Output) -> String {
    let line = text(&output.stderr);
    assert!(output.status.code() == Some(1) && output.stdout.is_empty() && line.lines().count() == 1, "{line}");
    line
}

#[test]
fn a_hub_id_is_downloaded_and_served_under_its_id() {
    let hub = hub();
    let generated = quire(&hub, &["generate", REPO, "-p", "The capital of France is"], &[]);
    let log = text(&generated.stderr);
    assert!(text(&generated.stdout).contains("Paris"), "{generated:?}");
    for line in ["downloading org/name to /", "downloaded 3.", "model: org/name (LlamaForCausalLM"] {
        assert!(log.contains(line), "{line}: {log}");
    }
    // The second time only the revision is resolved; offline not even that.
    let before = hub.requests().len();
    let server = Process::start_with(&[REPO], |command| environment(command, &hub));
    let models: Value = serde_json::from_str(&server.send("GET /v1/models HTTP/1.1", "").body).unwrap();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["root"]), (&REPO.into(), &REPO.into()));
    assert!(!server.stop().concat().contains("download"));
    assert_eq!(hub.requests().len(), before + 1);
    let planned = quire(&hub, &["plan", REPO, "--json"], &[("HF_HUB_OFFLINE", "1")]);
    let plan: Value = serde_json::from_slice(&planned.stdout).unwrap();
    assert!(plan["weight_bytes"].as_u64() > Some(3 << 20), "{plan}");
    assert_eq!(hub.requests().len(), before + 1);
}

#[test]
fn the_flags_choose_revision_token_and_folder() {
    let hub = hub();
    let folder = hub.home.path().join("models");
    let folder = folder.to_str().unwrap();
    let secret = ("HF_TOKEN", "of-the-environment");
    let args = [
        "generate",
        REPO,
        "-p",
        "a",
        "--max-tokens",
        "1",
        "--revision",
        "other",
        "--hf-token",
        "of-the-flag",
        "--download-dir",
        folder,
    ];
    let planned = quire(&hub, &args, &[secret]);
    assert!(planned.status.success(), "{planned:?}");
    assert!(!format!("{planned:?}").contains("of-the-"), "tokens are in no output");
    assert!(hub.requests()[0].ends_with("/revision/other"));
    let sent: Vec<_> = hub.api.requests().iter().map(|it| it.header("Authorization").unwrap().to_string()).collect();
    assert!(sent.iter().all(|header| header == "Bearer of-the-flag"), "{sent:?}");
    assert!(Path::new(folder).join("models--org--name/refs/other").is_file());
    let snapshot = Path::new(folder).join("models--org--name/snapshots").join(COMMIT);
    let snapshot = snapshot.to_str().unwrap();
    // The path of a snapshot is a path, and a revision means nothing with one.
    assert!(quire(&hub, &["plan", snapshot], &[]).status.success());
    let line = refusal(&quire(&hub, &["plan", snapshot, "--revision", "other"], &[]));
    assert!(line.contains("--revision: found \"other\" with the path") && line.contains("omit it"), "{line}");
    let line = refusal(&quire(&hub, &["plan", "--revision", "other"], &[]));
    assert!(line.contains("--revision: found \"other\" without a model"), "{line}");
}

#[test]
fn what_is_no_model_is_one_line() {
    let hub = hub();
    for neither in ["no-such-folder", "./no/such", "/no/such", "org/name/more", "org/..", "org/name:"] {
        let line = refusal(&quire(&hub, &["plan", neither], &[]));
        assert!(
            line.contains(neither) && line.contains("no such folder or file; expected a checkpoint folder"),
            "{line}"
        );
    }
    assert_eq!(hub.requests().len(), 0);
    let line = refusal(&quire(&hub, &["plan", "org/other"], &[]));
    assert!(line.contains("org/other: found no such model at http://") && line.contains("no folder or file"), "{line}");
    let line = refusal(&quire(&hub, &["plan", "org/other"], &[("TRANSFORMERS_OFFLINE", "1")]));
    assert!(line.contains("found no revision main in /"), "{line}");
    let line = refusal(&quire(&hub, &["plan", REPO, "--hf-token", "of the flag\u{1}"], &[]));
    assert!(line.contains("--hf-token: found characters") && !line.contains("of the"), "{line}");
    // Five attempts, of which the user sees two lines.
    let down = Hub::scripted(&[], |_| Some(Reply::status(503).with("Retry-After", "0")));
    let failed = quire(&down, &["plan", REPO], &[]);
    let log = text(&failed.stderr);
    assert!(log.lines().count() == 2 && log.contains("status 503; trying again"), "{log}");
    let gated = Hub::scripted(&[], |_| Some(Reply::status(403).with("X-Error-Code", "GatedRepo")));
    let line = refusal(&quire(&gated, &["serve", "--port", "0", REPO], &[]));
    assert!(line.contains("org/name is gated: accept its terms at http://") && line.contains("--hf-token"), "{line}");
}

/// A hub with the files of a folder.
fn hub_of(folder: &Path) -> Hub {
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    let is_file = |path: &Path| path.is_file();
    let entries = std::fs::read_dir(folder).unwrap().filter(|entry| is_file(&entry.as_ref().unwrap().path()));
    let files: Vec<(String, Vec<u8>)> = entries.map(read).collect();
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
    Hub::new(&files)
}

#[test]
fn a_model_is_planned_without_its_weights_as_with_them() {
    let root = testkit::workspace::root().join("models/tests");
    let models = [
        "reference/gpt-oss",
        "reference/phi3-longrope",
        "reference/qwen3-next",
        "reference/mixtral",
        "gguf/reference/gguf-qwen2-iq4_nl",
    ];
    for model in models {
        let (hub, temporary) = (hub_of(&root.join(model)), tempfile::tempdir().unwrap());
        let flags = ["--json", "--kv-cache-memory-bytes", "8M", "--threads", "1"];
        let plan = |model: &str, variables: &[(&str, &str)]| {
            let output = quire(&hub, &[&["plan", model][..], &flags].concat(), variables);
            assert!(output.status.success(), "{model}: {}", text(&output.stderr));
            let mut plan: Value = serde_json::from_slice(&output.stdout).unwrap();
            let plan = plan.as_object_mut().unwrap();
            (plan.remove("model"), plan.remove("speed"), plan.clone())
        };
        let own = root.join(model);
        let gguf = std::fs::read_dir(&own).unwrap().map(|entry| entry.unwrap().path());
        let gguf = gguf.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "gguf"));
        let own = gguf.unwrap_or(own);
        let (_, none, expected) = plan(own.to_str().unwrap(), &[]);
        let (_, speed, found) = plan(REPO, &[("TMPDIR", temporary.path().to_str().unwrap())]);
        assert_eq!(found, expected, "{model}");
        let is_fast = |figure: &str| speed.as_ref().is_some_and(|speed| speed[figure].as_f64() > Some(0.0));
        assert!(
            none.is_none() && ["tokens_per_second", "tokens_per_second_at_most"].into_iter().all(is_fast),
            "{model}"
        );
        // What was read for the plan is gone, and no weights were stored.
        assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
        let cached = hub.cached("snapshots").join(COMMIT);
        let names = std::fs::read_dir(cached).into_iter().flatten().map(|entry| entry.unwrap().file_name());
        assert!(!names.into_iter().any(|name| name.to_str().unwrap().ends_with(".safetensors")), "{model}");
    }
}

#[test]
fn a_damaged_header_of_a_hub_model_is_one_line_that_names_the_file() {
    let folder = testkit::workspace::root().join("models/demo");
    let config = std::fs::read(folder.join("config.json")).unwrap();
    for (bytes, expected) in [
        (u64::MAX.to_le_bytes().to_vec(), "found a header of 18446744073709551615 bytes"),
        (1_000_000u64.to_le_bytes().to_vec(), "expected a header of 1000000 bytes"),
        (b"abc".to_vec(), "expected a whole header"),
    ] {
        let hub = Hub::new(&[("config.json", &config), ("model.safetensors", &bytes)]);
        let failed = quire(&hub, &["plan", REPO], &[]);
        let log = text(&failed.stderr);
        let line = log.lines().last().unwrap();
        assert!(failed.stdout.is_empty() && line.starts_with("quire: "), "{log}");
        assert!(line.contains("model.safetensors") && line.contains(expected), "{line}");
    }
}

#[test]
fn a_gpu_that_is_not_here_can_be_planned_for() {
    let output = |arguments: &[&str]| Command::new(env!("CARGO_BIN_EXE_quire")).args(arguments).output().unwrap();
    let table = text(&output(&["plan", "--card", "h100"]).stdout);
    assert!(table.contains("tokens/s of one sequence (the data sheet of h100)"), "{table}");
    let speed = |card: &str| {
        let plan: Value = serde_json::from_slice(&output(&["plan", "--json", "--card", card]).stdout).unwrap();
        plan["speed"]["tokens_per_second_at_most"].as_f64().unwrap()
    };
    assert!(speed("h200") > 1.4 * speed("h100"), "bandwidth is what counts");
    let line = text(&output(&["plan", "--card", "h9"]).stderr);
    assert!(line.contains("--card") && line.contains("expected one of a10, ") && line.lines().count() == 1, "{line}");
}
