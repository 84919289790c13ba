//! vLLM's routes about the server and its requests.

use std::io::Read;
use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Reply, Server, config, slow};
use engine::AsyncEngine;
use serde_json::{Value, json};
use server::ServerOptions;

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

/// A server on which a long request takes seconds.
fn slow_server() -> Server {
    let engine = AsyncEngine::start(slow(config()), &|_, _| {}).unwrap();
    Server::of(engine, ServerOptions::default(), Duration::ZERO)
}

#[test]
fn a_request_is_ended_by_its_id_or_that_of_its_response_and_no_other_is() {
    let server = slow_server();
    let body = |stream: bool| {
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 600, "ignore_eos": true, "stream": stream}).to_string()
    };
    let headers = |id| [("Content-Type", "application/json"), ("X-Request-Id", id)];
    let open = |id, stream| server.open("POST", "/v1/chat/completions", &headers(id), body(stream).as_bytes());
    let (whole, stream, other) = (open("a-1", false), open("b-2", true), open("c-3", true));
    server.until("all run", |server| server.get("/load").json() == json!({"server_load": 3}));
    assert_eq!(
        server.post("/abort_requests", &json!({"request_ids": ["3", "xc-3", "x-c-3", "-c-3", "chatcmpl", ""]})).status,
        200
    );
    assert_eq!(server.post("/abort_requests", &json!({"request_ids": ["a-1", "chatcmpl-b-2", "unknown"]})).status, 200);
    let (whole, stream) = (Reply::read(whole), Reply::read(stream));
    assert_eq!((whole.status, &whole.error()["code"]), (400, &json!("aborted")));
    let last = stream.body.lines().rfind(|line| line.starts_with("data: ")).unwrap();
    assert!(stream.status == 200 && last.contains("/abort_requests"), "{last}");
    // Ids are whole.
    server.until("the third alone is left", |server| server.get("/load").json() == json!({"server_load": 1}));
    drop(other);
    for body in [json!({}), json!({"request_ids": 5}), json!({"request_ids": [5]})] {
        let reply = server.post("/abort_requests", &body);
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("request_ids")));
    }
}

#[test]
fn sleep_ends_unfinished_requests_or_refuses_or_waits() {
    let server = slow_server();
    let body = |tokens: u32| json!({"prompt": "a", "max_tokens": tokens, "ignore_eos": true}).to_string();
    let json_type = [("Content-Type", "application/json")];
    let begin = |tokens| {
        let call = server.open("POST", "/v1/completions", &json_type, body(tokens).as_bytes());
        server.until("it runs", |server| server.get("/load").json() == json!({"server_load": 1}));
        call
    };
    let long = begin(800);
    assert_eq!(server.send("POST", "/sleep?mode=keep", &[], b"").status, 409);
    assert_eq!(server.get("/is_sleeping").json(), json!({"is_sleeping": false}));
    assert_eq!(server.send("POST", "/sleep", &[], b"").status, 200);
    assert_eq!(Reply::read(long).status, 503);
    assert_eq!(server.send("POST", "/wake_up", &[], b"").status, 200);
    let short = begin(20);
    assert_eq!(server.send("POST", "/sleep?mode=wait", &[], b"").status, 200);
    assert_eq!(Reply::read(short).status, 200);
}

#[test]
fn the_server_and_its_tokenizer_describe_themselves() {
    let info = SERVER.get("/server_info").json();
    assert!(info["vllm_config"].as_str().unwrap().contains("device: "), "{info}");
    let info = SERVER.get("/server_info?config_format=json").json();
    assert_eq!(info["vllm_config"]["model_config"]["max_model_len"], 1024);
    assert_eq!(SERVER.get("/server_info?config_format=xml").status, 400);
    let tokenizer = SERVER.get("/tokenizer_info").json();
    assert!(tokenizer["chat_template"].as_str().unwrap().contains("messages"));
    assert_eq!(tokenizer["vocab_size"], 1536);
    let page = SERVER.get("/docs");
    assert_eq!((page.status, page.header("content-type")), (200, "text/html; charset=utf-8"));
    assert!(page.header("content-security-policy").starts_with("default-src 'none'"));
    let document = SERVER.get("/openapi.json").json();
    for path in document["paths"].as_object().unwrap().keys().filter(|path| !path.starts_with("/page/")) {
        assert!(page.body.contains(&format!(" {path}</code>")), "{path}");
    }
    assert!(page.body.contains("<code>max_completion_tokens</code>") && !page.body.contains("<script"));
}

#[test]
fn an_invocation_is_the_route_that_its_fields_tell() {
    let same = |path: &str, body: Value| {
        let clean = |mut answer: Value| {
            for name in ["id", "created", "usage"] {
                answer.as_object_mut().unwrap().remove(name);
            }
            answer
        };
        assert_eq!(clean(SERVER.ok("/invocations", body.clone())), clean(SERVER.ok(path, body)), "{path}");
    };
    same(
        "/v1/chat/completions",
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}),
    );
    same("/v1/completions", json!({"prompt": "a", "max_tokens": 4, "temperature": 0}));
    same("/v1/embeddings", json!({"input": ["a", "b"]}));
    same("/rerank", json!({"query": "a", "documents": ["b", "c"]}));
    same("/score", json!({"text_1": "a", "text_2": "b"}));
    let stream = SERVER.stream("/invocations", json!({"prompt": "a", "max_tokens": 4}));
    assert!(stream.len() > 1);
    assert_eq!(SERVER.post("/invocations", &json!({})).status, 400);
    let mut text = String::new();
    SERVER.open("POST", "/invocations", &[("Content-Type", "text/plain")], b"{}").read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 415"), "{text}");
}
