//! Keys, origins, sizes, times and numbers: every limit is tested, from both sides where that is cheap.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::{Reply, Server, config, slow};
use engine::EngineConfig;
use serde_json::{Value, json};
use server::{Cors, Limits, ServerOptions};

const COMPLETIONS: &str = "/v1/completions";
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];

fn with(limits: Limits) -> Server {
    Server::with(config(), ServerOptions { limits, ..ServerOptions::default() }, Duration::ZERO)
}

fn long(stream: bool) -> String {
    json!({"prompt": "One", "max_tokens": 900, "ignore_eos": true, "stream": stream}).to_string()
}

#[test]
fn any_of_several_keys_is_accepted_and_none_is_revealed() {
    let options = ServerOptions { api_keys: vec!["first".into(), "second".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let ask = |header: &str| server.send("GET", "/v1/models", &[("Authorization", header)], b"");
    for good in ["Bearer first", "bearer second", "BEARER first", "Bearer  second "] {
        assert_eq!(ask(good).status, 200, "{good}");
    }
    for bad in [
        "Bearer third",
        "Bearer firstsecond",
        "Bearer firstfirst",
        "Bearer firs",
        "Bearer firsts",
        "Bearer First",
        "Bearer",
        "Bearer ",
        "first",
        "Basic first",
    ] {
        let reply = ask(bad);
        assert_eq!(reply.status, 401, "{bad}");
        assert_eq!(reply.header("www-authenticate"), "Bearer");
        assert!(!reply.body.contains("first") && reply.body.contains("Authorization: Bearer"), "{}", reply.body);
    }
    let options = ServerOptions { api_keys: vec![String::new()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    assert_eq!(server.send("GET", "/v1/models", &[("Authorization", "Bearer a")], b"").status, 401);
}

#[test]
fn no_page_of_another_origin_may_use_the_server_unless_it_is_allowed() {
    let origin = [("Origin", "https://a.example")];
    let preflight = [origin[0], ("Access-Control-Request-Method", "POST")];
    let closed = Server::start();
    for headers in [&origin[..], &preflight[..]] {
        let method = if headers.len() == 1 { "GET" } else { "OPTIONS" };
        assert_eq!(closed.send(method, "/v1/models", headers, b"").header("access-control-allow-origin"), "");
    }
    let cors = Cors { origins: vec!["https://a.example".into()], ..Cors::default() };
    let options = ServerOptions { cors: cors.clone(), api_keys: vec!["k".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let reply = server.send("OPTIONS", "/v1/models", &preflight, b"");
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (204, "https://a.example"));
    assert_eq!(reply.header("access-control-allow-methods"), "GET, POST");
    // Headers that clients invent are allowed as asked.
    let asked = [preflight[0], preflight[1], ("Access-Control-Request-Headers", "authorization,x-stainless-os")];
    let reply = server.send("OPTIONS", "/v1/models", &asked, b"");
    assert_eq!(reply.header("access-control-allow-headers"), "authorization,x-stainless-os");
    assert!(reply.headers.contains(&("vary".into(), "access-control-request-headers".into())));
    let refused = server.send("GET", "/v1/models", &origin, b"");
    assert_eq!((refused.status, refused.header("access-control-allow-origin")), (401, "https://a.example"));
    let other = server.send("GET", "/health", &[("Origin", "https://b.example")], b"");
    assert_eq!(other.header("access-control-allow-origin"), "");
    // With keys nothing but the method tells that a page is refused.
    let refused = server.send("OPTIONS", "/v1/models", &[("Origin", "https://b.example"), preflight[1]], b"");
    assert_eq!(refused.status, 401);
    let refused = closed.send("OPTIONS", "/v1/models", &[], b"");
    assert!(refused.status == 405 && refused.body.contains("--allowed-origins"), "{}", refused.body);
    let cors = Cors { headers: vec!["authorization".into(), "x-a".into()], ..cors };
    let server = Server::with(config(), ServerOptions { cors, ..ServerOptions::default() }, Duration::ZERO);
    let reply = server.send("OPTIONS", "/v1/models", &asked, b"");
    assert_eq!(reply.header("access-control-allow-headers"), "authorization, x-a");
}

#[test]
fn a_call_keeps_the_id_that_it_came_with_or_gets_one() {
    let server = Server::start();
    let reply = server.send("GET", "/health", &[("X-Request-Id", "abc-1")], b"");
    assert_eq!(reply.header("x-request-id"), "abc-1");
    let (one, two) = (server.get("/health"), server.get("/nowhere"));
    assert!(!one.header("x-request-id").is_empty() && one.header("x-request-id") != two.header("x-request-id"));
    let long = "x".repeat(129);
    for bad in ["a b", "", &long] {
        let reply = server.send("GET", "/health", &[("X-Request-Id", bad)], b"");
        assert!(reply.header("x-request-id").starts_with("req-"), "{bad}");
    }
}

#[test]
fn fields_over_their_limits_are_a_400_that_names_them() {
    let limits = Limits {
        max_prompts: 2,
        max_n: 2,
        max_stop: 2,
        max_stop_bytes: 8,
        max_logit_bias: 2,
        max_schema_bytes: 100,
        max_messages: 2,
        ..Limits::default()
    };
    let server = with(limits);
    let user = json!({"role": "user", "content": "hi"});
    for (path, field, good, bad) in [
        (COMPLETIONS, "prompt", json!(["a", "b"]), json!(["a", "b", "c"])),
        (COMPLETIONS, "n", json!(2), json!(3)),
        (COMPLETIONS, "best_of", json!(2), json!(3)),
        (COMPLETIONS, "stop", json!(["a", "b"]), json!(["a", "b", "c"])),
        (COMPLETIONS, "stop", json!("12345678"), json!("123456789")),
        (COMPLETIONS, "logit_bias", json!({"5": 1, "6": 1}), json!({"5": 1, "6": 1, "7": 1})),
        (COMPLETIONS, "guided_regex", json!("a+"), json!("a".repeat(101))),
        ("/v1/chat/completions", "messages", json!([user, user]), json!([user, user, user])),
    ] {
        let mut body = json!({"max_tokens": 1, "prompt": "a", "messages": [user]});
        body[field] = good;
        assert_eq!(server.post(path, &body).status, 200, "{field}");
        body[field] = bad;
        let reply = server.post(path, &body);
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(field)), "{}", reply.body);
    }
}

#[test]
fn products_of_fields_reach_their_limits_and_do_not_exceed_them() {
    let server = with(Limits {
        max_sequences: 8,
        max_request_tokens: 100,
        max_logprob_entries: 60,
        max_inflight_bytes: 32 << 10,
        ..Limits::default()
    });
    let ids = |lengths: &[usize]| lengths.iter().map(|&length| vec![40; length]).collect::<Vec<_>>();
    for (good, bad, param) in [
        (json!({"prompt": ids(&[1, 1]), "n": 4}), json!({"prompt": ids(&[1, 1]), "n": 5}), json!("n")),
        (json!({"n": 2, "best_of": 8}), json!({"n": 2, "best_of": 9}), json!("n")),
        (json!({"prompt": ids(&[60, 40])}), json!({"prompt": ids(&[60, 41])}), json!("prompt")),
        (json!({"prompt": ids(&[100])}), json!({"prompt": ids(&[101])}), json!("prompt")),
        (json!({"logprobs": 1, "max_tokens": 30}), json!({"logprobs": 1, "max_tokens": 31}), json!("logprobs")),
        (
            json!({"prompt": ids(&[10]), "prompt_logprobs": 2, "n": 2}),
            json!({"prompt": ids(&[10]), "prompt_logprobs": 2, "n": 2, "logprobs": 0}),
            json!("prompt_logprobs"),
        ),
        // 8 sequences take 16 KiB, and 7 of them hold text of 4 bytes per token.
        (json!({"n": 8, "max_tokens": 500}), json!({"n": 8, "max_tokens": 600}), Value::Null),
    ] {
        let body = |fields: Value| {
            let mut body = json!({"prompt": "a", "max_tokens": 1});
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            body
        };
        let reply = server.post(COMPLETIONS, &body(good.clone()));
        assert_eq!(reply.status, 200, "{good}: {}", reply.body);
        let reply = server.post(COMPLETIONS, &body(bad.clone()));
        assert_eq!((reply.status, &reply.error()["param"]), (400, &param), "{}", reply.body);
    }
    // Texts are refused by a lower bound of their tokens.
    let server = with(Limits { max_request_tokens: 100, ..Limits::default() });
    let reply = server.post(COMPLETIONS, &json!({"prompt": vec!["word ".repeat(900); 8]}));
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("prompt")), "{}", reply.body);
}

#[test]
fn requests_in_flight_share_a_budget_and_return_their_part() {
    let limits = Limits { max_inflight_bytes: 100 << 10, ..Limits::default() };
    let options = ServerOptions { limits, ..ServerOptions::default() };
    let server = Server::with(slow(config()), options, Duration::ZERO);
    // 30 sequences take 60 KiB: one such request fits, two do not.
    let body = json!({"prompt": "One", "n": 30, "max_tokens": 200, "ignore_eos": true, "stream": true});
    let mut first = server.open("POST", COMPLETIONS, &JSON, body.to_string().as_bytes());
    first.read_exact(&mut [0; 64]).unwrap();
    let reply = server.post(COMPLETIONS, &body);
    assert_eq!((reply.status, reply.header("retry-after")), (429, "1"), "{}", reply.body);
    assert!(reply.error()["message"].as_str().unwrap().contains("--max-inflight-bytes"), "{}", reply.body);
    assert_eq!(server.metric("quire:requests_rejected_total"), 1.0);
    assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "a", "n": 10, "max_tokens": 1})).status, 200);
    drop(first);
    let small = json!({"prompt": "One", "n": 30, "max_tokens": 1, "stream": true});
    server.until("its part of the budget is returned", |server| server.post(COMPLETIONS, &small).status == 200);
}

