//! `quire serve --state-dir` is killed again and again under load: what was accepted ends once, with the bytes of a run that was
//! never cut, and a stream that is read over all its servers has no gap and no repeat.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{Reply, listening};

/// Number of kills: a few, or with `QUIRE_TEST_ALL` so many that every phase is hit.
fn kills() -> u64 {
    if std::env::var_os("QUIRE_TEST_ALL").is_some() { 200 } else { 5 }
}

struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    fn start(folder: &std::path::Path) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
        command
            .args(["serve", "--port", "0", "--kv-cache-memory-bytes", "16M", "--threads", "1", "--state-dir"])
            .arg(folder);
        command.args(["--max-num-seqs", "3", "--no-enable-prefix-caching"]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let address = listening(&mut errors);
        // What it logs must not block it.
        std::thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
        Server { child, address }
    }

    fn connect(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(&[head.as_bytes(), body].concat())?;
        Ok(stream)
    }

    fn json(&self, method: &str, path: &str, body: &str) -> Value {
        let reply = Reply::read(self.connect(method, path, "application/json", body.as_bytes()).unwrap());
        assert_eq!(reply.status, 200, "{method} {path}: {}", reply.body);
        reply.json()
    }

    /// Uploads this many lines and begins their batch.
    fn batch(&self, lines: u64) -> String {
        let line = |i: u64| {
            json!({"custom_id": i.to_string(), "method": "POST", "url": "/v1/completions", "body": line(i)}).to_string()
        };
        let lines: Vec<String> = (0..lines).map(line).collect();
        let part =
            |head: &str, data: &str| format!("--b\r\nContent-Disposition: form-data; name={head}\r\n\r\n{data}\r\n");
        let body = part("purpose", "batch") + &part("file; filename=\"f\"", &lines.join("\n")) + "--b--";
        let stream = self.connect("POST", "/v1/files", "multipart/form-data; boundary=b", body.as_bytes()).unwrap();
        let file = Reply::read(stream).json()["id"].clone();
        let new = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
        self.json("POST", "/v1/batches", &new.to_string())["id"].as_str().unwrap().to_string()
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops it in order.
    fn terminate(mut self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert!(self.child.wait().unwrap().success());
    }
}

/// Sends requests that are not stored, one after the other, until the server is gone. Returns those that were answered.
fn clients(address: SocketAddr, first: u64) -> Vec<(u64, Value)> {
    let ask = |i: u64| {
        let mut stream = TcpStream::connect(address).ok()?;
        let body = line(i).to_string();
        let length = body.len();
        let head =
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json";
        stream.write_all(format!("{head}\r\nContent-Length: {length}\r\n\r\n{body}").as_bytes()).ok()?;
        let mut reply = String::new();
        std::io::Read::read_to_string(&mut stream, &mut reply).ok()?;
        let (_, body) = reply.split_once("\r\n\r\n").filter(|(head, _)| head.starts_with("HTTP/1.1 200"))?;
        serde_json::from_str::<Value>(body).ok()
    };
    (first..).map_while(|i| Some((i, ask(i)?))).collect()
}

/// A request with the same answer each time: text, log probabilities, or a tool call.
fn request(i: u64) -> Value {
    let mut body = json!({"input": format!("Story number {i}"), "temperature": 1, "seed": i, "max_output_tokens": 60, "ignore_eos": true, "background": true, "stream": i.is_multiple_of(2)});
    match i % 3 {
        0 => body["include"] = json!(["message.output_text.logprobs"]),
        1 => {
            body["tools"] = json!([{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}]);
            body["tool_choice"] = json!("required");
            body["ignore_eos"] = json!(false);
        }
        _ => {}
    }
    body
}

/// The body of a line with the same answer each time.
fn line(i: u64) -> Value {
    json!({"prompt": format!("Line {i}"), "max_tokens": 20, "temperature": 1, "seed": i, "logprobs": 2, "return_token_ids": true, "ignore_eos": true})
}

/// What must be equal in two runs of a request: everything but ids and times.
fn gist(mut response: Value) -> Value {
    for name in ["id", "created_at", "completed_at"] {
        response[name].take();
    }
    for item in response["output"].as_array_mut().unwrap() {
        item["id"].take();
        if item["type"] == "function_call" {
            item["call_id"].take();
        }
    }
    response
}

/// Data of the events of a stream, which may be cut at any byte.
fn events(stream: TcpStream) -> Vec<Value> {
    let mut events = Vec::new();
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { break };
        if let Some(data) = line.strip_prefix("data: ") {
            match serde_json::from_str(data) {
                Ok(event) => events.push(event),
                Err(_) => break,
            }
        }
    }
    events
}

#[test]
fn a_server_that_is_killed_at_any_time_loses_and_repeats_nothing() {
    survive(kills(), 400, false);
}

/// Also part of `cargo xtask test-all`, which restarts the server for minutes.
#[test]
fn a_server_that_is_stopped_and_killed_every_few_seconds_under_load_ends_all_work_once() {
    let everything = std::env::var_os("QUIRE_TEST_ALL").is_some();
    survive(if everything { 60 } else { 3 }, if everything { 5000 } else { 900 }, true);
}

