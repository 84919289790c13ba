//! `/v1/messages`: a message is the answer of a chat, and the events of a stream add up to it.

use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Reply, Server, config};
use serde_json::{Value, json};
use server::{Limits, ServerOptions};
use text::{ReasoningFormat, ToolFormat};

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const CHAT: &str = "/v1/chat/completions";
const QUESTION: &str = "What is the capital of France?";

/// Returns the events of a stream after checking their names.
fn events(server: &Server, mut body: Value) -> Vec<Value> {
    body["stream"] = json!(true);
    let reply = server.post(MESSAGES, &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(reply.header("content-type").starts_with("text/event-stream"));
    let event = |block: &str| {
        let (name, data) = block.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name, format!("event: {}", event["type"].as_str().unwrap()));
        event
    };
    reply.body.split_terminator("\n\n").map(event).collect()
}

/// The message as a client assembles it from the events.
fn assembled(events: &[Value]) -> Value {
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    let mut message = events[0]["message"].clone();
    assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &Value::Null));
    let (mut open, mut arguments) = (None, String::new());
    for event in &events[1..events.len() - 1] {
        let count = message["content"].as_array().unwrap().len();
        if event["type"] == "message_delta" {
            assert_eq!(open, None);
            for (name, value) in event["delta"].as_object().unwrap() {
                message[name] = value.clone();
            }
            message["usage"] = event["usage"].clone();
            continue;
        }
        let index = event["index"].as_u64().unwrap() as usize;
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!((open.replace(index), index), (None, count), "blocks do not overlap");
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                arguments.clear();
            }
            "content_block_stop" => {
                assert_eq!(open.take(), Some(index));
                let block = &mut message["content"][index];
                if block["type"] == "tool_use" {
                    assert_eq!(block["input"], json!({}));
                    block["input"] = serde_json::from_str(&arguments).unwrap();
                }
            }
            "content_block_delta" => {
                assert_eq!(open, Some(index));
                let (delta, block) = (&event["delta"], &mut message["content"][index]);
                let (field, more) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", &delta["text"]),
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "signature_delta" => ("signature", &delta["signature"]),
                    "input_json_delta" => {
                        arguments += delta["partial_json"].as_str().unwrap();
                        continue;
                    }
                    other => panic!("{other}"),
                };
                block[field] = format!("{}{}", block[field].as_str().unwrap(), more.as_str().unwrap()).into();
            }
            other => panic!("{other}"),
        }
    }
    message
}

/// A message without unique ids and without what the cache changes.
fn stripped(mut message: Value) -> Value {
    let usage = message["usage"].clone();
    let prompt = ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"];
    let prompt: u64 = prompt.iter().map(|name| usage[*name].as_u64().unwrap()).sum();
    message["usage"] =
        json!({"prompt": prompt, "output": usage["output_tokens"], "details": usage["output_tokens_details"]});
    message.as_object_mut().unwrap().remove("id");
    for block in message["content"].as_array_mut().unwrap() {
        for name in ["id", "signature"] {
            block.as_object_mut().unwrap().remove(name);
        }
    }
    message
}

/// Runs the request whole and as a stream, compares the two and returns the whole message.
fn both(server: &Server, body: Value) -> Value {
    let whole = server.ok(MESSAGES, body.clone());
    assert_eq!(stripped(assembled(&events(server, body))), stripped(whole.clone()));
    whole
}

/// Sum of the token counts of the prompt.
fn prompt_tokens(message: &Value) -> Value {
    stripped(message.clone())["usage"]["prompt"].clone()
}

fn thinking_server() -> Server {
    let options = ServerOptions {
        reasoning_parser: Some(ReasoningFormat::Qwen3),
        tool_call_parser: Some(ToolFormat::Hermes),
        ..ServerOptions::default()
    };
    Server::with(config(), options, Duration::ZERO)
}

