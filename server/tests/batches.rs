//! Files and batches: uploads in pieces, results in input order, errors line by line, cancelled, taken up by another server.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use engine::{AsyncEngine, EngineConfig};
use serde_json::{Value, json};
use server::{App, ServerOptions, Store, local};

use crate::common::{Reply, Server, config, slow};
use crate::stored::over;

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

/// Uploads a file under a key.
pub fn upload_as(server: &Server, key: &str, purpose: Option<&str>, name: &str, data: &[u8]) -> Reply {
    let mut body = Vec::new();
    if let Some(purpose) = purpose {
        body.extend(
            format!("--XX\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\n{purpose}\r\n").into_bytes(),
        );
    }
    body.extend(format!("--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\nContent-Type: application/jsonl\r\n\r\n").into_bytes());
    body.extend(data);
    body.extend(b"\r\n--XX--\r\n");
    let authorization = format!("Bearer {key}");
    let headers = [("Authorization", &*authorization), ("Content-Type", "multipart/form-data; boundary=XX")];
    server.send("POST", "/v1/files", &headers, &body)
}

fn upload(server: &Server, data: &str) -> String {
    let reply = upload_as(server, "", Some("batch"), "in.jsonl", data.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()["id"].as_str().unwrap().to_string()
}

fn create(server: &Server, file: &str, endpoint: &str) -> String {
    let body = json!({"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", "metadata": {"k": "v"}});
    let batch = server.ok("/v1/batches", body);
    assert_eq!((&batch["object"], &batch["status"]), (&json!("batch"), &json!("validating")));
    batch["id"].as_str().unwrap().to_string()
}

fn ended(server: &Server, batch: &str) -> Value {
    let path = format!("/v1/batches/{batch}");
    server.until("the batch has ended", |server| {
        let status = server.get(&path).json()["status"].clone();
        ["completed", "failed", "expired", "cancelled"].contains(&status.as_str().unwrap())
    });
    server.get(&path).json()
}

/// The lines of a file of results.
fn lines(server: &Server, file: &Value) -> Vec<Value> {
    let Some(id) = file.as_str() else { return Vec::new() };
    let content = server.get(&format!("/v1/files/{id}/content"));
    assert_eq!(content.status, 200);
    let described = server.get(&format!("/v1/files/{id}")).json();
    assert_eq!((&described["bytes"], &described["purpose"]), (&json!(content.body.len()), &json!("batch_output")));
    content.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn line(id: &str, url: &str, body: Value) -> String {
    json!({"custom_id": id, "method": "POST", "url": url, "body": body}).to_string() + "\n"
}

/// A body with the same answer each time.
fn question(i: usize) -> Value {
    json!({"prompt": format!("Number {i} is"), "max_tokens": 12, "temperature": 1, "seed": i, "logprobs": 1, "ignore_eos": true})
}

#[test]
fn a_file_is_what_was_uploaded() {
    let data: Vec<u8> = (0..300_000_u32).map(|i| (i * 7919 % 96 + 32) as u8).collect();
    let file = upload_as(&SERVER, "", Some("user_data"), "a b.txt", &data).json();
    assert_eq!(
        (&file["object"], &file["bytes"], &file["filename"], &file["purpose"], &file["status"]),
        (&json!("file"), &json!(300_000), &json!("a b.txt"), &json!("user_data"), &json!("processed"))
    );
    let path = format!("/v1/files/{}", file["id"].as_str().unwrap());
    assert_eq!(SERVER.get(&path).json(), file);
    let content = SERVER.get(&format!("{path}/content"));
    assert_eq!((content.header("content-length"), content.body.as_bytes()), ("300000", &*data));
    let listed = SERVER.get("/v1/files?purpose=user_data&order=asc").json();
    assert!(listed["data"].as_array().unwrap().contains(&file));
    assert_eq!(SERVER.get("/v1/files?purpose=vision").json()["data"], json!([]));
    assert_eq!(
        SERVER.send("DELETE", &path, &[], b"").json(),
        json!({"id": file["id"], "object": "file", "deleted": true})
    );
    for reply in [SERVER.get(&path), SERVER.get(&format!("{path}/content")), SERVER.send("DELETE", &path, &[], b"")] {
        assert_eq!(reply.status, 404);
        assert!(reply.error()["message"].as_str().unwrap().starts_with("No file found with id "));
    }
    assert_eq!(upload_as(&SERVER, "", Some("batch"), "empty", b"").json()["bytes"], 0);
}

#[test]
fn a_file_may_ask_for_its_time() {
    let upload = |fields: &[(&str, &str)]| {
        let part = |(name, value): &(&str, &str)| {
            format!("--b\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
        };
        // The file first: what is said after it counts too.
        let file = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"timed\"\r\n\r\n{}\r\n".to_string();
        let body = file + &fields.iter().map(part).collect::<String>() + "--b--";
        SERVER.send("POST", "/v1/files", &[("Content-Type", "multipart/form-data; boundary=b")], body.as_bytes())
    };
    let (purpose, anchor) = (("purpose", "batch"), ("expires_after[anchor]", "created_at"));
    let lasts = |file: &Value| file["expires_at"].as_u64().unwrap() - file["created_at"].as_u64().unwrap();
    assert_eq!(lasts(&upload(&[purpose]).json()), 30 * 86400);
    let file = upload(&[purpose, anchor, ("expires_after[seconds]", "7200")]).json();
    assert_eq!(lasts(&file), 7200);
    for (fields, param) in [
        ([purpose, ("expires_after[anchor]", "now")], "expires_after.anchor"),
        ([purpose, ("expires_after[seconds]", "5")], "expires_after.seconds"),
        ([purpose, ("expires_after[seconds]", "x")], "expires_after.seconds"),
    ] {
        let reply = upload(&fields);
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)), "{}", reply.body);
    }
    let new = json!({"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h",
        "output_expires_after": {"anchor": "created_at", "seconds": 3600}});
    let batch = ended(&SERVER, SERVER.ok("/v1/batches", new)["id"].as_str().unwrap());
    let errors = SERVER.get(&format!("/v1/files/{}", batch["error_file_id"].as_str().unwrap())).json();
    assert_eq!(lasts(&errors), 3600);
}