/// Starts servers on one folder, each for up to so many milliseconds. With `load` other clients send requests meanwhile, and every other
/// server is stopped in order.
fn survive(servers: u64, most_millis: u64, load: bool) {
    let folder = tempfile::tempdir().unwrap();
    let (mut noise, mut accepted, mut next) = (1_u64, Vec::<(u64, String)>::new(), 0);
    let mut random = |below: u64| {
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (noise >> 33) % below
    };
    // The response whose events are read over all servers, and what was read.
    let mut followed: Option<(String, Vec<Value>)> = None;
    let mut batch = None;
    let mut answered = Vec::new();
    for round in 0..servers {
        let server = Server::start(&folder.path().join("state"));
        let batch = batch.get_or_insert_with(|| server.batch(8 * servers));
        let counts = server.json("GET", &format!("/v1/batches/{batch}"), "")["request_counts"].clone();
        assert_eq!(counts["failed"], 0, "{counts}");
        for _ in 0..2 {
            // Accepted if it is answered.
            let mut body = request(next);
            body["stream"] = json!(false);
            let stream = next % 2 == 0;
            if stream {
                body["stream"] = json!(true);
                let connection =
                    server.connect("POST", "/v1/responses", "application/json", body.to_string().as_bytes()).unwrap();
                let mut lines = BufReader::new(connection).lines();
                let first = lines.find_map(|line| line.unwrap().strip_prefix("data: ").map(str::to_string)).unwrap();
                let first: Value = serde_json::from_str(&first).unwrap();
                accepted.push((next, first["response"]["id"].as_str().unwrap().to_string()));
                followed.get_or_insert((accepted.last().unwrap().1.clone(), Vec::new()));
            } else {
                let queued = server.json("POST", "/v1/responses", &body.to_string());
                accepted.push((next, queued["id"].as_str().unwrap().to_string()));
            }
            next += 1;
        }
        let reader = followed.as_ref().map(|(id, seen)| {
            let after = seen
                .last()
                .map_or(String::new(), |last: &Value| format!("&starting_after={}", last["sequence_number"]));
            let stream = server
                .connect("GET", &format!("/v1/responses/{id}?stream=true{after}"), "application/json", b"")
                .unwrap();
            std::thread::spawn(move || events(stream))
        });
        let clients = load.then(|| {
            let address = server.address;
            std::thread::spawn(move || clients(address, 1_000_000 * (round + 1)))
        });
        std::thread::sleep(Duration::from_millis(random(most_millis)));
        if load && round % 2 == 0 {
            server.terminate()
        } else {
            server.kill()
        }
        answered.extend(clients.into_iter().flat_map(|clients| clients.join().unwrap()));
        if let (Some(reader), Some((_, seen))) = (reader, &mut followed) {
            seen.extend(reader.join().unwrap());
            let numbers: Vec<u64> = seen.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
            assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>(), "a gap or a repeat");
            if seen.last().is_some_and(|event| {
                ["response.completed", "response.incomplete"].contains(&event["type"].as_str().unwrap())
            }) {
                followed = None;
            }
        }
    }
    let server = Server::start(&folder.path().join("state"));
    let reference = tempfile::tempdir().unwrap();
    let uncut = Server::start(reference.path());
    for (i, id) in &accepted {
        let deadline = Instant::now() + Duration::from_secs(120);
        let answer = loop {
            let answer = server.json("GET", &format!("/v1/responses/{id}"), "");
            if !["queued", "in_progress"].contains(&answer["status"].as_str().unwrap()) {
                break answer;
            }
            assert!(Instant::now() < deadline, "{answer}");
            std::thread::sleep(Duration::from_millis(20));
        };
        let mut body = request(*i);
        (body["background"], body["stream"]) = (json!(false), json!(false));
        let mut expected = gist(uncut.json("POST", "/v1/responses", &body.to_string()));
        expected["background"] = json!(true);
        assert_eq!(gist(answer.clone()), expected, "request {i}");
        if i % 2 == 0 {
            let stream =
                server.connect("GET", &format!("/v1/responses/{id}?stream=true"), "application/json", b"").unwrap();
            let events = events(stream);
            assert!(events.iter().zip(0..).all(|(event, number)| event["sequence_number"] == number));
            assert_eq!(events.last().unwrap()["response"], answer);
            if let Some((_, seen)) = followed.as_ref().filter(|(other, _)| other == id) {
                assert_eq!(events[..seen.len()], seen[..], "what was sent is what is kept");
            }
        }
    }
    for (i, answer) in &answered {
        let expected = uncut.json("POST", "/v1/completions", &line(*i).to_string());
        assert_eq!(answer["choices"], expected["choices"], "request {i} of a client");
    }
    assert!(!load || !answered.is_empty());
    let batch = batch.unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    let done = loop {
        let done = server.json("GET", &format!("/v1/batches/{batch}"), "");
        if done["status"] == "completed" {
            break done;
        }
        assert!(Instant::now() < deadline, "{done}");
        std::thread::sleep(Duration::from_millis(20));
    };
    let content = format!("/v1/files/{}/content", done["output_file_id"].as_str().unwrap());
    let content = Reply::read(server.connect("GET", &content, "application/json", b"").unwrap()).body;
    assert_eq!(content.lines().count() as u64, 8 * servers);
    for (output, i) in content.lines().zip(0..) {
        let output: Value = serde_json::from_str(output).unwrap();
        assert_eq!(output["custom_id"], i.to_string());
        let expected = uncut.json("POST", "/v1/completions", &line(i).to_string());
        for name in ["choices", "usage"] {
            assert_eq!(output["response"]["body"][name], expected[name], "line {i}");
        }
    }
    server.kill();
    uncut.kill();
}
