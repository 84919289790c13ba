//! Settings of the server that requests inherit: variables of the template, sampling defaults, usage of streams, tools.

use std::path::Path;
use std::time::Duration;

use engine::{EngineConfig, GenerationConfig, GenerationSource, ModelSource};
use serde_json::{Value, json};
use server::{Cors, ServerOptions};

use crate::common::{Server, config};

const TEMPLATE: &str = "{{ {'tools': tools | default(none), 'effort': reasoning_effort | default(none), 'a': a | default(none)} | tojson }}";

/// A server whose template is given as text and writes its variables.
fn server(options: ServerOptions) -> Server {
    let model = ModelSource::Folder(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/reference/llama"));
    let chat_template = Some(TEMPLATE.into());
    Server::with(EngineConfig { model, chat_template, ..config() }, options, Duration::ZERO)
}

/// The variables of the template for this chat.
fn rendered(server: &Server, body: Value) -> Value {
    let mut all = json!({"messages": [{"role": "user", "content": "hi"}]});
    all.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
    let tokens = server.ok("/v1/chat/completions/render", all)["token_ids"].clone();
    let text = server.ok("/detokenize", json!({"tokens": tokens}))["prompt"].clone();
    serde_json::from_str(text.as_str().unwrap().trim()).unwrap()
}

#[test]
fn variables_of_the_template_have_defaults_that_a_request_overrides() {
    let kwargs = json!({"reasoning_effort": "low", "a": [1]}).as_object().cloned();
    let server = server(ServerOptions { default_chat_template_kwargs: kwargs, ..ServerOptions::default() });
    let of = |body: Value| {
        let found = rendered(&server, body);
        (found["effort"].clone(), found["a"].clone())
    };
    assert_eq!(of(json!({})), (json!("low"), json!([1])));
    assert_eq!(of(json!({"chat_template_kwargs": {"a": 2}})), (json!("low"), json!(2)));
    assert_eq!(of(json!({"reasoning_effort": "high"})), (json!("high"), json!([1])));
}

#[test]
fn tools_that_must_not_be_called_can_be_left_out_of_the_prompt() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    for excluded in [false, true] {
        let options = ServerOptions { exclude_tools_when_tool_choice_none: excluded, ..ServerOptions::default() };
        let server = server(options);
        let of = |choice: &str| rendered(&server, json!({"tools": tools, "tool_choice": choice}))["tools"].clone();
        assert_eq!(of("auto"), tools);
        assert_eq!(of("none"), if excluded { Value::Null } else { tools.clone() });
    }
}

#[test]
fn sampling_defaults_come_from_the_checkpoint_another_folder_or_the_flag() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("generation_config.json"), r#"{"max_new_tokens": 5, "eos_token_id": 0}"#)
        .unwrap();
    let tokens = |source: GenerationSource, overrides: &str| {
        let overrides = overrides.parse().unwrap();
        let generation_config = GenerationConfig { source, overrides };
        let server =
            Server::with(EngineConfig { generation_config, ..config() }, ServerOptions::default(), Duration::ZERO);
        let body = json!({"messages": [{"role": "user", "content": "Count to twelve."}], "ignore_eos": true, "temperature": 0});
        server.ok("/v1/chat/completions", body)["usage"]["completion_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens(GenerationSource::Folder(folder.path().into()), "{}"), 5);
    assert_eq!(tokens(GenerationSource::Folder(folder.path().into()), r#"{"max_new_tokens": 3}"#), 3);
    assert_eq!(tokens(GenerationSource::Checkpoint, r#"{"max_new_tokens": 7}"#), 7);
    assert!(tokens(GenerationSource::Neutral, "{}") > 100, "up to the end of the context");
}

#[test]
fn every_stream_has_its_usage_if_the_server_says_so() {
    let options = ServerOptions { enable_force_include_usage: true, ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let chunks = server.stream("/v1/completions", json!({"prompt": "One", "max_tokens": 3, "ignore_eos": true}));
    let last = chunks.last().unwrap();
    assert_eq!((&last["usage"]["completion_tokens"], &last["choices"]), (&json!(3), &json!([])));
}

#[test]
fn pages_may_send_credentials_only_if_the_server_says_so() {
    for credentials in [false, true] {
        let cors = Cors { origins: vec!["*".into()], credentials, ..Cors::default() };
        let server = Server::with(config(), ServerOptions { cors, ..ServerOptions::default() }, Duration::ZERO);
        let reply = server.send("GET", "/v1/models", &[("Origin", "https://a.example")], b"");
        let (origin, allowed) =
            (reply.header("access-control-allow-origin"), reply.header("access-control-allow-credentials"));
        // A browser takes no `*` together with credentials.
        assert_eq!((origin, allowed), if credentials { ("https://a.example", "true") } else { ("*", "") });
    }
}
