//! `/openapi.json` is a valid document and describes requests as the code reads them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Reply, Server, config};
use serde_json::{Map, Value, json};
use server::{Limits, ServerOptions};

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);
static DOCUMENT: LazyLock<Value> = LazyLock::new(|| SERVER.get("/openapi.json").json());

/// All operations: path, method and description.
fn operations() -> Vec<(String, String, Value)> {
    let paths = DOCUMENT["paths"].as_object().unwrap();
    let of = |(path, item): (&String, &Value)| {
        let methods = item.as_object().unwrap().clone();
        methods.into_iter().map(move |(method, operation)| (path.clone(), method, operation)).collect::<Vec<_>>()
    };
    paths.iter().flat_map(|entry| of((entry.0, entry.1))).collect()
}

/// A path with ids that exist.
fn real(path: &str) -> String {
    let id = |value: Value| value["id"].as_str().unwrap().to_string();
    let file = || id(crate::batches::upload_as(&SERVER, "", Some("batch"), "f", b"{}").json());
    let made = match path {
        path if path.contains("responses/{id}") => {
            id(SERVER.ok("/v1/responses", json!({"input": "hi", "max_output_tokens": 2, "background": true})))
        }
        path if path.contains("conversations/{id}") => id(SERVER.ok("/v1/conversations", json!({}))),
        path if path.contains("files/{id}") => file(),
        path if path.contains("batches/{id}") => {
            let body = json!({"input_file_id": file(), "endpoint": "/v1/completions", "completion_window": "24h"});
            id(SERVER.ok("/v1/batches", body))
        }
        _ => String::new(),
    };
    path.replace("{id}", &made).replace("{name}", "quire-demo")
}

/// Resolves a reference.
fn resolve(schema: &Value) -> &Value {
    match schema["$ref"].as_str() {
        Some(place) => {
            DOCUMENT.pointer(place.strip_prefix('#').unwrap()).unwrap_or_else(|| panic!("{place} leads nowhere"))
        }
        None => schema,
    }
}

/// The fields of a request's body.
fn fields(operation: &Value) -> Map<String, Value> {
    let body = resolve(&operation["requestBody"]["content"]["application/json"]["schema"]);
    body["properties"].as_object().cloned().unwrap_or_default()
}

/// Calls `see` with each object in the document.
fn walk(value: &Value, see: &mut impl FnMut(&Map<String, Value>)) {
    match value {
        Value::Object(map) => {
            see(map);
            map.values().for_each(|value| walk(value, see));
        }
        Value::Array(items) => items.iter().for_each(|value| walk(value, see)),
        _ => {}
    }
}

#[test]
fn the_document_is_sound() {
    assert_eq!(DOCUMENT["openapi"], "3.1.0");
    assert!(DOCUMENT["info"]["title"].is_string() && DOCUMENT["info"]["version"].is_string());
    let mut references = 0;
    walk(&DOCUMENT, &mut |map| {
        if let Some(place) = map.get("$ref") {
            resolve(&json!({"$ref": place}));
            references += 1;
        }
        if let Some(required) = map.get("required").and_then(Value::as_array) {
            assert!(required.iter().all(|name| map["properties"].get(name.as_str().unwrap()).is_some()), "{map:?}");
        }
    });
    assert!(references > 20, "{references}");
    let mut ids = BTreeSet::new();
    for (path, method, operation) in operations() {
        assert!(ids.insert(operation["operationId"].as_str().unwrap().to_string()), "{path}: an id twice");
        assert!(operation["responses"].as_object().unwrap().values().all(|r| resolve(r)["description"].is_string()));
        let of_path = operation["parameters"].as_array().unwrap().iter().filter(|parameter| parameter["in"] == "path");
        let named = of_path.map(|parameter| parameter["name"].as_str().unwrap());
        let expected: Vec<&str> = path.split('{').skip(1).map(|rest| rest.split('}').next().unwrap()).collect();
        assert_eq!(named.collect::<Vec<_>>(), expected, "{method} {path}");
    }
}

