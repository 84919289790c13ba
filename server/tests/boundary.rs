//! Any JSON gets a response or the error object, never a 5xx, and the server keeps running.

use std::sync::OnceLock;

use crate::common::Server;
use crate::fuzzed::PATHS;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Known fields, and an unknown one.
const FIELDS: [&str; 95] = [
    "n_predict",
    "n_probs",
    "repeat_penalty",
    "repeat_last_n",
    "samplers",
    "response_fields",
    "json_schema",
    "grammar",
    "input_prefix",
    "input_suffix",
    "input_extra",
    "content",
    "options",
    "format",
    "think",
    "raw",
    "keep_alive",
    "template",
    "images",
    "name",
    "system",
    "max_tokens",
    "stop_sequences",
    "thinking",
    "output_config",
    "model",
    "prompt",
    "messages",
    "n",
    "best_of",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "seed",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logit_bias",
    "echo",
    "suffix",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "use_beam_search",
    "length_penalty",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "priority",
    "cache_salt",
    "kv_transfer_params",
    "speculative",
    "truncate_prompt_tokens",
    "tokens",
    "allowed_token_ids",
    "input",
    "instructions",
    "text",
    "include",
    "truncation",
    "reasoning",
    "reasoning_effort",
    "metadata",
    "store",
    "previous_response_id",
    "parallel_tool_calls",
    "max_tool_calls",
    "service_tier",
    "encoding_format",
    "dimensions",
    "query",
    "documents",
    "text_1",
    "text_2",
    "top_n",
    "truncation_side",
    "use_activation",
    "max_tokens_per_doc",
    "user",
    "unknown",
];

/// Values that are valid for some field, so that more than the first check is reached.
fn plausible() -> impl Strategy<Value = Value> {
    prop::sample::select(vec![
        json!("a"),
        json!(["a", "b"]),
        json!([1, 2, 3]),
        json!([[1], [2, 3]]),
        json!([{"role": "user", "content": "hi"}]),
        json!([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "you"}]]),
        json!([{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": "yes"}]),
        json!([{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]),
        json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
        json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"a": {"$ref": "#/x"}}}}}),
        json!({"type": "json_object"}),
        json!({"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}),
        json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]),
        json!([{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}, {"type": "function_call_output", "call_id": "1", "output": "x"}]),
        json!({"effort": "low"}),
        json!({"type": "enabled", "budget_tokens": 1024}),
        json!([{"name": "f", "input_schema": {"properties": {}}}]),
        json!({"type": "any"}),
        json!({"temperature": 0.5, "num_predict": 2, "stop": ["x"], "repeat_penalty": 1}),
        json!([{"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}, {"type": "tool_use", "id": "a",
            "name": "f", "input": {}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type":
            "text", "text": "x"}]}, {"type": "document", "source": {"type": "text", "data": "x"}}]}]),
        json!([["a", -1], [5, false]]),
        json!([{"filename": "a", "text": "b"}]),
        json!(["a", 5]),
        json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {"role": "tool", "content": "x"}]),
        json!("base64"),
        json!({"regex": "[a-z]+"}),
        json!({"5": 1, "99999": -100}),
        json!({"include_usage": true}),
        json!("auto"),
        json!(1),
        json!(0),
        json!(2.5),
        json!(-1),
        json!(true),
        json!(false),
        json!(null),
    ])
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        Just(json!("\u{0}\u{fffd}😀")),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((prop_oneof![Just("type".to_string()), "[a-z_]{1,8}"], inner), 0..4)
                .prop_map(|fields| Value::Object(Map::from_iter(fields))),
        ]
    })
}

