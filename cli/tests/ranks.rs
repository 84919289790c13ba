//! `quire serve` on several ranks: threads, and processes of an MPI job where `cargo xtask test-mpi` has installed MPICH.

use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::capability::{Capability, mpi};

use crate::common::{Reply, listening};

/// How soon all ranks must have ended after one has failed.
const SOON: Duration = Duration::from_secs(5);
const QUIRE: &str = env!("CARGO_BIN_EXE_quire");

/// MPICH's launcher, whose ranks find its library; `None`, reported, where it is not installed.
struct Mpiexec(PathBuf);

impl Mpiexec {
    fn command(&self) -> Command {
        let mut command = Command::new(self.0.join("bin/mpiexec"));
        command.env("QUIRE_MPI_LIBRARY", self.0.join("lib/libmpi_abi.so.1"));
        command
    }
}

fn mpiexec() -> Option<Mpiexec> {
    let folder = mpi("mpich");
    if folder.join("bin/mpiexec").is_file() {
        return Some(Mpiexec(folder));
    }
    testkit::not_run::report(Capability::Mpi, "cargo xtask test-mpi has not installed MPICH");
    None
}

/// A server, and the launcher of its ranks if it has one.
struct Server {
    process: Child,
    errors: BufReader<ChildStderr>,
    address: SocketAddr,
}

impl Server {
    fn start(mut command: Command, args: &[&str]) -> Server {
        command.args(["serve", "--port", "0", "--kv-cache-memory-bytes", "16M", "--threads", "1"]).args(args);
        let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut errors = BufReader::new(process.stderr.take().unwrap());
        let address = listening(&mut errors);
        Server { process, errors, address }
    }

    /// Ranks that are processes.
    fn of_ranks(mpiexec: &Mpiexec, ranks: usize, args: &[&str]) -> Server {
        let mut command = mpiexec.command();
        command.args(["-n", &ranks.to_string(), QUIRE]);
        Server::start(command, args)
    }

    fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let length = body.len();
        write!(stream, "{head} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        stream
    }

    fn answer(&self) -> Value {
        let body =
            r#"{"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "logprobs": 2, "seed": 3}"#;
        let reply = Reply::read(self.send("POST /v1/completions", body));
        assert_eq!(reply.status, 200);
        serde_json::from_str::<Value>(&reply.body).unwrap()["choices"].clone()
    }

    /// Begins an answer that takes long, and reads its first bytes.
    fn long_answer(&self) -> TcpStream {
        let body = r#"{"prompt": "The", "max_tokens": 1000, "ignore_eos": true, "stream": true}"#;
        let mut stream = self.send("POST /v1/completions", body);
        stream.read_exact(&mut [0; 200]).unwrap();
        stream
    }

    /// The status of `/health`; `None` if nobody answers.
    fn health(&self) -> Option<u16> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        write!(stream, "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
        let mut head = [0; 12];
        stream.read_exact(&mut head).ok()?;
        String::from_utf8_lossy(&head[9..]).parse().ok()
    }

    /// The process of a rank: a descendant of the launcher.
    fn rank(&self, rank: usize) -> String {
        let launcher = self.process.id().to_string();
        let parent = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            stat.rsplit_once(") ")?.1.split(' ').nth(1).map(str::to_owned)
        };
        let wanted = format!("PMI_RANK={rank}");
        let is_rank = |pid: &String| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let has = environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes());
            has && parent(pid).and_then(|proxy| parent(&proxy)).is_some_and(|it| it == launcher)
        };
        let all = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        all.filter(|name| name.parse::<u32>().is_ok()).find(is_rank).unwrap()
    }

    /// Waits for the end of all ranks, which must be soon and a failure, and returns the log.
    fn failed(mut self) -> String {
        let since = Instant::now();
        let status = loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                break status;
            }
            assert!(since.elapsed() < SOON, "the ranks have not ended");
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(!status.success());
        let mut log = String::new();
        self.errors.read_to_string(&mut log).unwrap();
        log
    }

    /// Stops it in order.
    fn stop(mut self) {
        signal("-TERM", &self.process.id().to_string());
        let mut log = String::new();
        self.errors.read_to_string(&mut log).unwrap();
        let status = self.process.wait().unwrap();
        assert!(status.success(), "{status}: {log}");
    }
}

fn signal(name: &str, pid: &str) {
    assert!(Command::new("kill").args([name, pid]).status().unwrap().success());
}

/// The last line of a start that must fail on every rank, and how many lines have the program's name.
fn refused(command: &mut Command) -> (String, usize) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("quire: ")).collect();
    (lines.last().unwrap_or(&&*text).to_string(), lines.len())
}

