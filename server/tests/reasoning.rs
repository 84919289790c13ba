//! Reasoning before the text of a response, over HTTP.

use std::time::Duration;

use crate::common::{Server, config};
use serde_json::{Value, json};
use server::{Reasoning, ServerOptions};

const CHAT: &str = "/v1/chat/completions";

fn server(reasoning: Option<Reasoning>) -> Server {
    let options = ServerOptions { reasoning_parser: reasoning, ..ServerOptions::default() };
    Server::with(config(), options, Duration::ZERO)
}

/// A request with this text as its output.
fn saying(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": "How much?"}], "structured_outputs": {"choice": [text]},
        "max_tokens": 200, "n": 2, "temperature": 1})
}

/// The concatenated field of the second choice's deltas.
fn joined(chunks: &[Value], field: &str) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    choices.filter(|choice| choice["index"] == 1).filter_map(|choice| choice["delta"][field].as_str()).collect()
}

#[test]
fn thoughts_become_reasoning_content_whole_and_streamed() {
    let server = server(Some(Reasoning::Tags));
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    for (text, reasoning, content) in [
        ("<think>\n2 + 2\n= 4 </think>\n\nFour: 世.", "2 + 2\n= 4", "Four: 世."),
        ("Four <think>really</think>", "", "Four <think>really</think>"),
        ("<think></think>Four", "", "Four"),
        ("<think>endless", "endless", ""),
    ] {
        let answer = server.ok(CHAT, saying(text));
        let message = &answer["choices"][1]["message"];
        assert_eq!(message["content"].as_str().unwrap_or_default(), content, "{answer}");
        assert_eq!(message["reasoning_content"].as_str().unwrap_or_default(), reasoning, "{answer}");
        assert_eq!(message.get("reasoning_content").is_some(), !reasoning.is_empty());
        let chunks = server.stream(CHAT, saying(text));
        assert_eq!(
            (joined(&chunks, "reasoning_content"), joined(&chunks, "content")),
            (reasoning.into(), content.into())
        );
    }
    // A call inside of reasoning is text; one after it is a call.
    let mut body = saying(&format!("<think>{call}</think>{call}"));
    body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    let answer = server.ok(CHAT, body);
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], call);
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn a_prompt_may_end_inside_of_reasoning() {
    let messages = json!([{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "<think>"}]);
    let body = json!({"messages": messages, "continue_final_message": true, "temperature": 0, "max_tokens": 8});
    let text = server(None).ok(CHAT, body.clone())["choices"][0]["message"].clone();
    let thought = server(Some(Reasoning::Tags)).ok(CHAT, body.clone())["choices"][0]["message"].clone();
    assert_eq!(thought["reasoning_content"], text["content"].as_str().unwrap().trim());
    assert_eq!((&thought["content"], text.get("reasoning_content")), (&Value::Null, None));
    // The same for a model that begins with reasoning without a tag.
    let plain = json!({"messages": [{"role": "user", "content": "How much?"}], "temperature": 0, "max_tokens": 8});
    let message = server(Some(Reasoning::Always)).ok(CHAT, plain)["choices"][0]["message"].clone();
    assert!(message["content"].is_null() && !message["reasoning_content"].as_str().unwrap().is_empty(), "{message}");
}

#[test]
fn a_model_without_reasoning_keeps_its_text() {
    let text = "<think>2 + 2</think>Four";
    let answer = server(None).ok(CHAT, saying(text));
    assert_eq!(answer["choices"][0]["message"]["content"], text);
}
