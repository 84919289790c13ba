//! Stored work on a disk that fails, and on a server that computes other bits.

use std::sync::Arc;
use std::time::Duration;

use engine::{AsyncEngine, Dtype, EngineConfig};
use serde_json::{Value, json};
use server::{App, ServerOptions, Store};

#[allow(dead_code, reason = "the tests of the store use the rest")]
#[path = "../../store/tests/common/mod.rs"]
mod disk;

use crate::batches::upload_as;
use crate::common::{Server, config, slow};
use crate::stored::{ended, events};
use disk::Disk;

const RESPONSES: &str = "/v1/responses";

fn over_disk(disk: &Disk, engine: EngineConfig) -> Server {
    over_disk_at(disk, engine, 0)
}

/// A server whose clock is this many seconds ahead.
fn over_disk_at(disk: &Disk, engine: EngineConfig, ahead: u64) -> Server {
    let limits = ServerOptions::default().state.limits();
    let store = Store::with(disk.opener(), limits, Arc::new(move || store::unix_seconds() + ahead)).unwrap();
    let engine = AsyncEngine::start(engine, &|_, _| {}).unwrap();
    Server::serving(App::new(engine, ServerOptions::default()).with_store(store), Duration::ZERO)
}

/// Begins a streamed background response and reads its first event. Returns its id.
fn begin_stream(server: &Server, body: &Value) -> Value {
    let connection =
        server.open("POST", RESPONSES, &[("Content-Type", "application/json")], body.to_string().as_bytes());
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(connection));
    let created = lines.find_map(|line| line.unwrap().strip_prefix("data: ").map(str::to_string)).unwrap();
    serde_json::from_str::<Value>(&created).unwrap()["response"]["id"].clone()
}

fn story(stream: bool) -> Value {
    json!({"input": "A story", "temperature": 1, "seed": 5, "max_output_tokens": 60, "ignore_eos": true, "background": true, "stream": stream})
}

/// The answer to the story, waited for.
fn whole_story(server: &Server) -> Value {
    let mut body = story(false);
    body["background"] = json!(false);
    server.ok(RESPONSES, body)
}

#[test]
fn a_disk_that_fails_accepts_nothing_and_what_was_accepted_waits_for_it() {
    let disk = Disk::default();
    let server = over_disk(&disk, slow(config()));
    let whole = whole_story(&server);
    let quiet = server.ok(RESPONSES, story(false))["id"].clone();
    let loud = begin_stream(&server, &story(true));
    disk.fail_after(Some(0));
    server.until("the store has failed", |server| server.metric("quire:store_failures_total") > 0.0);
    let refused = server.post(RESPONSES, &story(false));
    assert_eq!((refused.status, &refused.error()["type"]), (503, &json!("server_error")));
    assert!(refused.error()["message"].as_str().unwrap().contains("check the disk's space"), "{}", refused.body);
    // An answer on its connection needs no disk, and says that it is not kept.
    let answer = server.ok(RESPONSES, json!({"input": "One", "max_output_tokens": 2}));
    assert_eq!(answer["store"], false);
    let stream = server.post(RESPONSES, &json!({"input": "One", "max_output_tokens": 2, "stream": true}));
    assert!(stream.body.rsplit("data: ").next().unwrap().contains("\"store\":false"));
    server.until("both have been computed", |server| server.metric("vllm:num_requests_running") == 0.0);
    disk.fail_after(None);
    for id in [&quiet, &loud] {
        let answer = ended(&server, id);
        assert_eq!(answer["output"][0]["content"], whole["output"][0]["content"]);
    }
    let all = events(&server.get(&format!("{RESPONSES}/{}?stream=true", loud.as_str().unwrap())).body);
    assert!(all.iter().zip(0..).all(|((number, _), expected)| *number == expected));
    server.wait();
    // It is on the disk.
    let server = over_disk(&disk, config());
    assert_eq!(ended(&server, &loud)["output"][0]["content"], whole["output"][0]["content"]);
}

