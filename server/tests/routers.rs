//! What routers need of a replica: numbers such as B2 are those of `docs/routers.md`.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use server::ServerOptions;

use crate::common::{Reply, Server, config, slow};
use crate::lora::{adapters, load, with_lora};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const JSON: (&str, &str) = ("Content-Type", "application/json");

/// A server of the demo model under two names.
fn named() -> Server {
    let names = vec!["quire".to_string(), "publishers/a/models/b".to_string(), "quire".to_string()];
    let owned_by = Some("vllm".to_string());
    let options = ServerOptions { served_model_names: names, owned_by, root: "/models".into(), ..Default::default() };
    Server::with(config(), options, Duration::ZERO)
}

/// The labels and the value of the only sample of a metric.
fn sample(server: &Server, name: &str) -> (String, f64) {
    let page = server.get("/metrics").body;
    let mut samples = page.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('{')?.split_once("} "));
    let (labels, value) = samples.next().unwrap();
    assert!(samples.next().is_none(), "{name}");
    (labels.to_string(), value.parse().unwrap())
}

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

#[test]
fn b1_health_answers_within_a_second_under_load_and_is_503_while_the_server_drains() {
    let mut server = Server::with(slow(config()), ServerOptions::default(), Duration::from_secs(60));
    let body = json!({"prompt": "One", "n": 4, "max_tokens": 400, "ignore_eos": true, "stream": true}).to_string();
    let running: Vec<_> = (0..32).map(|_| server.open("POST", COMPLETIONS, &[JSON], body.as_bytes())).collect();
    server.until("the engine is busy", |server| server.metric("vllm:num_requests_running") > 8.0);
    let answer = |path| {
        let asked = Instant::now();
        assert_eq!(server.get(path).status, 200);
        asked.elapsed()
    };
    let mut times: Vec<Duration> = ["/health", "/ping"].into_iter().cycle().take(40).map(answer).collect();
    // The median: the machine may be busy with other tests.
    times.sort_unstable();
    assert!(times[20] < Duration::from_secs(1), "{times:?}");
    assert!(server.metric("vllm:num_requests_running") > 8.0, "the load ended too early");
    server.begin_stop();
    server.until_it_stops();
    // On new connections, on all routes, and as long as requests run.
    for path in ["/health", "/ping", "/v1/models"] {
        let reply = server.get(path);
        assert_eq!((reply.status, reply.header("retry-after")), (503, "1"));
        assert!(reply.error()["message"].as_str().unwrap().contains("is stopping"), "{}", reply.body);
    }
    drop(running);
    assert_eq!(server.wait(), 0);
}

#[test]
fn b1_a_server_that_loads_its_model_answers_503() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let loading = runtime.spawn(server::refuse_while_loading(listener));
    let agent = ureq::Agent::config_builder().http_status_as_error(false).build().new_agent();
    for path in ["/health", "/v1/models"] {
        let mut reply = agent.get(format!("http://{address}{path}")).call().unwrap();
        let body = reply.body_mut().read_to_string().unwrap();
        assert_eq!((reply.status().as_u16(), reply.headers()["retry-after"].to_str().unwrap()), (503, "1"));
        assert!(body.contains("the model is being loaded"), "{body}");
    }
    loading.abort();
    assert!(runtime.block_on(loading).unwrap_err().is_cancelled());
    std::net::TcpListener::bind(address).unwrap();
}

#[test]
fn b2_every_name_of_the_model_is_listed_with_its_owner_root_and_length() {
    let server = named();
    let models = server.get("/v1/models").json();
    let listed = models["data"].as_array().unwrap();
    assert_eq!(listed.len(), 2);
    for (model, name) in listed.iter().zip(["quire", "publishers/a/models/b"]) {
        assert_eq!(
            (&model["id"], &model["owned_by"], &model["root"], &model["parent"]),
            (&json!(name), &json!("vllm"), &json!("/models"), &Value::Null)
        );
        assert!(model["max_model_len"].as_u64() > Some(0));
        assert_eq!(server.get(&format!("/v1/models/{name}")).json(), *model);
    }
}

#[test]
fn b2_adapters_are_listed_under_the_first_name_of_their_model() {
    let names = vec!["base".to_string(), "alias".to_string()];
    let options = ServerOptions { served_model_names: names, ..ServerOptions::default() };
    let (server, folder) = (Server::with(with_lora(), options, Duration::ZERO), adapters());
    assert_eq!(load(&server, &folder, "a").status, 200);
    let models = server.get("/v1/models").json();
    let parents: Vec<_> = models["data"].as_array().unwrap().iter().map(|it| (&it["id"], &it["parent"])).collect();
    let [base, alias, a] = ["base", "alias", "a"].map(Value::from);
    assert_eq!(parents, [(&base, &Value::Null), (&alias, &Value::Null), (&a, &base)]);
    let path = folder.path().join("a");
    let taken = server.post("/v1/load_lora_adapter", &json!({"lora_name": "alias", "lora_path": path}));
    assert_eq!(taken.status, 400, "{}", taken.body);
}

