//! The page and the engine's state as an HTTP client sees them. `cargo xtask page-test` tests the page in a browser.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use crate::common::{Server, config, slow};
use crate::lora::{adapters, load, with_lora};
use serde_json::{Value, json};
use server::ServerOptions;
use sha2::{Digest, Sha256};

#[test]
fn the_page_needs_no_key_and_allows_nothing_from_elsewhere() {
    let options = ServerOptions { api_keys: vec!["s3cret".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let html = [("Accept", "text/html,application/xhtml+xml,*/*;q=0.8")];
    let page = server.send("GET", "/", &html, b"");
    assert_eq!((page.status, page.header("content-type")), (200, "text/html; charset=utf-8"));
    let policy = page.header("content-security-policy");
    assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    let named: Vec<&str> = page.body.split('"').filter(|text| text.starts_with("page/")).collect();
    assert!(named.len() >= 4, "{named:?}");
    for path in named {
        assert_eq!(server.get(&format!("/{path}")).status, 200, "{path}");
    }
    for headers in [&[][..], &[("Accept", "*/*")]] {
        let program = server.send("GET", "/", headers, b"");
        assert_eq!((program.status, program.body.as_str()), (200, "Ollama is running"));
    }
    assert_eq!(server.send("POST", "/", &[], b"").status, 405);
    for path in ["/quire/state", "/quire/events"] {
        assert_eq!(server.get(path).status, 401, "the state requires the key");
    }
    let key = [("Authorization", "Bearer s3cret")];
    assert_eq!(server.send("GET", "/quire/state", &key, b"").json()["blocks"]["in_use"], 0);
}

#[test]
fn the_page_names_its_own_files_and_nothing_from_elsewhere() {
    let server = Server::start();
    let document = server.get("/openapi.json").json();
    let paths = document["paths"].as_object().unwrap().keys();
    let files: Vec<(&str, String)> = paths
        .filter(|path| *path == "/" || path.starts_with("/page/"))
        .map(|path| (path.as_str(), server.send("GET", path, &[("Accept", "text/html")], b"").body))
        .collect();
    assert!(files.len() > 8, "{files:?}");
    let mut imported = vec!["/".to_string(), "/page/vendor/marked.LICENSE".to_string()];
    let page = &files.iter().find(|file| file.0 == "/").unwrap().1;
    imported.extend(page.split('"').filter(|text| text.starts_with("page/")).map(|path| format!("/{path}")));
    for (path, text) in &files {
        for import in text.split("from './").skip(1) {
            let name = format!("/page/{}", import.split('\'').next().unwrap());
            assert!(files.iter().any(|file| file.0 == name), "{path} imports {name}");
            imported.push(name);
        }
        if path.starts_with("/page/vendor/") {
            continue;
        }
        let foreign = text.matches("http://").count() + text.matches("https://").count();
        assert_eq!(foreign, text.matches("http://www.w3.org/").count(), "{path} names an address");
        for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!text.contains(word), "{path} has {word}: text of a model must not become markup");
        }
        for quote in ['"', '\'', '`'] {
            let begin = format!("{quote}/");
            let is_path = |rest: &str| rest.starts_with(|c: char| c.is_ascii_alphabetic());
            assert!(!text.split(&begin).skip(1).any(is_path), "{path} has an absolute path: it breaks behind a prefix");
        }
    }
    for (path, _) in &files {
        assert!(imported.iter().any(|name| name == path), "{path} is served, but nothing of the page names it");
    }
    assert!(!page.contains("style=") && !page.contains(" onclick"), "the policy allows nothing inline");
}

/// The page itself has no network to compare with: the table says what was published.
#[test]
fn the_files_of_other_authors_are_those_that_were_published() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("page/vendor");
    let table = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.split('|').map(|cell| cell.trim().trim_matches('`')).collect())
        .collect();
    let server = Server::start();
    for row in &rows {
        let (file, version, hash) = (row[1], row[2].rsplit(' ').next().unwrap(), row[5]);
        let served = server.get(&format!("/page/vendor/{file}"));
        assert_eq!(served.status, 200, "{file}");
        let digest = Sha256::digest(served.body.as_bytes());
        let found: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, hash, "{file} differs from the published one");
        if file.ends_with(".js") {
            assert!(served.body.contains(&format!("v{version} ")), "{file} is not version {version}");
        }
    }
    let mut listed: Vec<&str> = rows.iter().map(|row| row[1]).chain(["README.md"]).collect();
    let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut found: Vec<String> = names.collect();
    listed.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, listed, "a file without a row, or a row without a file");
}