#[test]
fn threads_and_processes_answer_as_one_rank_does_and_stop_in_order() {
    let one = Server::start(Command::new(QUIRE), &[]);
    let want = one.answer();
    one.stop();
    let grid = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"];
    let threads = Server::start(Command::new(QUIRE), &grid);
    assert_eq!(threads.answer(), want);
    threads.stop();
    let Some(mpiexec) = mpiexec() else { return };
    let processes = Server::of_ranks(&mpiexec, 4, &grid);
    assert_eq!(processes.answer(), want);
    processes.stop();
}

#[test]
fn a_killed_rank_ends_all_soon_and_clients_get_an_error() {
    let Some(mpiexec) = mpiexec() else { return };
    let server = Server::of_ranks(&mpiexec, 2, &["--tensor-parallel-size", "2"]);
    let mut stream = server.long_answer();
    signal("-KILL", &server.rank(1));
    server.failed();
    let mut rest = String::new();
    // The connection ends, with or without an error, before the answer does.
    let _ = stream.read_to_string(&mut rest);
    assert!(!rest.contains("[DONE]"));
}

#[test]
fn a_rank_that_hangs_makes_the_server_unhealthy_and_then_ends_all() {
    let Some(mpiexec) = mpiexec() else { return };
    let server = Server::of_ranks(&mpiexec, 2, &["--tensor-parallel-size", "2", "--engine-iteration-timeout", "1"]);
    assert_eq!(server.health(), Some(200));
    let _stream = server.long_answer();
    signal("-STOP", &server.rank(1));
    let (since, mut seen) = (Instant::now(), Vec::new());
    while since.elapsed() < SOON && seen.last() != Some(&None) {
        seen.push(server.health());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(seen.contains(&Some(503)), "{seen:?}");
    let log = server.failed();
    assert!(log.contains("no step was completed in 1 s (--engine-iteration-timeout)"), "{log}");
}

#[test]
fn ranks_that_cannot_compute_together_are_one_line_of_rank_0() {
    let Some(mpiexec) = mpiexec() else { return };
    let start = |args: &str| {
        let mut command = mpiexec.command();
        command.args(args.replace("QUIRE", QUIRE).split_whitespace());
        refused(&mut command)
    };
    let (line, count) = start("-n 3 QUIRE serve --port 0 --tensor-parallel-size 2");
    assert_eq!((line.contains("expected 3 ranks, as many as the launcher has started"), count), (true, 1), "{line}");
    let (line, count) = start("-n 2 QUIRE serve --port 0");
    assert_eq!((line.contains("--tensor-parallel-size: found 1"), count), (true, 1), "{line}");
    let other = "--port 0 --tensor-parallel-size 2 --max-num-seqs";
    let (line, count) = start(&format!("-n 1 QUIRE serve {other} 8 : -n 1 QUIRE serve {other} 9"));
    assert_eq!((line.contains("rank 1: hash of the settings "), count), (true, 1), "{line}");
    let (line, count) = start("-n 2 QUIRE serve --port 0 --tensor-parallel-size 2 /no/such/model");
    assert_eq!((line.contains("/no/such/model"), count), (true, 1), "{line}");
    let (line, count) = start("-n 2 QUIRE bench sweep --tensor-parallel-size 2");
    assert_eq!((line.contains("an engine of its own on rank 1"), count >= 1), (true, true), "{line}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let (line, count) = start(&format!("-n 2 QUIRE serve --port {port} --tensor-parallel-size 2"));
    assert_eq!((line.contains(&format!("--port {port}: ")), count), (true, 1), "{line}");
}

#[test]
fn a_benchmark_is_reported_by_rank_0_alone() {
    let args =
        "bench latency --input-len 4 --output-len 4 --batch-size 1 --num-iters 1 --tensor-parallel-size 2 --threads 1";
    let reported = |command: &mut Command| {
        let output = command.args(args.split(' ')).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let threads = reported(&mut Command::new(QUIRE));
    assert!(threads.contains("decode"), "{threads}");
    let Some(mpiexec) = mpiexec() else { return };
    let processes = reported(mpiexec.command().args(["-n", "2", QUIRE]));
    assert_eq!(processes.lines().count(), threads.lines().count(), "{processes}");
}

#[test]
fn a_plan_is_that_of_one_rank() {
    let grid = ["plan", "--tensor-parallel-size", "3", "--pipeline-parallel-size", "2"];
    let output = Command::new(QUIRE).args(grid).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("quire-demo, one of 6 ranks"), "{text}");
}
