//! Conversations as the chat template receives them, from chat completions and from responses.
//!
//! The model's template writes its variables as JSON, so that the tests can read them from `/tokenize`.

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Server, config};
use engine::{AsyncEngine, EngineConfig, ModelSource};
use serde_json::{Value, json};
use server::{App, ServerOptions};
use text::ToolFormat;

const TEMPLATE: &str = "{{ {'messages': messages, 'tools': tools | default(none), 'start': add_generation_prompt,
    'effort': reasoning_effort | default(none), 'documents': documents} | tojson }}";

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let model = ModelSource::Folder(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/reference/llama"));
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), TEMPLATE).unwrap();
    let chat_template = Some(file.path().to_path_buf());
    Server::with(EngineConfig { model, chat_template, ..config() }, ServerOptions::default(), Duration::ZERO)
});

/// The variables of the template for this request.
fn rendered(body: Value) -> Value {
    let tokens = SERVER.ok("/tokenize", body)["tokens"].clone();
    let text = SERVER.ok("/detokenize", json!({"tokens": tokens}))["prompt"].clone();
    serde_json::from_str(text.as_str().unwrap().trim()).unwrap()
}

#[test]
fn text_parts_of_every_kind_are_joined_by_line_breaks_as_in_vllm() {
    let parts = json!([{"type": "text", "text": "Count"}, {"type": "input_text", "text": "to"},
        {"type": "output_text", "text": "twelve."}, {"type": "refusal", "refusal": "No."}]);
    let found = rendered(json!({"messages": [{"role": "user", "content": parts}], "documents": [{"title": "a"}]}));
    assert_eq!(found["messages"], json!([{"role": "user", "content": "Count\nto\ntwelve.\nNo."}]));
    assert_eq!((&found["start"], &found["documents"]), (&json!(true), &json!([{"title": "a"}])));
}

/// C54 of public reports.
#[test]
fn developer_messages_are_system_messages_in_chats_and_responses() {
    let messages =
        |role: &str| json!([{"role": role, "content": "Answer in French."}, {"role": "user", "content": "hi"}]);
    let found = rendered(json!({"messages": messages("developer")}));
    assert_eq!(found["messages"], messages("system"));
    let count = |path: &str, field: &str, role: &str| SERVER.ok(path, json!({field: messages(role)}));
    let tokens = count("/tokenize", "messages", "system")["count"].clone();
    assert_eq!(count("/v1/responses/input_tokens", "input", "developer")["input_tokens"], tokens);
    let prompt = |role: &str| {
        let limit = json!({"input": messages(role), "temperature": 0, "max_output_tokens": 8});
        let answer = SERVER.ok("/v1/responses", limit);
        (answer["usage"]["input_tokens"].clone(), answer["output"][0]["content"].clone())
    };
    assert_eq!(prompt("developer"), prompt("system"));
}

#[test]
fn past_tool_calls_become_objects_where_they_are_json_and_stay_text_where_not() {
    let call = |arguments: &str| json!({"function": {"name": "f", "arguments": arguments}});
    let calls = json!([call("{\"a\": 1}"), call("{broken"), call("42")]);
    let found = rendered(json!({"messages": [{"role": "assistant", "content": null, "tool_calls": calls}]}));
    let arguments = |i: usize| found["messages"][0]["tool_calls"][i]["function"]["arguments"].clone();
    assert_eq!([arguments(0), arguments(1), arguments(2)], [json!({"a": 1}), json!("{broken"), json!("42")]);
}

#[test]
fn a_message_is_either_continued_or_answered() {
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "The red"}]);
    let answered = rendered(json!({"messages": messages, "reasoning_effort": "low"}));
    assert_eq!((&answered["start"], &answered["effort"]), (&json!(true), &json!("low")));
    let unanswered = rendered(json!({"messages": messages, "add_generation_prompt": false}));
    assert_eq!(unanswered["start"], false);
    let both = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true});
    let reply = SERVER.post("/tokenize", &both);
    assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("continue_final_message")));
}

#[test]
fn tools_reach_the_template_if_there_are_any() {
    let messages = json!([{"role": "user", "content": "a"}]);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_eq!(rendered(json!({"messages": messages, "tools": tools}))["tools"], tools);
    assert_eq!(rendered(json!({"messages": messages, "tools": [], "tool_choice": "none"}))["tools"], Value::Null);
}

#[test]
fn the_items_of_a_turn_become_one_message() {
    let call = |id: &str, name: &str| json!({"type": "function_call", "call_id": id, "name": name, "arguments": "{}"});
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        call("1", "f"), call("2", "g"),
        {"type": "function_call_output", "call_id": "2", "output": "42"},
    ]);
    let made =
        |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "hm", "tool_calls": [made("1", "f"), made("2", "g")]},
        {"role": "tool", "tool_call_id": "2", "content": "42", "name": "g"},
    ]);
    // The template writes every field in order, so that equal counts and equal greedy outputs mean equal messages.
    let limit = json!({"input": input, "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 8});
    let response = SERVER.ok("/v1/responses", limit);
    let chat = SERVER.ok("/v1/chat/completions", json!({"messages": messages, "temperature": 0, "max_tokens": 8}));
    assert_eq!(response["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(response["output"][0]["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    let count = SERVER.ok("/tokenize", json!({"messages": [{"role": "user", "content": "hi"}]}))["count"].clone();
    assert_eq!(SERVER.ok("/v1/responses/input_tokens", json!({"input": "hi"}))["input_tokens"], count);
}

#[test]
fn a_template_of_a_request_is_used_only_if_the_server_trusts_it() {
    let body =
        json!({"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ messages[0].content ~ '!' }}"});
    let error = SERVER.post("/tokenize", &body).error();
    assert_eq!(error["param"], "chat_template");
    assert!(error["message"].as_str().unwrap().contains("--trust-request-chat-template"), "{error}");
    let trusting = ServerOptions { trust_request_chat_template: true, ..ServerOptions::default() };
    let server = Server::with(config(), trusting, Duration::ZERO);
    let tokens = server.ok("/tokenize", body.clone())["tokens"].clone();
    assert_eq!(server.ok("/detokenize", json!({"tokens": tokens}))["prompt"], "hi!");
    let looping = json!({"messages": body["messages"], "chat_template": "{% for i in range(99999999) %}{% endfor %}"});
    assert_eq!(server.post("/tokenize", &looping).status, 400);
}

#[test]
fn the_start_line_says_which_formats_were_chosen_and_why() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let formats = |template: &str, options: ServerOptions| {
        std::fs::write(file.path(), template).unwrap();
        let chat_template = Some(file.path().to_path_buf());
        let engine = AsyncEngine::start(EngineConfig { chat_template, ..config() }, &|_, _| {}).unwrap();
        App::new(engine, options).formats()
    };
    let path = file.path().display();
    assert_eq!(
        formats("<seed:tool_call><seed:think>", ServerOptions::default()),
        format!(
            "chat template: {path}; tool calls: seed_oss (the template has <seed:tool_call>); \
             reasoning: seed_oss (the template has <seed:think>)"
        )
    );
    let set = ServerOptions { tool_call_parser: Some(ToolFormat::Granite), ..ServerOptions::default() };
    assert_eq!(
        formats("{{ messages }}", set),
        format!(
            "chat template: {path}; tool calls: granite (set); reasoning: none (assumed, because no template tells it)"
        )
    );
    let unknown = formats("{{ messages }}", ServerOptions::default());
    assert!(unknown.contains("tool calls: hermes (assumed, because no template tells it)"), "{unknown}");
}
