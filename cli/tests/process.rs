//! `quire serve` as a process: what it logs, and the keys that it reads from a file.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use crate::common::{Reply, listening};
use serde_json::{Value, json};

/// `quire serve` with the demo model.
pub struct Process {
    child: Child,
    errors: BufReader<std::process::ChildStderr>,
    pub address: SocketAddr,
}

impl Process {
    pub fn start(args: &[&str]) -> Process {
        Process::start_with(args, |_| ())
    }

    /// Starts it after `prepare` has changed the command.
    pub fn start_with(args: &[&str], prepare: impl FnOnce(&mut Command)) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
        command.args(["serve", "--port", "0", "--kv-cache-memory-bytes", "16M"]).args(args).stderr(Stdio::piped());
        prepare(&mut command);
        let mut child = command.spawn().unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let address = listening(&mut errors);
        Process { child, errors, address }
    }

    /// Sends a request, of which `head` is the first line and further headers.
    pub fn send(&self, head: &str, body: &str) -> Reply {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let length = body.len();
        write!(stream, "{head}\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        Reply::read(stream)
    }

    /// Stops it in order; the rest of its log.
    pub fn stop(mut self) -> Vec<String> {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let lines = self.errors.lines().map(Result::unwrap).collect();
        assert!(self.child.wait().unwrap().success());
        lines
    }
}

#[test]
fn a_server_that_other_machines_reach_without_a_key_says_so() {
    for (args, says) in [
        (&["--host", "0.0.0.0"][..], true),
        (&["--host", "0.0.0.0", "--api-key", "k"], false),
        (&["--host", "127.0.0.1"], false),
    ] {
        let log = Process::start(args).stop().join("\n");
        assert_eq!(log.contains("no API key is set") && log.contains("--allowed-hosts"), says, "{args:?}: {log}");
    }
}

#[test]
fn each_request_is_one_object_in_the_log_and_its_prompt_is_logged_only_on_request() {
    for asked in [false, true] {
        let mut args = vec!["--log-format", "json", "--log-level", "info", "--max-log-len", "11"];
        args.extend(asked.then_some("--enable-log-requests"));
        let server = Process::start(&args);
        let body = r#"{"prompt": "The capital of France is", "max_tokens": 5, "ignore_eos": true}"#;
        let reply = server.send("POST /v1/completions HTTP/1.1\r\nX-Request-Id: mine-1", body);
        assert_eq!((reply.status, reply.header("x-request-id")), (200, "mine-1"));
        let lines: Vec<Value> = server.stop().iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let spans: Vec<&Value> =
            lines.iter().filter(|line| line["message"] == "ended").map(|line| &line["span"]).collect();
        let [span] = spans[..] else { panic!("{} lines for one request", spans.len()) };
        assert_eq!((&span["id"], &span["finish_reason"]), (&"mine-1".into(), &"length".into()));
        assert_eq!((&span["generation_tokens"], &span["cached_tokens"]), (&5.into(), &0.into()));
        for part in ["queue_seconds", "prefill_seconds", "decode_seconds", "first_token_seconds"] {
            assert!(
                span[part].as_f64().is_some_and(|s| s <= span["total_seconds"].as_f64().unwrap()),
                "{part}: {span}"
            );
        }
        let told = lines.iter().any(|line| line.to_string().contains("The capital"));
        assert_eq!(told, asked);
        assert!(!lines.iter().any(|line| line.to_string().contains("The capital of")), "it is cut");
    }
}

#[test]
fn keys_can_come_from_a_file_and_an_empty_file_is_an_error() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, "# of the team\nfrom-file\n\n  second \n").unwrap();
    let file = path.to_str().unwrap();
    let server = Process::start(&["--api-key", "from-flag", "--api-key", "another", "--api-key-file", file]);
    for (key, status) in
        [("from-file", 200), ("second", 200), ("from-flag", 200), ("another", 200), ("# of the team", 401)]
    {
        let reply = server.send(&format!("GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {key}"), "");
        assert_eq!(reply.status, status, "{key}");
    }
    assert!(!server.stop().concat().contains("from-"), "keys are in no log");
    std::fs::write(&path, "# nothing\n").unwrap();
    let refused = Command::new(env!("CARGO_BIN_EXE_quire"))
        .args(["serve", "--port", "0", "--api-key-file", file])
        .output()
        .unwrap();
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && message.contains("--api-key-file") && message.contains("no key"), "{message}");
}

#[test]
fn sampled_spans_reach_the_collector_when_the_server_stops() {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = collector.local_addr().unwrap();
    let endpoint = format!("http://{address}");
    let variables = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()), ("OTEL_BSP_SCHEDULE_DELAY", "3600000")];
    let server = Process::start_with(&[], |command| {
        command.envs(variables);
    });
    let (trace, parent) = ("0123456789abcdef0123456789abcdef", "0123456789abcdef");
    for (id, flags) in [("dropped", "00"), ("first", "01"), ("dropped", "02"), ("second", "03"), ("no-parent", "")] {
        let header = if flags.is_empty() { "" } else { &format!("\r\ntraceparent: 00-{trace}-{parent}-{flags}") };
        let head = format!("POST /v1/completions HTTP/1.1\r\nX-Request-Id: {id}{header}");
        assert_eq!(server.send(&head, r#"{"prompt": "One", "max_tokens": 2, "ignore_eos": true}"#).status, 200);
    }
    let collected = std::thread::spawn(move || {
        let (mut stream, _) = collector.accept().unwrap();
        let (mut text, mut part) = (String::new(), [0; 4096]);
        // The message is one JSON object; it ends with the brackets that it began with.
        while !text.ends_with("]}]}]}") {
            let read = stream.read(&mut part).unwrap();
            assert!(read > 0, "{text}");
            text += std::str::from_utf8(&part[..read]).unwrap();
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        text
    });
    server.stop();
    // If no spans have come, the collector takes this connection, and the test ends.
    drop(TcpStream::connect(address));
    let text = collected.join().unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
    let message: Value = serde_json::from_str(body).unwrap();
    let spans = message["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap();
    let attribute = |span: &Value, key: &str| {
        let attributes = span["attributes"].as_array().unwrap();
        attributes.iter().find(|attribute| attribute["key"] == key).map(|attribute| attribute["value"].clone())
    };
    let ids: Vec<Value> = spans.iter().map(|span| attribute(span, "gen_ai.request.id").unwrap()).collect();
    assert_eq!(ids, ["first", "second", "no-parent"].map(|id| json!({"stringValue": id})));
    for span in &spans[..2] {
        assert_eq!((&span["traceId"], &span["parentSpanId"]), (&json!(trace), &json!(parent)));
    }
    assert!(spans[2]["parentSpanId"].is_null() && spans[2]["traceId"].as_str().unwrap().len() == 32, "{text}");
    for span in spans {
        assert_eq!(attribute(span, "gen_ai.usage.output_tokens"), Some(json!({"intValue": "2"})));
        let queued = attribute(span, "gen_ai.latency.time_in_queue").unwrap();
        assert!(queued["doubleValue"].as_f64().unwrap() >= 0.0, "{span}");
        let time = |name: &str| span[name].as_str().unwrap().parse::<u128>().unwrap();
        assert!(0 < time("startTimeUnixNano") && time("startTimeUnixNano") <= time("endTimeUnixNano"));
    }
}