#[test]
fn the_document_has_exactly_the_routes_of_the_page_and_they_exist() {
    let page = include_str!("../../docs/api.md").split("\n## ").nth(1).unwrap();
    let cells = page.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let names = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let listed: BTreeSet<&str> = names.filter_map(|name| Some(&name[name.find('/')?..])).collect();
    let operations = || operations().into_iter().filter(|(path, ..)| !path.starts_with("/page/"));
    let described: Vec<String> = operations().map(|(path, ..)| path).collect();
    assert_eq!(described.iter().map(String::as_str).collect::<BTreeSet<_>>(), listed);
    for (path, method, operation) in operations() {
        if path == "/quire/events" || path == "/sleep" {
            // The first does not end, and the second stops the other tests of this server. Both have tests of their own.
            continue;
        }
        // Stored objects also repeat their request.
        let is_stored = path.contains("{id}");
        let path = real(&path);
        let reply = SERVER.send(&method.to_uppercase(), &path, &[("Content-Type", "application/json")], b"{}");
        assert_ne!(reply.status, 405, "{method} {path}");
        if method == "get" && reply.status == 200 {
            let described = operation["responses"]["200"]["content"].as_object().unwrap();
            let found = reply.header("content-type").split(';').next().unwrap().to_string();
            assert!(described.contains_key(&found), "{path}: {found}");
            let schema = resolve(&described[&found]["schema"]);
            let properties = schema["properties"].as_object().map(|p| p.keys().cloned().collect::<BTreeSet<_>>());
            if let Some(properties) = properties.filter(|_| found == "application/json") {
                let fields = reply.json().as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
                assert!(fields.is_superset(&properties) && (is_stored || fields == properties), "{path}: {fields:?}");
            }
        }
    }
}

#[test]
fn every_field_that_the_code_reads_is_described() {
    let mut described = BTreeSet::new();
    walk(&DOCUMENT["components"]["schemas"], &mut |map| {
        described.extend(
            map.get("properties").and_then(Value::as_object).into_iter().flat_map(|fields| fields.keys().cloned()),
        );
    });
    let mut missing = BTreeMap::new();
    let mut folders = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut read = 0;
    while let Some(place) = folders.pop() {
        if place.is_dir() {
            folders.extend(std::fs::read_dir(place).unwrap().map(|file| file.unwrap().path()));
            continue;
        }
        let source = std::fs::read_to_string(&place).unwrap();
        // The other readers describe their fields.
        for reader in ["get", "raw", "check_items", "check_bytes"] {
            for call in source.split(&format!("fields.{reader}(")).skip(1) {
                let Some(name) = call.trim_start().strip_prefix('"') else { continue };
                let name = name.split('"').next().unwrap();
                read += 1;
                if !described.contains(name) {
                    missing.insert(name.to_string(), place.clone());
                }
            }
        }
    }
    assert!(read > 4 && missing.is_empty(), "{read} read, not described: {missing:?}");
}

#[test]
fn fields_that_are_accepted_without_effect_are_those_of_the_page() {
    let page = include_str!("../../docs/other-apis.md");
    let rows = page.lines().filter(|line| line.contains("accepted without effect"));
    let named: BTreeSet<&str> = rows.flat_map(|row| row.split('`').skip(1).step_by(2)).collect();
    let mut found = 0;
    for (path, _, operation) in operations() {
        for (name, schema) in fields(&operation) {
            if schema["description"].as_str().is_some_and(|text| text.starts_with("Accepted without effect")) {
                assert!(named.contains(name.as_str()), "{path}: {name} is not on the page");
                found += 1;
            }
        }
    }
    assert!(found > 10, "{found}");
}

#[test]
fn the_limits_and_defaults_are_those_of_this_server() {
    let limits =
        Limits { max_n: 3, max_logprobs: 5, max_messages: 7, max_stop: 2, max_stop_bytes: 9, ..Limits::default() };
    let options = ServerOptions { limits, ..ServerOptions::default() };
    let document = Server::with(config(), options, Duration::ZERO).get("/openapi.json").json();
    let field = |request: &str, name: &str| document["components"]["schemas"][request]["properties"][name].clone();
    let chat = |name| field("ChatRequest", name);
    assert_eq!((&chat("n")["maximum"], &chat("best_of")["maximum"]), (&json!(3), &json!(3)));
    assert_eq!(chat("top_logprobs")["maximum"], 5);
    assert_eq!(chat("messages")["maxItems"], 7);
    assert_eq!(field("ResponsesRequest", "input")["anyOf"][1]["maxItems"], 7);
    assert_eq!(chat("stop")["anyOf"][1]["maxItems"], 2);
    assert_eq!(chat("stop")["anyOf"][0]["maxLength"], 9);
    assert_eq!((&chat("skip_special_tokens")["default"], &chat("stream")["default"]), (&json!(true), &json!(false)));
    assert_eq!(chat("temperature")["type"], json!(["number", "null"]));
    let others = &DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"];
    assert_eq!((&others["n"]["maximum"], &others["stop"]["anyOf"][1]["maxItems"]), (&json!(128), &json!(16)));
}

