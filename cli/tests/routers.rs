//! The command line of orchestrators: `vllm serve` with flags of vLLM starts this program. Numbers such as B15 are those of
//! `docs/routers.md`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Reply, listening};

/// A folder with the program under vLLM's name.
fn vllm() -> tempfile::TempDir {
    let folder = tempfile::TempDir::new().unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_quire"), folder.path().join("vllm")).unwrap();
    folder
}

fn get(address: SocketAddr, path: &str) -> std::io::Result<Reply> {
    let mut stream = TcpStream::connect(address)?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    Ok(Reply::read(stream))
}

/// Ends the process with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn b3_b4_b15_the_command_line_of_kserve_starts_the_program() {
    let folder = vllm();
    let program = folder.path().join("vllm");
    let version = Command::new(&program).arg("--version").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&version.stdout), format!("quire {}\n", env!("CARGO_PKG_VERSION")));
    let model = testkit::workspace::root().join("models/tests/reference/llama");
    let mut command = Command::new(&program);
    command.arg("serve").arg(&model).args(["--served-model-name", "llama", "publishers/ns/models/llama"]);
    command.args(["--port", "0", "--disable-access-log-for-endpoints", "/health,/metrics,/ping"]);
    command.args(["--shutdown-timeout", "45", "--tensor-parallel-size", "1", "--enable-ssl-refresh"]);
    command.args(["--uvicorn-log-level", "warning", "--kv-cache-memory-bytes", "16M"]);
    let mut process = Process(command.stderr(Stdio::piped()).spawn().unwrap());
    let address = listening(&mut BufReader::new(process.0.stderr.take().unwrap()));
    let models = get(address, "/v1/models").unwrap().json();
    let names: Vec<&str> = models["data"].as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["llama", "publishers/ns/models/llama"]);
    assert_eq!(models["data"][0]["root"], model.display().to_string());
}

#[test]
fn b15_flags_that_would_be_missed_are_refused_in_one_line() {
    let refused = |args: &[&str], expected: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_quire")).args(["serve", "--port=0"]).args(args).output().unwrap();
        let line = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && line.lines().count() == 1 && line.contains(expected), "{line}");
    };
    // A server that was told to use TLS does not start without it.
    refused(&["--ssl-certfile", "/no/cert.pem"], "--ssl-certfile /no/cert.pem: No such file");
    for flag in ["--ssl-keyfile", "--ssl-ca-certs"] {
        refused(&[flag, "cert.pem"], "--ssl-certfile");
    }
    refused(&["--ssl-cert-reqs", "2"], "expected --ssl-certfile too");
    refused(&["--uds", "/no/folder/socket"], "--uds /no/folder/socket: ");
    refused(&["--uds", "/dev/null"], "found a file, expected none");
    refused(&["--tensor-parallel-size", "0"], "--tensor-parallel-size");
    refused(&["--uvicorn-log-level", "loud"], "--uvicorn-log-level");
    // The model was meant, and the demo model would be served.
    refused(&["--served-model-name", "llama", "/models/llama"], "put MODEL before the flag");
}

#[test]
fn b1_while_the_model_loads_probes_get_a_503() {
    let folder = tempfile::TempDir::new().unwrap();
    // A hub that never answers.
    let hub = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    command.args(["serve", "some/model", "--port", &address.port().to_string()]);
    command.env("HF_HOME", folder.path()).env("HF_ENDPOINT", format!("http://{}", hub.local_addr().unwrap()));
    command.env_remove("HF_HUB_OFFLINE").env("HF_HUB_ETAG_TIMEOUT", "60");
    let process = Process(command.stderr(Stdio::piped()).spawn().unwrap());
    let deadline = Instant::now() + Duration::from_secs(30);
    let reply = loop {
        match get(address, "/health") {
            Ok(reply) => break reply,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(reply.status, 503);
    assert!(reply.body.contains("the model is being loaded"), "{}", reply.body);
    drop(process);
}

#[test]
fn b13_a_term_signal_ends_the_program_with_0_after_its_running_requests() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    command.args(["serve", "--port", "0", "--kv-cache-memory-bytes", "16M", "--shutdown-timeout", "60"]);
    let mut process = Process(command.stderr(Stdio::piped()).spawn().unwrap());
    let mut errors = BufReader::new(process.0.stderr.take().unwrap());
    let address = listening(&mut errors);
    let body = r#"{"prompt": "One", "n": 4, "max_tokens": 900, "ignore_eos": true, "stream": true}"#;
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n");
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    stream.read_exact(&mut [0; 1]).unwrap();
    let pid = process.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let mut line = String::new();
    while !line.contains("stopping") {
        line.clear();
        assert!(errors.read_line(&mut line).unwrap() > 0, "no word of the stop");
    }
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{}", &rest[rest.len().saturating_sub(300)..]);
    assert_eq!(process.0.wait().unwrap().code(), Some(0));
    assert!(TcpStream::connect(address).is_err(), "something listens after the end");
}
