//! Structured output over HTTP: all fields, on both APIs, whole and streamed; and invalid ones.

use std::sync::LazyLock;

use crate::common::Server;
use serde_json::{Value, json};

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// A request with other sampling fields.
fn request(path: &str, fields: &Value) -> Value {
    let mut body = match path {
        CHAT => json!({"messages": [{"role": "user", "content": "Which colour?"}]}),
        "/v1/responses" => json!({"input": "Which colour?"}),
        _ => json!({"prompt": "Which colour?"}),
    };
    body["max_tokens"] = json!(60);
    body["temperature"] = json!(1.2);
    body["seed"] = json!(5);
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn text(choice: &Value) -> &str {
    choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap()
}

fn colour() -> Value {
    let colour = json!({"type": "string", "enum": ["red", "grün", "青🙂"]});
    json!({"type": "object", "properties": {"colour": colour}, "required": ["colour"], "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false}})
}

fn is_colour(text: &str) -> bool {
    ["red", "grün", "青🙂"].iter().any(|colour| text == format!("{{\"colour\":\"{colour}\"}}"))
}

#[test]
fn every_field_that_asks_for_a_grammar_gets_it_on_both_apis_whole_and_streamed() {
    let format = json!({"type": "json_schema", "json_schema": {"name": "c", "schema": colour(), "strict": true}});
    let loose = json!({"type": "json_schema", "json_schema": {"name": "c", "schema": colour()}});
    let ab = |text: &str| ["a", "b b"].contains(&text);
    let digits = |text: &str| text.len() == 3 && text.chars().all(|c| c.is_ascii_digit());
    type Check<'a> = &'a dyn Fn(&str) -> bool;
    let tag = json!({"type": "structural_tag", "format": {"type": "regex", "pattern": "[0-9]{3}"}});
    let cases: [(Value, Check); 23] = [
        (json!({"response_format": format}), &is_colour),
        (json!({"response_format": loose}), &is_colour),
        (json!({"structured_outputs": {"json": colour()}}), &is_colour),
        (json!({"structured_outputs": {"json": colour().to_string()}}), &is_colour),
        (json!({"structured_outputs": {"choice": ["a", "b b"]}}), &ab),
        (json!({"structured_outputs": {"regex": "[0-9]{3}"}}), &digits),
        (json!({"structured_outputs": {"grammar": "start: \"a\" | \"b b\""}}), &ab),
        (json!({"structured_outputs": {"grammar": "root ::= \"a\" | \"b b\""}}), &ab),
        (json!({"response_format": tag}), &digits),
        (json!({"structured_outputs": {"structural_tag": tag.to_string()}}), &digits),
        (json!({"guided_json": colour()}), &is_colour),
        // The names of llama-server, Together and SGLang.
        (json!({"response_format": {"type": "json_object", "schema": colour()}}), &is_colour),
        (json!({"response_format": {"type": "json_schema", "schema": colour()}}), &is_colour),
        (json!({"json_schema": colour()}), &is_colour),
        (json!({"json_schema": colour().to_string(), "grammar": ""}), &is_colour),
        (json!({"regex": "[0-9]{3}"}), &digits),
        (json!({"grammar": "start: \"a\" | \"b b\""}), &ab),
        (json!({"ebnf": "start: \"a\" | \"b b\""}), &ab),
        (
            json!({"structured_outputs": {"regex": "[0-9]{3}", "disable_any_whitespace": false, "whitespace_pattern": null}}),
            &digits,
        ),
        (json!({"guided_regex": "[0-9]{3}", "guided_decoding_backend": "outlines"}), &digits),
        (json!({"guided_choice": ["a", "b b"]}), &ab),
        (json!({"guided_grammar": "start: \"a\" | \"b b\""}), &ab),
        (json!({"guided_regex": "[0-9]{3}", "response_format": {"type": "text"}, "structured_outputs": {}}), &digits),
    ];
    for path in [COMPLETIONS, CHAT] {
        for (fields, holds) in &cases {
            let body = request(path, fields);
            let whole = SERVER.ok(path, body.clone());
            assert!(holds(text(&whole["choices"][0])), "{fields}: {whole}");
            assert_eq!(whole["choices"][0]["finish_reason"], "stop");
            assert_eq!(whole["choices"][0]["stop_reason"], Value::Null);
            let chunks = SERVER.stream(path, body);
            let piece = |chunk: &Value| {
                let choice = &chunk["choices"][0];
                choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default().to_string()
            };
            assert_eq!(chunks.iter().map(piece).collect::<String>(), text(&whole["choices"][0]));
        }
    }
}

/// The white space of JSON, or of its beginning, that is not in strings.
fn white_space(text: &str) -> String {
    let (mut is_string, mut is_escaped, mut found) = (false, false, String::new());
    for c in text.chars() {
        match c {
            '"' if !is_escaped => is_string = !is_string,
            c if c.is_whitespace() && !is_string => found.push(c),
            _ => {}
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    found
}

#[test]
fn white_space_of_json_is_none_or_what_a_pattern_matches_where_a_request_says_so() {
    let pair = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x y"]}},
        "required": ["a", "b"], "additionalProperties": false});
    for of in
        [json!({"json_object": true}), json!({"json": pair}), json!({"json": pair.to_string()}), json!({"json": true})]
    {
        let found = |path: &str, name: &str, value: Value| {
            let mut constraint = of.clone();
            constraint[name] = value;
            let answer = SERVER.ok(path, request(path, &json!({"structured_outputs": constraint, "n": 8})));
            let choices = answer["choices"].as_array().unwrap().clone();
            let of_pair = choices.iter().filter(|choice| choice["finish_reason"] == "stop" && of["json"].is_object());
            let is_pair = |choice| serde_json::from_str::<Value>(text(choice)).is_ok_and(|v| v["b"] == "x y");
            assert!(of_pair.into_iter().all(is_pair), "{answer}");
            choices.iter().map(|choice| white_space(text(choice))).collect::<String>()
        };
        for path in [COMPLETIONS, CHAT] {
            let free = found(path, "whitespace_pattern", Value::Null);
            assert!(!free.is_empty() || of["json"] == true, "{of}: the model writes none by itself");
            assert_eq!(found(path, "disable_any_whitespace", json!(true)), "", "{of}");
            let tabs = found(path, "whitespace_pattern", json!("\\t"));
            assert!(tabs.chars().all(|c| c == '\t'), "{of}: {tabs:?}");
        }
    }
}

#[test]
fn a_grammar_works_with_other_fields() {
    for path in [COMPLETIONS, CHAT] {
        let grammar =
            json!({"guided_json": colour(), "n": 3, "best_of": 5, "frequency_penalty": 1.0, "min_tokens": 40});
        let answer = SERVER.ok(path, request(path, &grammar));
        let choices = answer["choices"].as_array().unwrap();
        assert!(choices.len() == 3 && choices.iter().all(|choice| is_colour(text(choice))), "{answer}");
        let cut = SERVER.ok(path, request(path, &json!({"guided_json": colour(), "max_tokens": 2})));
        assert_eq!(cut["choices"][0]["finish_reason"], "length");
        let stop = json!({"guided_choice": ["one two"], "stop": "two"});
        let stopped = SERVER.ok(path, request(path, &stop));
        assert_eq!((text(&stopped["choices"][0]), &stopped["choices"][0]["stop_reason"]), ("one ", &json!("two")));
    }
    let scored = SERVER.ok(COMPLETIONS, request(COMPLETIONS, &json!({"guided_choice": ["red"], "logprobs": 2})));
    let logprobs = &scored["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), logprobs["token_logprobs"].as_array().unwrap().len());
    assert_eq!(scored["usage"]["completion_tokens"], logprobs["tokens"].as_array().unwrap().len());
}

#[test]
fn objects_of_a_closed_schema_have_the_properties_that_it_names() {
    let object = json!({"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]});
    let list = |object: &Value| json!({"type": "array", "minItems": 1, "maxItems": 1, "$defs": {"object": object}, "items": {"anyOf": [{"$ref": "#/$defs/object"}]}});
    let texts = |object: &Value, closed: bool| -> Vec<String> {
        let options =
            json!({"json": list(object), "disable_additional_properties": closed, "disable_any_whitespace": true});
        let body = |seed: u64| json!({"prompt": "A list: ", "max_tokens": 30, "temperature": 1, "seed": seed, "structured_outputs": options});
        (0..8).map(|seed| text(&SERVER.ok(COMPLETIONS, body(seed))["choices"][0]).to_string()).collect()
    };
    let is_named = |text: &String| [r#"[{"b":true}]"#, r#"[{"b":false}]"#].contains(&text.as_str());
    assert!(texts(&object, true).iter().all(is_named));
    assert!(!texts(&object, false).iter().all(is_named), "otherwise there may be others");
    // What the schema itself says holds.
    let mut open = object;
    open["additionalProperties"] = json!(true);
    assert_eq!(texts(&open, true), texts(&open, false));
}

#[test]
fn neighbours_of_a_held_request_are_free() {
    let free = request(CHAT, &json!({"temperature": 0, "max_tokens": 30}));
    let alone = text(&SERVER.ok(CHAT, free.clone())["choices"][0]).to_string();
    std::thread::scope(|scope| {
        for i in 0..12 {
            let (free, alone) = (&free, &alone);
            scope.spawn(move || match i % 2 {
                0 => assert_eq!(text(&SERVER.ok(CHAT, free.clone())["choices"][0]), alone),
                _ => {
                    let held = request(CHAT, &json!({"guided_json": colour(), "seed": i}));
                    assert!(is_colour(text(&SERVER.ok(CHAT, held)["choices"][0])));
                }
            });
        }
    });
}

#[test]
fn an_invalid_grammar_is_a_400_of_one_line_that_names_the_field() {
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    for (fields, param) in [
        (json!({"response_format": "json"}), "response_format"),
        (json!({"response_format": {"type": "yaml"}}), "response_format.type"),
        (json!({"response_format": {}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
            "response_format.json_schema",
        ),
        (json!({"response_format": schema(json!(5))}), "response_format.json_schema"),
        (json!({"response_format": schema(json!({"type": "banana"}))}), "response_format"),
        (json!({"response_format": schema(json!({"$ref": "http://example.com/x"}))}), "response_format"),
        (json!({"response_format": schema(json!({"enum": vec!["é".repeat(1000); 300]}))}), "response_format"),
        (json!({"structured_outputs": "x"}), "structured_outputs"),
        (json!({"structured_outputs": {"regex": "("}}), "structured_outputs"),
        (json!({"structured_outputs": {"regex": 5}}), "structured_outputs"),
        (json!({"structured_outputs": {"colour": "red"}}), "structured_outputs.colour"),
        (json!({"structured_outputs": {"json": {}, "zzz": 1}}), "structured_outputs.zzz"),
        (json!({"structured_outputs": {"json": {}, "whitespace_pattern": 5}}), "structured_outputs.whitespace_pattern"),
        (
            json!({"structured_outputs": {"regex": "a", "whitespace_pattern": " ?"}}),
            "structured_outputs.whitespace_pattern",
        ),
        (json!({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}), "structured_outputs"),
        (
            json!({"structured_outputs": {"json": {}, "disable_any_whitespace": "yes"}}),
            "structured_outputs.disable_any_whitespace",
        ),
        (
            json!({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": true}}),
            "structured_outputs.disable_any_whitespace",
        ),
        (
            json!({"structured_outputs": {"json": {}, "disable_any_whitespace": true, "whitespace_pattern": " "}}),
            "structured_outputs.whitespace_pattern",
        ),
        (
            json!({"structured_outputs": {"json": {}, "disable_additional_properties": 5}}),
            "structured_outputs.disable_additional_properties",
        ),
        (
            json!({"structured_outputs": {"regex": "a", "disable_additional_properties": true}}),
            "structured_outputs.disable_additional_properties",
        ),
        (json!({"structured_outputs": {"json_object": "yes"}}), "structured_outputs.json_object"),
        (json!({"structured_outputs": {"json": false}}), "structured_outputs"),
        (json!({"structured_outputs": {"json": {}, "json_object": true}}), "structured_outputs"),
        (json!({"response_format": {"type": "json_object", "schema": 5}}), "response_format.schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}}),
            "response_format.schema",
        ),
        (json!({"response_format": {"type": "json_object", "pattern": "a"}}), "response_format.pattern"),
        (json!({"response_format": {"type": "text", "schema": {}}}), "response_format.schema"),
        (json!({"response_format": {"type": "structural_tag"}}), "response_format"),
        (json!({"guided_whitespace_pattern": " "}), "guided_whitespace_pattern"),
        (json!({"regex": "a", "json_schema": {}}), "regex"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs"),
        (json!({"structured_outputs": {"structural_tag": {}}}), "structured_outputs.structural_tag"),
        (json!({"guided_json": "{"}), "guided_json"),
        (json!({"guided_json": [1]}), "guided_json"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"guided_choice": ["a", ""]}), "guided_choice"),
        (json!({"guided_choice": ["a", 5]}), "guided_choice"),
        (json!({"guided_regex": "(".repeat(5000)}), "guided_regex"),
        (json!({"guided_regex": "a".repeat(600_000)}), "guided_regex"),
        (json!({"guided_grammar": "begin: \"a\""}), "guided_grammar"),
        (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice"),
        (json!({"guided_regex": "a", "response_format": {"type": "json_object"}}), "guided_regex"),
        (json!({"guided_regex": "a", "use_beam_search": true, "n": 2}), "guided_regex"),
    ] {
        for path in [COMPLETIONS, CHAT] {
            let reply = SERVER.post(path, &request(path, &fields));
            assert_eq!(reply.status, 400, "{:.200}: {}", fields.to_string(), reply.body);
            let error = reply.error();
            assert_eq!(error["param"], param, "{:.200}: {error}", fields.to_string());
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(param) && !message.contains('\n') && message.len() < 1000, "{message}");
        }
    }
}

#[test]
fn keywords_that_are_not_enforced_are_named_in_a_header_and_refused_if_strict() {
    let schema =
        json!({"type": "array", "items": {"type": "null"}, "maxItems": 2, "uniqueItems": true, "not": {"const": 1}});
    let tool = |strict: bool| {
        let parameters = json!({"type": "object", "properties": {"a": schema}, "required": ["a"]});
        json!([{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}])
    };
    let format =
        |strict: bool| json!({"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": strict}});
    let called = |strict: bool| json!({"tools": tool(strict), "tool_choice": "required"});
    for (loose, strict) in [
        (json!({"response_format": format(false)}), json!({"response_format": format(true)})),
        (called(false), called(true)),
        (json!({"guided_json": schema}), json!({"tools": tool(true)})),
    ] {
        let reply = SERVER.post(CHAT, &request(CHAT, &loose));
        assert_eq!(reply.status, 200, "{loose}");
        assert_eq!(reply.header("x-quire-unenforced"), "not, uniqueItems", "{loose}");
        let reply = SERVER.post(CHAT, &request(CHAT, &strict));
        assert_eq!(reply.status, 400, "{strict}");
        assert!(reply.error()["message"].as_str().unwrap().contains("uniqueItems"), "{strict}");
    }
    let plain = SERVER.post(CHAT, &request(CHAT, &json!({"guided_json": colour()})));
    assert_eq!(plain.header("x-quire-unenforced"), "");
}

#[test]
fn a_grammar_that_other_fields_leave_no_token_is_an_error_whole_and_at_the_end_of_a_stream() {
    let digit = SERVER.ok("/tokenize", json!({"prompt": "7"}))["tokens"].clone();
    for path in [COMPLETIONS, CHAT, "/v1/responses"] {
        let mut body = request(path, &json!({"guided_choice": ["yes"], "allowed_token_ids": digit}));
        let whole = SERVER.post(path, &body);
        assert_eq!(whole.status, 400, "{}", whole.body);
        let message = whole.error()["message"].as_str().unwrap().to_string();
        assert!(message.starts_with("the grammar of this request failed: "), "{message}");
        body["stream"] = json!(true);
        let streamed = SERVER.post(path, &body);
        let last = streamed.body.lines().rev().find_map(|line| line.strip_prefix("data: ")).unwrap();
        let last: Value = serde_json::from_str(last).unwrap();
        let error = if path == "/v1/responses" { &last["response"]["error"] } else { &last["error"] };
        assert_eq!((streamed.status, error["message"].as_str()), (200, Some(message.as_str())), "{path}: {last}");
    }
}