fn request() -> impl Strategy<Value = Value> {
    let value = prop_oneof![3 => plausible(), 1 => any_json()];
    let fields = prop::collection::vec((prop::sample::select(&FIELDS[..]), value), 0..6);
    (fields, prop_oneof![4 => Just(json!(2)), 1 => any_json()], any::<bool>(), any::<bool>()).prop_map(
        |(fields, max_tokens, prompt, messages)| {
            let mut body = Map::new();
            if prompt {
                body.insert("prompt".into(), json!("One"));
                body.insert("input".into(), json!("One"));
            }
            if messages {
                body.insert("messages".into(), json!([{"role": "user", "content": "hi"}]));
            }
            body.extend(fields.into_iter().map(|(name, value)| (name.to_string(), value)));
            // Without a limit, responses may be as long as the context; these tests are about the input.
            body.insert("max_tokens".into(), max_tokens.clone());
            body.insert("max_output_tokens".into(), max_tokens.clone());
            body.insert("max_completion_tokens".into(), if max_tokens == json!(2) { json!(2) } else { json!(null) });
            Value::Object(body)
        },
    )
}

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::start)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if testkit::everything() { 4096 } else { 384 }, ..ProptestConfig::default() })]

    #[test]
    fn p22_no_request_brings_a_5xx_or_an_answer_without_the_error_object(
        path in prop::sample::select(&PATHS[..]),
        mut body in request(),
    ) {
        if path.starts_with("/api/") && body["options"].is_null() {
            body["options"] = json!({"num_predict": 2});
        }
        let reply = server().post(path, &body);
        if reply.status == 200 {
            let failed = ["\"server_error\"", "\"api_error\""].iter().any(|kind| reply.body.contains(kind));
            prop_assert!(!failed, "{path} {body}: {}", reply.body);
        } else {
            prop_assert!((400..500).contains(&reply.status), "{path} {body}: {} {}", reply.status, reply.body);
            let keys = |value: &Value| {
                value.as_object().map(|fields| fields.keys().cloned().collect::<Vec<String>>()).unwrap_or_default()
            };
            let whole = reply.json();
            let expected: (&[&str], &[&str]) = match path {
                path if path.starts_with("/v1/messages") => (&["type", "error", "request_id"], &["type", "message"]),
                path if path.starts_with("/api/") => (&["error"], &[]),
                "/completion" | "/infill" | "/apply-template" | "/embedding" if whole["error"]["n_ctx"].is_null() => {
                    (&["error"], &["code", "message", "type"])
                }
                "/completion" | "/infill" | "/apply-template" | "/embedding" => {
                    (&["error"], &["code", "message", "type", "n_prompt_tokens", "n_ctx"])
                }
                _ => (&["error"], &["message", "type", "param", "code"]),
            };
            prop_assert_eq!(keys(&whole), expected.0);
            prop_assert_eq!(keys(&whole["error"]), expected.1);
            let message = reply.message();
            prop_assert!(!message.is_empty() && message.len() < 2000 && !message.contains('\n'), "{}", message);
        }
    }
}

/// Parts of grammars of all forms.
const GRAMMAR_PARTS: [&str; 46] = [
    "a",
    "\"a\"",
    "\"",
    "/[a-z]+/",
    "/",
    "[a-z]",
    "[^a]",
    "[",
    "]",
    "(",
    ")",
    "{",
    "}",
    "{2,3}",
    "*",
    "+",
    "?",
    "|",
    "&",
    "~",
    ":",
    " ::= ",
    "\n",
    " ",
    "\\",
    "\\d",
    "\\p{L}",
    "start",
    "root",
    "A",
    "a: ",
    "A: ",
    "%json {\"type\": \"null\"}",
    "%ignore ",
    "#",
    ",",
    "{\"$ref\": \"#\"}",
    "{\"anyOf\": [",
    "{\"type\": \"object\", \"properties\": {\"a\": ",
    "{\"not\": ",
    "\"pattern\": ",
    "true",
    "1",
    "-",
    "^",
    "é",
];

proptest! {
    #[test]
    fn bytes_that_are_not_json_are_refused(path in prop::sample::select(&PATHS[..]), bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        prop_assume!(serde_json::from_slice::<Value>(&bytes).is_err());
        let reply = server().send("POST", path, &[("Content-Type", "application/json")], &bytes);
        prop_assert_eq!(reply.status, if path == "/quire/state" { 405 } else { 400 });
        reply.message();
    }

    #[test]
    fn what_libfuzzer_tries_holds_for_any_bytes(route in any::<u8>(), body in request(), bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        crate::fuzzed::request(&bytes);
        crate::fuzzed::request(&[&[route], body.to_string().as_bytes()].concat());
    }

    #[test]
    fn a_grammar_of_any_form_is_compiled_or_refused_in_one_line(
        form in any::<u8>(),
        parts in prop::collection::vec(prop::sample::select(&GRAMMAR_PARTS[..]), 0..24),
    ) {
        crate::fuzzed::grammar(&[&[form], parts.concat().as_bytes()].concat());
    }

    #[test]
    fn pieces_of_text_add_up_whatever_the_tokens(
        prompt in prop::collection::vec(any::<u16>(), 0..8),
        output in prop::collection::vec(any::<u16>(), 0..24),
        stop in prop::collection::vec("[ a-e]{0,2}", 0..3),
        skip_special_tokens: bool,
    ) {
        crate::fuzzed::detokeniser(&prompt, &output, &stop, skip_special_tokens);
    }
}
