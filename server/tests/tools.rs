//! Tool calls over HTTP: required calls, whole and streamed; conversations with calls; invalid requests.

use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Server, config};
use serde_json::{Value, json};
use server::ServerOptions;
use text::ToolFormat;

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const CHAT: &str = "/v1/chat/completions";

fn tools() -> Value {
    let strict = |properties: Value, required: Value| {
        json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false,
            "x-guidance": {"whitespace_flexible": false}})
    };
    let weather =
        strict(json!({"city": {"enum": ["Paris", "東京"]}, "metric": {"type": "boolean"}}), json!(["city", "metric"]));
    let colour = strict(json!({"colour": {"enum": ["red", "blue"]}}), json!(["colour"]));
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "description": "…", "parameters": parameters}});
    json!([tool("get_weather", weather), tool("set colour", colour)])
}

fn request(fields: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": tools(),
        "max_tokens": 120, "temperature": 1.0, "seed": 7});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn named(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

fn fits(call: &Value) -> bool {
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    let fields = arguments.as_object().unwrap().len();
    match call["function"]["name"].as_str().unwrap() {
        "get_weather" => {
            fields == 2
                && arguments["metric"].is_boolean()
                && [json!("Paris"), json!("東京")].contains(&arguments["city"])
        }
        "set colour" => fields == 1 && [json!("red"), json!("blue")].contains(&arguments["colour"]),
        _ => false,
    }
}

#[test]
fn a_call_that_must_come_comes_in_every_format_whole_and_streamed_alike() {
    for format in ToolFormat::all() {
        let options = ServerOptions { tool_call_parser: Some(format), ..ServerOptions::default() };
        let server = Server::with(config(), options, Duration::ZERO);
        // The demo model spells the markers in many tokens.
        let is_long = ![ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral].contains(&format);
        for (choice, parallel) in [
            (named("get_weather"), true),
            (named("set colour"), true),
            (json!("required"), false),
            (json!("required"), true),
        ] {
            // Several calls may go on until the limit.
            let goes_on = parallel && choice == "required";
            let max_tokens = if is_long { 400 } else { 120 } / if goes_on { 2 } else { 1 };
            let mut fields = json!({"tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": max_tokens});
            if choice == named("set colour") {
                // For messages, of which there is none.
                fields["response_format"] = json!({"type": "json_object"});
            }
            let body = request(&fields);
            let whole = server.ok(CHAT, body.clone());
            let choice_of_answer = &whole["choices"][0];
            let message = &choice_of_answer["message"];
            let calls = message["tool_calls"].as_array().unwrap();
            if choice_of_answer["finish_reason"] == "length" {
                assert!(goes_on, "{whole}");
            } else {
                assert_eq!(choice_of_answer["finish_reason"], "tool_calls");
                assert!(calls.iter().all(fits), "{format:?}: {whole}");
            }
            // The limit may cut the markers of a further call, which are then text.
            let is_cut = choice_of_answer["finish_reason"] == "length" && is_long;
            assert!(message["content"].is_null() || is_cut, "{whole}");
            assert!(calls.len() == 1 || parallel, "{whole}");
            if let Some(name) = choice["function"]["name"].as_str() {
                assert!(calls.len() == 1 && calls[0]["function"]["name"] == name, "{whole}");
            }
            for call in calls {
                let id = call["id"].as_str().unwrap();
                assert!(call["type"] == "function" && (format != ToolFormat::Mistral || id.len() == 9));
            }

            let mut streamed: Vec<(Vec<String>, String, String)> = Vec::new();
            let mut finish = Value::Null;
            for chunk in server.stream(CHAT, body) {
                let choice = &chunk["choices"][0];
                assert!(is_cut || choice["delta"]["content"].as_str().unwrap_or_default().is_empty(), "{chunk}");
                for piece in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                    let index = piece["index"].as_u64().unwrap() as usize;
                    streamed.resize_with(streamed.len().max(index + 1), Default::default);
                    let (ids, name, arguments) = &mut streamed[index];
                    ids.extend(piece["id"].as_str().map(str::to_string));
                    *name += piece["function"]["name"].as_str().unwrap_or_default();
                    *arguments += piece["function"]["arguments"].as_str().unwrap();
                }
                if choice["finish_reason"].is_string() {
                    finish = choice["finish_reason"].clone();
                }
            }
            assert_eq!(finish, choice_of_answer["finish_reason"]);
            assert_eq!(streamed.len(), calls.len());
            for ((ids, name, arguments), call) in streamed.iter().zip(calls) {
                assert_eq!(ids.len(), 1, "one id, in the first piece");
                assert_eq!(
                    (name.as_str(), arguments.as_str()),
                    (call["function"]["name"].as_str().unwrap(), call["function"]["arguments"].as_str().unwrap())
                );
            }
        }
    }
}

