//! What users of such servers complain of, as a client sees it; `docs/status.md` lists each problem with its test.

use std::io::Read;
use std::process::Command;
use std::time::Duration;

use crate::common::{Reply, Server, config, slow};
use engine::EngineConfig;
use serde_json::{Value, json};
use server::ServerOptions;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];
/// Bytes of a block of 16 tokens of the demo model: keys and values, 5 layers, 2 heads of 32, float32.
const BLOCK: u64 = 16 * 2 * 5 * 2 * 32 * 4;

fn with_blocks(blocks: u64) -> Server {
    let tight = EngineConfig { kv_cache_memory_bytes: Some(blocks * BLOCK), ..config() };
    Server::with(tight, ServerOptions::default(), Duration::ZERO)
}

/// Tokens of a prompt of so many, different for each `which`.
fn prompt(which: usize, len: usize) -> Vec<usize> {
    (0..len).map(|i| 3 + (which * 131 + i * 17 + i * i * which) % 400).collect()
}

#[test]
fn p06_a_cached_answer_equals_the_cold_one() {
    let server = Server::start();
    for (i, len) in [1, 15, 16, 17, 64, 200].into_iter().enumerate() {
        for temperature in [0, 1] {
            let ask = json!({"prompt": prompt(i + 1, len), "max_tokens": 24, "temperature": temperature, "seed": 5,
                "logprobs": 3, "ignore_eos": true, "cache_salt": format!("{temperature}")});
            let cold = server.ok(COMPLETIONS, ask.clone());
            let warm = server.ok(COMPLETIONS, ask.clone());
            assert_eq!(cold["choices"], warm["choices"], "{len} tokens, temperature {temperature}");
            let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            assert_eq!((cached(&cold), cached(&warm)), (0, 16 * ((len as u64 - 1) / 16)));
        }
    }
    let chat = json!({"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20, "temperature": 0});
    assert_eq!(server.ok(CHAT, chat.clone())["choices"], server.ok(CHAT, chat)["choices"]);
}

#[test]
fn p08_a_request_that_the_pool_can_never_hold_is_refused_with_the_numbers_and_the_next_runs() {
    let server = with_blocks(8);
    let reply = server.post(COMPLETIONS, &json!({"prompt": "One", "n": 4, "max_tokens": 100}));
    assert_eq!(reply.status, 400, "{}", reply.body);
    let message = "needs 28 blocks, the pool holds 8; the longest prompt that fits is 0 tokens";
    assert_eq!(reply.error()["message"], message);
    assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "One", "max_tokens": 4})).status, 200);
}

#[test]
fn p13_the_context_is_fitted_to_the_cache_and_a_table_says_what_fits() {
    let context = |server: &Server| server.get("/v1/models").json()["data"][0]["max_model_len"].as_u64().unwrap();
    assert_eq!(context(&with_blocks(8)), 128);
    let run = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_quire")).args(args).output().unwrap();
    let plan = run(&["plan", "--dtype=float32", "--kv-cache-memory-bytes", &(8 * BLOCK).to_string()]);
    let table = String::from_utf8(plan.stdout).unwrap();
    assert!(table.contains("sequences at once") && table.contains("128"), "{table}");
    let asked = run(&[
        "plan",
        "--dtype=float32",
        "--max-model-len",
        "512",
        "--kv-cache-memory-bytes",
        &(8 * BLOCK).to_string(),
    ]);
    let error = String::from_utf8(asked.stderr).unwrap();
    assert!(error.contains(&format!("--kv-cache-memory-bytes {}", 32 * BLOCK)), "the flag to set: {error}");
}

