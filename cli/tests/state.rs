//! `--state-dir` of `quire serve`, and `quire run-batch`.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::Reply;
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

/// Makes the files of a command end at about this size, as if the disk were full: writes behind it fail.
fn limited(command: &mut Command, bytes: u64) {
    let mut shell = Command::new("sh");
    let script = format!("trap '' XFSZ; ulimit -f {}; exec \"$0\" \"$@\"", bytes / 512);
    shell.args(["-c", &script]).arg(command.get_program()).args(command.get_args()).stderr(Stdio::piped());
    *command = shell;
}

/// Uploads a file of this size, whose bytes are all the letter.
fn upload(server: &Process, letter: char, size: usize) -> Reply {
    let part = |head: &str, data: &str| format!("--b\r\nContent-Disposition: form-data; name={head}\r\n\r\n{data}\r\n");
    let contents = letter.to_string().repeat(size);
    let body = part("purpose", "batch") + &part("file; filename=\"f\"", &contents) + "--b--";
    let mut stream = TcpStream::connect(server.address).unwrap();
    let head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: multipart/form-data; boundary=b";
    stream.write_all(format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
    Reply::read(stream)
}

#[test]
fn a_full_disk_refuses_new_work_and_keeps_what_was_accepted() {
    let folder = tempfile::tempdir().unwrap();
    Process::start(&state(folder.path())).stop();
    let size = std::fs::metadata(folder.path().join("quire.redb")).unwrap().len();
    let server = Process::start_with(&state(folder.path()), |command| limited(command, size + (1 << 20)));
    let body =
        json!({"input": "A story", "max_output_tokens": 300, "ignore_eos": true, "background": true}).to_string();
    let accepted = server.send("POST /v1/responses HTTP/1.1", &body);
    assert_eq!(accepted.status, 200, "{}", accepted.body);
    let response = format!("GET /v1/responses/{} HTTP/1.1", accepted.json()["id"].as_str().unwrap());
    const SIZE: usize = 200_000;
    let (mut files, mut refused) = (Vec::new(), None);
    for letter in ('a'..='z').cycle().take(300) {
        let reply = upload(&server, letter, SIZE);
        if reply.status != 200 {
            refused = Some(reply);
            break;
        }
        files.push((reply.json()["id"].as_str().unwrap().to_string(), letter));
    }
    let refused = refused.expect("the disk is full");
    let message = refused.error()["message"].as_str().unwrap().to_string();
    assert_eq!(refused.status, 503, "{message}");
    assert!(message.contains("check the disk's space") && !message.contains('\n'), "{message}");
    let is_kept = |server: &Process, (id, letter): &(String, char)| {
        let found = server.send(&format!("GET /v1/files/{id}/content HTTP/1.1"), "");
        assert_eq!((found.status, found.body.len()), (200, SIZE), "{id}");
        assert!(found.body.chars().all(|c| c == *letter), "{id}");
    };
    files.iter().for_each(|file| is_kept(&server, file));
    let plain = server.send("POST /v1/completions HTTP/1.1", &json!({"prompt": "One", "max_tokens": 2}).to_string());
    assert_eq!(plain.status, 200, "what is not stored needs no disk: {}", plain.body);
    server.stop();
    // With room again, nothing is missing.
    let server = Process::start(&state(folder.path()));
    files.iter().for_each(|file| is_kept(&server, file));
    assert_eq!(upload(&server, 'z', SIZE).status, 200);
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let answer = server.send(&response, "").json();
        if answer["status"] == "incomplete" {
            assert_eq!(answer["usage"]["output_tokens"], 300);
            break;
        }
        assert!(Instant::now() < deadline, "{answer}");
        std::thread::sleep(Duration::from_millis(20));
    }
    server.stop();
}

#[test]
fn a_folder_that_cannot_be_written_is_one_line() {
    // No process may make files there, whatever its rights; in containers it is mounted read-only.
    let refused = quire(&["serve", "--port", "0", "--state-dir", "/sys/quire-state"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    let parts = ["quire: --state-dir /sys/quire-state", "expected a folder that can be made, read and written"];
    assert!(parts.iter().all(|part| said.contains(part)) && said.lines().count() == 1, "{said}");
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
