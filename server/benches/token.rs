//! CPU time of a streamed token outside of the forward pass, by part. The device computes nothing and sleeps once per step, so every
//! microsecond of this process belongs to the engine's host side, the server or the system.
//!
//! ```text
//! cargo bench -p server --bench token [-- WORD...]     # only the parts whose names contain one of the words
//! ```
//!
//! Clients run in a process of their own. Times are those of the scheduler (`/proc`), so this needs Linux.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::Request;
use device::{Device, DeviceError, Event, Queue};
use engine::{AsyncEngine, Engine, GenerationParams, GenerationRequest, LoadOn};
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use prometheus::{Histogram, HistogramOpts};
use serde_json::{Value, json};
use server::{App, ServerOptions, router, serve};
use text::{Detokenizer, StopScanner};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};

#[path = "../../device/tests/support/hooked.rs"]
#[allow(dead_code)]
mod hooked;
#[path = "../tests/common/long.rs"]
mod long;

use hooked::{Hooked, Hooks};

/// Streams at once over HTTP.
const STREAMS: usize = 128;

/// Time of a step over HTTP: more than the server needs for the tokens of a step, so that it writes each of them.
const STEP: Duration = Duration::from_millis(16);

/// Lengths of answers.
const LENGTHS: [usize; 2] = [100, 4_000];

/// Every step sleeps for as many nanoseconds.
#[derive(Clone, Default)]
struct Pace(Arc<AtomicU64>);

