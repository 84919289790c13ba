//! Clients that disconnect or read slowly, keys, metrics, and shutdown.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use crate::common::{Reply, Server, config, slow};
use engine::EngineConfig;
use serde_json::json;
use server::ServerOptions;

const COMPLETIONS: &str = "/v1/completions";
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];

fn long(stream: bool) -> String {
    json!({"prompt": "One", "max_tokens": 900, "ignore_eos": true, "temperature": 1, "stream": stream}).to_string()
}

#[test]
fn a_client_that_leaves_frees_its_blocks() {
    let server = Server::with(slow(config()), ServerOptions::default(), Duration::ZERO);
    // A client that closes its sending side counts as one that has left.
    for (stream, half) in [(true, false), (false, false), (false, true), (true, true)] {
        let before = server.metric("vllm:generation_tokens_total");
        let mut connections: Vec<_> =
            (0..4).map(|_| server.open("POST", COMPLETIONS, &JSON, long(stream).as_bytes())).collect();
        if stream {
            for connection in &mut connections {
                connection.read_exact(&mut [0; 64]).unwrap();
            }
        }
        server.until("all four run", |s| s.metric("vllm:num_requests_running") == 4.0);
        let half_closed =
            connections.into_iter().filter(|connection| half && connection.shutdown(Shutdown::Write).is_ok());
        let _half_closed: Vec<TcpStream> = half_closed.collect();
        server.until("nothing runs", |s| {
            s.metric("vllm:num_requests_running") + s.metric("vllm:num_requests_waiting") == 0.0
        });
        assert_eq!(server.metric("vllm:kv_cache_usage_perc"), 0.0);
        assert!(server.metric("vllm:generation_tokens_total") - before < 4.0 * 900.0);
    }
    let aborted = |line: &str| line.contains("finished_reason=\"abort\"") && line.ends_with(" 16");
    server.until("sixteen aborts are counted", |server| server.get("/metrics").body.lines().any(aborted));
}

#[test]
fn a_slow_reader_blocks_no_other_client_and_gets_everything() {
    let server = Server::start();
    let slow = server.open("POST", COMPLETIONS, &JSON, long(true).as_bytes());
    for _ in 0..8 {
        assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "Two", "max_tokens": 4})).status, 200);
    }
    let reply = Reply::read(slow);
    assert!(reply.body.ends_with("data: [DONE]\n\n"));
}

#[test]
fn counters_move_by_what_the_usage_says() {
    let server = Server::start();
    let body = json!({"prompt": "The capital of", "max_tokens": 11, "ignore_eos": true});
    let usage = server.ok(COMPLETIONS, body)["usage"].clone();
    server.until("tokens are counted", |s| s.metric("vllm:generation_tokens_total") == 11.0);
    assert_eq!(server.metric("vllm:prompt_tokens_total"), usage["prompt_tokens"].as_f64().unwrap());
    assert_eq!(server.metric("vllm:request_success_total"), 1.0);
    assert_eq!(server.metric("vllm:time_to_first_token_seconds_count"), 1.0);
    assert_eq!(server.metric("vllm:inter_token_latency_seconds_count"), 10.0);
    assert_eq!(server.metric("vllm:e2e_request_latency_seconds_count"), 1.0);
}

#[test]
fn a_repeated_prompt_comes_from_the_prefix_cache() {
    let server = Server::start();
    let body = json!({"prompt": vec![7; 200], "max_tokens": 2, "temperature": 0});
    let cold = server.ok(COMPLETIONS, body.clone());
    let warm = server.ok(COMPLETIONS, body);
    assert_eq!(cold["choices"][0]["text"], warm["choices"][0]["text"]);
    assert_eq!(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    // 200 tokens are 12 full blocks of 16 and a partial one.
    assert_eq!(warm["usage"]["prompt_tokens_details"]["cached_tokens"], 192);
    server.until("hits are counted", |s| s.metric("vllm:prefix_cache_hits_total") == 192.0);
}

#[test]
fn a_request_that_can_never_fit_is_refused_and_stops_nobody() {
    // Eight blocks of 16 tokens: the context is limited to them, so that only several sequences can be too large.
    let tight = EngineConfig { kv_cache_memory_bytes: Some(8 * 16 * 2 * 5 * 2 * 32 * 4), ..config() };
    let server = Server::with(tight, ServerOptions::default(), Duration::ZERO);
    assert_eq!(server.get("/v1/models").json()["data"][0]["max_model_len"], 128);
    let reply = server.post(COMPLETIONS, &json!({"prompt": "One", "n": 4, "max_tokens": 100}));
    assert_eq!(reply.status, 400, "{}", reply.body);
    // Four sequences of seven blocks each: the prompt fills no block that they could share.
    let message = "needs 28 blocks, the pool holds 8; the longest prompt that fits is 0 tokens";
    assert_eq!(reply.error()["message"], message);
    assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "One", "max_tokens": 4})).status, 200);
}

