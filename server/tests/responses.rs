//! `/v1/responses`: the response is that of a chat, and the events of a stream add up to it.

use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Server, config};
use serde_json::{Value, json};
use server::ServerOptions;
use text::{ReasoningFormat, ToolFormat};

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const RESPONSES: &str = "/v1/responses";
const QUESTION: &str = "What is the capital of France?";

/// Returns the events of a stream after checking their names and consecutive numbers.
fn events(server: &Server, mut body: Value) -> Vec<Value> {
    body["stream"] = json!(true);
    let reply = server.post(RESPONSES, &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(reply.header("content-type").starts_with("text/event-stream"));
    let mut events = Vec::new();
    for (number, block) in reply.body.split_terminator("\n\n").enumerate() {
        let (name, data) = block.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name, format!("event: {}", event["type"].as_str().unwrap()));
        assert_eq!(event["sequence_number"], number);
        events.push(event);
    }
    events
}

fn names(events: &[Value]) -> Vec<&str> {
    let mut names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    names.dedup();
    names
}

/// The output as a client assembles it from the events with deltas. Every `done` event is compared with the deltas.
fn assembled(events: &[Value]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    for event in events {
        let name = event["type"].as_str().unwrap();
        if name == "response.output_item.added" {
            assert_eq!(event["output_index"], items.len());
            items.push(event["item"].clone());
            continue;
        }
        let Some(index) = event["output_index"].as_u64() else { continue };
        let item = &mut items[index as usize];
        assert_eq!(if name.contains("item.done") { &event["item"]["id"] } else { &event["item_id"] }, &item["id"]);
        let grow =
            |text: &mut Value| *text = format!("{}{}", text.as_str().unwrap(), event["delta"].as_str().unwrap()).into();
        match name {
            "response.content_part.added" => item["content"] = json!([event["part"]]),
            "response.output_text.delta" => {
                grow(&mut item["content"][0]["text"]);
                let scores = item["content"][0]["logprobs"].as_array_mut().unwrap();
                scores.extend(event["logprobs"].as_array().unwrap().clone());
            }
            "response.reasoning_text.delta" => grow(&mut item["content"][0]["text"]),
            "response.function_call_arguments.delta" => grow(&mut item["arguments"]),
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(event["text"], item["content"][0]["text"]);
            }
            "response.function_call_arguments.done" => assert_eq!(event["arguments"], item["arguments"]),
            "response.content_part.done" => assert_eq!(event["part"], item["content"][0]),
            "response.output_item.done" => {
                item["status"] = event["item"]["status"].clone();
                assert_eq!(&event["item"], item);
            }
            other => panic!("{other}"),
        }
    }
    items
}

/// The output without unique ids.
fn stripped(mut output: Value) -> Value {
    for item in output.as_array_mut().unwrap() {
        for name in ["id", "call_id"] {
            item.as_object_mut().unwrap().remove(name);
        }
    }
    output
}