impl Hooks for Pace {
    fn record(&self, device: &dyn Device, queue: Queue) -> Result<Event, DeviceError> {
        let pause = self.0.load(Relaxed);
        if pause > 0 && queue == Queue::Compute {
            std::thread::sleep(Duration::from_nanos(pause));
        }
        device.record(queue)
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    if let [word, address, streams, path, body] = &words[..]
        && word == "client"
    {
        return client(address.parse().unwrap(), streams.parse().unwrap(), path, body);
    }
    let is_asked = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
    let pace = Pace::default();
    let device = Arc::new(Hooked { device: long::noop::NoOp::new(), hooks: pace.clone() });
    let engine = long::start(device, 2 * LENGTHS[1], STREAMS);
    println!("{:<44}{:>12}", "part", "µs per token");
    text(&engine, &is_asked);
    let runtime = Builder::new_multi_thread().worker_threads(2).thread_name("server").enable_all().build().unwrap();
    let app = Arc::new(App::new(engine.clone(), ServerOptions::default()));
    for length in LENGTHS {
        for (name, path, body) in requests(length) {
            let name = format!("body of {length} tokens, {name}");
            if is_asked(&name) {
                line(&name, body_time(&engine, &app, &runtime, path, &body) / length as f64);
            }
        }
    }
    pace.0.store(STEP.as_nanos() as u64, Relaxed);
    if is_asked("step") {
        step(pace);
    }
    over_http(&app, &runtime, &is_asked);
    std::process::exit(0);
}

fn line(name: &str, nanoseconds: f64) {
    println!("{name:<44}{:>12.3}", nanoseconds / 1000.0);
}

/// Names, paths and bodies of the requests of `length` tokens.
fn requests(length: usize) -> Vec<(&'static str, &'static str, Value)> {
    let with = |more| long::request(length, more);
    let messages = json!([{"role": "user", "content": "One"}]);
    let usage = json!({"include_usage": true});
    vec![
        ("completions", "/v1/completions", with(json!({"prompt": "One", "stream_options": usage}))),
        ("completions, logprobs 5", "/v1/completions", with(json!({"prompt": "One", "logprobs": 5}))),
        ("chat", "/v1/chat/completions", with(json!({"messages": messages}))),
        (
            "chat, logprobs 5",
            "/v1/chat/completions",
            with(json!({"messages": messages, "logprobs": true, "top_logprobs": 5})),
        ),
    ]
}

/// Time of `work` in nanoseconds: the least of several rounds.
fn least(mut work: impl FnMut()) -> f64 {
    let round = |_| {
        let start = Instant::now();
        work();
        start.elapsed().as_nanos() as f64
    };
    (0..20).map(round).fold(f64::MAX, f64::min)
}

/// Detokenisation, the search for stop strings, and the histogram of a token, in themselves.
fn text(engine: &AsyncEngine, is_asked: &dyn Fn(&str) -> bool) {
    let tokenizer = engine.tokenizer();
    let story = "Once upon a time there was a king who had three sons, and the youngest of them was “naïve”. ";
    let ids = tokenizer.encode(&story.repeat(300), false).unwrap();
    let stops = ["\n\nUser:", "###", "</s>", "the end"].map(str::to_string);
    for length in LENGTHS {
        let ids = &ids[..length];
        let name = format!("detokenise {length} tokens");
        if is_asked(&name) {
            let time = least(|| {
                let mut detokenizer = Detokenizer::new(tokenizer.clone(), &[], true);
                ids.iter().for_each(|&id| drop(std::hint::black_box(detokenizer.push(id))));
            });
            line(&name, time / length as f64);
        }
        let pieces: Vec<String> = ids.iter().map(|&id| tokenizer.decode(&[id], true).unwrap()).collect();
        for stops in [&stops[..0], &stops[..]] {
            let name = format!("search {length} tokens for {} stop strings", stops.len());
            if is_asked(&name) {
                let time = least(|| {
                    let mut scanner = StopScanner::new(stops, false);
                    pieces.iter().for_each(|piece| drop(std::hint::black_box(scanner.push(piece))));
                });
                line(&name, time / length as f64);
            }
        }
    }
    if is_asked("metrics") {
        let bounds = (1..19).map(|bound| 0.005 * f64::from(bound)).collect();
        let histogram = Histogram::with_opts(HistogramOpts::new("a", "b").buckets(bounds)).unwrap();
        let time = least(|| (0..1000).for_each(|i| histogram.observe(0.02 + 1e-6 * f64::from(i))));
        line("metrics: one observation of a histogram", time / 1000.0);
    }
}

/// Time of reading a response whose tokens have all been computed: the channel, JSON, server-sent events, and metrics.
fn body_time(engine: &AsyncEngine, app: &Arc<App>, runtime: &Runtime, path: &str, body: &Value) -> f64 {
    let round = |_| {
        runtime.block_on(async {
            let request = Request::post(path).header("host", "localhost").header("content-type", "application/json");
            let request = request.body(Body::from(body.to_string())).unwrap();
            let Ok(mut response) = TowerToHyperService::new(router(app.clone())).call(request).await;
            while engine.num_unfinished() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let start = Instant::now();
            while let Some(frame) = response.body_mut().frame().await {
                std::hint::black_box(frame.unwrap());
            }
            start.elapsed().as_nanos() as f64
        })
    };
    (0..5).map(round).fold(f64::MAX, f64::min)
}

/// Nanoseconds that a thread has computed.
fn cpu(thread: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{thread}/schedstat")).unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

/// CPU time, and the ticks of it that the system used, of each kind of thread.
fn threads() -> BTreeMap<String, [u64; 3]> {
    let mut all: BTreeMap<String, [u64; 3]> = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let id = task.unwrap().file_name().into_string().unwrap();
        let read = |file: &str| std::fs::read_to_string(format!("/proc/self/task/{id}/{file}")).unwrap();
        let stat = read("stat");
        let ticks: Vec<u64> =
            stat.rsplit(')').next().unwrap().split(' ').skip(12).take(2).map(|t| t.parse().unwrap()).collect();
        let sums = all.entry(read("comm").trim().to_string()).or_default();
        let more = [cpu(&format!("self/task/{id}")), ticks[0], ticks[1]];
        sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
    all
}

/// Calls of `write` and `writev` of this process.
fn writes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("syscw: ")).unwrap().parse().unwrap()
}