#[test]
fn b3_the_version_is_a_string() {
    assert_eq!(named().get("/version").json(), json!({"version": env!("CARGO_PKG_VERSION")}));
}

#[test]
fn b4_requests_may_use_every_name_and_unknown_models_are_a_404() {
    let server = named();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for name in ["quire", "publishers/a/models/b"] {
        let body = json!({"model": name, "prompt": "a", "messages": messages, "max_tokens": 1});
        assert_eq!(server.ok(COMPLETIONS, body.clone())["model"], "quire");
        assert_eq!(server.ok(CHAT, body)["model"], "quire");
    }
    for name in ["quire-demo", "publishers/a/models", ""] {
        let reply = server.post(COMPLETIONS, &json!({"model": name, "prompt": "a"}));
        assert_eq!((reply.status, &reply.error()["code"]), (404, &json!("model_not_found")), "{name}");
    }
}

#[test]
fn b5_rendered_token_ids_are_those_that_a_request_computes() {
    let server = named();
    let body = json!({
        "model": "publishers/a/models/b",
        "prompt": ["Once upon", [40, 41], "a time"],
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "max_tokens": 1,
        "return_token_ids": true,
        "stream": false,
    });
    let ids: Vec<Value> = server.ok(COMPLETIONS, body.clone())["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| choice["prompt_token_ids"].clone())
        .collect();
    let rendered = server.ok("/v1/completions/render", body.clone());
    let rendered: Vec<&Value> = rendered.as_array().unwrap().iter().map(|prompt| &prompt["token_ids"]).collect();
    assert!(ids.len() == 3 && rendered == ids.iter().collect::<Vec<_>>(), "{rendered:?} {ids:?}");
    let chat = server.ok(CHAT, body.clone());
    let rendered = server.ok("/v1/chat/completions/render", body.clone());
    assert!(rendered["token_ids"].as_array().unwrap().len() > 4);
    assert_eq!((&rendered["token_ids"], &rendered["model"]), (&chat["prompt_token_ids"], &json!("quire")));
    assert!(rendered["request_id"].as_str().unwrap().starts_with("chatcmpl-"));
    let generated = server.metric("vllm:generation_tokens_total");
    assert_eq!(generated, 4.0, "rendering computes nothing");
    // What would be refused is refused here too.
    for (path, field, value) in [
        ("/v1/completions/render", "prompt", json!([[99_999_999]])),
        ("/v1/chat/completions/render", "messages", json!([])),
        ("/v1/chat/completions/render", "max_tokens", json!(-1)),
    ] {
        let mut wrong = body.clone();
        wrong[field] = value;
        let reply = server.post(path, &wrong);
        assert_eq!(reply.status, 400, "{}", reply.body);
        assert!(reply.error()["param"].as_str().unwrap().starts_with(field), "{}", reply.body);
    }
}

#[test]
fn b8_cached_tokens_are_in_the_usage_of_every_answer() {
    let server = Server::start();
    let usage = json!({"include_usage": true});
    for (path, body) in [
        (COMPLETIONS, json!({"prompt": vec![9; 80], "max_tokens": 1, "stream_options": usage})),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "word ".repeat(40)}], "max_tokens": 1,
                      "stream_options": usage}),
        ),
    ] {
        let cold = server.stream(path, body.clone());
        assert_eq!(cached(cold.last().unwrap()), 0, "{path}");
        let prompt_tokens = cold.last().unwrap()["usage"]["prompt_tokens"].as_u64().unwrap();
        let expected = (prompt_tokens - 1) / 16 * 16;
        assert!(expected > 0);
        assert_eq!(cached(server.stream(path, body.clone()).last().unwrap()), expected, "{path}");
        let mut whole = body;
        whole.as_object_mut().unwrap().remove("stream_options");
        assert_eq!(cached(&server.ok(path, whole)), expected, "{path}");
    }
}

