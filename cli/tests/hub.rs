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
    let args = ["plan", REPO, "--revision", "other", "--hf-token", "of-the-flag", "--download-dir", folder];
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