/// The host's part of a step: planning it, launching it, collecting its tokens and committing it, without text and streams.
fn step(pace: Pace) {
    let device = Arc::new(Hooked { device: long::noop::NoOp::new(), hooks: pace });
    let (_folder, config) = long::configure(2 * LENGTHS[1], STREAMS);
    let mut engine = Engine::new(engine::load(&config, LoadOn::Device(device), &|_, _| {}).unwrap().parts).unwrap();
    for _ in 0..STREAMS {
        let params = GenerationParams { max_tokens: Some(1_000), ignore_eos: true, ..GenerationParams::default() };
        engine.submit(GenerationRequest { prompt: vec![4, 5, 6], params, ..Default::default() }).unwrap();
    }
    (0..20).for_each(|_| engine.step(|_, _| {}));
    let (before, mut tokens) = (threads(), 0);
    (0..300).for_each(|_| engine.step(|_, _| tokens += 1));
    let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
    line("step of the engine", (threads()[name.trim()][0] - before[name.trim()][0]) as f64 / f64::from(tokens));
}

/// [`STREAMS`] clients read at once.
fn over_http(app: &Arc<App>, runtime: &Runtime, is_asked: &dyn Fn(&str) -> bool) {
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    runtime.spawn(serve(listener, app.clone(), std::future::pending(), Duration::ZERO));
    let length = 300;
    for (name, path, body) in requests(length) {
        let name = format!("over HTTP, {STREAMS} streams, {name}");
        if !is_asked(&name) {
            continue;
        }
        let (before, wrote) = (threads(), writes());
        let client = Command::new(std::env::current_exe().unwrap())
            .args(["client", &address.to_string(), &STREAMS.to_string(), path, &body.to_string()])
            .stdout(Stdio::piped())
            .output()
            .unwrap();
        let (after, wrote) = (threads(), writes() - wrote);
        let tokens = (STREAMS * length) as f64;
        println!(
            "{name}: {:.2} writes per token; {}",
            wrote as f64 / tokens,
            String::from_utf8_lossy(&client.stdout).trim()
        );
        for (kind, now) in after {
            let then = before.get(&kind).copied().unwrap_or_default();
            let [time, user, system] = [0, 1, 2].map(|i| (now[i] - then[i]) as f64);
            if time / tokens > 10.0 {
                let share = 100.0 * system / (user + system).max(1.0);
                line(&format!("  {kind} ({share:.0} % in the system)"), time / tokens);
            }
        }
    }
    if is_asked("bare writes") {
        bare(runtime);
    }
}

/// The same clients, but the bytes of a token are written by a loop: what the system takes for them.
fn bare(runtime: &Runtime) {
    let length = 300;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let mut client = Command::new(std::env::current_exe().unwrap())
        .args(["client", &address.to_string(), &STREAMS.to_string(), "/", ""])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let streams: Vec<std::net::TcpStream> = runtime.block_on(async {
        let mut streams = Vec::new();
        for _ in 0..STREAMS {
            let stream = listener.accept().await.unwrap().0.into_std().unwrap();
            stream.set_nodelay(true).unwrap();
            streams.push(stream);
        }
        streams
    });
    std::thread::sleep(Duration::from_millis(200));
    let bytes = vec![b'x'; 250];
    let before = threads();
    for _ in 0..length {
        std::thread::sleep(STEP);
        for mut stream in &streams {
            std::io::Write::write_all(&mut stream, &bytes).unwrap();
        }
    }
    let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
    let spent = threads()[name.trim()][0] - before[name.trim()][0];
    line("bare writes of 250 bytes", spent as f64 / (STREAMS * length) as f64);
    drop(streams);
    client.wait().unwrap();
}

/// Sends the request on `streams` connections, reads what comes, and prints how often it read and how much.
fn client(address: SocketAddr, streams: usize, path: &str, body: &str) {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let (reads, bytes) = Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..streams {
            let head = head.clone();
            tasks.spawn(async move {
                let mut stream = TcpStream::connect(address).await.unwrap();
                stream.write_all(head.as_bytes()).await.unwrap();
                let (mut buffer, mut reads, mut bytes) = (vec![0; 64 << 10], 0, 0);
                loop {
                    match stream.read(&mut buffer).await.unwrap_or(0) {
                        0 => return (reads, bytes),
                        more => (reads, bytes) = (reads + 1, bytes + more),
                    }
                }
            });
        }
        tasks.join_all().await.into_iter().fold((0, 0), |(a, b), (c, d)| (a + c, b + d))
    });
    println!("clients read {reads} times {} bytes", bytes / reads.max(1));
}