#[test]
fn the_state_counts_blocks_and_tokens_and_shows_no_text() {
    let server = Server::start();
    let words = "My secret is hunter2 and nobody else knows it, hunter2 hunter2 hunter2 hunter2 hunter2 hunter2.";
    let before = server.get("/quire/state").json();
    assert_eq!(before["map"]["runs"], json!([[0, before["blocks"]["total"]]]));
    let usage =
        server.ok("/v1/completions", json!({"prompt": words, "max_tokens": 20, "ignore_eos": true}))["usage"].clone();
    let reply = server.get("/quire/state");
    let state = reply.json();
    assert_eq!(state["stats"]["prompt_tokens"], usage["prompt_tokens"]);
    assert_eq!(state["stats"]["generation_tokens"], 20);
    let sum = ["in_use", "cached", "free"].map(|name| state["blocks"][name].as_u64().unwrap()).iter().sum::<u64>();
    assert_eq!(state["blocks"]["total"], sum);
    assert!(state["blocks"]["cached"].as_u64().unwrap() > 0 && state["map"]["runs"][0][0] == 1, "{state}");
    assert!(!reply.body.contains("hunter2"));
}

#[test]
fn the_state_lists_adapters_with_their_requests_and_the_ranks() {
    let (server, folder) = (Server::with(slow(with_lora()), ServerOptions::default(), Duration::ZERO), adapters());
    let before = server.get("/quire/state").json();
    assert_eq!((&before["adapters"], &before["adapters_left_out"]), (&json!([]), &json!(0)));
    assert_eq!(before["ranks"], json!({"tensor_parallel": 1, "pipeline_parallel": 1}));
    assert_eq!((load(&server, &folder, "a").status, load(&server, &folder, "b").status), (200, 200));
    let body =
        json!({"model": "b", "prompt": "Once", "max_tokens": 900, "ignore_eos": true, "stream": true}).to_string();
    let client = server.open("POST", "/v1/completions", &[("Content-Type", "application/json")], body.as_bytes());
    let mut states = std::iter::repeat_with(|| server.get("/quire/state").json());
    let running = states.find(|state| state["adapters"][1]["running"] == 1).unwrap();
    let [a, b] = [&running["adapters"][0], &running["adapters"][1]];
    assert_eq!((&a["name"], &a["rank"], &a["running"], &a["waiting"]), (&json!("a"), &json!(4), &json!(0), &json!(0)));
    assert_eq!((&b["name"], &b["rank"], &b["waiting"]), (&json!("b"), &json!(16), &json!(0)));
    assert!(b["bytes"].as_u64() > Some(0));
    drop(client);
    assert!(states.any(|state| state["adapters"][1]["running"] == 0));
}

#[test]
fn events_show_a_request_while_it_runs_and_end_with_the_server() {
    let mut server = Server::with(slow(config()), ServerOptions::default(), Duration::ZERO);
    let events = server.open("GET", "/quire/events", &[], b"");
    let mut lines = BufReader::new(events).lines().map_while(Result::ok);
    let mut next = || -> Option<Value> {
        let line = lines.find(|line| line.starts_with("data: "))?;
        Some(serde_json::from_str(&line["data: ".len()..]).unwrap())
    };
    assert_eq!(next().unwrap()["requests"], json!([]));
    let body = json!({"prompt": "Once", "max_tokens": 900, "ignore_eos": true, "stream": true}).to_string();
    let client = server.open("POST", "/v1/completions", &[("Content-Type", "application/json")], body.as_bytes());
    let has_tokens = |state: &Value| state["requests"][0]["generated_tokens"].as_u64() > Some(0);
    let running = std::iter::from_fn(&mut next).find(has_tokens).unwrap();
    assert_eq!(running["requests"][0]["state"], "running");
    assert!(running["blocks"]["in_use"].as_u64().unwrap() > 0 && running["map"]["owners"][0]["references"] == 1);
    drop(client);
    assert!(
        std::iter::from_fn(&mut next).any(|state| state["requests"] == json!([]) && state["blocks"]["in_use"] == 0)
    );
    server.begin_stop();
    while next().is_some() {}
    assert_eq!(server.wait(), 0);
}