#[test]
fn a_wrong_upload_leaves_nothing() {
    for (reply, status, param) in [
        (upload_as(&SERVER, "", None, "bad", b"x"), 400, json!("purpose")),
        (upload_as(&SERVER, "", Some("pictures"), "bad", b"x"), 400, json!("purpose")),
        (SERVER.post("/v1/files", &json!({"file": "x"})), 415, json!(null)),
        (
            SERVER.send("POST", "/v1/files", &[("Content-Type", "multipart/form-data; boundary=b")], b"--b\r\nx"),
            400,
            json!(null),
        ),
        (
            SERVER.send(
                "POST",
                "/v1/files",
                &[("Content-Type", "multipart/form-data; boundary=b")],
                b"--b\r\nContent-Disposition: form-data; name=file; filename=bad\r\n\r\nabc",
            ),
            400,
            json!(null),
        ),
        (
            SERVER.send("POST", "/v1/files", &[("Content-Type", "multipart/form-data; boundary=b")], b"--b--"),
            400,
            json!("file"),
        ),
    ] {
        assert_eq!((reply.status, &reply.error()["param"]), (status, &param), "{}", reply.body);
    }
    // Other tests store too, but no file that is incomplete.
    let files = SERVER.get("/v1/files?limit=10000").json();
    assert!(files["data"].as_array().unwrap().iter().all(|file| file["filename"] != "bad"));
    let mut options = ServerOptions::default();
    options.limits.max_file_bytes = 1000;
    let server = Server::with(config(), options, Duration::ZERO);
    let refused = upload_as(&server, "", Some("batch"), "x", &[b'x'; 2000]);
    assert!(refused.status == 400 && refused.body.contains("--max-file-bytes"), "{}", refused.body);
}

#[test]
fn a_batch_has_the_answers_of_its_route_and_an_error_for_each_wrong_line() {
    let url = "/v1/completions";
    let mut input = String::new();
    for i in 0..20 {
        input += &line(&format!("q{i}"), url, question(i));
        if i == 3 {
            input += "\n  \nnot json\n";
            input += &line("wrong", url, json!({"prompt": "x", "max_tokens": -5}));
            input += &line("other", "/v1/embeddings", json!({"input": "x"}));
            input += &line("q1", url, question(1));
            input += &line("stream", url, json!({"prompt": "x", "stream": true}));
        }
    }
    let batch = ended(&SERVER, &create(&SERVER, &upload(&SERVER, input.trim_end()), url));
    assert_eq!((&batch["status"], &batch["metadata"]), (&json!("completed"), &json!({"k": "v"})), "{batch}");
    assert_eq!(batch["request_counts"], json!({"total": 25, "completed": 20, "failed": 5}));
    let outputs = lines(&SERVER, &batch["output_file_id"]);
    assert_eq!(outputs.len(), 20);
    for (i, output) in outputs.iter().enumerate() {
        assert_eq!(
            (&output["custom_id"], &output["error"]),
            (&json!(format!("q{i}")), &json!(null)),
            "in the order of the input"
        );
        assert_eq!(output["response"]["status_code"], 200);
        assert_eq!(output["response"]["body"]["choices"], SERVER.ok(url, question(i))["choices"]);
    }
    assert_eq!(batch["usage"]["output_tokens"], 240);
    let errors = lines(&SERVER, &batch["error_file_id"]);
    let found: Vec<(Value, Value, Value)> = errors
        .iter()
        .map(|line| (line["custom_id"].clone(), line["response"]["status_code"].clone(), line["error"]["code"].clone()))
        .collect();
    assert_eq!(
        found,
        [
            (json!(null), json!(null), json!("invalid_request")),
            (json!("wrong"), json!(400), json!(null)),
            (json!("other"), json!(null), json!("invalid_request")),
            (json!("q1"), json!(null), json!("duplicate_custom_id")),
            (json!("stream"), json!(400), json!(null)),
        ]
    );
    assert_eq!(errors[1]["response"]["body"]["error"]["param"], "max_tokens");
    assert!(
        SERVER.get("/v1/batches").json()["data"].as_array().unwrap().iter().any(|other| other["id"] == batch["id"])
    );
}

