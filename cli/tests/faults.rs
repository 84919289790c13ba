//! Kernels that fail, hang or panic, put in place through the registry as any plug-in would be: who is told what, and who
//! goes on.

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::common::{Reply, Server, config, listening, slow};
use attention_kernels::{
    CacheWriteArgs, Capabilities, Kernel, KernelChoice, KernelError, Operation, Variant, inventory,
};
use device::Device;
use engine::{AsyncEngine, EngineConfig};
use serde_json::json;
use server::{App, Limits, ServerOptions, serve};

const COMPLETIONS: &str = "/v1/completions";
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];

/// What the kernel does next.
const WORK: u8 = 0;
const FAIL: u8 = 1;
const HANG: u8 = 2;
const PANIC: u8 = 3;

static MODE: AtomicU8 = AtomicU8::new(WORK);

/// The call that panics, counted down; 0 for none.
static PANIC_AT: AtomicUsize = AtomicUsize::new(0);

/// The kernel is one for the whole process, so its tests come one after the other.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    MODE.store(WORK, Ordering::SeqCst);
    turn
}

fn cache_write(device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    while MODE.load(Ordering::SeqCst) == HANG {
        std::thread::sleep(Duration::from_millis(1));
    }
    if PANIC_AT.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) == Ok(1) {
        MODE.store(PANIC, Ordering::SeqCst);
    }
    match MODE.load(Ordering::SeqCst) {
        FAIL => {
            MODE.store(WORK, Ordering::SeqCst);
            return Err(KernelError::Unsupported { variant: "test.faulty", found: "a fault".to_string() });
        }
        PANIC => panic!("the test asked for this panic"),
        _ => {}
    }
    // Slow, so that a request still runs when the test changes the mode.
    slow::cache_write(device, args)
}

inventory::submit! { Variant {
    name: "test.faulty",
    operation: Operation::CacheWrite,
    capabilities: Capabilities::CPU,
    kernel: Kernel::CacheWrite(cache_write),
} }

fn faulty() -> EngineConfig {
    let kernels = KernelChoice { cache_write: "test.faulty".to_string(), ..KernelChoice::default() };
    EngineConfig { kernels, ..config() }
}

fn options(iteration: Duration) -> ServerOptions {
    let limits = Limits { engine_iteration_timeout: iteration, ..Limits::default() };
    ServerOptions { limits, ..ServerOptions::default() }
}

fn long() -> String {
    json!({"prompt": "One", "max_tokens": 900, "ignore_eos": true, "stream": true}).to_string()
}

#[test]
fn p24_a_kernel_that_fails_fails_the_requests_of_its_step_and_the_engine_goes_on() {
    let _turn = turn();
    let server = Server::with(faulty(), options(Duration::from_secs(60)), Duration::ZERO);
    let ask = json!({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0});
    let want = server.ok(COMPLETIONS, ask.clone());
    let mut stream = server.open("POST", COMPLETIONS, &JSON, long().as_bytes());
    stream.read_exact(&mut [0; 64]).unwrap();
    MODE.store(FAIL, Ordering::SeqCst);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: {\"error\":") && rest.contains("test.faulty") && !rest.contains("[DONE]"), "{rest}");
    server.until("the step has ended", |s| s.metric("vllm:num_requests_running") == 0.0);
    MODE.store(FAIL, Ordering::SeqCst);
    let reply = server.post(COMPLETIONS, &ask);
    assert_eq!(reply.status, 500, "{}", reply.body);
    assert_eq!(reply.error()["type"], "server_error");
    let again = server.ok(COMPLETIONS, ask);
    assert_eq!(again["choices"], want["choices"]);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.metric("quire:engine_failed_steps_total"), 2.0);
    assert_eq!(server.metric("vllm:kv_cache_usage_perc"), 0.0);
}