#[test]
fn b9_the_id_of_a_request_is_that_of_its_response() {
    let server = Server::start();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let body = json!({"prompt": "a", "messages": messages, "max_tokens": 2, "ignore_eos": true}).to_string();
    let streamed = body.replacen('{', "{\"stream\": true, ", 1);
    for (path, prefix) in [(COMPLETIONS, "cmpl"), (CHAT, "chatcmpl")] {
        let id = format!("{prefix}-of-the-router");
        for body in [&body, &streamed] {
            let headers = [JSON, ("X-Request-Id", "of-the-router")];
            let reply = server.send("POST", path, &headers, body.as_bytes());
            assert_eq!((reply.status, reply.header("x-request-id")), (200, "of-the-router"));
            assert!(reply.body.contains(&format!("\"id\":\"{id}\"")), "{}", reply.body);
        }
        let own = |reply: Reply| reply.json()["id"].as_str().unwrap().to_string();
        let [one, other] = [(); 2].map(|()| own(server.send("POST", path, &[JSON], body.as_bytes())));
        assert!(one != other && one.starts_with(prefix) && !one.contains("router"), "{one} {other}");
    }
}

#[test]
fn b11_one_token_without_a_stream_leaves_the_prompt_cached_for_whoever_decodes() {
    let server = Server::start();
    let mut body = json!({"prompt": vec![11; 100], "max_tokens": 1, "stream": false});
    assert_eq!(server.ok(COMPLETIONS, body.clone())["usage"]["completion_tokens"], 1);
    assert_eq!(server.metric("vllm:kv_cache_usage_perc"), 0.0);
    body["max_tokens"] = json!(8);
    assert_eq!(cached(&server.ok(COMPLETIONS, body)), 96);
}

#[test]
fn b14_a_server_sleeps_and_wakes_and_says_so() {
    let server = Server::start();
    // Some of it is cached before, and none of that may be read afterwards.
    let prompt: Vec<u32> = (0..100).map(|i| 11 + i % 7).collect();
    let body = json!({"prompt": prompt, "max_tokens": 12, "seed": 4, "temperature": 1, "logprobs": 2});
    let ask = || {
        let mut answer = server.ok(COMPLETIONS, body.clone());
        for name in ["id", "created", "usage"] {
            answer.as_object_mut().unwrap().remove(name);
        }
        answer
    };
    let state = || {
        let page = server.get("/metrics").body;
        let on =
            page.lines().find(|line| line.starts_with("vllm:engine_sleep_state{") && line.ends_with(" 1")).unwrap();
        on.split("sleep_state=\"").nth(1).unwrap().split('"').next().unwrap().to_string()
    };
    let send = |path: &str| server.send("POST", path, &[], b"");
    let before = ask();
    for (path, name) in [
        ("/sleep?level=0", "weights_offloaded"),
        ("/sleep", "weights_offloaded"),
        ("/sleep?level=1&mode=wait", "weights_offloaded"),
        ("/sleep?level=2&mode=keep", "discard_all"),
    ] {
        assert_eq!((send("/wake_up").status, state().as_str()), (200, "awake"));
        assert_eq!(server.get("/is_sleeping").json(), json!({"is_sleeping": false}));
        assert_eq!(send(path).status, 200, "{path}");
        assert_eq!(server.get("/is_sleeping").json(), json!({"is_sleeping": true}));
        assert_eq!(state(), name, "{path}");
        let refused = server.post(COMPLETIONS, &body);
        assert!(refused.status == 503 && refused.body.contains("/wake_up"), "{}", refused.body);
        assert_eq!(server.get("/health").status, 200, "it is not stuck");
        assert_eq!(send("/wake_up").status, 200);
        assert_eq!(ask(), before, "{path}");
    }
    for path in ["/sleep?level=3", "/sleep?mode=now"] {
        let reply = send(path);
        assert_eq!((reply.status, reply.error()["param"].is_string()), (400, true));
    }
    let options = ServerOptions { server_dev_mode: Some(false), ..ServerOptions::default() };
    let closed = Server::with(config(), options, Duration::ZERO);
    for (method, path) in [
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/server_info"),
        ("GET", "/tokenizer_info"),
        ("POST", "/abort_requests"),
    ] {
        assert_eq!(closed.send(method, path, &[], b"").status, 403, "{path}");
    }
}

