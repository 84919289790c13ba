//! Reasoning before the text of a response, over HTTP.

use std::time::Duration;

use crate::common::{Server, config};
use engine::EngineConfig;
use serde_json::{Value, json};
use server::ServerOptions;
use text::ReasoningFormat;

const CHAT: &str = "/v1/chat/completions";

fn server(reasoning: Option<ReasoningFormat>) -> Server {
    let options = ServerOptions { reasoning_parser: reasoning, ..ServerOptions::default() };
    Server::with(config(), options, Duration::ZERO)
}

/// A request with this text as its output. A grammar without the opening tag binds after reasoning, so for such a text the prompt
/// ends the reasoning.
fn saying(text: &str) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "How much?"}], "structured_outputs": {"choice": [text]},
        "max_tokens": 200, "n": 2, "temperature": 1});
    if !text.starts_with("<") {
        let thought = json!({"role": "assistant", "content": "<think></think>"});
        body["messages"].as_array_mut().unwrap().push(thought);
        body["continue_final_message"] = json!(true);
    }
    body
}

/// The concatenated field of the second choice's deltas.
fn joined(chunks: &[Value], field: &str) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    choices.filter(|choice| choice["index"] == 1).filter_map(|choice| choice["delta"][field].as_str()).collect()
}

#[test]
fn thoughts_become_reasoning_content_whole_and_streamed() {
    let server = server(Some(ReasoningFormat::Qwen3));
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
        assert_eq!(message["reasoning"], message["reasoning_content"]);
        assert!(message.get("reasoning").is_some());
        let chunks = server.stream(CHAT, saying(text));
        assert_eq!(
            (joined(&chunks, "reasoning_content"), joined(&chunks, "content")),
            (reasoning.into(), content.into())
        );
        assert_eq!(joined(&chunks, "reasoning"), reasoning);
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
fn reasoning_tokens_are_those_that_begin_before_the_answer_does_whole_and_streamed() {
    let server = server(Some(ReasoningFormat::Qwen3));
    for text in ["<think>\n2 + 2\n= 4 </think>\n\nFour: 世.", "<think>é</think>Four", "Four", "<think>endless"] {
        let mut body = saying(text);
        // The same tokens each time: a text can be drawn in several.
        (body["n"], body["return_token_ids"], body["seed"]) = (json!(1), json!(true), json!(7));
        let answer = server.ok(CHAT, body.clone());
        let ids = answer["choices"][0]["token_ids"].as_array().unwrap();
        let before = |count: usize| {
            let prefix = server.ok("/detokenize", json!({"tokens": ids[..count]}));
            // An incomplete character is no text yet.
            prefix["prompt"].as_str().unwrap().trim_end_matches('\u{fffd}').chars().count()
        };
        let end = match text.find("</think>") {
            Some(at) => text[..at + "</think>".len()].chars().count(),
            None if text.starts_with("<think>") => text.chars().count(),
            None => 0,
        };
        let expected = (0..ids.len()).filter(|&count| before(count) < end).count();
        let found = |usage: &Value| usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() as usize;
        assert_eq!(found(&answer["usage"]), expected, "{text}");
        body.as_object_mut().unwrap().remove("return_token_ids");
        assert_eq!(found(&server.ok(CHAT, body.clone())["usage"]), expected, "{text}");
        body["stream_options"] = json!({"include_usage": true});
        assert_eq!(found(&server.stream(CHAT, body).last().unwrap()["usage"]), expected, "{text}");
    }
}

/// C41 of public reports.
#[test]
fn a_stop_string_counts_in_the_answer_and_only_if_asked_for_in_the_reasoning() {
    let harmony = "<|channel|>analysis<|message|>Question: final?<|end|><|start|>assistant<|channel|>final<|message|>Paris. Question: and?";
    let think = "<think>\nQuestion: what?\n</think>\n\nParis. Question: and now?";
    for (format, text) in [(ReasoningFormat::Qwen3, think), (ReasoningFormat::GptOss, harmony)] {
        let server = server(Some(format));
        let mut body = saying(text);
        body["stop"] = json!(["Question:", "\n\n", "final", "end"]);
        let answer = server.ok(CHAT, body.clone());
        let choice = &answer["choices"][1];
        let reasoning = choice["message"]["reasoning"].as_str().unwrap_or_default();
        assert!(reasoning.starts_with("Question: "), "{answer}");
        assert_eq!((&choice["message"]["content"], &choice["stop_reason"]), (&json!("Paris. "), &json!("Question:")));
        let chunks = server.stream(CHAT, body.clone());
        assert_eq!(
            (joined(&chunks, "content").as_str(), joined(&chunks, "reasoning").as_str()),
            ("Paris. ", reasoning)
        );
        body["stop_in_reasoning"] = json!(true);
        let choice = server.ok(CHAT, body)["choices"][1].clone();
        assert!(choice["message"]["content"].is_null() || choice["message"]["content"] == "", "{choice}");
        assert_eq!(choice["finish_reason"], "stop");
    }
    let input = json!({"input": "How much?", "structured_outputs": {"choice": [think]}, "max_output_tokens": 200, "stop": ["Question:"]});
    let output = server(Some(ReasoningFormat::Qwen3)).ok("/v1/responses", input)["output"].clone();
    assert_eq!(output[1]["content"][0]["text"], "Paris. ");
}

#[test]
fn reasoning_is_dropped_on_request() {
    let server = server(Some(ReasoningFormat::Qwen3));
    let mut body = saying("<think>2 + 2</think>Four");
    body["include_reasoning"] = json!(false);
    let message = server.ok(CHAT, body.clone())["choices"][1]["message"].clone();
    assert_eq!(
        (&message["content"], &message["reasoning"], message.get("reasoning_content")),
        (&json!("Four"), &Value::Null, None)
    );
    let chunks = server.stream(CHAT, body);
    assert_eq!((joined(&chunks, "content").as_str(), joined(&chunks, "reasoning").as_str()), ("Four", ""));
}

#[test]
fn a_prompt_may_end_inside_of_reasoning() {
    let messages = json!([{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "<think>"}]);
    let body = json!({"messages": messages, "continue_final_message": true, "temperature": 0, "max_tokens": 8});
    let text = server(None).ok(CHAT, body.clone())["choices"][0]["message"].clone();
    let thought = server(Some(ReasoningFormat::Qwen3)).ok(CHAT, body.clone())["choices"][0]["message"].clone();
    assert_eq!(thought["reasoning_content"], text["content"].as_str().unwrap().trim());
    assert_eq!((&thought["content"], text.get("reasoning_content")), (&Value::Null, None));
    // The same for a model that begins with reasoning without a tag.
    let plain = json!({"messages": [{"role": "user", "content": "How much?"}], "temperature": 0, "max_tokens": 8});
    let message = server(Some(ReasoningFormat::DeepseekR1)).ok(CHAT, plain)["choices"][0]["message"].clone();
    assert!(message["content"].is_null() && !message["reasoning_content"].as_str().unwrap().is_empty(), "{message}");
}

#[test]
fn a_model_without_reasoning_keeps_its_text() {
    let text = "<think>2 + 2</think>Four";
    let answer = server(None).ok(CHAT, saying(text));
    assert_eq!(answer["choices"][0]["message"]["content"], text);
}

#[test]
fn a_grammar_binds_after_the_reasoning_that_the_prompt_opens() {
    let server = server(Some(ReasoningFormat::Qwen3));
    let messages = json!([{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "<think>\nWell"}]);
    for within in [true, false] {
        let mut body = json!({"messages": messages, "structured_outputs": {"choice": ["four", "five"]}, "max_tokens": 24, "temperature": 1,
            "n": 3, "seed": 5, "continue_final_message": true});
        body["messages"][1]["content"] = json!(if within { "<think>" } else { "<think>\nWell</think>" });
        for choice in server.ok(CHAT, body)["choices"].as_array().unwrap() {
            let message = &choice["message"];
            if within && choice["finish_reason"] == "length" {
                assert!(message["content"].is_null() && message["reasoning"].is_string(), "{choice}");
            } else {
                assert!(["four", "five"].contains(&message["content"].as_str().unwrap()), "{choice}");
            }
        }
    }
}

#[test]
fn messages_of_harmony_become_reasoning_content_and_calls() {
    let server = server(Some(ReasoningFormat::GptOss));
    let text = "<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>Four.";
    let body = json!({"messages": [{"role": "user", "content": "How much?"}], "structured_outputs": {"choice": [text]},
        "max_tokens": 200, "n": 2});
    let message = server.ok(CHAT, body.clone())["choices"][1]["message"].clone();
    assert_eq!((&message["content"], &message["reasoning"]), (&json!("Four."), &json!("2 + 2")));
    let chunks = server.stream(CHAT, body);
    assert_eq!((joined(&chunks, "reasoning"), joined(&chunks, "content")), ("2 + 2".to_string(), "Four.".to_string()));
}

const COMPLETIONS: &str = "/v1/completions";

/// A prompt that ends within the reasoning, of which all tokens are returned.
fn thinking(more: &Value) -> Value {
    let mut body = json!({"prompt": "How much is it?<think>", "max_tokens": 40, "ignore_eos": true, "seed": 3, "logprobs": 2,
        "return_token_ids": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn reasoning_ends_after_its_budget_and_every_other_token_is_drawn_as_without_one() {
    let server = server(Some(ReasoningFormat::Qwen3));
    let close = server.ok("/tokenize", json!({"content": "</think>"}))["tokens"].as_array().unwrap().clone();
    for temperature in [0.0, 1.0] {
        let ask = |budget: i64, more: Value| {
            let mut body = thinking(&json!({"temperature": temperature, "thinking_token_budget": budget}));
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            server.ok(COMPLETIONS, body)["choices"].clone()
        };
        let ids = |choice: &Value| choice["token_ids"].as_array().unwrap().clone();
        let free = ask(-1, json!({"n": 2}));
        assert_eq!(free, ask(1000, json!({"n": 2})), "a budget that is not used up changes nothing");
        for budget in [0, 1, 7, 30] {
            let limited = ask(budget as i64, json!({"n": 2}));
            for (limited, free) in limited.as_array().unwrap().iter().zip(free.as_array().unwrap()) {
                let (found, free_ids) = (ids(limited), ids(free));
                assert_eq!(found[..budget], free_ids[..budget], "{temperature}");
                assert_eq!(found[budget..budget + close.len()], close[..], "{temperature}");
                let scores =
                    |choice: &Value| choice["logprobs"]["token_logprobs"].as_array().unwrap()[..budget].to_vec();
                assert_eq!(scores(limited), scores(free));
                assert_eq!(found.len(), 40);
            }
        }
    }
    // Drafts change no token.
    let drafts = EngineConfig {
        speculative: Some(r#"{"method": "ngram", "num_speculative_tokens": 3}"#.parse().unwrap()),
        ..config()
    };
    let options = ServerOptions { reasoning_parser: Some(ReasoningFormat::Qwen3), ..ServerOptions::default() };
    let drafting = Server::with(drafts, options, Duration::ZERO);
    for budget in [3, 20] {
        let body = thinking(&json!({"temperature": 1, "n": 8, "thinking_token_budget": budget, "max_tokens": 120}));
        let ids = |server: &Server| {
            let choices = server.ok(COMPLETIONS, body.clone())["choices"].clone();
            choices.as_array().unwrap().iter().map(|choice| choice["token_ids"].clone()).collect::<Vec<_>>()
        };
        assert_eq!(ids(&drafting), ids(&server), "{budget}");
    }
    // What follows is what the model writes behind these tokens.
    let limited =
        server.ok(COMPLETIONS, thinking(&json!({"temperature": 0, "reasoning_budget": 7})))["choices"][0].clone();
    let prompt = [&limited["prompt_token_ids"], &limited["token_ids"]].map(|ids| ids.as_array().unwrap().clone());
    let (before, tokens) = (prompt[0].len() + 7 + close.len(), prompt.concat());
    let body = json!({"prompt": tokens[..before], "temperature": 0, "max_tokens": 33 - close.len(), "ignore_eos": true,
        "return_token_ids": true});
    assert_eq!(server.ok(COMPLETIONS, body)["choices"][0]["token_ids"], json!(tokens[before..]));
}

#[test]
fn a_budget_holds_in_every_route_and_beside_a_grammar() {
    let server = server(Some(ReasoningFormat::Qwen3));
    let messages = json!([{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "<think>\nWell"}]);
    let chat = json!({"messages": messages, "continue_final_message": true, "max_tokens": 40, "temperature": 1, "n": 3, "seed": 5,
        "structured_outputs": {"choice": ["four", "five"]}});
    for (name, value) in [
        ("thinking_token_budget", json!(6)),
        ("thinking_budget", json!(6)),
        ("reasoning", json!({"max_tokens": 6, "effort": "low"})),
    ] {
        let mut body = chat.clone();
        body[name] = value;
        let answer = server.ok(CHAT, body.clone());
        for choice in answer["choices"].as_array().unwrap() {
            let message = &choice["message"];
            assert!(["four", "five"].contains(&message["content"].as_str().unwrap()), "{choice}");
            assert!(message["reasoning"].is_string(), "{choice}");
        }
        let contents: String = answer["choices"].as_array().unwrap()[1]["message"]["content"].as_str().unwrap().into();
        assert_eq!(joined(&server.stream(CHAT, body), "content"), contents);
    }
    let mut hidden = chat.clone();
    hidden["reasoning"] = json!({"max_tokens": 6, "exclude": true});
    assert!(server.ok(CHAT, hidden)["choices"][0]["message"]["reasoning"].is_null());
    // A model that opens the reasoning itself, and one that begins with it.
    let mut body = saying("<think>endless");
    body["thinking_token_budget"] = json!(2);
    let answer = server.ok(CHAT, body);
    assert_eq!(answer["choices"][0]["message"]["reasoning"], "endless", "the grammar has no end of the reasoning");
    let deepseek = self::server(Some(ReasoningFormat::DeepseekR1));
    let body = json!({"input": "How much?", "max_output_tokens": 30, "reasoning": {"max_tokens": 4}, "temperature": 0});
    let answer = deepseek.ok("/v1/responses", body);
    let kinds: Vec<&Value> = answer["output"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message"], "{answer}");
    let body =
        json!({"messages": [{"role": "user", "content": "How much?"}], "max_tokens": 30, "thinking_token_budget": 4});
    let answer = deepseek.ok("/v1/messages", body);
    let kinds: Vec<&Value> = answer["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
    assert_eq!(kinds, ["thinking", "text"], "{answer}");
}

#[test]
fn a_budget_that_cannot_be_held_is_refused_in_one_line() {
    let thinks = server(Some(ReasoningFormat::Qwen3));
    for (server, body, param) in [
        (&server(None), json!({"thinking_token_budget": 5}), "thinking_token_budget"),
        (&server(None), json!({"reasoning": {"max_tokens": 5}}), "reasoning.max_tokens"),
        (&thinks, json!({"thinking_budget": -2}), "thinking_budget"),
        (&thinks, json!({"reasoning": {"max_tokens": -1}}), "reasoning.max_tokens"),
        (&thinks, json!({"reasoning": {"enabled": 1}}), "reasoning.enabled"),
        (&thinks, json!({"thinking_token_budget": 5, "use_beam_search": true}), "use_beam_search"),
    ] {
        let mut body = body;
        body["messages"] = json!([{"role": "user", "content": "How much?"}]);
        let reply = server.post(CHAT, &body);
        let error = reply.error();
        assert_eq!((reply.status, error["param"].as_str()), (400, Some(param)), "{body}: {}", reply.body);
        assert!(!error["message"].as_str().unwrap().contains('\n'), "{}", reply.body);
    }
    let mut free =
        json!({"messages": [{"role": "user", "content": "How much?"}], "max_tokens": 4, "thinking_token_budget": -1});
    server(None).ok(CHAT, free.clone());
    free["reasoning"] = json!({"max_tokens": null});
    server(None).ok(CHAT, free);
}