#[test]
fn the_api_key_guards_all_but_the_probes() {
    let options = ServerOptions { api_keys: vec!["s3cret".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    for path in ["/health", "/version", "/metrics"] {
        assert_eq!(server.get(path).status, 200);
    }
    let with = |value: &str| server.send("GET", "/v1/models", &[("Authorization", value)], b"");
    for wrong in ["", "s3cret", "Bearer", "Bearer s3cre", "Bearer s3crets", "Basic s3cret"] {
        let reply = with(wrong);
        assert_eq!(reply.status, 401, "{wrong}");
        reply.error();
        assert!(!reply.body.contains("s3cret"));
    }
    assert_eq!(with("Bearer s3cret").status, 200);
    assert_eq!(with("bearer s3cret").status, 200);
}

#[test]
fn the_model_can_be_served_under_another_name() {
    let options = ServerOptions { served_model_names: vec!["mine".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "mine");
    assert_eq!(server.ok(COMPLETIONS, json!({"model": "mine", "prompt": "a", "max_tokens": 1}))["model"], "mine");
}

#[test]
fn a_shutdown_lets_running_streams_finish() {
    let mut server = Server::with(slow(config()), ServerOptions::default(), Duration::from_secs(60));
    let body = json!({"prompt": "One", "max_tokens": 60, "ignore_eos": true, "stream": true}).to_string();
    let mut stream = server.open("POST", COMPLETIONS, &JSON, body.as_bytes());
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    server.begin_stop();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"));
    assert_eq!(server.wait(), 0);
}

#[test]
fn a_shutdown_closes_idle_connections_while_others_stream() {
    let mut server = Server::with(slow(config()), ServerOptions::default(), Duration::from_secs(60));
    let mut stream = server.open("POST", COMPLETIONS, &JSON, long(true).as_bytes());
    stream.read_exact(&mut [0; 1]).unwrap();
    let mut idle = TcpStream::connect(server.address).unwrap();
    idle.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    idle.write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    idle.read_exact(&mut [0; 1]).unwrap();
    server.begin_stop();
    // The stream takes 18 s.
    idle.read_to_end(&mut Vec::new()).unwrap();
    drop(stream);
    assert_eq!(server.wait(), 0);
}

#[test]
fn a_shutdown_cancels_requests_after_the_grace_period() {
    let mut server = Server::with(slow(config()), ServerOptions::default(), Duration::from_millis(1));
    let mut stream = server.open("POST", COMPLETIONS, &JSON, long(true).as_bytes());
    stream.read_exact(&mut [0; 1]).unwrap();
    server.begin_stop();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: {\"error\":") && !rest.contains("[DONE]"), "the client gets an error");
    assert_eq!(server.wait(), 1);
}

/// A request whose head the server has read and whose body it expects.
fn half_sent(server: &Server, length: usize) -> TcpStream {
    const ASKED: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", server.address);
    let head = head + "Content-Type: application/json\r\nExpect: 100-continue\r\n";
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.write_all(format!("{head}Content-Length: {length}\r\n\r\n").as_bytes()).unwrap();
    let mut answer = [0; ASKED.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, ASKED);
    stream
}

#[test]
fn a_request_that_arrives_during_a_shutdown_is_refused() {
    let mut server = Server::with(slow(config()), ServerOptions::default(), Duration::from_secs(60));
    // Without a running request the shutdown may end first.
    let mut running = server.open("POST", COMPLETIONS, &JSON, long(true).as_bytes());
    running.read_exact(&mut [0; 1]).unwrap();
    let body = br#"{"prompt": "One", "max_tokens": 4}"#;
    // The head arrives before the shutdown, the body during it.
    let mut late = half_sent(&server, body.len());
    late.write_all(&body[..1]).unwrap();
    server.begin_stop();
    server.until_it_stops();
    late.write_all(&body[1..]).unwrap();
    let reply = Reply::read(late);
    assert_eq!(reply.status, 503, "{}", reply.body);
    reply.error();
    drop(running);
    assert_eq!(server.wait(), 0);
}

#[test]
fn incomplete_requests_do_not_delay_a_shutdown() {
    let server = Server::with(config(), ServerOptions::default(), Duration::from_secs(60));
    let mut half_head = TcpStream::connect(server.address).unwrap();
    half_head.write_all(b"POST /v1/comp").unwrap();
    let mut half_body = half_sent(&server, 50);
    half_body.write_all(b"{").unwrap();
    let begun = Instant::now();
    assert_eq!(server.wait(), 0);
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

#[test]
fn a_shutdown_waits_for_a_slow_reader_after_the_engine_is_idle() {
    let mut server = Server::with(config(), ServerOptions::default(), Duration::from_secs(60));
    // More text than the socket buffers hold, from an engine that finishes early.
    let ids: String = (0..500).map(|id| format!("{id},")).collect();
    let body = format!("{{\"tokens\":[{}7]}}", ids.repeat(7000));
    let mut slow = server.open("POST", "/detokenize", &JSON, body.as_bytes());
    let mut text = vec![0; 1];
    slow.read_exact(&mut text).unwrap();
    server.begin_stop();
    // The pause is twice the time after which an idle server stops.
    std::thread::sleep(Duration::from_secs(2));
    slow.read_to_end(&mut text).unwrap();
    assert!(text.ends_with(b"\"}"), "the whole answer has come");
    assert_eq!(server.wait(), 0);
}
