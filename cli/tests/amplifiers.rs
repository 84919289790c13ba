//! Requests that cost a client little and would cost the server much, against a real process: none takes much memory, none
//! keeps it, and none delays `/health`.
//!
//! The process runs under a limit of address space, so that an amplifier that works harms nothing but this test.

use std::fmt::Write as _;
use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Reply, listening};
use serde_json::json;

/// Address space of the process in KiB.
const ADDRESS_SPACE: u64 = 6 << 20;
/// By how much a request may raise the peak of the process's memory, in KiB.
const GROWTH: u64 = 256 << 10;
/// What the process may keep of it: this part of what it holds when idle, in percent.
const KEPT: u64 = 30;
/// For memory to be given back.
const RETURN_TIME: Duration = Duration::from_secs(10);
/// For places to be free.
const PATIENCE: Duration = Duration::from_secs(30);
/// What `/health` may take.
const HEALTH: Duration = Duration::from_millis(100);

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const COUNT: &str = "/v1/responses/input_tokens";
const EMBEDDINGS: &str = "/v1/embeddings";

struct Process {
    child: Child,
    address: SocketAddr,
}

impl Process {
    /// A step takes fewer tokens than a long prompt has, so that a single such prompt fills the buffers of a step.
    fn start(args: &[&str]) -> Process {
        let limited = format!("ulimit -v {ADDRESS_SPACE}; exec \"$0\" \"$@\"");
        let mut child = Command::new("sh")
            .args(["-c", &limited, env!("CARGO_BIN_EXE_quire")])
            .args(["serve", "--port", "0", "--kv-cache-memory-bytes", "16M", "--threads", "1"])
            // What is kept of an attack does not count responses that were asked to be kept.
            .args(["--max-num-batched-tokens", "512", "--state-max-bytes", "1M"])
            .args(args)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let address = listening(&mut errors);
        std::thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
        Process { child, address }
    }

    /// A number of `/proc/PID/status`, in KiB.
    fn memory(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Forgets the peak so far.
    fn reset_peak(&self) {
        std::fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5").unwrap();
    }

    fn open(&self, path: &str, body: &[u8]) -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        Ok(stream)
    }

    fn post(&self, path: &str, body: &[u8]) -> Reply {
        Reply::read(self.open(path, body).unwrap())
    }

    fn health(&self) -> Duration {
        let start = Instant::now();
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        start.elapsed()
    }

    fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !condition() {
            assert!(Instant::now() < deadline, "not reached in {PATIENCE:?}: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How long `/health` takes while `running`, beyond what the same request takes from a process that nobody attacks: the
/// machine may be busy with other things, which is not the server's fault.
fn delays(attacked: &Process, control: &Process, running: &AtomicBool) -> Vec<Duration> {
    let (mut delays, mut before) = (Vec::new(), control.health());
    while running.load(Ordering::Acquire) {
        let found = attacked.health();
        let after = control.health();
        delays.push(found.saturating_sub(before.max(after)));
        before = after;
        std::thread::sleep(Duration::from_millis(2));
    }
    delays
}

/// One way to ask for much.
struct Amplifier {
    name: &'static str,
    path: &'static str,
    body: fn() -> String,
    /// So many clients ask at once.
    clients: usize,
    /// What they may be answered.
    answers: &'static [u16],
}

fn one(name: &'static str, path: &'static str, answers: &'static [u16], body: fn() -> String) -> Amplifier {
    Amplifier { name, path, body, clients: 1, answers }
}

fn several(
    clients: usize,
    name: &'static str,
    path: &'static str,
    answers: &'static [u16],
    body: fn() -> String,
) -> Amplifier {
    Amplifier { name, path, body, clients, answers }
}

/// `count` times the same item, as a JSON list.
fn list(item: &str, count: usize) -> String {
    let mut text = String::with_capacity((item.len() + 1) * count + 2);
    text.push('[');
    for i in 0..count {
        text.push_str(if i == 0 { "" } else { "," });
        text.push_str(item);
    }
    text + "]"
}

/// An object of fields `"0": value, "1": value, …`.
fn object(value: &str, count: usize) -> String {
    let mut text = String::from("{");
    for i in 0..count {
        let _ = write!(text, "{}\"{i}\":{value}", if i == 0 { "" } else { "," });
    }
    text + "}"
}

fn letters(count: usize) -> String {
    format!("\"{}\"", "ab ".repeat(count / 3))
}

/// Text of which each word is another.
fn words(bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 32);
    text.push('"');
    let mut i = 0_u64;
    while text.len() < bytes {
        i = i.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let _ = write!(text, "{:x} ", i >> 20);
    }
    text + "\""
}

const USER: &str = r#"{"role":"user","content":"hi"}"#;
const REFUSED: &[u16] = &[400];
const MAYBE: &[u16] = &[200, 400, 429];

fn amplifiers() -> Vec<Amplifier> {
    vec![
        one("a name that every output repeats", COUNT, REFUSED, || {
            let call =
                format!(r#"{{"type":"function_call","call_id":"c","arguments":"{{}}","name":{}}}"#, letters(600_000));
            let outputs = list(r#"{"type":"function_call_output","call_id":"c","output":""}"#, 4000);
            format!(r#"{{"input":[{call},{}}}"#, &outputs[1..])
        }),
        one("items of an input", COUNT, REFUSED, || {
            format!(r#"{{"input":{}}}"#, list(r#"{"role":"user","content":""}"#, 100_000))
        }),
        one("ids that every prompt is held to", COMPLETIONS, REFUSED, || {
            format!(r#"{{"prompt":{},"allowed_token_ids":{}}}"#, list("\"a\"", 2000), list("1", 2_000_000))
        }),
        one("ids that end every prompt", COMPLETIONS, REFUSED, || {
            format!(r#"{{"prompt":{},"stop_token_ids":{}}}"#, list("\"a\"", 2000), list("1", 2_000_000))
        }),
        several(3, "log-probabilities of a prompt for each of many answers", COMPLETIONS, REFUSED, || {
            format!(r#"{{"prompt":{},"n":128,"prompt_logprobs":20,"max_tokens":1}}"#, list("5", 1000))
        }),
        several(3, "log-probabilities of an echo for each of many answers", COMPLETIONS, REFUSED, || {
            format!(r#"{{"prompt":{},"n":128,"echo":true,"logprobs":20,"max_tokens":0}}"#, list("5", 1000))
        }),
        several(3, "log-probabilities of as much as one answer may have", COMPLETIONS, MAYBE, || {
            format!(r#"{{"prompt":{},"n":40,"prompt_logprobs":20,"max_tokens":1}}"#, list("5", 1000))
        }),
        several(2, "log-probabilities of many prompts", COMPLETIONS, MAYBE, || {
            format!(r#"{{"prompt":{},"prompt_logprobs":20,"max_tokens":1}}"#, list(&list("5", 900), 3))
        }),
        several(2, "log-probabilities of a batch of prompts", COMPLETIONS, MAYBE, || {
            format!(r#"{{"prompt":{},"prompt_logprobs":20,"max_tokens":1}}"#, list(&list("5", 900), 38))
        }),
        several(2, "log-probabilities of an echoed batch, with ids", COMPLETIONS, MAYBE, || {
            let prompts = list(&list("5", 900), 8);
            format!(r#"{{"prompt":{prompts},"echo":true,"logprobs":20,"return_token_ids":true,"max_tokens":1}}"#)
        }),
        several(2, "ids of a prompt and of its answers, for each of many answers", COMPLETIONS, MAYBE, || {
            format!(
                r#"{{"prompt":{},"n":100,"return_token_ids":true,"max_tokens":8,"ignore_eos":true}}"#,
                list("5", 900)
            )
        }),
        several(3, "log-probabilities that each of the last events repeats", RESPONSES, MAYBE, || {
            let include = r#""include":["message.output_text.logprobs"],"top_logprobs":20"#;
            format!(r#"{{"input":"hi","stream":true,"max_output_tokens":900,"ignore_eos":true,{include}}}"#)
        }),
        several(4, "choices of many prompts", COMPLETIONS, MAYBE, || {
            format!(r#"{{"prompt":{},"n":4,"max_tokens":1,"ignore_eos":true}}"#, list("\"a\"", 1000))
        }),
        one("log-probabilities of many answers", CHAT, REFUSED, || {
            format!(r#"{{"messages":[{USER}],"n":128,"logprobs":true,"top_logprobs":20,"ignore_eos":true}}"#)
        }),
        several(16, "large bodies at once", COMPLETIONS, &[200, 429], || {
            format!(r#"{{"prompt":"hi","x":{}}}"#, words(15 << 20))
        }),
        one("a text that cannot fit", COMPLETIONS, REFUSED, || format!(r#"{{"prompt":{}}}"#, words(3 << 20))),
        one("a longer text", COMPLETIONS, REFUSED, || format!(r#"{{"prompt":{}}}"#, letters(15 << 20))),
        one("a text without spaces", "/tokenize", MAYBE, || format!(r#"{{"prompt":"{}"}}"#, "a".repeat(2 << 20))),
        one("a text of as many tokens as there may be", "/tokenize", MAYBE, || {
            format!(r#"{{"prompt":{},"return_token_strs":true}}"#, words(600_000))
        }),
        one("a text that is cut to its end", COMPLETIONS, MAYBE, || {
            format!(r#"{{"prompt":{},"truncate_prompt_tokens":4,"max_tokens":1}}"#, words(400_000))
        }),
        one("many long texts", EMBEDDINGS, REFUSED, || format!(r#"{{"input":{}}}"#, list(&words(8000), 1500))),
        one("a schema of a text", RESPONSES, REFUSED, || {
            let schema = format!(r#"{{"type":"object","properties":{}}}"#, object(r#"{"type":"string"}"#, 60_000));
            format!(r#"{{"input":"hi","text":{{"format":{{"type":"json_schema","name":"x","schema":{schema}}}}}}}"#)
        }),
        one("a schema of a chat", CHAT, REFUSED, || {
            let schema = format!(r#"{{"type":"object","properties":{}}}"#, object(r#"{"type":"string"}"#, 60_000));
            format!(r#"{{"messages":[{USER}],"guided_json":{schema}}}"#)
        }),
        one("biases", COMPLETIONS, REFUSED, || format!(r#"{{"prompt":"a","logit_bias":{}}}"#, object("1", 400_000))),
        one("bad words", COMPLETIONS, REFUSED, || {
            format!(r#"{{"prompt":"a","bad_words":{}}}"#, list(&letters(15_000), 600))
        }),
        one("stop strings for each of many answers", COMPLETIONS, REFUSED, || {
            format!(r#"{{"prompt":{},"n":128,"stop":{}}}"#, list("\"a\"", 2000), list(&letters(1000), 16))
        }),
        one("a salt for each of many prompts", COMPLETIONS, REFUSED, || {
            format!(r#"{{"prompt":{},"cache_salt":{}}}"#, list("\"a\"", 2000), letters(8 << 20))
        }),
        one("many prompts with many answers", COMPLETIONS, REFUSED, || {
            format!(r#"{{"prompt":{},"n":24,"max_tokens":900}}"#, list("\"a\"", 2000))
        }),
        one("more prompts than may be", EMBEDDINGS, REFUSED, || format!(r#"{{"input":{}}}"#, list("\"\"", 1_000_000))),
        one("ids of a prompt", COMPLETIONS, REFUSED, || format!(r#"{{"prompt":{}}}"#, list("7", 7_000_000))),
        one("prompts of ids", EMBEDDINGS, REFUSED, || format!(r#"{{"input":{}}}"#, list(&list("7", 2000), 2000))),
        one("a field that nobody reads", COMPLETIONS, &[200], || {
            format!(r#"{{"prompt":"a","max_tokens":1,"x":{}}}"#, list("0", 7_000_000))
        }),
        one("fields that nobody reads", COMPLETIONS, REFUSED, || {
            format!(r#"{{"prompt":"a",{}"#, &object("0", 1_000_000)[1..])
        }),
        one("lists in lists", CHAT, REFUSED, || {
            format!(r#"{{"messages":[{{"role":"user","content":{}{}}}]}}"#, "[".repeat(5 << 20), "]".repeat(5 << 20))
        }),
        one("a field of a message", CHAT, REFUSED, || {
            format!(r#"{{"messages":[{{"role":"user","content":"hi","x":{}}}]}}"#, list("{}", 3_000_000))
        }),
        one("parts of a message", CHAT, REFUSED, || {
            format!(r#"{{"messages":[{{"role":"user","content":{}}}]}}"#, list(r#"{"type":"text","text":""}"#, 400_000))
        }),
        one("variables of the template", CHAT, REFUSED, || {
            format!(r#"{{"messages":[{USER}],"chat_template_kwargs":{}}}"#, object("[]", 700_000))
        }),
        one("tools", CHAT, REFUSED, || {
            let tool = r#"{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}"#;
            format!(r#"{{"messages":[{USER}],"n":128,"tools":{}}}"#, list(tool, 6000))
        }),
        one("the name of a tool", CHAT, REFUSED, || {
            let tool = format!(r#"{{"type":"function","function":{{"name":{}}}}}"#, letters(400_000));
            format!(r#"{{"messages":[{USER}],"n":128,"tools":[{tool}]}}"#)
        }),
        one("instructions that every event repeats", RESPONSES, REFUSED, || {
            format!(r#"{{"input":"hi","stream":true,"instructions":{}}}"#, letters(15 << 20))
        }),
        one("a key that every event repeats", RESPONSES, REFUSED, || {
            format!(r#"{{"input":"hi","stream":true,"prompt_cache_key":{}}}"#, letters(15 << 20))
        }),
        several(2, "ids of a text", "/detokenize", MAYBE, || format!(r#"{{"tokens":{}}}"#, list("300", 2_000_000))),
        one("more ids of a text", "/detokenize", REFUSED, || format!(r#"{{"tokens":{}}}"#, list("30", 5_000_000))),
        one("a text that is escaped", "/tokenize", MAYBE, || {
            format!(r#"{{"prompt":"{}"}}"#, r"\u0000".repeat(1 << 20))
        }),
        several(8, "an echo for each of many answers", COMPLETIONS, MAYBE, || {
            format!(r#"{{"prompt":{},"n":24,"echo":true,"return_token_ids":true,"max_tokens":1}}"#, list("5", 1000))
        }),
        several(3, "a beam search with all it can tell", COMPLETIONS, MAYBE, || {
            r#"{"prompt":"a","n":16,"use_beam_search":true,"logprobs":20,"max_tokens":40,"ignore_eos":true}"#
                .to_string()
        }),
        one("choices", COMPLETIONS, REFUSED, || {
            format!(r#"{{"prompt":"a","guided_choice":{}}}"#, list(&letters(1000), 5000))
        }),
    ]
}

#[test]
fn no_request_takes_much_memory_or_keeps_it_or_delays_others() {
    let (server, control) = (Process::start(&[]), Process::start(&[]));
    // What stays for good once it was used: the cache's memory, the buffers of a full step, the grammar's vocabulary, threads
    // with their stacks, and the words that the tokenizer remembers.
    let text = format!(r#"{{"prompt":{}}}"#, words(160 << 10));
    std::thread::scope(|scope| {
        let asks: Vec<_> = (0..3).map(|_| scope.spawn(|| server.post("/tokenize", text.as_bytes()).status)).collect();
        asks.into_iter().for_each(|ask| assert_eq!(ask.join().unwrap(), 200));
    });
    let prompts: Vec<Vec<usize>> = (5..21).map(|id| vec![id; 900]).collect();
    for body in [
        json!({"prompt": prompts, "max_tokens": 8, "ignore_eos": true, "prompt_logprobs": 5}),
        json!({"prompt": "a", "n": 16, "max_tokens": 100, "ignore_eos": true, "logprobs": 5}),
        json!({"prompt": vec!["One two three four five six seven"; 40], "max_tokens": 20, "guided_regex": "[a-z]+"}),
    ] {
        assert_eq!(server.post(COMPLETIONS, body.to_string().as_bytes()).status, 200);
    }
    // Freed memory is given back a second later.
    std::thread::sleep(Duration::from_secs(2));
    let idle = server.memory("VmRSS");
    let most_kept = idle + idle * KEPT / 100;
    let (mut faults, mut delays_of_all) = (Vec::new(), Vec::new());
    for Amplifier { name, path, body, clients, answers } in amplifiers() {
        let body = body();
        server.reset_peak();
        let running = AtomicBool::new(true);
        let start = Instant::now();
        let (statuses, delays) = std::thread::scope(|scope| {
            let polls = scope.spawn(|| delays(&server, &control, &running));
            let asks: Vec<_> = (0..clients).map(|_| scope.spawn(|| server.post(path, body.as_bytes()))).collect();
            let replies: Vec<Reply> = asks.into_iter().map(|ask| ask.join().unwrap()).collect();
            running.store(false, Ordering::Release);
            (replies, polls.join().unwrap())
        });
        let (peak, took) = (server.memory("VmHWM"), start.elapsed());
        let found: Vec<u16> = statuses.iter().map(|reply| reply.status).collect();
        let worst = delays.iter().max().copied().unwrap_or_default();
        let grown = peak.saturating_sub(idle) >> 10;
        if let Some(reply) = statuses.iter().find(|reply| !answers.contains(&reply.status)) {
            let said: String = reply.body.chars().take(300).collect();
            faults.push(format!("{name}: answered {}: {said}", reply.status));
        }
        if let Some(reply) = statuses.iter().find(|reply| reply.status == 400) {
            let message = reply.error()["message"].as_str().unwrap().to_string();
            if !(message.contains("expected") || message.contains("context length")) || message.len() > 500 {
                faults.push(format!("{name}: the error does not say what was expected: {message}"));
            }
        }
        if peak > idle + GROWTH {
            faults.push(format!("{name}: {grown} MiB more than the idle {} MiB", idle >> 10));
        }
        delays_of_all.extend(delays);
        let deadline = Instant::now() + RETURN_TIME;
        while server.memory("VmRSS") > most_kept && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let kept = server.memory("VmRSS");
        let left = kept.saturating_sub(idle) >> 10;
        println!("{name}: {found:?}, +{grown} MiB, {left} of them kept, /health {worst:?} later at worst, {took:?}");
        if kept > most_kept {
            faults.push(format!("{name}: {} MiB are kept of an idle {}", kept >> 10, idle >> 10));
        }
    }
    delays_of_all.sort_unstable();
    let p99 = delays_of_all[(delays_of_all.len() - 1) * 99 / 100];
    println!("idle {} MiB; /health: {} samples, p99 {p99:?} later", idle >> 10, delays_of_all.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(p99 <= HEALTH, "/health answers {p99:?} later (p99) than a server that nobody attacks");
    assert_eq!(server.post(COMPLETIONS, br#"{"prompt":"a","max_tokens":1}"#).status, 200);
}

#[test]
fn clients_that_leave_give_back_all_that_they_held() {
    // One such body fits into the budget, two do not.
    let server = Process::start(&["--max-inflight-bytes", "15M"]);
    let body = format!(r#"{{"prompt":{},"x":{}}}"#, words(4_000_000), words(5_000_000));
    for round in 0..3 {
        // Half a body, then a whole one whose text is being tokenised.
        let mut half = TcpStream::connect(server.address).unwrap();
        let head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9000000\r\n\r\n";
        half.write_all(head.as_bytes()).unwrap();
        half.write_all(&body.as_bytes()[..8_000_000]).unwrap();
        drop(half);
        server.until("the half body is gone", || server.post("/tokenize", &body.as_bytes()[..5]).status == 400);
        let whole = server.open("/tokenize", body.as_bytes());
        if let Ok(whole) = whole {
            let _ = whole.shutdown(Shutdown::Both);
        }
        let small = format!(r#"{{"prompt":"a","x":{}}}"#, words(9_000_000));
        server.until(&format!("round {round}: the budget is free again"), || {
            server.post("/tokenize", small.as_bytes()).status == 200
        });
    }
}

#[test]
fn small_requests_do_not_wait_for_large_ones() {
    let server = Process::start(&[]);
    let large = format!(r#"{{"prompt":{}}}"#, words(300 << 10));
    let small = format!(r#"{{"prompt":{}}}"#, words(20 << 10));
    std::thread::scope(|scope| {
        let finished: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let reply = server.post("/tokenize", large.as_bytes());
                    (reply.status, Instant::now())
                })
            })
            .collect();
        // All of them are under way or wait.
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(server.post("/tokenize", small.as_bytes()).status, 200);
        let answered = Instant::now();
        let last = finished.into_iter().map(|large| large.join().unwrap().1).max().unwrap();
        assert!(answered < last, "the small one was answered after all the large ones");
    });
}
