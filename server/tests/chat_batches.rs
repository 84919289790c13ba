//! `/v1/chat/completions/batch`: each chat of a batch has the choices that it has alone.

use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Server, config};
use serde_json::{Value, json};
use server::{Limits, ServerOptions};
use text::{ReasoningFormat, ToolFormat};

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let limits = Limits { max_request_tokens: 200, ..Limits::default() };
    let (reasoning, tools) = (Some(ReasoningFormat::Qwen3), Some(ToolFormat::KimiK2));
    let options =
        ServerOptions { reasoning_parser: reasoning, tool_call_parser: tools, limits, ..ServerOptions::default() };
    Server::with(config(), options, Duration::ZERO)
});

const CHAT: &str = "/v1/chat/completions";
const BATCH: &str = "/v1/chat/completions/batch";

fn chats() -> Vec<Value> {
    let user = |text: &str| json!({"role": "user", "content": text});
    let call = json!({"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]});
    vec![
        json!([user("What is the capital of France?")]),
        json!([user("Add 2 and 3."), call, {"role": "tool", "tool_call_id": "a", "content": "5"}]),
        json!([{"role": "system", "content": "Be brief."}, user("What is the capital of Japan?")]),
    ]
}

/// Requests: for two choices with all that may be returned, with a choice of texts behind reasoning, and with a required call.
fn requests() -> [Value; 3] {
    let more =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}});
    [
        json!({"max_tokens": 6, "n": 2, "temperature": 1, "seed": 5, "logprobs": true, "top_logprobs": 2, "prompt_logprobs": 1,
            "return_token_ids": true}),
        json!({"max_tokens": 60, "temperature": 1, "seed": 3, "structured_outputs": {"choice": ["<think>2 + 2</think>Four"]}}),
        json!({"max_tokens": 200, "thinking_token_budget": 2, "temperature": 0, "tools": [more], "tool_choice": "required", "parallel_tool_calls": false}),
    ]
}

fn with(mut body: Value, messages: &Value) -> Value {
    body["messages"] = messages.clone();
    body
}

/// A choice without its index. Ids of calls count the calls of their chat.
fn clean(mut choice: Value) -> Value {
    choice["index"] = Value::Null;
    choice
}

#[test]
fn each_chat_of_a_batch_has_the_choices_and_usage_that_it_has_alone() {
    for body in requests() {
        let mut batch = SERVER.ok(BATCH, with(body.clone(), &Value::from(chats())));
        assert_eq!(batch["object"], "chat.completion");
        let mut choices = batch["choices"].take().as_array().unwrap().clone();
        if body.get("tools").is_some() {
            let ids = choices.iter().map(|choice| &choice["message"]["tool_calls"][0]["id"]).collect::<Vec<_>>();
            assert_eq!(json!(ids), json!(["functions.f:0", "functions.f:1", "functions.f:0"]));
        }
        assert!(choices.iter().enumerate().all(|(i, choice)| choice["index"] == i), "{choices:?}");
        let mut usage = [0; 3];
        for chat in chats() {
            let alone = SERVER.ok(CHAT, with(body.clone(), &chat));
            let count = |name: &str| alone["usage"].pointer(name).unwrap().as_u64().unwrap();
            let names = ["/prompt_tokens", "/completion_tokens", "/completion_tokens_details/reasoning_tokens"];
            usage.iter_mut().zip(names).for_each(|(sum, name)| *sum += count(name));
            for choice in alone["choices"].as_array().unwrap() {
                let mut choice = choice.clone();
                for field in ["prompt_logprobs", "prompt_token_ids"] {
                    if let Some(value) = alone.get(field) {
                        choice[field] = value.clone();
                    }
                }
                assert_eq!(clean(choices.remove(0)), clean(choice));
            }
        }
        assert!(choices.is_empty());
        let found = &batch["usage"];
        assert_eq!(
            json!(usage),
            json!([
                found["prompt_tokens"],
                found["completion_tokens"],
                found["completion_tokens_details"]["reasoning_tokens"]
            ])
        );
        assert!(usage[2] > 0 || body.get("structured_outputs").is_none());
    }
}

#[test]
fn a_stream_of_a_batch_has_the_text_of_each_chat() {
    let body = with(json!({"max_tokens": 8, "temperature": 0}), &Value::from(chats()));
    let whole = SERVER.ok(BATCH, body.clone());
    let mut texts = vec![String::new(); chats().len()];
    let mut roles = 0;
    for chunk in SERVER.stream(BATCH, body) {
        for choice in chunk["choices"].as_array().unwrap() {
            let delta = &choice["delta"];
            roles += usize::from(delta["role"] == "assistant");
            texts[choice["index"].as_u64().unwrap() as usize] += delta["content"].as_str().unwrap_or_default();
        }
    }
    assert_eq!(roles, texts.len());
    let expected = whole["choices"].as_array().unwrap().iter().map(|choice| choice["message"]["content"].clone());
    assert_eq!(texts, expected.map(|text| text.as_str().unwrap_or_default().to_string()).collect::<Vec<_>>());
}

#[test]
fn a_wrong_batch_is_refused_by_the_path_of_what_is_wrong_and_by_its_products() {
    let chat = chats().remove(0);
    let refused = |body: Value, param: &str, part: &str| {
        let reply = SERVER.post(BATCH, &body);
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)), "{}", reply.body);
        assert!(reply.message().contains(part), "{}", reply.body);
    };
    for (messages, param, part) in [
        (Value::Null, "messages", "a list of conversations"),
        (json!([]), "messages", "a list of conversations"),
        (chat.clone(), "messages[0]", "a list of messages"),
        (json!([chat, []]), "messages[1]", "at least one message"),
        (json!([chat, [chat[0], 5]]), "messages[1][1]", "an object with role and content"),
        (json!([chat, [{"role": "user", "content": 5}]]), "messages[1][0].content", "a string"),
        (Value::from(vec![chat.clone(); 5000]), "messages", "--max-prompts"),
    ] {
        refused(with(json!({"max_tokens": 1}), &messages), param, part);
    }
    let many = Value::from(vec![chat; 100]);
    refused(with(json!({"n": 128, "max_tokens": 1}), &many), "n", "12800 sequences (100 prompts of 128)");
    refused(with(json!({"max_tokens": 1}), &many), "prompt", "expected at most 200");
    let long = json!({"a": "x".repeat(200_000)});
    refused(with(json!({"chat_template_kwargs": long}), &many), "messages", "in 100 conversations");
}