#[test]
fn batches_of_every_route_are_answered() {
    for (url, body, field) in [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}), "choices"),
        ("/v1/embeddings", json!({"input": "Hi"}), "data"),
        ("/v1/responses", json!({"input": "Hi", "max_output_tokens": 3}), "output"),
    ] {
        let batch = ended(&SERVER, &create(&SERVER, &upload(&SERVER, &line("a", url, body)), url));
        let outputs = lines(&SERVER, &batch["output_file_id"]);
        assert!(!outputs[0]["response"]["body"][field].as_array().unwrap().is_empty(), "{url}: {batch}");
        assert_eq!(batch["error_file_id"], json!(null));
    }
    let empty = ended(&SERVER, &create(&SERVER, &upload(&SERVER, "\n \n"), "/v1/completions"));
    assert_eq!((&empty["status"], &empty["errors"]["data"][0]["code"]), (&json!("failed"), &json!("empty_file")));
}

#[test]
fn a_wrong_batch_names_its_field() {
    let file = upload(&SERVER, "x");
    let other = upload_as(&SERVER, "", Some("vision"), "x", b"x").json()["id"].clone();
    for (body, status, param) in [
        (json!({}), 400, "input_file_id"),
        (json!({"input_file_id": file, "completion_window": "24h"}), 400, "endpoint"),
        (json!({"input_file_id": file, "endpoint": "/v1/x", "completion_window": "24h"}), 400, "endpoint"),
        (
            json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h"}),
            400,
            "completion_window",
        ),
        (
            json!({"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}),
            404,
            "input_file_id",
        ),
        (
            json!({"input_file_id": other, "endpoint": "/v1/completions", "completion_window": "24h"}),
            400,
            "input_file_id",
        ),
    ] {
        let reply = SERVER.post("/v1/batches", &body);
        assert_eq!((reply.status, &reply.error()["param"]), (status, &json!(param)), "{body}: {}", reply.body);
    }
    assert_eq!(SERVER.get("/v1/batches/batch_1").status, 404);
    assert_eq!(SERVER.post("/v1/batches/batch_1/cancel", &json!({})).status, 404);
    assert_eq!(SERVER.get("/v1/batches?limit=0").status, 400);
    assert_eq!(SERVER.get("/v1/batches?after=batch_1").status, 404);
}

/// A slow server over a folder.
fn slow_over(folder: &std::path::Path, config: EngineConfig) -> Server {
    let store = Store::open(folder, ServerOptions::default().state.limits()).unwrap();
    let engine = AsyncEngine::start(slow(config), &|_, _| {}).unwrap();
    Server::serving(App::new(engine, ServerOptions::default()).with_store(store), Duration::ZERO)
}

#[test]
fn a_batch_is_taken_up_by_another_server_and_each_line_ends_once() {
    let folder = tempfile::tempdir().unwrap();
    let url = "/v1/completions";
    let input: String = (0..30).map(|i| line(&format!("q{i}"), url, question(i))).collect();
    let mut server = slow_over(folder.path(), EngineConfig { max_num_seqs: 4, ..config() });
    let (file, mut seen) = (upload(&server, &input), 0);
    let batch = create(&server, &file, url);
    for least in [3, 9, 15] {
        server.until("some lines have ended", |server| {
            server.get(&format!("/v1/batches/{batch}")).json()["request_counts"]["completed"].as_u64().unwrap() >= least
        });
        let counts = server.get(&format!("/v1/batches/{batch}")).json()["request_counts"].clone();
        assert!(counts["completed"].as_u64().unwrap() >= seen && counts["total"] == 30, "{counts}");
        seen = counts["completed"].as_u64().unwrap();
        let refused = server.send("DELETE", &format!("/v1/files/{file}"), &[], b"");
        assert!(refused.status == 400 && refused.body.contains(&batch), "{}", refused.body);
        server.wait();
        server = slow_over(folder.path(), EngineConfig { max_num_seqs: 4, ..config() });
        assert_eq!(server.metric("quire:stored_work_resumed_total"), 1.0);
    }
    let done = ended(&server, &batch);
    assert_eq!(done["request_counts"], json!({"total": 30, "completed": 30, "failed": 0}));
    for (i, output) in lines(&server, &done["output_file_id"]).iter().enumerate() {
        assert_eq!(output["custom_id"], format!("q{i}"));
        assert_eq!(output["response"]["body"]["choices"], SERVER.ok(url, question(i))["choices"]);
    }
    server.wait();
    // The results outlive their server.
    let server = over(folder.path(), ServerOptions::default());
    assert_eq!(lines(&server, &done["output_file_id"]).len(), 30);
    assert_eq!(server.send("DELETE", &format!("/v1/files/{file}"), &[], b"").status, 200);
}

#[test]
fn a_cancelled_batch_keeps_its_results_and_ends_the_other_lines() {
    let folder = tempfile::tempdir().unwrap();
    let server = slow_over(folder.path(), EngineConfig { max_num_seqs: 2, ..config() });
    let url = "/v1/completions";
    let input: String = (0..40).map(|i| line(&format!("q{i}"), url, question(i))).collect();
    let batch = create(&server, &upload(&server, &input), url);
    server.until("some lines have ended", |server| {
        server.get(&format!("/v1/batches/{batch}")).json()["request_counts"]["completed"].as_u64().unwrap() > 2
    });
    let cancelling = server.post(&format!("/v1/batches/{batch}/cancel"), &json!({})).json();
    assert_eq!(cancelling["status"], "cancelling");
    let done = ended(&server, &batch);
    assert_eq!(done["status"], "cancelled");
    let (outputs, errors) = (lines(&server, &done["output_file_id"]), lines(&server, &done["error_file_id"]));
    assert!(outputs.len() > 2 && outputs.len() < 40);
    let mut ids: Vec<String> =
        outputs.iter().chain(&errors).map(|line| line["custom_id"].as_str().unwrap().to_string()).collect();
    ids.sort();
    let mut all: Vec<String> = (0..40).map(|i| format!("q{i}")).collect();
    all.sort();
    assert_eq!(ids, all, "each line has one result");
    assert!(errors.iter().all(|line| line["error"]["code"] == "batch_cancelled"));
    server.until("nothing runs", |server| server.metric("vllm:num_requests_running") == 0.0);
}

#[test]
fn a_batch_waits_for_the_requests_of_clients() {
    let folder = tempfile::tempdir().unwrap();
    let server = slow_over(folder.path(), EngineConfig { max_num_seqs: 4, ..config() });
    let url = "/v1/completions";
    let body = json!({"prompt": "x", "max_tokens": 40, "ignore_eos": true});
    let input: String = (0..60).map(|i| line(&format!("q{i}"), url, body.clone())).collect();
    let batch = create(&server, &upload(&server, &input), url);
    server.until("the lines wait for each other", |server| server.metric("vllm:num_requests_waiting") > 40.0);
    let before = server.get(&format!("/v1/batches/{batch}")).json()["request_counts"]["completed"].as_u64().unwrap();
    server.ok(url, json!({"prompt": "now", "max_tokens": 2, "ignore_eos": true}));
    let after = server.get(&format!("/v1/batches/{batch}")).json()["request_counts"]["completed"].as_u64().unwrap();
    // It is the next that gets a place, before 56 lines that came earlier.
    assert!(after - before <= 8, "{before} {after}");
}

#[test]
fn as_many_lines_run_at_once_as_a_step_takes() {
    for (places, at_once) in [(96, 96), (8, 64)] {
        let server = Server::with(
            EngineConfig { max_num_seqs: places, ..slow(config()) },
            ServerOptions::default(),
            Duration::ZERO,
        );
        let url = "/v1/completions";
        let body = json!({"prompt": "x", "max_tokens": 30, "ignore_eos": true});
        let input: String = (0..200).map(|i| line(&format!("q{i}"), url, body.clone())).collect();
        let batch = create(&server, &upload(&server, &input), url);
        let with_engine = |server: &Server| {
            // Both counts come from one page, because a line that waits in one page may run in the next.
            let page = server.get("/metrics").body;
            let samples = page.lines().filter_map(|line| line.split_once('{'));
            let count = |name: &str| -> usize {
                let found = samples.clone().find(|(found, _)| *found == name).unwrap().1;
                found.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as usize
            };
            (count("vllm:num_requests_running"), count("vllm:num_requests_waiting"))
        };
        server.until("all places are taken", |server| {
            let (running, waiting) = with_engine(server);
            assert!(running + waiting <= at_once, "{running} and {waiting}");
            running == places && running + waiting == at_once
        });
        let half_done = |server: &Server| {
            let (running, waiting) = with_engine(server);
            assert!(running + waiting <= at_once, "{running} and {waiting}");
            server.get(&format!("/v1/batches/{batch}")).json()["request_counts"]["completed"].as_u64().unwrap() > 10
        };
        server.until("others take the places of those that have ended", half_done);
        server.post(&format!("/v1/batches/{batch}/cancel"), &json!({}));
        assert_eq!(ended(&server, &batch)["status"], "cancelled");
    }
}

#[test]
fn files_and_batches_of_one_key_do_not_exist_for_another() {
    let options = ServerOptions { api_keys: vec!["ann".into(), "ben".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let send = |key: &str, method: &str, path: &str, body: &Value| {
        let authorization = format!("Bearer {key}");
        let headers = [("Authorization", &*authorization), ("Content-Type", "application/json")];
        server.send(method, path, &headers, if body.is_null() { String::new() } else { body.to_string() }.as_bytes())
    };
    let input = line("a", "/v1/completions", question(0));
    let file =
        upload_as(&server, "ann", Some("batch"), "x", input.as_bytes()).json()["id"].as_str().unwrap().to_string();
    let new = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
    let batch = send("ann", "POST", "/v1/batches", &new).json()["id"].as_str().unwrap().to_string();
    for (method, path, body) in [
        ("GET", format!("/v1/files/{file}"), Value::Null),
        ("GET", format!("/v1/files/{file}/content"), Value::Null),
        ("DELETE", format!("/v1/files/{file}"), Value::Null),
        ("GET", format!("/v1/files?after={file}"), Value::Null),
        ("POST", "/v1/batches".to_string(), new.clone()),
        ("GET", format!("/v1/batches/{batch}"), Value::Null),
        ("POST", format!("/v1/batches/{batch}/cancel"), json!({})),
    ] {
        let reply = send("ben", method, &path, &body);
        assert_eq!(reply.status, 404, "{method} {path}: {}", reply.body);
        // The same words as for an id that was never given out.
        let unknown = |id: &str| format!("{}{}", &id[..id.len() - 4], "0000");
        let (path, text) = (
            path.replace(&file, &unknown(&file)).replace(&batch, &unknown(&batch)),
            body.to_string().replace(&file, &unknown(&file)),
        );
        let never = send("ben", method, &path, &serde_json::from_str(&text).unwrap());
        let plain = |reply: &Reply| {
            [&file, &batch]
                .iter()
                .fold(reply.body.clone(), |body, id| body.replace(*id, "ID").replace(&unknown(id), "ID"))
        };
        assert_eq!((never.status, plain(&never)), (404, plain(&reply)));
    }
    for path in ["/v1/files", "/v1/batches"] {
        assert_eq!(send("ben", "GET", path, &Value::Null).json()["data"], json!([]));
        assert_ne!(send("ann", "GET", path, &Value::Null).json()["data"], json!([]));
    }
}

#[test]
fn a_batch_without_a_server_has_the_same_answers() {
    let engine = AsyncEngine::start(config(), &|_, _| {}).unwrap();
    let app = Arc::new(App::new(engine.clone(), ServerOptions::default()));
    let url = "/v1/completions";
    let mut input: String = (0..70).map(|i| line(&format!("q{i}"), url, question(i % 9))).collect();
    input += "\nnonsense\n";
    let mut output = Vec::new();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let counts = runtime.block_on(async {
        tokio::spawn(engine.wake_readers());
        local::run_batch(&app, &mut input.as_bytes(), &mut output, |_| {}).await.unwrap()
    });
    assert_eq!((counts.completed, counts.failed), (70, 1));
    let output = String::from_utf8(output).unwrap();
    let results: Vec<Value> = output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(results.len(), 71);
    for i in 0..70 {
        let found = results.iter().find(|line| line["custom_id"] == format!("q{i}")).unwrap();
        assert_eq!(found["response"]["body"]["choices"], SERVER.ok(url, question(i % 9))["choices"]);
    }
}