#[test]
fn p16_a_long_prompt_does_not_block_a_short_one() {
    let small = EngineConfig { max_num_batched_tokens: 32, max_num_seqs: 8, ..slow(config()) };
    let server = Server::with(small, ServerOptions::default(), Duration::ZERO);
    let ask = |which, len, tokens| json!({"prompt": prompt(which, len), "max_tokens": tokens}).to_string();
    let open = |body: String| server.open("POST", COMPLETIONS, &JSON, body.as_bytes());
    // A step takes 20 ms: each long prompt has 29 steps to compute, and six have 169.
    let busy: Vec<_> = (0..6).map(|which| open(ask(which + 1, 900, 1))).collect();
    server.until("all long prompts are there, and one is under way", |s| {
        s.metric("quire:engine_steps_total") >= 1.0
            && s.metric("vllm:num_requests_running") + s.metric("vllm:num_requests_waiting") == 6.0
    });
    let ended = || server.metric("vllm:request_success_total");
    assert_eq!(Reply::read(open(ask(7, 8, 3))).status, 200);
    server.until("the short prompt is counted", |_| ended() >= 1.0);
    assert_eq!(ended(), 1.0, "it ends before all long ones");
    for stream in busy {
        assert_eq!(Reply::read(stream).status, 200);
    }
    server.until("all are counted", |_| ended() >= 7.0);
    // Several prompts share a step, in chunks: no step is larger than the budget.
    let page = server.get("/metrics").body;
    let count = |bound: &str| -> f64 {
        let line =
            page.lines().find(|line| line.starts_with("vllm:iteration_tokens_total_bucket") && line.contains(bound));
        line.unwrap().rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(count("le=\"32\""), count("le=\"+Inf\""));
}

#[test]
fn p17_and_18_preemptions_are_counted_by_cause_and_with_what_they_cost() {
    let tight = EngineConfig { kv_cache_memory_bytes: Some(40 * BLOCK), ..slow(config()) };
    let server = Server::with(tight, ServerOptions::default(), Duration::ZERO);
    let ask = |i: usize| json!({"prompt": prompt(i + 1, 60), "max_tokens": 60, "ignore_eos": true}).to_string();
    let streams: Vec<_> = (0..10).map(|i| server.open("POST", COMPLETIONS, &JSON, ask(i).as_bytes())).collect();
    for stream in streams {
        assert_eq!(Reply::read(stream).status, 200);
    }
    let metric = |name: &str| server.metric(name);
    assert!(metric("vllm:num_preemptions_total") > 0.0);
    assert!(metric("quire:preemption_tokens_lost_total") >= 60.0 * metric("vllm:num_preemptions_total"));
    assert_eq!(metric("quire:num_swap_preemptions_total"), 0.0, "there is no swap space");
    assert_eq!(metric("quire:num_priority_preemptions_total"), 0.0, "all are equals");
}

#[test]
fn p21_a_client_may_leave_at_any_moment_and_its_blocks_are_free() {
    let small = EngineConfig { max_num_batched_tokens: 32, max_num_seqs: 4, ..slow(config()) };
    let server = Server::with(small, ServerOptions::default(), Duration::ZERO);
    let ask = json!({"prompt": prompt(2, 200), "max_tokens": 100, "ignore_eos": true, "stream": true}).to_string();
    // While it waits, in the midst of its prompt, and while it decodes.
    for _ in 0..3 {
        let mut streams: Vec<_> = (0..8).map(|_| server.open("POST", COMPLETIONS, &JSON, ask.as_bytes())).collect();
        server.until("some run and some wait", |s| {
            s.metric("vllm:num_requests_running") > 0.0 && s.metric("vllm:num_requests_waiting") > 0.0
        });
        streams.truncate(4);
        streams[0].read_exact(&mut [0; 300]).unwrap();
        drop(streams);
        server.until("nothing is left", |s| {
            s.metric("vllm:num_requests_running") + s.metric("vllm:num_requests_waiting") == 0.0
        });
        assert_eq!(server.metric("vllm:kv_cache_usage_perc"), 0.0);
    }
}

#[test]
fn p28_and_29_streams_of_any_bytes_and_stop_strings_add_up_to_the_whole() {
    let server = Server::start();
    for seed in 0..12 {
        for stop in [json!([]), json!(["e"]), json!(["the", "an", "\n"])] {
            let ask = json!({"prompt": "Once", "max_tokens": 60, "temperature": 2, "seed": seed, "stop": stop,
                "skip_special_tokens": false, "ignore_eos": true});
            let whole = server.ok(COMPLETIONS, ask.clone());
            let chunks = server.stream(COMPLETIONS, ask);
            let text: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
            assert_eq!(text, whole["choices"][0]["text"].as_str().unwrap(), "seed {seed}, stop {stop}");
            for stop in stop.as_array().unwrap() {
                assert!(!text.contains(stop.as_str().unwrap()), "{stop} in {text:?}");
            }
        }
    }
}

#[test]
fn p30_a_history_of_broken_tool_calls_is_text_and_no_error() {
    let server = Server::start();
    for arguments in ["{", "", "[1", "{\"a\": \u{1}}", "null"] {
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let messages = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "{"},
        ]);
        let reply = server.post(CHAT, &json!({"messages": messages, "max_tokens": 2}));
        assert_eq!(reply.status, 200, "{arguments:?}: {}", reply.body);
    }
}

#[test]
fn p32_a_greedy_answer_is_the_same_alone_and_under_load() {
    let server = Server::with(slow(config()), ServerOptions::default(), Duration::ZERO);
    let ask = json!({"prompt": "The capital of France is", "max_tokens": 40, "temperature": 0, "ignore_eos": true, "logprobs": 2});
    let alone = server.ok(COMPLETIONS, ask.clone());
    let others: Vec<_> = (0..31)
        .map(|i| json!({"prompt": prompt(i, 10 + 9 * i), "max_tokens": 600, "ignore_eos": true}).to_string())
        .map(|body| server.open("POST", COMPLETIONS, &JSON, body.as_bytes()))
        .collect();
    server.until("others run", |s| s.metric("vllm:num_requests_running") >= 8.0);
    assert_eq!(server.ok(COMPLETIONS, ask)["choices"], alone["choices"]);
    drop(others);
}

#[test]
fn p33_a_miss_says_why() {
    let server = Server::start();
    let miss = |reason: &str| -> f64 {
        let page = server.get("/metrics").body;
        let wanted = format!("reason=\"{reason}\"");
        let line =
            page.lines().find(|line| line.starts_with("quire:prefix_cache_misses_total{") && line.contains(&wanted));
        line.unwrap().rsplit(' ').next().unwrap().parse().unwrap()
    };
    for _ in 0..2 {
        server.ok(COMPLETIONS, json!({"prompt": prompt(1, 9), "max_tokens": 1}));
    }
    server.until("short prompts are counted", |_| miss("shorter_than_block") == 2.0);
    server.ok(COMPLETIONS, json!({"prompt": prompt(2, 40), "max_tokens": 1}));
    server.until("so are new ones", |_| miss("no_shared_prefix") == 1.0);
}