#[test]
fn the_values_of_a_request_are_counted_before_they_are_parsed() {
    let server = with(Limits { max_json_values: 40, ..Limits::default() });
    let user = json!({"role": "user", "content": "a, b: [{"});
    let body = |messages: usize, kwargs: usize| json!({"messages": vec![user.clone(); messages], "chat_template_kwargs": {"x": vec![0; kwargs]}, "max_tokens": 1});
    let chat = "/v1/chat/completions";
    assert_eq!(server.post(chat, &body(1, 5)).status, 200);
    for (messages, kwargs, param) in [(9, 5, "messages"), (1, 50, "chat_template_kwargs"), (4, 20, "messages")] {
        let reply = server.post(chat, &body(messages, kwargs));
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)), "{}", reply.body);
        assert!(reply.error()["message"].as_str().unwrap().contains("--max-json-values"), "{}", reply.body);
    }
    // Token ids do not count as values.
    assert_eq!(server.post(COMPLETIONS, &json!({"prompt": vec![5; 100], "max_tokens": 1})).status, 200);
}

#[test]
fn a_head_or_body_over_its_limit_is_refused() {
    let server =
        with(Limits { max_body_bytes: 1000, max_header_bytes: 2000, max_header_count: 10, ..Limits::default() });
    let reply = server.post(COMPLETIONS, &json!({"prompt": "a".repeat(1000)}));
    assert_eq!(reply.status, 413, "{}", reply.body);
    reply.error();
    // The error does not wait for a body that would be discarded.
    let head = "Content-Type: application/json\r\nContent-Length: 1000000000000";
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.write_all(format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n{{").as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut start = [0; 12];
    stream.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 413");
    let reply = server.send("GET", "/health", &[("X-Long", &"a".repeat(2000))], b"");
    assert_eq!(reply.status, 431, "{}", reply.body);
    assert!(reply.error()["message"].as_str().unwrap().contains("2000"));
    let many: Vec<(&str, &str)> = vec![("X-Many", "a"); 11];
    assert_eq!(server.send("GET", "/health", &many, b"").status, 431);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn incomplete_heads_and_bodies_time_out() {
    let soon = Duration::from_millis(100);
    let server = with(Limits { header_timeout: soon, ..Limits::default() });
    let mut idle = TcpStream::connect(server.address).unwrap();
    let mut half_head = TcpStream::connect(server.address).unwrap();
    half_head.write_all(b"POST /v1/comp").unwrap();
    for stream in [&mut idle, &mut half_head] {
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&rest));
    }
    // A separate server, so that only the body can be late.
    let server = with(Limits { body_timeout: soon, ..Limits::default() });
    let mut half_body = TcpStream::connect(server.address).unwrap();
    half_body.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{").unwrap();
    let reply = Reply::read(half_body);
    assert_eq!(reply.status, 408, "{}", reply.body);
}

#[test]
fn bodies_that_stall_block_no_other_request_and_are_closed_soon() {
    const LENGTH: usize = 16 << 20;
    // A sixtieth of the time is a tick.
    let server = with(Limits { body_timeout: Duration::from_secs(12), ..Limits::default() });
    let stall = |sent: usize| {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let head = format!("Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {LENGTH}");
        stream.write_all(format!("POST {COMPLETIONS} HTTP/1.1\r\n{head}\r\n\r\n").as_bytes()).unwrap();
        let _ = stream.write_all(&vec![b' '; sent]);
        stream
    };
    let stalled: Vec<TcpStream> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..8).map(|_| scope.spawn(|| stall(LENGTH - 1))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let begun = Instant::now();
    let padded = |bytes: usize| json!({"prompt": "a", "max_tokens": 1, "x": "y".repeat(bytes)});
    for bytes in [0, 60 << 10, 1 << 20, 0, 15 << 20, 0] {
        let reply = server.post(COMPLETIONS, &padded(bytes));
        assert_eq!(reply.status, 200, "{bytes}: {}", reply.body);
    }
    for stream in stalled {
        let reply = Reply::read(stream);
        assert!([408, 429].contains(&reply.status), "{}", reply.body);
        reply.error();
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(server.post(COMPLETIONS, &padded(0)).status, 200);
}

#[test]
fn a_body_that_arrives_too_slowly_is_refused_and_a_slow_one_is_not() {
    let server = with(Limits { body_timeout: Duration::from_secs(6), ..Limits::default() });
    let send = |pieces: usize, size: usize| {
        let mut stream = TcpStream::connect(server.address).unwrap();
        let body = format!(r#"{{"prompt":"a","max_tokens":1,"x":"{}"}}"#, "y".repeat(pieces * size));
        let head = format!("Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {}", body.len());
        let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nConnection: close\r\n{head}\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        for piece in body.as_bytes().chunks(size) {
            std::thread::sleep(Duration::from_millis(50));
            if stream.write_all(piece).is_err() {
                break;
            }
        }
        Reply::read(stream)
    };
    // Ten ticks of 100 ms with less than 4 KiB in each.
    let reply = send(60, 1 << 10);
    assert_eq!(reply.status, 408, "{}", reply.body);
    assert!(reply.error()["message"].as_str().unwrap().contains("too slowly"), "{}", reply.body);
    assert_eq!(send(30, 64 << 10).status, 200);
}

#[test]
fn connections_over_the_limit_get_a_503_while_all_others_are_answered() {
    let limits = Limits { max_connections: 2, ..Limits::default() };
    let server = Server::with(slow(config()), ServerOptions { limits, ..ServerOptions::default() }, Duration::ZERO);
    let open = || {
        let mut stream = server.open("POST", COMPLETIONS, &JSON, long(true).as_bytes());
        stream.read_exact(&mut [0; 64]).unwrap();
        stream
    };
    let held: Vec<TcpStream> = (0..2).map(|_| open()).collect();
    let reply = Reply::read(TcpStream::connect(server.address).unwrap());
    assert_eq!((reply.status, reply.header("retry-after")), (503, "1"));
    reply.error();
    drop(held);
    server.until("a connection is free", |server| {
        let stream = server.open("GET", "/health", &[], b"");
        Reply::read(stream).status == 200
    });
}

#[test]
fn connections_whose_request_does_not_arrive_give_way_to_others() {
    let limits = Limits { max_connections: 3, ..Limits::default() };
    let server = Server::with(slow(config()), ServerOptions { limits, ..ServerOptions::default() }, Duration::ZERO);
    let mut running = server.open("POST", COMPLETIONS, &JSON, long(true).as_bytes());
    running.read_exact(&mut [0; 64]).unwrap();
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n");
    for part in [String::new(), "POST /v1".to_string(), head.clone(), format!("{head}Content-Length: 9\r\n\r\n{{")] {
        let mut stalled: Vec<TcpStream> = (0..20)
            .map(|_| {
                let mut stream = TcpStream::connect(server.address).unwrap();
                stream.write_all(part.as_bytes()).unwrap();
                stream
            })
            .collect();
        for _ in 0..5 {
            let reply = Reply::read(server.open("GET", "/version", &[], b""));
            assert_eq!(reply.status, 200, "{part:?}: {}", reply.body);
        }
        // The first has been closed without an answer.
        assert!(matches!(stalled[0].read(&mut [0; 8]), Ok(0) | Err(_)), "{part:?}");
    }
    // A connection between two requests waits too, and is served as long as no other needs its place.
    let mut kept = TcpStream::connect(server.address).unwrap();
    for _ in 0..3 {
        kept.write_all(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut head = [0; 12];
        kept.read_exact(&mut head).unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        let mut rest = [0; 4096];
        let _ = kept.read(&mut rest).unwrap();
    }
    // What runs goes on.
    running.read_exact(&mut [0; 64]).unwrap();
}

#[test]
fn a_queue_that_is_full_answers_429_with_retry_after() {
    let small = EngineConfig { max_queued_requests: 2, max_num_seqs: 1, max_num_batched_tokens: 64, ..slow(config()) };
    let server = Server::with(small, ServerOptions::default(), Duration::ZERO);
    let mut first = server.open("POST", COMPLETIONS, &JSON, long(true).as_bytes());
    first.read_exact(&mut [0; 64]).unwrap();
    // The head of the answer comes before its first step.
    server.until("the first has left the queue", |s| s.metric("vllm:num_requests_running") == 1.0);
    let waiting: Vec<TcpStream> =
        (0..2).map(|_| server.open("POST", COMPLETIONS, &JSON, long(false).as_bytes())).collect();
    server.until("one runs and two wait", |s| {
        s.metric("vllm:num_requests_running") == 1.0 && s.metric("vllm:num_requests_waiting") == 2.0
    });
    let reply = server.post(COMPLETIONS, &json!({"prompt": "a"}));
    assert_eq!((reply.status, reply.header("retry-after")), (429, "1"), "{}", reply.body);
    assert_eq!(reply.error()["code"], "rate_limit_exceeded");
    assert_eq!(server.metric("quire:requests_rejected_total"), 1.0);
    drop((first, waiting));
    server
        .until("the queue has space", |s| s.post(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 1})).status == 200);
}

#[test]
fn streams_over_the_limit_are_answered_429_and_whole_answers_are_not() {
    let limits = Limits { max_concurrent_streams: Some(1), ..Limits::default() };
    let options = ServerOptions { limits, ..ServerOptions::default() };
    let server = Server::with(slow(config()), options, Duration::ZERO);
    let mut first = server.open("POST", COMPLETIONS, &JSON, long(true).as_bytes());
    first.read_exact(&mut [0; 64]).unwrap();
    let mut body: Value = json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(server.post(COMPLETIONS, &body).status, 200);
    body["stream"] = json!(true);
    assert_eq!(server.post(COMPLETIONS, &body).status, 429);
    drop(first);
    server.until("the stream permit is free", |server| server.post(COMPLETIONS, &body).status == 200);
}

#[test]
fn a_request_that_takes_too_long_ends_and_frees_its_blocks() {
    let limits = Limits { request_timeout: Some(Duration::from_millis(150)), ..Limits::default() };
    let options = ServerOptions { limits, ..ServerOptions::default() };
    let server = Server::with(slow(config()), options, Duration::ZERO);
    let endless = json!({"prompt": "One", "max_tokens": 900, "ignore_eos": true});
    let reply = server.post(COMPLETIONS, &endless);
    assert_eq!(reply.status, 504, "{}", reply.body);
    assert_eq!(reply.error()["code"], "request_timeout");
    let mut streamed = endless;
    streamed["stream"] = json!(true);
    let reply = server.post(COMPLETIONS, &streamed);
    assert!(reply.status == 200 && reply.body.contains("request_timeout") && !reply.body.contains("[DONE]"));
    server.until("the blocks are free", |s| s.metric("vllm:kv_cache_usage_perc") == 0.0);
}

#[test]
fn a_client_that_reads_nothing_is_disconnected_and_blocks_no_other_client() {
    let server = with(Limits { send_timeout: Duration::from_millis(200), ..Limits::default() });
    // More text than the socket buffers hold.
    let body = json!({"prompt": "One", "n": 24, "max_tokens": 900, "ignore_eos": true, "logprobs": 20, "stream": true});
    let _unread = server.open("POST", COMPLETIONS, &JSON, body.to_string().as_bytes());
    server.until("it runs or has run", |s| s.metric("vllm:generation_tokens_total") > 0.0);
    assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "Two", "max_tokens": 4})).status, 200);
    server.until("its request is cancelled", |s| {
        let page = s.get("/metrics").body;
        page.lines().any(|line| line.contains("finished_reason=\"abort\"") && line.ends_with(" 24"))
    });
    server.until("its blocks are free", |s| s.metric("vllm:kv_cache_usage_perc") == 0.0);
}

