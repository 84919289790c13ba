//! What routers need of a replica: numbers such as B2 are those of `docs/routers.md`.

use std::time::Duration;

use serde_json::{Value, json};
use server::ServerOptions;

use crate::common::{Reply, Server, config, slow};

const COMPLETIONS: &str = "/v1/completions";

/// The number of cached tokens of the prompt.
fn cached(answer: &Value) -> &Value {
    &answer["usage"]["prompt_tokens_details"]["cached_tokens"]
}

#[test]
fn b33_a_reset_empties_the_prefix_cache_where_clients_may_do_that() {
    let reset = |server: &Server, query: &str| -> Reply {
        server.send("POST", &format!("/reset_prefix_cache{query}"), &[], b"")
    };
    let server = Server::with(slow(config()), ServerOptions::default(), Duration::ZERO);
    let prompt = json!({"prompt": vec![7; 64], "max_tokens": 1});
    for expected in [0, 48] {
        assert_eq!(cached(&server.ok(COMPLETIONS, prompt.clone())), expected);
    }
    let reply = reset(&server, "");
    assert_eq!((reply.status, reply.body.as_str()), (200, ""));
    assert_eq!(cached(&server.ok(COMPLETIONS, prompt)), 0);
    let long = json!({"prompt": "One", "max_tokens": 40, "ignore_eos": true, "temperature": 0});
    let expected = server.ok(COMPLETIONS, long.clone())["choices"][0]["text"].clone();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.ok(COMPLETIONS, long.clone()));
        server.until("it runs", |server| server.metric("vllm:num_requests_running") == 1.0);
        let reply = reset(&server, "?reset_external=true");
        assert_eq!(reply.status, 409);
        assert!(reply.error()["message"].as_str().unwrap().contains("reset_running_requests=true"), "{}", reply.body);
        assert_eq!(reset(&server, "?reset_running_requests=true").status, 200);
        assert_eq!(running.join().unwrap()["choices"][0]["text"], expected);
    });
    let reply = reset(&server, "?reset_running_requests=maybe");
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("reset_running_requests")));
    let options = ServerOptions { server_dev_mode: Some(false), ..ServerOptions::default() };
    let reply = reset(&Server::with(config(), options, Duration::ZERO), "");
    assert_eq!(reply.status, 403);
    assert!(reply.error()["message"].as_str().unwrap().contains("--server-dev-mode"), "{}", reply.body);
}