#[test]
fn p10_health_follows_the_steps_and_not_the_threads_that_answer() {
    let _turn = turn();
    let server = Server::with(faulty(), options(Duration::from_millis(200)), Duration::ZERO);
    assert_eq!(server.get("/health").status, 200);
    MODE.store(HANG, Ordering::SeqCst);
    let stuck =
        server.open("POST", COMPLETIONS, &JSON, json!({"prompt": "One", "max_tokens": 3}).to_string().as_bytes());
    server.until("the engine counts as stuck", |s| s.get("/health").status == 503);
    let message = server.get("/health").error()["message"].as_str().unwrap().to_string();
    assert!(message.contains("no step"), "{message}");
    assert!(server.metric("quire:engine_step_age_seconds") > 0.1);
    MODE.store(WORK, Ordering::SeqCst);
    assert_eq!(Reply::read(stuck).status, 200);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn p09_what_a_watchdog_logs_shows_queues_pool_and_the_plan_of_the_step_that_hangs() {
    let _turn = turn();
    let engine = AsyncEngine::start(faulty(), &|_, _| {}).unwrap();
    assert!(engine.dump().contains("no work") && engine.dump().contains("no step is under way"), "{}", engine.dump());
    MODE.store(HANG, Ordering::SeqCst);
    let request = engine::GenerationRequest { prompt: vec![1, 2, 3], ..Default::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut stream = runtime.block_on(engine.submit(request)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while !engine.dump().contains("under way: step 1") {
        assert!(Instant::now() < deadline, "{}", engine.dump());
        std::thread::sleep(Duration::from_millis(1));
    }
    let dump = engine.dump();
    for part in ["engine thread alive, last step completed", "queues: ", "pool: ", "positions 0..3"] {
        assert!(dump.contains(part), "{part} in\n{dump}");
    }
    MODE.store(WORK, Ordering::SeqCst);
    assert!(stream.next_blocking().is_some());
}

#[test]
fn p23_an_engine_thread_that_dies_ends_streams_with_an_error_and_the_server_too() {
    let _turn = turn();
    let engine = AsyncEngine::start(faulty(), &|_, _| {}).unwrap();
    let app = Arc::new(App::new(engine.clone(), ServerOptions::default()));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            serve(listener, app, std::future::pending(), Duration::from_secs(60)).await
        })
    });
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let body = long();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    stream.read_exact(&mut [0; 64]).unwrap();
    assert!(engine.is_healthy(Duration::from_secs(60)));
    MODE.store(PANIC, Ordering::SeqCst);
    let mut rest = Vec::new();
    while !rest.windows(9).any(|part| part == b"{\"error\":") {
        let mut more = [0; 4096];
        let read = stream.read(&mut more).unwrap();
        assert!(read > 0, "the stream says so: {}", String::from_utf8_lossy(&rest));
        rest.extend_from_slice(&more[..read]);
    }
    // Until it is gone, it says that it is ill.
    while let Ok(mut probe) = TcpStream::connect(address) {
        let _ = probe.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let mut health = String::new();
        let _ = probe.read_to_string(&mut health);
        assert!(health.is_empty() || health.starts_with("HTTP/1.1 503 "), "{health}");
    }
    stream.read_to_end(&mut rest).unwrap();
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
    assert!(!engine.is_healthy(Duration::MAX));
    let ended = server.join().unwrap();
    assert!(ended.unwrap_err().to_string().contains("engine thread has died"), "and the program exits with an error");
}

/// Names the settings file for the program with the faulty kernel, which is this one under another name.
const PROGRAM: &str = "QUIRE_TEST_FAULTY_PROGRAM";

#[test]
#[ignore = "only as a program of its own, which the next test starts"]
fn the_program_with_a_faulty_kernel() {
    let file = std::env::var(PROGRAM).unwrap();
    PANIC_AT.store(100, Ordering::SeqCst);
    let arguments = ["quire", "serve", "--port", "0", "--kv-cache-memory-bytes", "16M", "--config", &file];
    let code = cli::main(arguments.map(Into::into));
    std::process::exit(if code == ExitCode::SUCCESS { 0 } else { 7 });
}

#[test]
fn p23_the_program_exits_with_an_error_when_its_engine_thread_dies() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("quire.toml");
    std::fs::write(&file, "dtype = \"float32\"\n[kernels]\ncache_write = \"test.faulty\"\n").unwrap();
    let mut program = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "faults::the_program_with_a_faulty_kernel", "--ignored", "--nocapture"])
        .env(PROGRAM, &file)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(program.stderr.take().unwrap());
    let address = listening(&mut log);
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let body = long();
    write!(stream, "POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("data: {\"id\"") && answer.contains("data: {\"error\":"), "{answer}");
    assert!(!answer.contains("[DONE]"));
    let mut rest = String::new();
    log.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("quire: ") && rest.contains("engine thread has died"), "{rest}");
    assert_eq!(program.wait().unwrap().code(), Some(7), "{rest}");
}
