//! LoRA adapters over HTTP: chosen by `model`, loaded and unloaded by clients.

use std::time::Duration;

use engine::{EngineConfig, LoraConfig};
use serde_json::{Value, json};
use server::ServerOptions;
use tempfile::TempDir;
use testkit::adapters::{Module, simple};

use crate::common::{Reply, Server, config, slow};

const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

pub fn with_lora() -> EngineConfig {
    EngineConfig { lora: Some(LoraConfig { max_loras: 2, ..LoraConfig::default() }), ..config() }
}

/// Folders `a` and `b` of adapters of the demo model, and `big` with a rank above the limit.
pub fn adapters() -> TempDir {
    let folder = TempDir::new().unwrap();
    let decoder = engine::declare(&config()).unwrap().decoder;
    let linears = decoder.linears().filter(|linear| linear.adapters);
    let parts =
        linears.flat_map(|linear| linear.parts.iter().map(|part| (part.name.clone(), linear.inputs, part.rows)));
    let modules: Vec<Module> = parts.collect();
    simple(&folder.path().join("a"), &modules, 4, 1);
    simple(&folder.path().join("b"), &modules[1..], 16, 2);
    simple(&folder.path().join("big"), &modules, 17, 3);
    folder
}

pub fn load(server: &Server, folder: &TempDir, name: &str) -> Reply {
    server.post(LOAD, &json!({"lora_name": name, "lora_path": folder.path().join(name)}))
}

fn error(reply: &Reply, status: u16, kind: &str) -> String {
    let error = &reply.json()["error"];
    assert_eq!(
        (reply.status, &error["type"], &error["code"]),
        (status, &json!(kind), &json!(status)),
        "{}",
        reply.body
    );
    error["message"].as_str().unwrap().to_string()
}

#[test]
fn requests_choose_adapters_by_model_and_the_list_names_their_parent() {
    let (server, folder) = (Server::with(with_lora(), ServerOptions::default(), Duration::ZERO), adapters());
    let reply = load(&server, &folder, "a");
    assert_eq!((reply.status, reply.body.as_str()), (200, "Success: LoRA adapter 'a' added successfully."));
    assert_eq!(load(&server, &folder, "b").status, 200);
    let models = server.get("/v1/models").json();
    let names: Vec<(&Value, &Value)> =
        models["data"].as_array().unwrap().iter().map(|model| (&model["id"], &model["parent"])).collect();
    let [base, a, b] = ["quire-demo", "a", "b"].map(Value::from);
    assert_eq!(names, [(&base, &Value::Null), (&a, &base), (&b, &base)]);
    assert_eq!(models["data"][1]["root"], json!(folder.path().join("a")));
    assert_eq!(server.get("/v1/models/a").json(), models["data"][1]);
    let mut texts = Vec::new();
    for model in ["quire-demo", "a", "b"] {
        let body = json!({"model": model, "prompt": "One day", "max_tokens": 12, "temperature": 0, "ignore_eos": true});
        let reply = server.ok("/v1/completions", body.clone());
        assert_eq!(reply["model"], model);
        let chunks = server.stream("/v1/completions", body);
        assert!(chunks.iter().all(|chunk| chunk["model"] == model));
        texts.push(reply["choices"][0]["text"].clone());
        let messages = json!([{"role": "user", "content": "Hi"}]);
        let chat =
            json!({"model": model, "messages": messages, "max_tokens": 2, "input": "Hi", "max_output_tokens": 2});
        assert_eq!(server.ok("/v1/chat/completions", chat.clone())["model"], model);
        assert_eq!(server.ok("/v1/responses", chat.clone())["model"], model);
        assert_eq!(server.ok("/tokenize", json!({"model": model, "prompt": "Hi"}))["count"], 2);
    }
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
    let embedding = |model: &str| server.ok("/v1/embeddings", json!({"model": model, "input": "Hi"}));
    let [plain, adapted] = ["quire-demo", "a"].map(embedding);
    assert_eq!(adapted["model"], "a");
    assert_ne!(plain["data"][0], adapted["data"][0]);
    let unknown = server.post("/v1/completions", &json!({"model": "c", "prompt": "x"}));
    assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("model_not_found")));
}