#[test]
fn a_model_that_may_call_and_does_not_gives_its_text() {
    let free = |fields: Value| SERVER.ok(CHAT, request(&fields))["choices"][0].clone();
    let auto = free(json!({"temperature": 0}));
    let none = free(json!({"temperature": 0, "tool_choice": "none"}));
    assert_eq!(auto["message"]["content"], none["message"]["content"]);
    assert!(auto["message"].get("tool_calls").is_none() && auto["finish_reason"] == none["finish_reason"]);
    assert!(!auto["message"]["content"].as_str().unwrap().is_empty());
    // A grammar that forces the text of a call: it is parsed as a call.
    let text = "Well. <tool_call>\n{\"name\": \"set colour\", \"arguments\": {\"colour\": \"red\"}}\n</tool_call>";
    let choice = free(json!({"structured_outputs": {"choice": [text]}}));
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("Well."), &json!("tool_calls")));
    assert!(fits(&choice["message"]["tool_calls"][0]));
    let choice = free(json!({"structured_outputs": {"choice": [text]}, "tool_choice": "none"}));
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(text), &json!("stop")));
    // Without parallel calls only the first is returned, for each sample.
    let two = json!({"structured_outputs": {"choice": [text.repeat(2)]}, "parallel_tool_calls": false, "n": 2});
    let answer = SERVER.ok(CHAT, request(&two));
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1, "{answer}");
    }
}

/// C07 of public reports.
#[test]
fn a_choice_that_allows_no_call_needs_no_tools() {
    for more in [
        json!({"tools": [], "tool_choice": "auto"}),
        json!({"tools": null, "tool_choice": "auto"}),
        json!({"tools": [], "tool_choice": "none"}),
        json!({"tools": [], "parallel_tool_calls": true}),
    ] {
        let mut body = request(&json!({"max_tokens": 3}));
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert!(SERVER.ok(CHAT, body)["choices"][0]["message"]["content"].is_string(), "{more}");
    }
}

#[test]
fn a_strict_function_leaves_text_free_and_needs_a_valid_schema() {
    let mut strict = tools();
    strict[0]["function"]["strict"] = json!(true);
    let free = |tools: Value| {
        SERVER.ok(CHAT, request(&json!({"tools": tools, "temperature": 0, "max_tokens": 24})))["choices"][0].clone()
    };
    let (bound, unbound) = (free(strict.clone()), free(tools()));
    assert_eq!(bound["message"]["content"], unbound["message"]["content"]);
    for (value, param) in [(json!("yes"), "tools[0].function.strict"), (json!(true), "tools")] {
        let mut wrong = strict.clone();
        wrong[0]["function"]["strict"] = value;
        wrong[0]["function"]["parameters"] = json!({"type": "banana"});
        let reply = SERVER.post(CHAT, &request(&json!({"tools": wrong})));
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)), "{}", reply.body);
    }
}

#[test]
fn a_conversation_with_calls_and_results_can_continue() {
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}});
    let messages = json!([
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ]);
    let answer = SERVER.ok(CHAT, request(&json!({"messages": messages, "max_tokens": 8})));
    assert!(answer["choices"][0]["message"]["content"].is_string());
}

#[test]
fn ids_of_kimi_count_the_calls_of_the_conversation() {
    let options = ServerOptions { tool_call_parser: Some(ToolFormat::KimiK2), ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "get_weather", "arguments": "{}"}});
    let question = json!({"role": "user", "content": "What is the weather in Paris?"});
    let calls =
        json!({"role": "assistant", "content": null, "tool_calls": [call("functions.f:0"), call("functions.f:1")]});
    let result = json!({"role": "tool", "tool_call_id": "functions.f:0", "content": "12 degrees"});
    for (messages, id) in [(json!([question]), 0), (json!([question, calls, result, question]), 2)] {
        let fields = json!({"messages": messages, "tool_choice": named("get_weather"), "max_tokens": 400});
        let answer = server.ok(CHAT, request(&fields));
        let call = &answer["choices"][0]["message"]["tool_calls"][0];
        assert_eq!(call["id"], format!("functions.get_weather:{id}"), "{answer}");
    }
}

#[test]
fn invalid_tools_are_refused_by_field() {
    let function = |function: Value| json!([{"type": "function", "function": function}]);
    for (fields, param) in [
        (json!({"tools": {}}), "tools"),
        (json!({"tools": [5]}), "tools[0].type"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function.name"),
        (json!({"tools": function(json!({"name": ""}))}), "tools[0].function.name"),
        (json!({"tools": function(json!({"name": "f", "parameters": "x"}))}), "tools[0].function.parameters"),
        (
            json!({"tools": function(json!({"name": "f", "parameters": {"type": "banana"}})), "tool_choice": "required"}),
            "tools",
        ),
        (json!({"tools": null, "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": null, "tool_choice": named("f")}), "tool_choice"),
        (json!({"tool_choice": named("nope")}), "tool_choice"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function"}}), "tool_choice"),
        (json!({"tool_choice": 5}), "tool_choice"),
        (json!({"parallel_tool_calls": "yes"}), "parallel_tool_calls"),
        (json!({"tool_choice": "required", "structured_outputs": {"regex": "a"}}), "tool_choice"),
        (json!({"tool_choice": "required", "use_beam_search": true}), "tools"),
    ] {
        let reply = SERVER.post(CHAT, &request(&fields));
        assert_eq!(reply.status, 400, "{fields}: {}", reply.body);
        let error = reply.error();
        assert_eq!(error["param"], param, "{fields}: {error}");
        assert!(!error["message"].as_str().unwrap().contains('\n'), "{error}");
    }
}