/// A valid request to this path that may have the field `name`.
fn valid(path: &str, name: &str) -> Value {
    match path {
        "/tokenize" if !["prompt", "model"].contains(&name) => json!({"messages": [{"role": "user", "content": "hi"}]}),
        "/v1/completions" | "/v1/completions/render" => json!({"prompt": "a", "max_tokens": 2}),
        "/v1/chat/completions" | "/chat/completions" | "/v1/chat/completions/render" => {
            json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
        }
        "/v1/chat/completions/batch" => json!({"messages": [[{"role": "user", "content": "hi"}]], "max_tokens": 2}),
        "/v1/responses" | "/responses" | "/v1/responses/input_tokens" => json!({"input": "hi", "max_output_tokens": 2}),
        "/v1/embeddings" | "/embeddings" | "/pooling" | "/classify" if name == "messages" => {
            json!({"messages": [{"role": "user", "content": "hi"}]})
        }
        "/v1/embeddings" | "/embeddings" | "/pooling" | "/classify" => json!({"input": "hi"}),
        "/score" | "/v1/score" => json!({"queries": "hi", "documents": "you"}),
        "/rerank" | "/v1/rerank" | "/v2/rerank" => json!({"query": "hi", "documents": ["you"]}),
        "/tokenize" => json!({"prompt": "hi"}),
        "/detokenize" => json!({"tokens": [40]}),
        "/abort_requests" => json!({"request_ids": []}),
        "/invocations" => json!({"prompt": "hi", "max_tokens": 2}),
        "/completion" | "/completions" => json!({"prompt": "hi", "n_predict": 2}),
        "/infill" => json!({"input_prefix": "a", "n_predict": 2}),
        "/apply-template" => json!({"messages": [{"role": "user", "content": "hi"}]}),
        "/embedding" => json!({"input": "hi"}),
        "/api/chat" => {
            json!({"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 2}, "stream": false})
        }
        "/api/generate" => json!({"prompt": "hi", "options": {"num_predict": 2}, "stream": false}),
        "/api/embed" => json!({"input": "hi"}),
        "/api/embeddings" => json!({"prompt": "hi"}),
        "/api/show" | "/api/pull" => json!({}),
        "/v1/messages" | "/v1/messages/count_tokens" => {
            json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
        }
        "/v1/conversations" | "/v1/conversations/{id}" | "/v1/conversations/{id}/items" => json!({}),
        path if path.ends_with("/cancel") => json!({}),
        "/v1/batches" => {
            let file = crate::batches::upload_as(&SERVER, "", Some("batch"), "f", b"{}").json()["id"].clone();
            json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"})
        }
        "/v1/load_lora_adapter" | "/v1/unload_lora_adapter" => json!({"lora_name": "a", "lora_path": "b"}),
        other => panic!("a new path: {other}"),
    }
}

/// Values that a field's schema forbids.
fn forbidden(schema: &Value) -> Vec<Value> {
    let schema = resolve(schema);
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(many) => many.iter().map(|one| one.as_str().unwrap()).collect(),
        // Any type, or several types.
        _ => {
            return schema["anyOf"].as_array().map_or(Vec::new(), |forms| {
                let forms: Vec<&Value> = forms.iter().map(resolve).filter(|form| form["type"] != "null").collect();
                if forms.is_empty() { Vec::new() } else { vec![json!(5), json!(true)] }
            });
        }
    };
    let is = |name: &str| types.contains(&name);
    let samples = [
        ("string", json!("x")),
        ("boolean", json!(true)),
        ("number", json!(5)),
        ("array", json!([["x"]])),
        ("object", json!({"x": {}})),
    ];
    let wrong = samples.into_iter().filter(|(name, _)| !(is(name) || *name == "number" && is("integer")));
    let mut values: Vec<Value> = wrong.map(|(_, value)| value).collect();
    if is("integer") {
        values.push(json!(0.5));
    }
    let number = |name: &str| schema[name].as_f64();
    values.extend(number("minimum").map(|low| json!(low as i64 - 1)));
    values.extend(number("exclusiveMinimum").map(|low| json!(low)));
    values.extend(number("maximum").map(|high| json!(high as i64 + 1)));
    if !schema["enum"].is_null() {
        values.push(json!("something else"));
    }
    let most = |name: &str| schema[name].as_u64().filter(|&most| most <= 4096).map(|most| most as usize + 1);
    values.extend(most("maxLength").map(|more| json!("x".repeat(more))));
    values.extend(most("maxItems").map(|more| json!(vec![0; more])));
    values.extend(schema["minItems"].as_u64().filter(|&least| least > 0).map(|_| json!([])));
    values
}

/// The field that an error names. Errors of other APIs name it in their message alone.
fn param(reply: &Reply) -> String {
    let body = reply.json();
    let error = &body["error"];
    let named = error["param"].as_str().or(error["message"].as_str()).or(error.as_str());
    named.unwrap_or_default().split(':').next().unwrap_or_default().to_string()
}

#[test]
fn what_a_description_forbids_is_refused_by_name_and_null_is_nothing() {
    let mut tried = 0;
    for (path, _, operation) in operations().into_iter().filter(|(_, method, _)| method == "post") {
        // Its fields are those of a new conversation, of which each of these routes reads a part.
        if path.starts_with("/v1/conversations/") {
            continue;
        }
        let body = resolve(&operation["requestBody"]["content"]["application/json"]["schema"]);
        let required = body["required"].as_array().cloned().unwrap_or_default();
        for (name, schema) in fields(&operation) {
            let mut values = forbidden(&schema);
            let is_required = required.contains(&json!(name));
            if is_required {
                values.push(Value::Null);
            }
            for value in values {
                let mut request = valid(&path, &name);
                request[&name] = value.clone();
                let reply = SERVER.post(&path, &request);
                assert_eq!(reply.status, 400, "{path} {name}: {value}: {}", reply.body);
                assert!(param(&reply).starts_with(&name), "{path} {name}: {value}: {}", reply.body);
                tried += 1;
            }
            let mut request = valid(&path, &name);
            // This server takes no adapters, and its model has no labels and no marks to fill in.
            if path.ends_with("lora_adapter") || ["/classify", "/infill"].contains(&path.as_str()) {
                continue;
            }
            if !is_required && request.get(&name).is_none() {
                request[&name] = Value::Null;
                let reply = SERVER.post(&path, &request);
                assert_eq!(reply.status, 200, "{path} {name}: null: {}", reply.body);
            }
        }
    }
    assert!(tried > 500, "{tried}");
}

/// Whether a value has the type and the required fields of a schema.
fn fits(schema: &Value, value: &Value) -> bool {
    let schema = resolve(schema);
    if let Some(forms) = schema["anyOf"].as_array() {
        return forms.iter().any(|form| fits(form, value));
    }
    match schema["type"].as_str() {
        None => true,
        Some("null") => value.is_null(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_u64() || value.is_i64(),
        Some("number") => value.is_number(),
        Some("array") => value.as_array().is_some_and(|items| items.iter().all(|item| fits(&schema["items"], item))),
        Some("object") => value.as_object().is_some_and(|fields| {
            let required = schema["required"].as_array().cloned().unwrap_or_default();
            let field_fits = |(name, value): (&String, &Value)| fits(&schema["properties"][name], value);
            required.iter().all(|name| fields.contains_key(name.as_str().unwrap())) && fields.iter().all(field_fits)
        }),
        Some(other) => panic!("a new type: {other}"),
    }
}

#[test]
fn responses_have_the_fields_and_types_that_the_document_describes() {
    for (path, method, operation) in operations() {
        let schema = &operation["responses"]["200"]["content"]["application/json"]["schema"];
        // The model of this server has no labels and no marks to fill in. An upload is no JSON.
        if schema.is_null()
            || ["/classify", "/infill"].contains(&path.as_str())
            || (path == "/v1/files" && method == "post")
        {
            continue;
        }
        let reply = match method.as_str() {
            "post" => SERVER.post(&real(&path), &valid(&path, "prompt")),
            method => SERVER.send(&method.to_uppercase(), &real(&path), &[], b""),
        };
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
        assert!(fits(schema, &reply.json()), "{path}: {schema} {}", reply.body);
    }
    let error = &DOCUMENT["components"]["responses"]["Error"]["content"]["application/json"]["schema"];
    for path in ["/v1/nothing", "/v1/completions", "/v1/models/other"] {
        assert!(fits(error, &SERVER.get(path).json()), "{path}");
    }
}