fn tool() -> Value {
    let schema = json!({"properties": {"city": {"enum": ["Paris"]}}, "required": ["city"],
        "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}});
    json!({"name": "get_weather", "description": "…", "input_schema": schema, "cache_control": {"type": "ephemeral"},
        "eager_input_streaming": true})
}

/// Returns the error after checking its form.
fn error(reply: &Reply) -> (u16, String, String) {
    let body = reply.json();
    assert_eq!(body["type"], "error", "{body}");
    let id = body["request_id"].as_str().unwrap();
    assert_eq!((id, id), (reply.header("x-request-id"), reply.header("request-id")));
    let text = |name: &str| body["error"][name].as_str().unwrap().to_string();
    (reply.status, text("type"), text("message"))
}

#[test]
fn a_message_is_the_answer_of_the_chat_whole_and_streamed() {
    let body = json!({"system": "Be brief.", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32, "temperature": 0});
    let message = both(&SERVER, body.clone());
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]);
    let chat = SERVER.ok(CHAT, json!({"messages": messages, "max_tokens": 32, "temperature": 0}));
    assert_eq!(message["content"], json!([{"type": "text", "text": chat["choices"][0]["message"]["content"]}]));
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&message["model"], &message["stop_reason"]), (&chat["model"], &json!("end_turn")));
    assert_eq!(prompt_tokens(&message), chat["usage"]["prompt_tokens"]);
    assert_eq!(message["usage"]["output_tokens"], chat["usage"]["completion_tokens"]);
    assert_eq!(SERVER.ok(COUNT, body), json!({"input_tokens": prompt_tokens(&message)}));
}

#[test]
fn cached_tokens_are_not_input_tokens_and_are_known_at_the_first_event() {
    let long = "The quick brown fox jumps over the lazy dog. ".repeat(8);
    let body = json!({"messages": [{"role": "user", "content": long}], "max_tokens": 1});
    let first = SERVER.ok(MESSAGES, body.clone());
    let events = events(&SERVER, body);
    let usage = &events[0]["message"]["usage"];
    assert!(usage["cache_read_input_tokens"].as_u64().unwrap() >= 16, "{usage}");
    assert_eq!(prompt_tokens(&assembled(&events)), prompt_tokens(&first));
    assert_eq!(prompt_tokens(&events[0]["message"]), prompt_tokens(&first));
}

#[test]
fn thinking_text_and_calls_are_blocks_in_the_order_of_the_text() {
    let server = thinking_server();
    let call = |city: &str| {
        format!("<tool_call>\n{{\"name\": \"get_weather\", \"arguments\": {{\"city\": \"{city}\"}}}}\n</tool_call>")
    };
    let text = format!("<think>2 + 2 = 4</think>Let me see: 世.\n{}\nAnd:\n{}", call("Paris"), call("Rom"));
    let body = json!({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300, "temperature": 0,
        "tools": [tool()], "structured_outputs": {"choice": [text]}});
    let message = both(&server, body.clone());
    let blocks = message["content"].as_array().unwrap();
    let kinds: Vec<&str> = blocks.iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use", "text", "tool_use"]);
    assert_eq!(blocks[0]["thinking"], "2 + 2 = 4");
    assert!(!blocks[0]["signature"].as_str().unwrap().is_empty());
    assert_eq!(blocks[1]["text"].as_str().unwrap().trim(), "Let me see: 世.");
    assert_eq!((&blocks[2]["name"], &blocks[2]["input"]), (&json!("get_weather"), &json!({"city": "Paris"})));
    assert_eq!(blocks[3]["text"].as_str().unwrap().trim(), "And:");
    assert_eq!(blocks[4]["input"], json!({"city": "Rom"}));
    assert_eq!(message["stop_reason"], "tool_use");
    let thought = message["usage"]["output_tokens_details"]["thinking_tokens"].as_u64().unwrap();
    assert!(thought > 5 && thought < message["usage"]["output_tokens"].as_u64().unwrap(), "{}", message["usage"]);
    // Thinking that is not displayed is not returned.
    let mut hidden = body;
    hidden["thinking"] = json!({"type": "enabled", "budget_tokens": 1024, "display": "omitted"});
    hidden["max_tokens"] = json!(2000);
    let message = both(&server, hidden);
    assert_eq!(message["content"][0]["type"], "text");
}

