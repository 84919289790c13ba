//! Soak test: clients that send requests, disconnect, stall and send invalid bytes, with a cache that is too small for them.
//!
//! Runs for three seconds in every test run; `cargo xtask soak` runs it for two minutes, `QUIRE_SOAK_SECONDS` sets any length.
//! Growth of memory is checked in runs of at least 20 seconds.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Reply, Server, config};
use engine::EngineConfig;
use serde_json::{Value, json};
use server::ServerOptions;

const COMPLETIONS: &str = "/v1/completions";
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];
/// Bytes of a block of 16 tokens of the demo model: keys and values, 5 layers, 2 heads of 32, float32.
const BLOCK: u64 = 16 * 2 * 5 * 2 * 32 * 4;
const CLIENTS: u64 = 16;
/// Minimum length of a run that checks memory.
const SETTLED: Duration = Duration::from_secs(20);

fn seconds() -> u64 {
    let given = std::env::var("QUIRE_SOAK_SECONDS").ok();
    given.map_or(3, |text| {
        let seconds = text.parse().ok().filter(|seconds| *seconds > 0);
        seconds.unwrap_or_else(|| panic!("QUIRE_SOAK_SECONDS: found {text:?}, expected a whole number of seconds"))
    })
}

/// Requests with deterministic responses: greedy and seeded, short and long, with samples, stop strings or a grammar.
fn questions() -> Vec<Value> {
    let texts = ["The capital of France is", "One", "A cat and a dog", "Once upon a time there was a king who"];
    let mut questions = Vec::new();
    for (i, text) in texts.into_iter().enumerate() {
        let long = text.repeat(1 + 4 * i);
        questions.push(json!({"prompt": long, "max_tokens": 24, "temperature": 0}));
        questions
            .push(json!({"prompt": text, "max_tokens": 40, "temperature": 1, "seed": i, "n": 3, "ignore_eos": true}));
        questions.push(json!({"prompt": long, "max_tokens": 60, "temperature": 0.8, "seed": 7, "stop": ["."]}));
        questions.push(
            json!({"prompt": text, "max_tokens": 30, "temperature": 1, "seed": i, "guided_regex": "[a-z ]{5,20}"}),
        );
    }
    questions
}

/// Texts and finish reasons of the choices.
fn gist(answer: &Value) -> Vec<(String, String)> {
    let choice =
        |c: &Value| (c["text"].as_str().unwrap().to_string(), c["finish_reason"].as_str().unwrap().to_string());
    answer["choices"].as_array().unwrap().iter().map(choice).collect()
}

fn streamed(chunks: &[Value], n: usize) -> Vec<(String, String)> {
    let mut gist = vec![(String::new(), String::new()); n];
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let (text, reason) = &mut gist[choice["index"].as_u64().unwrap() as usize];
        *text += choice["text"].as_str().unwrap();
        *reason += choice["finish_reason"].as_str().unwrap_or_default();
    }
    gist
}

const RUBBISH: [&str; 10] = [
    "",
    "{",
    "[]",
    "{\"prompt\": 5}",
    "{\"prompt\": \"a\", \"n\": -1}",
    "{\"prompt\": \"a\", \"max_tokens\": 1.5}",
    "{\"prompt\": [[1], {}]}",
    "{\"prompt\": \"a\", \"guided_regex\": \"(\"}",
    "{\"prompt\": \"a\", \"temperature\": \"hot\", \"stream\": true}",
    "{\"prompt\": \"a\", \"logit_bias\": {\"x\": 1}}",
];