/// Runs the request whole and as a stream, compares the two and returns the whole response and the events.
fn both(server: &Server, body: Value) -> (Value, Vec<Value>) {
    let whole = server.ok(RESPONSES, body.clone());
    let events = events(server, body);
    let last = &events.last().unwrap()["response"];
    assert_eq!(json!(assembled(&events)), last["output"]);
    assert_eq!(stripped(last["output"].clone()), stripped(whole["output"].clone()));
    for name in ["status", "incomplete_details", "temperature", "tools", "metadata", "error"] {
        assert_eq!(last[name], whole[name], "{name}");
    }
    assert_eq!(last["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    assert_eq!(last["usage"]["output_tokens_details"], whole["usage"]["output_tokens_details"]);
    (whole, events)
}

#[test]
fn an_answer_is_that_of_the_chat_and_its_events_come_in_order() {
    let body =
        json!({"input": QUESTION, "temperature": 0, "max_output_tokens": 32, "metadata": {"a": "b"}, "store": true});
    let (answer, events) = both(&SERVER, body);
    let messages = json!([{"role": "user", "content": QUESTION}]);
    let chat = SERVER.ok("/v1/chat/completions", json!({"messages": messages, "temperature": 0, "max_tokens": 32}));
    assert_eq!(answer["output"][0]["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("completed")));
    assert_eq!((&answer["metadata"], &answer["store"]), (&json!({"a": "b"}), &json!(true)));
    for (here, there) in [("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")] {
        assert_eq!(answer["usage"][here], chat["usage"][there]);
    }
    assert_eq!(
        names(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert!(events[0]["response"]["usage"].is_null());
}

#[test]
fn items_and_instructions_are_the_messages_of_a_chat() {
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "Say"}, {"type": "input_text", "text": "one."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One."}]},
        {"role": "user", "content": QUESTION},
    ]);
    let body = json!({"instructions": "Be brief.", "input": input, "temperature": 0, "max_output_tokens": 8});
    let answer = SERVER.ok(RESPONSES, body);
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say\none."},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": QUESTION},
    ]);
    let chat = SERVER.ok("/v1/chat/completions", json!({"messages": messages, "temperature": 0, "max_tokens": 8}));
    assert_eq!(answer["output"][0]["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    assert_eq!(answer["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
}

#[test]
fn a_limit_makes_an_answer_incomplete() {
    let body = json!({"input": QUESTION, "temperature": 0, "max_output_tokens": 3, "ignore_eos": true});
    let (answer, events) = both(&SERVER, body);
    assert_eq!(answer["status"], "incomplete");
    assert_eq!(answer["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(answer["output"][0]["status"], "incomplete");
    assert_eq!(answer["usage"]["output_tokens"], 3);
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
}

#[test]
fn a_text_format_constrains_the_output() {
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["é", "b"]}}, "required": ["a"],
        "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}});
    let format = json!({"type": "json_schema", "name": "x", "strict": true, "schema": schema});
    let (answer, _) =
        both(&SERVER, json!({"input": QUESTION, "text": {"format": format}, "temperature": 1, "seed": 4}));
    let text = answer["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!([r#"{"a":"é"}"#, r#"{"a":"b"}"#].contains(&text), "{text}");
    assert_eq!(answer["text"]["format"], format);
}

#[test]
fn calls_are_items_of_their_own_and_can_be_answered() {
    let strict = json!({"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"],
        "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}});
    let tool = json!({"type": "function", "name": "get_weather", "description": "…", "parameters": strict});
    for format in [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral] {
        let options = ServerOptions { tool_call_parser: Some(format), ..ServerOptions::default() };
        let server = Server::with(config(), options, Duration::ZERO);
        for choice in [json!("required"), json!({"type": "function", "name": "get_weather"})] {
            let body = json!({"input": QUESTION, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": false,
                "temperature": 0});
            let (answer, events) = both(&server, body);
            let call =
                answer["output"].as_array().unwrap().iter().find(|item| item["type"] == "function_call").unwrap();
            assert_eq!(call["name"], "get_weather");
            let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
            assert_eq!(arguments, json!({"city": "Paris"}));
            assert_eq!(answer["tool_choice"], choice);
            assert!(names(&events).contains(&"response.function_call_arguments.done"));
            // What a client sends back: the items unchanged, and the result.
            let mut input = vec![json!({"role": "user", "content": QUESTION})];
            input.extend(answer["output"].as_array().unwrap().clone());
            input.push(
                json!({"type": "function_call_output", "call_id": call["call_id"], "output": "{\"sky\": \"blue\"}"}),
            );
            let next = json!({"input": input, "tools": [tool], "tool_choice": "none", "max_output_tokens": 4});
            assert_eq!(server.ok(RESPONSES, next)["output"][0]["type"], "message");
        }
    }
}

/// As Codex sends its tools.
#[test]
fn functions_in_a_namespace_are_called_by_their_name_and_say_where_they_are() {
    let function = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object", "properties": {"id": {"enum": [1]}}, "required": ["id"], "additionalProperties": false}});
    let namespace =
        json!({"type": "namespace", "name": "agents", "description": "Agents.", "tools": [function("close")]});
    let search = json!({"type": "web_search", "external_web_access": false});
    for (name, expected) in [("close", json!("agents")), ("look", Value::Null)] {
        let choice = json!({"type": "function", "name": name});
        let tools = [function("look"), namespace.clone(), search.clone()];
        let (answer, events) =
            both(&SERVER, json!({"input": "hi", "tools": tools, "tool_choice": choice, "temperature": 0}));
        let call = &answer["output"][0];
        assert_eq!(
            (&call["type"], &call["name"], &call["namespace"]),
            (&json!("function_call"), &json!(name), &expected)
        );
        assert_eq!(serde_json::from_str::<Value>(call["arguments"].as_str().unwrap()).unwrap(), json!({"id": 1}));
        let done = events.iter().find(|event| event["type"] == "response.output_item.done").unwrap();
        assert_eq!(done["item"]["namespace"], expected);
    }
    let only = json!({"input": "What is the capital of France?", "tools": [search], "temperature": 0});
    assert_eq!(SERVER.post(RESPONSES, &only).json()["output"][0]["type"], "message");
}

#[test]
fn reasoning_text_and_calls_are_items_in_this_order() {
    let options = ServerOptions { reasoning_parser: Some(ReasoningFormat::Qwen3), ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let text = "<think>2 + 2 = 4</think>Let me see: 世.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let body = json!({"input": QUESTION, "structured_outputs": {"choice": [text]}, "max_output_tokens": 200,
        "temperature": 0, "tools": [{"type": "function", "name": "f"}]});
    let (answer, events) = both(&server, body);
    let output = answer["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "2 + 2 = 4"}]));
    assert_eq!(output[1]["content"][0]["text"].as_str().unwrap().trim(), "Let me see: 世.");
    assert_eq!((&output[2]["name"], output[2]["arguments"].as_str().unwrap().trim()), (&json!("f"), "{\"a\": 1}"));
    let count = |details: &str| answer["usage"][details].as_u64().unwrap();
    let thought = answer["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!(thought > 3 && thought < count("output_tokens"), "{}", answer["usage"]);
    assert_eq!(events.iter().filter(|event| event["type"] == "response.output_item.done").count(), 3);
    // Without a closing tag everything is reasoning.
    let body = json!({"input": QUESTION, "structured_outputs": {"choice": ["<think>endless"]}, "temperature": 0, "max_output_tokens": 100});
    let (answer, _) = both(&server, body);
    assert_eq!(answer["output"].as_array().unwrap().len(), 1);
    assert_eq!(answer["output"][0]["content"][0]["text"], "endless");
}

#[test]
fn log_probabilities_come_with_the_text() {
    let body = json!({"input": QUESTION, "temperature": 0, "max_output_tokens": 6, "ignore_eos": true,
        "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let (answer, _) = both(&SERVER, body);
    let part = &answer["output"][0]["content"][0];
    let scores = part["logprobs"].as_array().unwrap();
    assert_eq!(scores.len(), 6);
    assert!(scores.iter().all(|score| score["top_logprobs"].as_array().unwrap().len() == 2));
    let text: String = scores.iter().map(|score| score["token"].as_str().unwrap()).collect();
    assert_eq!(part["text"], text);
}

#[test]
fn a_long_input_is_truncated_on_request() {
    let input = "word ".repeat(3000);
    let refused = SERVER.post(RESPONSES, &json!({"input": input}));
    assert_eq!((refused.status, &refused.error()["code"]), (400, &json!("context_length_exceeded")));
    let body = json!({"input": input, "truncation": "auto", "max_output_tokens": 20, "ignore_eos": true});
    assert_eq!(SERVER.ok(RESPONSES, body)["usage"]["total_tokens"], 1024);
}

#[test]
fn invalid_responses_requests_name_the_field_of_this_api() {
    let tool = |fields: Value| {
        let mut tool = json!({"type": "function", "name": "f"});
        tool.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"tools": [tool]})
    };
    for (fields, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"input": [{"type": "reasoning", "summary": []}]}), "input"),
        (json!({"input": ["hi"]}), "input[0]"),
        (json!({"input": [{"content": "hi"}]}), "input[0].role"),
        (json!({"input": [{"role": "tool", "content": "hi"}]}), "input[0].role"),
        (json!({"input": [{"role": "user", "content": 5}]}), "input[0].content"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input[0].content[0].type"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}), "input[0].content[0].text"),
        (json!({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}), "input[0].call_id"),
        (json!({"input": [{"type": "function_call_output", "call_id": "1"}]}), "input[0].output"),
        (json!({"input": [{"type": "item_reference", "id": "msg_1"}]}), "input[0].id"),
        (json!({"input": [{"type": "web_search_call"}]}), "input[0].type"),
        (json!({"input": [{"type": 5, "role": "user", "content": "hi"}]}), "input[0].type"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"include": [5]}), "include"),
        (json!({"text": "x"}), "text"),
        (json!({"text": {"format": {"type": "yaml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema", "name": "x"}}}), "text.format.schema"),
        (json!({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}), "text.format"),
        (json!({"tools": "x"}), "tools"),
        (tool(json!({"type": "web_search"})), "tools[0].type"),
        (tool(json!({"name": ""})), "tools[0].name"),
        (tool(json!({"parameters": 5})), "tools[0].parameters"),
        (tool(json!({"type": "namespace"})), "tools[0].tools"),
        (tool(json!({"type": "namespace", "tools": [{"type": "custom"}]})), "tools[0].tools[0].type"),
        (tool(json!({"type": "namespace", "tools": [{"type": "namespace", "tools": []}]})), "tools[0].tools[0].type"),
        (json!({"tools": [{"type": "namespace", "tools": []}]}), "tools[0].name"),
        (
            json!({"tools": [{"type": "function", "name": "g"}, {"type": "namespace", "name": "f", "tools": [{"type": "function", "name": "g"}]}]}),
            "tools",
        ),
        (tool(json!({"type": "namespace", "tools": vec![json!({"type": "function", "name": "g"}); 300]})), "tools"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (
            json!({"tool_choice": {"type": "function", "name": "g"}, "tools": [{"type": "function", "name": "f"}]}),
            "tool_choice",
        ),
        (json!({"previous_response_id": 5}), "previous_response_id"),
        (json!({"conversation": 5}), "conversation"),
        (json!({"previous_response_id": "resp_1", "conversation": "conv_1"}), "previous_response_id"),
        (json!({"background": true, "store": false}), "background"),
        (json!({"store": "yes"}), "store"),
        (json!({"metadata": {"a": 5}}), "metadata"),
        (json!({"reasoning": {"effort": "extreme"}}), "reasoning.effort"),
        (json!({"truncation": "middle"}), "truncation"),
        (json!({"n": 2}), "n"),
    ] {
        let mut body = json!({"input": "hi", "max_output_tokens": 2});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let reply = SERVER.post(RESPONSES, &body);
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)), "{fields}: {}", reply.body);
    }
    assert_eq!(SERVER.get("/v1/responses/resp_1").status, 404);
}