#[test]
fn a_call_can_be_answered_and_the_prompt_is_that_of_the_chat() {
    let options = ServerOptions { tool_call_parser: Some(ToolFormat::Hermes), ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let body = json!({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200, "temperature": 0,
        "tools": [tool()], "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    let message = both(&server, body);
    let call = message["content"].as_array().unwrap().iter().find(|block| block["type"] == "tool_use").unwrap();
    assert_eq!((&call["input"], &message["stop_reason"]), (&json!({"city": "Paris"}), &json!("tool_use")));
    // What a client sends back: the blocks unchanged, the result, and more text.
    let turns = json!([
        {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "there."}]},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Well."}, call]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "is_error": false, "content": [
                {"type": "text", "text": "blue"}, {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "x"}]}]},
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
        {"role": "system", "content": "Be brief."},
    ]);
    let chat = json!([
        {"role": "user", "content": format!("Look\nthere.\n{QUESTION}")},
        {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": [{"id": call["id"], "type": "function",
            "function": {"name": "get_weather", "arguments": call["input"].to_string()}}]},
        {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": "blue\nT\nS\nx"},
        {"role": "user", "content": "And now?"},
        {"role": "system", "content": "Be brief."},
    ]);
    let definition = json!({"type": "function", "function": {"name": "get_weather", "description": "…", "parameters": {
        "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"], "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false}, "type": "object"}}});
    let next = server.ok(MESSAGES, json!({"messages": turns, "max_tokens": 8, "temperature": 0, "tools": [tool()]}));
    let same = server.ok(CHAT, json!({"messages": chat, "max_tokens": 8, "temperature": 0, "tools": [definition]}));
    assert_eq!(next["content"][0]["text"], same["choices"][0]["message"]["content"]);
    assert_eq!(prompt_tokens(&next), same["usage"]["prompt_tokens"]);
}

#[test]
fn a_last_turn_of_the_assistant_is_continued() {
    let turns = json!([{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The capital"}]);
    let message = both(&SERVER, json!({"messages": turns, "max_tokens": 8, "temperature": 0}));
    let body = json!({"messages": turns, "max_tokens": 8, "temperature": 0, "continue_final_message": true});
    let chat = SERVER.ok(CHAT, body);
    assert_eq!(message["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    assert_eq!(prompt_tokens(&message), chat["usage"]["prompt_tokens"]);
}

#[test]
fn the_reason_of_an_end_has_its_own_name() {
    let body = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20, "temperature": 0, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        both(&SERVER, body)
    };
    assert_eq!(body(json!({}))["stop_reason"], "max_tokens");
    let text = body(json!({}))["content"][0]["text"].as_str().unwrap().to_string();
    let stop = &text[text.len() / 2..text.len() / 2 + 2];
    let stopped = body(json!({"stop_sequences": ["never written", stop]}));
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    assert_eq!(stopped["content"][0]["text"], text[..text.find(stop).unwrap()]);
    // A limit is cut to the context, whose end is another reason.
    let cut = body(json!({"max_tokens": 100_000}));
    assert_eq!(cut["stop_reason"], "model_context_window_exceeded");
    assert_eq!(cut["usage"]["output_tokens"].as_u64().unwrap() + prompt_tokens(&cut).as_u64().unwrap(), 1024);
    let none = body(json!({"max_tokens": 0}));
    assert_eq!((&none["stop_reason"], &none["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(0)));
}

#[test]
fn a_format_constrains_the_text() {
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["é"]}}, "required": ["a"],
        "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}});
    let format = json!({"type": "json_schema", "schema": schema});
    for more in [("output_config", json!({"effort": "low", "format": format})), ("output_format", format)] {
        let mut body = json!({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40});
        body[more.0] = more.1;
        assert_eq!(both(&SERVER, body)["content"][0]["text"], r#"{"a":"é"}"#);
    }
}

/// The shape of what Claude Code sends: several system blocks, many tools, and fields that this server has no use for.
#[test]
fn a_request_of_claude_code_is_answered() {
    let ephemeral = json!({"type": "ephemeral", "ttl": "1h", "scope": "global"});
    let billing = |hash: &str| json!({"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2.1; cch={hash};")});
    let body = |hash: &str| {
        json!({
            "model": "quire-demo",
            "system": [billing(hash), {"type": "text", "text": "You are an agent.", "cache_control": ephemeral},
                {"type": "text", "text": "Be brief.", "cache_control": ephemeral}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"},
                {"type": "text", "text": QUESTION, "cache_control": ephemeral}]}],
            "tools": [tool(), {"name": "Bash", "input_schema": {"type": "object", "properties": {}}, "defer_loading": true}],
            "metadata": {"user_id": "user_1_account_2_session_3"},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "diagnostics": {"previous_message_id": null},
            "a_field_of_the_next_version": {"x": 1},
            "temperature": 0,
            "ignore_eos": false,
        })
    };
    let headers = [
        ("Content-Type", "application/json"),
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "claude-code-20250219,mid-conversation-system-2026-04-07"),
        ("x-app", "cli"),
        ("X-Claude-Code-Session-Id", "1"),
    ];
    let send = |path: &str, body: Value| SERVER.send("POST", path, &headers, body.to_string().as_bytes());
    let reply = send("/v1/messages?beta=true", body("a1"));
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.json()["stop_reason"], "end_turn");
    // The block that differs in every request is not part of the prompt.
    let again = send("/v1/messages?beta=true", body("b2")).json();
    assert!(again["usage"]["cache_read_input_tokens"].as_u64().unwrap() > 0, "{again}");
    let counted = send("/v1/messages/count_tokens?beta=true", body("c3"));
    assert_eq!(counted.json()["input_tokens"], prompt_tokens(&again));
}

#[test]
fn a_prompt_that_is_too_long_is_counted_and_refused_in_the_words_that_clients_read() {
    let body = json!({"messages": [{"role": "user", "content": "word ".repeat(3000)}], "max_tokens": 5});
    let count = SERVER.ok(COUNT, body.clone())["input_tokens"].as_u64().unwrap();
    assert!(count > 1024, "{count}");
    let message = format!("prompt is too long: {count} tokens > 1023 maximum");
    assert_eq!(error(&SERVER.post(MESSAGES, &body)), (400, "invalid_request_error".into(), message));
}

#[test]
fn errors_of_every_layer_have_the_form_of_the_api_and_keys_may_be_in_either_header() {
    let limits = Limits { max_body_bytes: 4096, ..Limits::default() };
    let options = ServerOptions { limits, api_keys: vec!["s3cret".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let with = |name: &str, value: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
        body[name] = value;
        body.to_string()
    };
    let body = with("top_k", json!(0));
    let json_type = ("Content-Type", "application/json");
    let send = |method, path, headers: &[(&str, &str)], body: &str| server.send(method, path, headers, body.as_bytes());
    for key in [("x-api-key", "s3cret"), ("Authorization", "Bearer s3cret")] {
        assert_eq!(send("POST", MESSAGES, &[json_type, key], &body).status, 200);
        let (long, unknown) = ("x".repeat(5000), with("model", json!("other")));
        for (reply, status, kind) in [
            (send("POST", MESSAGES, &[json_type, key], &unknown), 404, "not_found_error"),
            (send("POST", MESSAGES, &[json_type, key], &long), 413, "request_too_large"),
            (send("POST", MESSAGES, &[key], &body), 415, "invalid_request_error"),
            (send("POST", MESSAGES, &[json_type, key], "{"), 400, "invalid_request_error"),
            (send("GET", MESSAGES, &[key], ""), 405, "invalid_request_error"),
            (send("POST", "/v1/messages/batches", &[json_type, key], &body), 404, "not_found_error"),
            (
                send("POST", MESSAGES, &[json_type, key, ("Host", "a"), ("Host", "b")], &body),
                400,
                "invalid_request_error",
            ),
        ] {
            let (found, name, message) = error(&reply);
            assert_eq!((found, name.as_str()), (status, kind), "{message}");
        }
    }
    for key in
        [("x-api-key", "other"), ("Authorization", "Bearer s3cre"), ("Authorization", "s3cret"), ("x-other", "s3cret")]
    {
        assert_eq!(error(&send("POST", MESSAGES, &[json_type, key], &body)).1, "authentication_error");
        // Other routes keep OpenAI's form.
        assert_eq!(send("POST", CHAT, &[json_type, key], &body).error()["code"], "invalid_api_key");
    }
    let full = Limits { max_inflight_bytes: 16, ..Limits::default() };
    let server = Server::with(config(), ServerOptions { limits: full, ..ServerOptions::default() }, Duration::ZERO);
    let reply = server.send("POST", MESSAGES, &[json_type], body.as_bytes());
    assert_eq!(error(&reply).1, "request_too_large");
    let busy = Limits { max_concurrent_streams: Some(0), ..Limits::default() };
    let server = Server::with(config(), ServerOptions { limits: busy, ..ServerOptions::default() }, Duration::ZERO);
    let reply = server.send("POST", MESSAGES, &[json_type], with("stream", json!(true)).as_bytes());
    assert_eq!((error(&reply).0, error(&reply).1.as_str()), (429, "rate_limit_error"));
    assert_eq!(reply.header("retry-after"), "1");
}

#[test]
fn invalid_requests_name_the_field_of_this_api() {
    let turn = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let answer = |block: Value| json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [block]}]});
    let tool = |fields: Value| {
        let mut tool = json!({"name": "f", "input_schema": {}});
        tool.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"tools": [tool]})
    };
    for (fields, param) in [
        (json!({"messages": null}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": ["hi"]}), "messages[0]"),
        (json!({"messages": [{"role": "tool", "content": "hi"}]}), "messages[0].role"),
        (turn(json!(5)), "messages[0].content"),
        (turn(json!([5])), "messages[0].content[0]"),
        (turn(json!([{"type": "text"}])), "messages[0].content[0].text"),
        (turn(json!([{"type": "image", "source": {}}])), "messages[0].content[0].type"),
        (turn(json!([{"type": "document", "source": {"type": "base64"}}])), "messages[0].content[0].source.type"),
        (turn(json!([{"type": "tool_result", "content": "x"}])), "messages[0].content[0].tool_use_id"),
        (
            turn(json!([{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}])),
            "messages[0].content[0].content[0].type",
        ),
        (turn(json!([{"type": "tool_result", "tool_use_id": "x".repeat(300)}])), "messages[0].content[0].tool_use_id"),
        (answer(json!({"type": "tool_use", "name": "f", "input": {}})), "messages[1].content[0].id"),
        (answer(json!({"type": "tool_use", "id": "a", "name": "f", "input": "{}"})), "messages[1].content[0].input"),
        (answer(json!({"type": "tool_use", "id": "a", "name": "f", "input": {}})), "messages"),
        (answer(json!({"type": "server_tool_use"})), "messages[1].content[0].type"),
        (json!({"system": 5}), "system"),
        (json!({"system": [{"type": "image"}]}), "system[0].type"),
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"top_p": 2}), "top_p"),
        (json!({"stop_sequences": [""]}), "stop_sequences"),
        (json!({"stop_sequences": 5}), "stop_sequences"),
        (json!({"stream": 1}), "stream"),
        (json!({"tools": {}}), "tools"),
        (json!({"tools": ["f"]}), "tools[0]"),
        (tool(json!({"type": "web_search_20250305"})), "tools[0].type"),
        (tool(json!({"name": ""})), "tools[0].name"),
        (tool(json!({"name": "f".repeat(300)})), "tools[0].name"),
        (tool(json!({"input_schema": null})), "tools[0].input_schema"),
        (tool(json!({"description": 5})), "tools[0].description"),
        (tool(json!({"strict": "yes"})), "tools[0].strict"),
        (json!({"tool_choice": "auto"}), "tool_choice"),
        (json!({"tool_choice": {"type": "required"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        (
            json!({"tool_choice": {"type": "none", "disable_parallel_tool_use": 1}}),
            "tool_choice.disable_parallel_tool_use",
        ),
        (json!({"thinking": {"type": "on"}}), "thinking.type"),
        (json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 2000}}), "thinking.budget_tokens"),
        (json!({"thinking": {"type": "adaptive", "display": "none"}}), "thinking.display"),
        (json!({"output_config": {"effort": "huge"}}), "output_config.effort"),
        (json!({"output_config": {"format": {"type": "text"}}}), "output_config.format.type"),
        (json!({"output_config": {"format": {"type": "json_schema"}}}), "output_config.format.schema"),
        (
            json!({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}),
            "output_config.format",
        ),
        (json!({"mcp_servers": [{"name": "x"}]}), "mcp_servers"),
        (json!({"container": "x"}), "container"),
    ] {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (status, kind, message) = error(&SERVER.post(MESSAGES, &body));
        assert_eq!((status, kind.as_str()), (400, "invalid_request_error"), "{fields}");
        assert!(message.starts_with(&format!("{param}: ")), "{fields}: {message}");
        assert!(!message.contains('\n'));
    }
}