#[test]
fn work_of_another_family_of_bits_is_left_to_a_server_that_computes_in_it() {
    let disk = Disk::default();
    let server = over_disk(&disk, slow(config()));
    let id = server.ok(RESPONSES, story(false))["id"].clone();
    server.wait();
    let other = over_disk(&disk, EngineConfig { dtype: Some(Dtype::Bf16), ..config() });
    assert_eq!((other.metric("quire:stored_work_left"), other.metric("quire:stored_work_resumed_total")), (1.0, 0.0));
    let path = format!("{RESPONSES}/{}", id.as_str().unwrap());
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(other.get(&path).json()["status"], "queued");
    other.wait();
    let server = over_disk(&disk, config());
    assert_eq!(server.metric("quire:stored_work_left"), 0.0);
    assert_eq!(ended(&server, &id)["status"], "incomplete");
    // What is left can be cancelled by whoever has it.
    let second = {
        server.wait();
        let server = over_disk(&disk, slow(config()));
        let id = server.ok(RESPONSES, story(false))["id"].clone();
        server.wait();
        id
    };
    let other = over_disk(&disk, EngineConfig { dtype: Some(Dtype::Bf16), ..config() });
    let path = format!("{RESPONSES}/{}", second.as_str().unwrap());
    assert_eq!(other.post(&format!("{path}/cancel"), &json!({})).json()["status"], "cancelled");
    assert_eq!(other.get(&path).json()["status"], "cancelled");
}

#[test]
fn a_server_whose_settings_lead_to_another_prompt_says_so() {
    let disk = Disk::default();
    let server = over_disk(&disk, slow(config()));
    let id = server.ok(RESPONSES, story(false))["id"].clone();
    server.wait();
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("chat.jinja");
    std::fs::write(&template, "{% for message in messages %}{{ message.content }}!{% endfor %}").unwrap();
    let server = over_disk(&disk, EngineConfig { chat_template: Some(template), ..config() });
    let answer = ended(&server, &id);
    assert_eq!(answer["status"], "failed");
    assert!(answer["error"]["message"].as_str().unwrap().contains("settings of the server have changed"), "{answer}");
}

#[test]
fn a_stream_with_tokens_that_have_no_text_goes_on_over_many_servers() {
    let disk = Disk::default();
    let mut server = over_disk(&disk, slow(config()));
    let id_of =
        |text: &str| server.ok("/tokenize", json!({"prompt": text, "add_special_tokens": false}))["tokens"].clone();
    // Half of the tokens are hidden, and the others have different lengths.
    let (hidden, shown) = (id_of("<|im_end|>"), id_of("The capital of France is a long way from nothing"));
    assert_eq!(hidden.as_array().unwrap().len(), 1);
    let mut body = story(true);
    body["allowed_token_ids"] = json!([hidden.as_array().unwrap().clone(), shown.as_array().unwrap().clone()].concat());
    body["logit_bias"] = json!({hidden[0].to_string(): 3});
    body["temperature"] = json!(2);
    body["max_output_tokens"] = json!(100);
    let whole = {
        let mut body = body.clone();
        (body["background"], body["stream"]) = (json!(false), json!(false));
        server.ok(RESPONSES, body)
    };
    let text = whole["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(text.len() > 40, "both kinds of tokens: {text}");
    let id = begin_stream(&server, &body);
    // Each repeats what the one before it gave, and goes on.
    for millis in [300, 700, 1100] {
        std::thread::sleep(Duration::from_millis(millis));
        server.wait();
        server = over_disk(&disk, slow(config()));
    }
    let answer = ended(&server, &id);
    assert_eq!(
        (&answer["status"], &answer["output"][0]["content"]),
        (&json!("incomplete"), &whole["output"][0]["content"])
    );
}

#[test]
fn a_batch_that_is_over_its_time_keeps_its_results_and_ends_the_other_lines() {
    let disk = Disk::default();
    let server = over_disk(&disk, EngineConfig { max_num_seqs: 2, ..slow(config()) });
    let body = json!({"prompt": "x", "max_tokens": 8, "ignore_eos": true});
    let line =
        |i: usize| json!({"custom_id": format!("q{i}"), "method": "POST", "url": "/v1/completions", "body": body});
    let input: Vec<String> = (0..30).map(|i| line(i).to_string()).collect();
    let file = upload_as(&server, "", Some("batch"), "f", input.join("\n").as_bytes()).json()["id"].clone();
    let new = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
    let path = format!("/v1/batches/{}", server.ok("/v1/batches", new)["id"].as_str().unwrap());
    server.until("some lines have ended", |server| {
        server.get(&path).json()["request_counts"]["completed"].as_u64().unwrap() > 2
    });
    server.wait();
    let server = over_disk_at(&disk, config(), 24 * 3600);
    server.until("it has expired", |server| server.get(&path).json()["status"] == "expired");
    let batch = server.get(&path).json();
    let [completed, failed] = ["completed", "failed"].map(|name| batch["request_counts"][name].as_u64().unwrap());
    assert!(completed > 2 && completed + failed == 30, "{batch}");
    let errors = server.get(&format!("/v1/files/{}/content", batch["error_file_id"].as_str().unwrap())).body;
    assert_eq!(errors.lines().count() as u64, failed);
    assert!(errors.lines().all(|line| line.contains("batch_expired")));
}

#[test]
fn steps_go_on_while_a_commit_waits_for_the_disk() {
    let disk = Disk::default();
    let server = over_disk(&disk, slow(config()));
    let whole = whole_story(&server);
    let ids = [begin_stream(&server, &story(true)), server.ok(RESPONSES, story(false))["id"].clone()];
    let held = disk.hold();
    // Neither what needs no disk nor what writes to it waits for a step.
    let body = json!({"prompt": "One", "max_tokens": 6, "temperature": 0});
    let alone = server.ok("/v1/completions", body.clone());
    server.until("a commit waits", |_| disk.is_waiting());
    for _ in 0..3 {
        assert_eq!(server.ok("/v1/completions", body.clone())["choices"], alone["choices"]);
    }
    server.until("all has been computed", |server| server.metric("vllm:num_requests_running") == 0.0);
    for id in &ids {
        let found = server.get(&format!("{RESPONSES}/{}", id.as_str().unwrap())).json();
        assert_eq!(found["status"], "in_progress", "it has not ended before its end is on the disk");
    }
    drop(held);
    for id in &ids {
        assert_eq!(ended(&server, id)["output"][0]["content"], whole["output"][0]["content"]);
    }
}

#[test]
fn what_another_request_has_deleted_meanwhile_is_answered_with_404() {
    let disk = Disk::default();
    let server = over_disk(&disk, config());
    let id = |found: Value| found["id"].as_str().unwrap().to_string();
    let conversation = format!("/v1/conversations/{}", id(server.ok("/v1/conversations", json!({}))));
    let file = format!("/v1/files/{}", id(upload_as(&server, "", Some("batch"), "f", b"x").json()));
    let response = format!("{RESPONSES}/{}", id(server.ok(RESPONSES, json!({"input": "One", "max_output_tokens": 2}))));
    let send = |method: &str, path: &str, body: &Value| {
        server.send(method, path, &[("Content-Type", "application/json")], body.to_string().as_bytes())
    };
    let item = json!({"items": [{"role": "user", "content": "x"}]});
    for (path, others) in [
        (
            &conversation,
            &[
                ("DELETE", "", json!(null)),
                ("POST", "", json!({"metadata": {"a": "b"}})),
                ("POST", "/items", item.clone()),
            ][..],
        ),
        (&file, &[("DELETE", "", json!(null))]),
        (&response, &[("DELETE", "", json!(null))]),
    ] {
        let held = disk.hold();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| send("DELETE", path, &json!(null)));
            server.until("the deletion waits for the disk", |_| disk.is_waiting());
            // These find the record.
            let late: Vec<_> = others
                .iter()
                .map(|(method, behind, body)| scope.spawn(move || send(method, &format!("{path}{behind}"), body)))
                .collect();
            std::thread::sleep(Duration::from_millis(200));
            drop(held);
            assert_eq!(first.join().unwrap().status, 200, "{path}");
            for late in late {
                let reply = late.join().unwrap();
                assert_eq!((reply.status, &reply.error()["param"]), (404, &json!("id")), "{path}: {}", reply.body);
            }
        });
    }
}