#[test]
fn b16_ping_is_health_and_needs_no_key() {
    let options = ServerOptions { api_keys: vec!["key".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let [ping, health] = ["/ping", "/health"].map(|path| server.get(path));
    assert_eq!((ping.status, ping.body), (200, health.body));
}

#[test]
fn b17_b18_b20_gauges_of_load_move_and_older_names_have_the_values_of_the_new_ones() {
    let server = Server::with(slow(config()), ServerOptions::default(), Duration::ZERO);
    let body = json!({"prompt": vec![5; 64], "max_tokens": 1});
    for _ in 0..2 {
        server.ok(COMPLETIONS, body.clone());
    }
    assert_eq!(server.metric("vllm:gpu_prefix_cache_hits_total"), 48.0);
    assert_eq!(server.metric("vllm:gpu_prefix_cache_queries_total"), server.metric("vllm:prefix_cache_queries_total"));
    let long = json!({"prompt": "One", "max_tokens": 400, "ignore_eos": true, "stream": true}).to_string();
    let running = server.open("POST", COMPLETIONS, &[JSON], long.as_bytes());
    server.until("it runs", |server| server.metric("vllm:kv_cache_usage_perc") > 0.0);
    let page = server.get("/metrics").body;
    let value = |name: &str| -> f64 {
        let line = page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
        line.unwrap_or_else(|| panic!("{name}")).rsplit(' ').next().unwrap().parse().unwrap()
    };
    let usage = value("vllm:kv_cache_usage_perc");
    assert!(usage > 0.0 && usage < 1.0 && value("vllm:gpu_cache_usage_perc") == usage, "{usage}");
    assert_eq!(value("vllm:num_requests_running"), 1.0);
    assert_eq!((value("vllm:num_requests_waiting"), value("vllm:num_requests_swapped")), (0.0, 0.0));
    drop(running);
}

#[test]
fn b19_the_size_of_the_cache_is_in_the_labels_of_a_gauge() {
    let server = Server::start();
    let blocks = server.get("/quire/state").json()["blocks"]["total"].to_string();
    let (labels, value) = sample(&server, "vllm:cache_config_info");
    assert_eq!(value, 1.0);
    for label in ["block_size=\"16\"", &format!("num_gpu_blocks=\"{blocks}\"")] {
        assert!(labels.contains(label), "{label} in {labels}");
    }
}

#[test]
fn b21_running_and_waiting_adapters_are_labels() {
    const NAME: &str = "vllm:lora_requests_info";
    let with_one = engine::EngineConfig { lora: Some(engine::LoraConfig::default()), ..slow(config()) };
    let (server, folder) = (Server::with(with_one, ServerOptions::default(), Duration::ZERO), adapters());
    let has = |running: &str, waiting: &str| {
        let expected = [
            "max_lora=\"1\"".to_string(),
            format!("running_lora_adapters=\"{running}\""),
            format!("waiting_lora_adapters=\"{waiting}\""),
        ];
        let (labels, at) = sample(&server, NAME);
        assert!(at > 1.7e9, "{at} is no time");
        expected.iter().all(|label| labels.contains(label.as_str()))
    };
    assert!(has("", ""));
    for name in ["a", "b"] {
        assert_eq!(load(&server, &folder, name).status, 200);
    }
    let start = |model: &str| {
        let body = json!({"model": model, "prompt": "x", "max_tokens": 300, "ignore_eos": true, "stream": true});
        server.open("POST", COMPLETIONS, &[JSON], body.to_string().as_bytes())
    };
    // One adapter runs at a time, so the other waits.
    let first = start("a");
    server.until("a runs", |_| has("a", ""));
    let second = start("b");
    server.until("b waits", |_| has("a", "b"));
    drop(first);
    server.until("b runs", |_| has("b", ""));
    drop(second);
    server.until("none is left", |_| has("", ""));
    assert!(!Server::start().get("/metrics").body.contains(NAME), "without adapters");
}

#[test]
fn b22_a_page_of_metrics_takes_less_than_five_milliseconds() {
    let server = Server::start();
    server.ok(COMPLETIONS, json!({"prompt": "a", "max_tokens": 4}));
    let scrape = || {
        let asked = Instant::now();
        assert_eq!(server.get("/metrics").status, 200);
        asked.elapsed()
    };
    // The best of several: the machine may be busy with other tests.
    let best = (0..40).map(|_| scrape()).min().unwrap();
    assert!(best < Duration::from_millis(5), "{best:?}");
}

#[test]
fn b23_counters_end_in_total_and_nothing_else_but_one_histogram_of_vllm_does() {
    let page = Server::start().get("/metrics").body;
    let families: Vec<(&str, &str)> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    assert!(families.len() > 40, "{}", families.len());
    for (name, kind) in &families {
        let is_total = name.ends_with("_total");
        assert!(is_total == (*kind == "counter") || *name == "vllm:iteration_tokens_total", "{name} is a {kind}");
        assert_eq!(families.iter().filter(|(other, _)| other == name).count(), 1, "{name}");
    }
}