/// Runs one client and returns the number of compared responses.
fn client(server: &Server, which: u64, until: Instant, questions: &[Value], want: &[Vec<(String, String)>]) -> usize {
    let mut state = which.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut draw = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let mut compared = 0;
    while Instant::now() < until {
        let pick = draw(questions.len() as u64) as usize;
        let question = &questions[pick];
        let body = question.to_string();
        match draw(10) {
            0..3 => {
                let reply = server.post(COMPLETIONS, question);
                assert_eq!(reply.status, 200, "{}", reply.body);
                assert_eq!(gist(&reply.json()), want[pick], "{question}");
                compared += 1;
            }
            3..6 => {
                let chunks = server.stream(COMPLETIONS, question.clone());
                assert_eq!(streamed(&chunks, want[pick].len()), want[pick], "{question}");
                compared += 1;
            }
            6 => {
                let mut question = question.clone();
                question["stream"] = json!(true);
                let mut stream = server.open("POST", COMPLETIONS, &JSON, question.to_string().as_bytes());
                stream.read_exact(&mut vec![0; 1 + draw(600) as usize]).unwrap();
            }
            7 => drop(server.open("POST", COMPLETIONS, &JSON, body.as_bytes())),
            8 => {
                let mut stream = TcpStream::connect(server.address).unwrap();
                let head = format!(
                    "POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                );
                let whole = head + &body;
                stream.write_all(&whole.as_bytes()[..draw(whole.len() as u64) as usize]).unwrap();
            }
            _ => {
                let rubbish = RUBBISH[draw(RUBBISH.len() as u64) as usize];
                let reply = server.send("POST", COMPLETIONS, &JSON, rubbish.as_bytes());
                assert!((400..500).contains(&reply.status), "{rubbish}: {} {}", reply.status, reply.body);
                reply.error();
            }
        }
    }
    compared
}

/// Resident bytes of this process, including server and clients.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn any_mix_of_clients_leaves_nothing_behind_and_every_answer_is_that_of_the_request_alone() {
    let tight = EngineConfig {
        kv_cache_memory_bytes: Some(32 * BLOCK),
        swap_space_bytes: 24 * BLOCK,
        max_num_seqs: 24,
        max_num_batched_tokens: 128,
        ..config()
    };
    let server = Server::with(tight, ServerOptions::default(), Duration::ZERO);
    let questions = questions();
    let want: Vec<_> = questions.iter().map(|question| gist(&server.ok(COMPLETIONS, question.clone()))).collect();
    let length = Duration::from_secs(seconds());
    let until = Instant::now() + length;
    let compared = AtomicUsize::new(0);
    let mut memory = Vec::new();
    std::thread::scope(|scope| {
        for which in 1..=CLIENTS {
            let (server, questions, want, compared) = (&server, &questions, &want, &compared);
            scope.spawn(move || compared.fetch_add(client(server, which, until, questions, want), Ordering::Relaxed));
        }
        while Instant::now() < until {
            memory.push(resident());
            std::thread::sleep(length / 40);
        }
    });
    server.until("nothing runs or waits", |s| {
        ["running", "waiting", "swapped"].iter().all(|kind| s.metric(&format!("vllm:num_requests_{kind}")) == 0.0)
    });
    assert_eq!(server.metric("vllm:kv_cache_usage_perc") + server.metric("vllm:cpu_cache_usage_perc"), 0.0);
    assert_eq!(server.metric("quire:engine_failed_steps_total"), 0.0);
    assert!(server.metric("vllm:num_preemptions_total") > 0.0, "the pool was not too small: nothing was shown");
    assert_eq!(server.get("/health").status, 200);
    // The allocator holds more in the first seconds and returns memory at its own times: the minimum of the last quarter is compared
    // with the maximum of the second.
    let quarter = memory.len() / 4;
    let early = *memory[quarter..2 * quarter].iter().max().unwrap();
    let late = *memory[3 * quarter..].iter().min().unwrap();
    println!(
        "{} answers compared in {} s, {} preemptions, {} swaps; resident at most {} MiB in the second quarter, at least {} MiB in the last",
        compared.load(Ordering::Relaxed),
        seconds(),
        server.metric("vllm:num_preemptions_total"),
        server.metric("quire:num_swap_preemptions_total"),
        early >> 20,
        late >> 20
    );
    assert!(compared.load(Ordering::Relaxed) > 0);
    if length >= SETTLED {
        assert!(late < early + early / 10 + (8 << 20), "memory grows: {early} bytes, later {late}");
    }
}

#[test]
fn two_hundred_and_fifty_six_streams_are_held_without_an_error() {
    let server = Server::with(
        EngineConfig { kv_cache_memory_bytes: Some(256 << 20), ..config() },
        ServerOptions::default(),
        Duration::ZERO,
    );
    let body =
        json!({"prompt": "One", "max_tokens": 48, "ignore_eos": true, "temperature": 1, "stream": true}).to_string();
    let streams: Vec<TcpStream> = (0..256).map(|_| server.open("POST", COMPLETIONS, &JSON, body.as_bytes())).collect();
    for stream in streams {
        let reply = Reply::read(stream);
        assert!(reply.status == 200 && reply.body.ends_with("data: [DONE]\n\n"), "{}", reply.body);
    }
    assert_eq!(server.metric("vllm:generation_tokens_total"), 256.0 * 48.0);
    // One interval per token except the first of each stream. Their length depends on the machine.
    assert_eq!(server.metric("vllm:inter_token_latency_seconds_count"), 256.0 * 47.0);
}
