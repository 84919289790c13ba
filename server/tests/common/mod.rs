//! A real server with the demo model on a free port, and a small HTTP client.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses its part

pub mod long;
#[path = "../../../engine/tests/common/slow.rs"]
pub mod slow;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::{AsyncEngine, EngineConfig};
use serde_json::{Value, json};
use server::{App, ServerOptions, serve};
#[allow(unused_imports)] // the soak test needs no slow steps
pub use slow::slow;
use tokio::sync::oneshot;

/// A running server. Dropping it stops it immediately.
pub struct Server {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<usize>>,
}

/// A cache small enough for several servers at a time, in float32 on every CPU.
pub fn config() -> EngineConfig {
    let dtype = Some(engine::Dtype::F32);
    EngineConfig { kv_cache_memory_bytes: Some(64 << 20), threads: Some(1), dtype, ..EngineConfig::default() }
}

impl Server {
    pub fn start() -> Server {
        Server::with(config(), ServerOptions::default(), Duration::ZERO)
    }

    pub fn with(config: EngineConfig, options: ServerOptions, grace: Duration) -> Server {
        Server::of(AsyncEngine::start(config, &|_, _| {}).unwrap(), options, grace)
    }

    /// A server of an engine that the test keeps a handle on.
    pub fn of(engine: AsyncEngine, options: ServerOptions, grace: Duration) -> Server {
        Server::listen("127.0.0.1:0", engine, options, grace)
    }

    /// A server that listens on this address, reached over loopback.
    pub fn on(address: &str, engine: AsyncEngine, options: ServerOptions) -> Server {
        Server::listen(address, engine, options, Duration::ZERO)
    }

    fn listen(address: &str, engine: AsyncEngine, options: ServerOptions, grace: Duration) -> Server {
        Server::listen_with(address, App::new(engine, options), grace)
    }

    /// A server of this state.
    pub fn serving(app: App, grace: Duration) -> Server {
        Server::listen_with("127.0.0.1:0", app, grace)
    }

    fn listen_with(address: &str, app: App, grace: Duration) -> Server {
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], listener.local_addr().unwrap().port()));
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let stop = async { drop(stopped.await) };
                serve(listener, Arc::new(app), stop, grace).await.unwrap()
            })
        });
        Server { address, stop: Some(stop), thread: Some(thread) }
    }

    /// Begins the shutdown; running requests get the grace period.
    pub fn begin_stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits for the end and returns the number of cancelled requests.
    pub fn wait(mut self) -> usize {
        self.begin_stop();
        self.thread.take().unwrap().join().unwrap()
    }

    pub fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.send("POST", path, &[("Content-Type", "application/json")], body.to_string().as_bytes())
    }

    /// Posts and expects 200.
    pub fn ok(&self, path: &str, body: Value) -> Value {
        let reply = self.post(path, &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    }

    /// Posts with `stream` and returns the chunks; checks that `[DONE]` ends them.
    pub fn stream(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = json!(true);
        let reply = self.post(path, &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert!(reply.header("content-type").starts_with("text/event-stream"));
        let mut lines: Vec<&str> = reply.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(lines.pop(), Some("[DONE]"));
        lines.into_iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        Reply::read(self.open(method, path, headers, body))
    }

    /// Sends a request and does not read the response.
    pub fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            head += &format!("Host: {}\r\n", self.address);
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("Content-Length: {}\r\n\r\n", body.len());
        // In one piece: a connection over all limits is closed at once, which may be before a second write.
        stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
        stream
    }

    /// Value of a metric, summed over its labels.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics").body;
        let samples = page.lines().filter(|line| line.split('{').next() == Some(name));
        samples.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    /// Waits until new connections get a 503. One that was accepted just before the stop may end without an answer.
    pub fn until_it_stops(&self) {
        self.until("it stops", |server| {
            let mut answer = String::new();
            let _ = server.open("GET", "/health", &[], b"").read_to_string(&mut answer);
            answer.starts_with("HTTP/1.1 503 ")
        });
    }

    /// Waits until `condition` holds.
    pub fn until(&self, what: &str, condition: impl Fn(&Server) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !condition(self) {
            assert!(Instant::now() < deadline, "not reached in 30 s: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.begin_stop();
    }
}

/// Reads the output of a started program until it prints its address.
pub fn listening(log: &mut impl BufRead) -> SocketAddr {
    let mut line = String::new();
    while !line.contains("listening on http") {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0, "it ended before it listened");
    }
    line.split("://").nth(1).unwrap().split([',', '"']).next().unwrap().parse().unwrap()
}

/// A complete response.
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    pub fn read(stream: TcpStream) -> Reply {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).unwrap().parse().unwrap();
        let mut headers = Vec::new();
        loop {
            line.clear();
            reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            headers.push((name.to_ascii_lowercase(), value.trim().to_string()));
        }
        let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
        let mut body = Vec::new();
        if chunked {
            loop {
                line.clear();
                reader.read_line(&mut line).unwrap();
                let size = usize::from_str_radix(line.trim(), 16).unwrap();
                let start = body.len();
                body.resize(start + size + 2, 0);
                reader.read_exact(&mut body[start..]).unwrap();
                body.truncate(start + size);
                if size == 0 {
                    break;
                }
            }
        } else {
            reader.read_to_end(&mut body).unwrap();
        }
        Reply { status, headers, body: String::from_utf8(body).unwrap() }
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(found, _)| found == name).map_or("", |(_, value)| value)
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }

    /// The message of an error, in the form of any API.
    pub fn message(&self) -> String {
        let error = &self.json()["error"];
        error["message"].as_str().or(error.as_str()).unwrap_or_else(|| panic!("{}", self.body)).to_string()
    }

    /// Returns the error object after checking its form.
    pub fn error(&self) -> Value {
        assert!(self.header("content-type").starts_with("application/json"), "{}", self.body);
        let error = self.json()["error"].clone();
        assert!(error["message"].is_string() && error["type"].is_string(), "{}", self.body);
        error
    }
}