#[test]
fn requests_to_load_and_unload_have_vllm_s_errors() {
    let (server, folder) = (Server::with(with_lora(), ServerOptions::default(), Duration::ZERO), adapters());
    assert_eq!(load(&server, &folder, "a").status, 200);
    let said = error(&load(&server, &folder, "a"), 400, "InvalidUserInput");
    assert_eq!(said, "The lora adapter 'a' has already been loaded.");
    let replaced = json!({"lora_name": "a", "lora_path": folder.path().join("b"), "load_inplace": true});
    assert_eq!(server.post(LOAD, &replaced).status, 200);
    assert_eq!(server.get("/v1/models/a").json()["root"], json!(folder.path().join("b")));
    let said = error(&server.post(LOAD, &json!({"lora_name": "x"})), 400, "InvalidUserInput");
    assert_eq!(said, "Both 'lora_name' and 'lora_path' must be provided.");
    let said = error(&server.post(LOAD, &json!({"lora_name": "x", "lora_path": "/nowhere"})), 404, "NotFoundError");
    assert!(said.contains("/nowhere: no such folder"), "{said}");
    let hub = json!({"lora_name": "x", "lora_path": "someone/adapter"});
    error(&server.post(LOAD, &hub), 404, "NotFoundError");
    let said = error(&load(&server, &folder, "big"), 400, "BadRequestError");
    assert!(said.contains("found rank 17 for r; expected at most 16 (--max-lora-rank)"), "{said}");
    let base = json!({"lora_name": "quire-demo", "lora_path": folder.path().join("a")});
    error(&server.post(LOAD, &base), 400, "InvalidUserInput");
    let said = error(&server.post(UNLOAD, &json!({})), 400, "InvalidUserInput");
    assert!(said.contains("'lora_name'"), "{said}");
    let said = error(&server.post(UNLOAD, &json!({"lora_name": "x"})), 404, "NotFoundError");
    assert_eq!(said, "The lora adapter 'x' cannot be found.");
    let reply = server.post(UNLOAD, &json!({"lora_name": "a"}));
    assert_eq!((reply.status, reply.body.as_str()), (200, "Success: LoRA adapter 'a' removed successfully."));
    assert_eq!(server.get("/v1/models/a").status, 404);
    assert_eq!(server.post("/v1/completions", &json!({"model": "a", "prompt": "x"})).status, 404);
}

#[test]
fn unloading_responds_after_the_last_request_of_the_adapter() {
    let (server, folder) = (Server::with(slow(with_lora()), ServerOptions::default(), Duration::ZERO), adapters());
    assert_eq!(load(&server, &folder, "a").status, 200);
    let body = json!({"model": "a", "prompt": "x", "max_tokens": 30, "ignore_eos": true});
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| server.ok("/v1/completions", body.clone()));
        server.until("it runs", |server| server.metric("vllm:num_requests_running") > 0.0);
        let unload = scope.spawn(|| server.post(UNLOAD, &json!({"lora_name": "a"})).status);
        server.until("it takes no requests", |server| server.get("/v1/models/a").status == 404);
        assert_eq!(server.post("/v1/completions", &body).status, 404);
        assert_eq!(answer.join().unwrap()["usage"]["completion_tokens"], 30);
        assert_eq!(unload.join().unwrap(), 200);
    });
}

#[test]
fn adapters_can_be_changed_only_where_that_is_allowed() {
    let folder = adapters();
    let options = ServerOptions { allow_runtime_lora_updating: Some(false), ..ServerOptions::default() };
    let closed = Server::with(with_lora(), options, Duration::ZERO);
    for path in [LOAD, UNLOAD] {
        let reply = closed.post(path, &json!({"lora_name": "a", "lora_path": folder.path().join("a")}));
        assert_eq!(reply.status, 403);
        assert!(reply.body.contains("--allow-runtime-lora-updating"), "{}", reply.body);
    }
    let without = Server::start();
    let said = error(&load(&without, &folder, "a"), 400, "BadRequestError");
    assert!(said.contains("--enable-lora"), "{said}");
}