#[test]
fn all_tokens_of_the_vocabulary_have_log_probabilities_if_the_server_allows_it() {
    let chat = json!({"messages": [{"role": "user", "content": "One"}], "max_tokens": 2, "temperature": 0, "logprobs": true,
        "top_logprobs": -1});
    let (closed, open) = (Server::start(), with(Limits { max_logprobs: usize::MAX, ..Limits::default() }));
    for (path, param) in
        [("/v1/chat/completions", "top_logprobs"), (COMPLETIONS, "logprobs"), (COMPLETIONS, "prompt_logprobs")]
    {
        let body = if param == "top_logprobs" { chat.clone() } else { json!({"prompt": "One", param: -1}) };
        let reply = closed.post(path, &body);
        let error = reply.error();
        assert_eq!((reply.status, error["param"].as_str()), (400, Some(param)), "{}", reply.body);
        assert!(error["message"].as_str().unwrap().contains("--max-logprobs -1"), "{}", reply.body);
    }
    let answer = open.ok("/v1/chat/completions", chat.clone());
    let few = {
        let mut few = chat.clone();
        few["top_logprobs"] = json!(3);
        closed.ok("/v1/chat/completions", few)
    };
    let tokens = |answer: &Value| answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    let config = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/config.json")).unwrap();
    let vocab = serde_json::from_str::<Value>(&config).unwrap()["vocab_size"].as_u64().unwrap() as usize;
    for (all, few) in tokens(&answer).iter().zip(tokens(&few)) {
        let top = all["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), vocab);
        let mass: f64 = top.iter().map(|one| one["logprob"].as_f64().unwrap().exp()).sum();
        assert!((mass - 1.0).abs() < 1e-4, "{} tokens have {mass}", top.len());
        assert_eq!(top[..3], few["top_logprobs"].as_array().unwrap()[..]);
    }
    // Nobody may keep a stream of so many unread.
    let mut long = chat;
    (long["max_tokens"], long["stream"]) = (json!(900), json!(true));
    let error = open.post("/v1/chat/completions", &long).error();
    assert!(error["message"].as_str().unwrap().contains("--max-logprob-entries"), "{error}");
}
