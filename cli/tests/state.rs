//! `--state-dir` of `quire serve`, and `quire run-batch`.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::process::Process;

fn quire(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_quire")).args(args).output().unwrap()
}

fn state(folder: &Path) -> [&str; 2] {
    ["--state-dir", folder.to_str().unwrap()]
}

#[test]
fn two_servers_cannot_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let first = Process::start(&state(folder.path()));
    let second = quire(&[&["serve", "--port", "0"], &state(folder.path())[..]].concat());
    let said = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(
        said.starts_with("quire: --state-dir ")
            && said.contains("another server has it open")
            && said.lines().count() == 1,
        "{said}"
    );
    first.stop();
    Process::start(&state(folder.path())).stop();
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let refused = quire(&["serve", "--port", "0", "--state-dir", file.to_str().unwrap()]);
    assert!(!refused.status.success() && refused.stderr.starts_with(b"quire: --state-dir "));
}

#[test]
fn a_stop_leaves_background_work_to_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let send = |server: &Process, head: &str, body: &str| {
        let reply = server.send(&format!("{head} HTTP/1.1"), body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    };
    let server = Process::start(&state(folder.path()));
    let body =
        json!({"input": "A story", "max_output_tokens": 900, "ignore_eos": true, "background": true}).to_string();
    let ids: Vec<Value> = (0..12).map(|_| send(&server, "POST /v1/responses", &body)["id"].clone()).collect();
    let began = Instant::now();
    server.stop();
    assert!(began.elapsed() < Duration::from_secs(8), "it does not wait for background work: {:?}", began.elapsed());
    let server = Process::start(&state(folder.path()));
    let unfinished = ids.iter().filter(|id| {
        let status = send(&server, &format!("GET /v1/responses/{}", id.as_str().unwrap()), "")["status"].clone();
        ["queued", "in_progress"].contains(&status.as_str().unwrap())
    });
    assert!(unfinished.count() > 0);
    let deadline = Instant::now() + Duration::from_secs(120);
    for id in &ids {
        loop {
            let answer = send(&server, &format!("GET /v1/responses/{}", id.as_str().unwrap()), "");
            if answer["status"] == "incomplete" {
                assert_eq!(answer["usage"]["output_tokens"], 900);
                break;
            }
            assert!(Instant::now() < deadline, "{answer}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    server.stop();
}

#[test]
fn a_file_of_requests_runs_without_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let line = |id: &str, url: &str, body: Value| {
        json!({"custom_id": id, "method": "POST", "url": url, "body": body}).to_string()
    };
    let completion = json!({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0});
    let lines = [
        line("a", "/v1/completions", completion),
        line("b", "/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})),
        line("c", "/v1/nothing", json!({})),
        String::new(),
        "{".to_string(),
    ];
    std::fs::write(path("in"), lines.join("\n")).unwrap();
    let done = quire(&["run-batch", "-i", &path("in"), "-o", &path("out"), "--kv-cache-memory-bytes", "16M"]);
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success() && said.contains("2 requests completed, 2 failed"), "{said}");
    let results: Vec<Value> =
        std::fs::read_to_string(path("out")).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |id: Value| results.iter().find(|line| line["custom_id"] == id).unwrap().clone();
    assert_eq!(results.len(), 4);
    let text = of(json!("a"))["response"]["body"]["choices"][0]["text"].clone();
    let generated = quire(&["generate", "-p", "The capital of France is", "--max-tokens", "4", "--json"]);
    let generated: Value = serde_json::from_slice(&generated.stdout).unwrap();
    assert!(generated.to_string().contains(text.as_str().unwrap()), "{generated} {text}");
    assert_eq!(of(json!("b"))["response"]["status_code"], 200);
    assert_eq!(of(json!("c"))["error"]["code"], "invalid_request");
    assert_eq!(of(Value::Null)["error"]["code"], "invalid_request");
    let missing = quire(&["run-batch", "-i", &path("none"), "-o", &path("out")]);
    assert!(!missing.status.success() && missing.stderr.starts_with(b"quire: --input-file "));
}