#[test]
fn items_come_behind_those_that_are_kept_whatever_the_clock_said_then() {
    let disk = Disk::default();
    let server = over_disk(&disk, config());
    let new = json!({"items": [{"role": "user", "content": "first"}]});
    let id = server.ok("/v1/conversations", new)["id"].as_str().unwrap().to_string();
    server.wait();
    // An earlier version numbered items by the time, and its clock was ahead.
    let store =
        Store::with(disk.opener(), ServerOptions::default().state.limits(), Arc::new(store::unix_seconds)).unwrap();
    let bytes = json!({"type": "message", "role": "user", "content": "second", "id": "msg_2"}).to_string().into_bytes();
    store.apply_blocking(vec![store::Change::Part { id: id.clone(), list: 0, number: 1 << 52, bytes }]).unwrap();
    store.close();
    let server = over_disk(&disk, config());
    let path = format!("/v1/conversations/{id}/items");
    server.ok(&path, json!({"items": [{"role": "user", "content": "third"}, {"role": "user", "content": "fourth"}]}));
    let body = json!({"input": "fifth", "conversation": id, "max_output_tokens": 2});
    server.ok(RESPONSES, body);
    let items = server.get(&format!("{path}?order=asc")).json();
    let texts: Vec<&Value> = items["data"].as_array().unwrap().iter().map(|item| &item["content"]).collect();
    assert_eq!(texts[..4], ["first", "second", "third", "fourth"]);
    assert_eq!((texts.len(), &texts[4][0]["text"]), (6, &json!("fifth")));
}
