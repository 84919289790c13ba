//! Ollama's API: an answer is that of our chat, and the lines of a stream add up to it.

use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Reply, Server, config};
use serde_json::{Value, json};
use server::ServerOptions;
use text::{ReasoningFormat, ToolFormat};

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";
const QUESTION: &str = "What is the capital of France?";

/// The lines of a stream, which is the default.
fn lines(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let reply = server.post(path, body);
    assert_eq!((reply.status, reply.header("content-type")), (200, "application/x-ndjson"), "{}", reply.body);
    let lines: Vec<Value> = reply.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(reply.body.ends_with('\n') && !lines.is_empty());
    lines
}

/// The answer as a client assembles it from the lines.
fn assembled(lines: &[Value]) -> Value {
    let (last, others) = lines.split_last().unwrap();
    assert!(others.iter().all(|line| line["done"] == false && line.get("eval_count").is_none()));
    let mut whole = last.clone();
    let grow = |whole: &mut Value, more: &Value| match more {
        Value::String(text) => *whole = format!("{}{text}", whole.as_str().unwrap_or_default()).into(),
        Value::Array(items) => {
            let mut all = whole.as_array().cloned().unwrap_or_default();
            all.extend(items.clone());
            *whole = all.into();
        }
        _ => {}
    };
    for field in ["content", "thinking", "tool_calls"] {
        let mut sum = Value::Null;
        others.iter().for_each(|line| grow(&mut sum, &line["message"][field]));
        if !sum.is_null() && whole["message"].is_object() {
            whole["message"][field] = sum;
        }
    }
    for field in ["response", "thinking", "logprobs"] {
        let mut sum = Value::Null;
        others.iter().for_each(|line| grow(&mut sum, &line[field]));
        if !sum.is_null() {
            whole[field] = sum;
        }
    }
    whole
}

/// An answer without times and ids, after checking the times.
fn stripped(mut answer: Value) -> Value {
    assert!(answer["created_at"].as_str().unwrap().starts_with("20"));
    let nanoseconds = |name: &str| answer[name].as_u64().unwrap_or_else(|| panic!("{name}"));
    let (prompt, eval) = (nanoseconds("prompt_eval_duration"), nanoseconds("eval_duration"));
    assert!(nanoseconds("total_duration") >= prompt + eval && eval > 0 && nanoseconds("load_duration") == 0);
    let fields = answer.as_object_mut().unwrap();
    for name in ["created_at", "total_duration", "prompt_eval_duration", "eval_duration"] {
        fields.remove(name);
    }
    for call in answer["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
        call.as_object_mut().unwrap().remove("id");
    }
    answer
}

/// Runs the request whole and as a stream, compares the two and returns the whole answer.
fn both(server: &Server, path: &str, mut body: Value) -> Value {
    let streamed = assembled(&lines(server, path, &body));
    body["stream"] = json!(false);
    let whole = server.ok(path, body);
    assert_eq!(stripped(streamed), stripped(whole.clone()));
    whole
}

fn error(reply: &Reply) -> (u16, String) {
    let body = reply.json();
    assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
    (reply.status, body["error"].as_str().unwrap().to_string())
}

#[test]
fn an_answer_is_that_of_the_chat_whole_and_streamed() {
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]);
    let options = json!({"temperature": 0, "num_predict": 32, "num_ctx": 4096, "repeat_penalty": 1.0, "an_option": 1});
    let body = json!({"model": "quire-demo:latest", "messages": messages, "options": options, "keep_alive": "5m"});
    let answer = both(&SERVER, CHAT, body);
    let chat =
        SERVER.ok("/v1/chat/completions", json!({"messages": messages, "temperature": 0, "max_completion_tokens": 32}));
    assert_eq!(answer["message"], json!({"role": "assistant", "content": chat["choices"][0]["message"]["content"]}));
    assert_eq!((&answer["model"], &answer["done_reason"]), (&json!("quire-demo:latest"), &json!("stop")));
    assert_eq!(answer["prompt_eval_count"], chat["usage"]["prompt_tokens"]);
    assert_eq!(answer["eval_count"], chat["usage"]["completion_tokens"]);
    // The same as a prompt with a system message.
    let body = json!({"prompt": QUESTION, "system": "Be brief.", "options": options});
    let answer = both(&SERVER, GENERATE, body);
    assert_eq!(answer["response"], chat["choices"][0]["message"]["content"]);
    // Drawn tokens with a seed, and log probabilities.
    let options = json!({"temperature": 1.5, "seed": 7, "top_k": 30, "num_predict": 6, "stop": ["never written"]});
    let body = json!({"messages": messages, "options": options, "logprobs": true, "top_logprobs": 2});
    let answer = both(&SERVER, CHAT, body);
    let body = json!({"messages": messages, "temperature": 1.5, "seed": 7, "top_k": 30, "max_tokens": 6,
        "logprobs": true, "top_logprobs": 2});
    let chat = &SERVER.ok("/v1/chat/completions", body)["choices"][0];
    assert_eq!(answer["message"]["content"].as_str().unwrap(), chat["message"]["content"].as_str().unwrap_or_default());
    assert_eq!(answer["logprobs"], chat["logprobs"]["content"]);
}

#[test]
fn a_raw_prompt_is_completed_as_it_is() {
    let options = json!({"temperature": 0, "num_predict": 8});
    let answer =
        both(&SERVER, GENERATE, json!({"prompt": "The capital of France is", "raw": true, "options": options}));
    let body = json!({"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8});
    let completion = SERVER.ok("/v1/completions", body);
    assert_eq!(answer["response"], completion["choices"][0]["text"]);
    assert_eq!(answer["prompt_eval_count"], completion["usage"]["prompt_tokens"]);
    assert_eq!(answer["done_reason"], "length");
}

#[test]
fn a_limit_below_1_is_none_and_a_greater_one_than_the_context_is_cut() {
    for limit in [-1, -2, 0, 100_000] {
        let body = json!({"prompt": "a b", "raw": true, "options": {"num_predict": limit}, "stream": false});
        let answer = SERVER.ok(GENERATE, body);
        let count = |name: &str| answer[name].as_u64().unwrap();
        assert!(
            answer["done_reason"] == "stop" || count("eval_count") + count("prompt_eval_count") == 1024,
            "{answer}"
        );
    }
}

#[test]
fn thoughts_and_calls_are_returned_and_calls_arrive_whole() {
    let options = ServerOptions {
        reasoning_parser: Some(ReasoningFormat::Qwen3),
        tool_call_parser: Some(ToolFormat::Hermes),
        ..ServerOptions::default()
    };
    let server = Server::with(config(), options, Duration::ZERO);
    let call = |x: u32| format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {{\"x\": {x}}}}}\n</tool_call>");
    let text = format!("<think>2 + 2 = 4</think>Let me see: 世.\n{}\n{}", call(1), call(2));
    let tool =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}});
    let options = json!({"temperature": 0, "num_predict": 200});
    let mut body = json!({"messages": [{"role": "user", "content": QUESTION}], "tools": [tool], "options": options,
        "structured_outputs": {"choice": [text]}, "think": true});
    let lines = lines(&server, CHAT, &body);
    let with_calls = lines.iter().filter(|line| line["message"]["tool_calls"].is_array()).count();
    assert!(with_calls > 0 && lines.len() > 10);
    let message = both(&server, CHAT, body.clone())["message"].clone();
    assert_eq!(message["thinking"], "2 + 2 = 4");
    assert_eq!(message["content"].as_str().unwrap().trim(), "Let me see: 世.");
    let function = |index: usize| json!({"index": index, "name": "f", "arguments": {"x": index + 1}});
    let found: Vec<&Value> = message["tool_calls"].as_array().unwrap().iter().map(|call| &call["function"]).collect();
    assert_eq!(found, [&function(0), &function(1)]);
    // A completion has no tools, so that the call is text.
    body = json!({"prompt": QUESTION, "options": options, "structured_outputs": {"choice": [text]}});
    let answer = both(&server, GENERATE, body);
    assert_eq!(answer["thinking"], "2 + 2 = 4");
    assert!(answer["response"].as_str().unwrap().ends_with("</tool_call>"), "{answer}");
    let messages = json!([
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [
            {"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"index": 1, "name": "g", "arguments": {}}}]},
        {"role": "tool", "tool_name": "g", "content": "2"},
        {"role": "tool", "content": "1"},
    ]);
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let same = json!([
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.",
            "tool_calls": [call("call00001", "f", "{\"x\":1}"), call("call00002", "g", "{}")]},
        {"role": "tool", "name": "g", "tool_call_id": "call00002", "content": "2"},
        {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "1"},
    ]);
    let options = json!({"temperature": 0, "num_predict": 6});
    let answer = server.ok(CHAT, json!({"messages": messages, "tools": [tool], "options": options, "stream": false}));
    let chat = server
        .ok("/v1/chat/completions", json!({"messages": same, "tools": [tool], "temperature": 0, "max_tokens": 6}));
    assert_eq!(
        answer["message"]["content"].as_str().unwrap(),
        chat["choices"][0]["message"]["content"].as_str().unwrap_or_default()
    );
    assert_eq!(answer["prompt_eval_count"], chat["usage"]["prompt_tokens"]);
}

#[test]
fn a_format_constrains_the_answer() {
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["é"]}}, "required": ["a"],
        "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}});
    for (path, what) in
        [(CHAT, json!({"messages": [{"role": "user", "content": QUESTION}]})), (GENERATE, json!({"prompt": QUESTION}))]
    {
        let ask = |format: &Value| {
            let mut body = what.clone();
            (body["format"], body["options"]) = (format.clone(), json!({"num_predict": 60, "temperature": 0}));
            let answer = both(&SERVER, path, body);
            answer["message"]["content"].as_str().or(answer["response"].as_str()).unwrap().to_string()
        };
        assert_eq!(ask(&schema), r#"{"a":"é"}"#);
        assert!(ask(&json!("json")).starts_with('{'));
        assert!(!ask(&json!("")).starts_with('{'));
    }
}

#[test]
fn a_request_without_a_prompt_only_loads_the_model() {
    for (path, body, reason) in [
        (CHAT, json!({"messages": []}), "load"),
        (CHAT, json!({"keep_alive": 0}), "unload"),
        (GENERATE, json!({"model": "quire-demo", "keep_alive": "10m"}), "load"),
        (GENERATE, json!({"prompt": "", "keep_alive": "0"}), "unload"),
    ] {
        let answer = SERVER.ok(path, body);
        assert_eq!((&answer["done"], &answer["done_reason"]), (&json!(true), &json!(reason)), "{answer}");
    }
    assert_eq!(error(&SERVER.post(GENERATE, &json!({"model": "other"}))).0, 404);
}

#[test]
fn embeddings_have_length_1_or_are_those_of_the_model_and_long_texts_are_cut() {
    let answer =
        SERVER.ok("/api/embed", json!({"model": "quire-demo", "input": ["Hello", "world"], "keep_alive": "5m"}));
    let vectors = answer["embeddings"].as_array().unwrap();
    assert_eq!(vectors.len(), 2);
    let ours = SERVER.ok("/v1/embeddings", json!({"input": ["Hello", "world"], "use_activation": true}));
    for (vector, ours) in vectors.iter().zip(ours["data"].as_array().unwrap()) {
        assert_eq!(vector, &ours["embedding"]);
        let length: f64 = vector.as_array().unwrap().iter().map(|x| x.as_f64().unwrap().powi(2)).sum();
        assert!((length - 1.0).abs() < 1e-4, "{length}");
    }
    assert_eq!(answer["prompt_eval_count"], ours["usage"]["prompt_tokens"]);
    let one = SERVER.ok("/api/embeddings", json!({"prompt": "Hello"}));
    assert_eq!(one["embedding"], SERVER.ok("/v1/embeddings", json!({"input": "Hello"}))["data"][0]["embedding"]);
    let long = "word ".repeat(3000);
    assert_eq!(SERVER.ok("/api/embed", json!({"input": long}))["embeddings"].as_array().unwrap().len(), 1);
    let refused = error(&SERVER.post("/api/embed", &json!({"input": long, "truncate": false})));
    assert!(refused.0 == 400 && refused.1.starts_with("input: "), "{refused:?}");
}

#[test]
fn the_served_model_is_listed_and_described_under_its_names() {
    let options = ServerOptions { served_model_names: vec!["a".into(), "b:8b".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let tags = server.get("/api/tags").json();
    let names: Vec<&Value> = tags["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
    assert_eq!(names, ["a:latest", "b:8b"]);
    let ps = server.get("/api/ps").json();
    for (tag, loaded) in tags["models"].as_array().unwrap().iter().zip(ps["models"].as_array().unwrap()) {
        assert_eq!((&tag["digest"], &tag["model"]), (&loaded["digest"], &loaded["name"]));
        assert_eq!(tag["digest"].as_str().unwrap().len(), 64);
        assert_eq!(tag["details"]["quantization_level"], "BF16");
        assert_eq!((&loaded["context_length"], &tag["details"]["family"]), (&json!(1024), &json!("llama")));
    }
    assert_ne!(tags["models"][0]["digest"], tags["models"][1]["digest"]);
    for body in [json!({"model": "a"}), json!({"name": "a:latest"}), json!({"model": "b:8b", "verbose": true})] {
        let shown = server.ok("/api/show", body.clone());
        assert!(shown["parameters"].as_str().unwrap().contains("num_ctx 1024"), "{shown}");
        assert_eq!(shown["model_info"]["llama.context_length"], 1024);
        let capabilities = shown["capabilities"].as_array().unwrap();
        assert!(capabilities.contains(&json!("completion")) && !capabilities.contains(&json!("insert")), "{shown}");
        assert_eq!(server.ok("/api/pull", body), json!({"status": "success"}));
    }
    let version = server.get("/api/version").json()["version"].as_str().unwrap().to_string();
    assert!(version.split('.').all(|number| number.parse::<u32>().is_ok()), "{version}");
}

#[test]
fn errors_are_one_line_and_bodies_need_no_media_type_unless_a_browser_sends_them() {
    assert_eq!(error(&SERVER.post("/api/show", &json!({"model": "other"}))).0, 404);
    assert_eq!(error(&SERVER.post("/api/pull", &json!({"model": "other"}))).0, 404);
    assert_eq!(error(&SERVER.get("/api/nothing")).0, 404);
    for path in ["/api/create", "/api/copy", "/api/push"] {
        let (status, message) = error(&SERVER.post(path, &json!({"model": "a"})));
        assert!(status == 403 && message.contains("clients may not change the models"), "{message}");
    }
    assert_eq!(error(&SERVER.send("DELETE", "/api/delete", &[], b"{\"model\": \"a\"}")).0, 403);
    let body = json!({"prompt": "a", "options": {"num_predict": 1}, "stream": false}).to_string();
    let send = |headers: &[(&str, &str)]| SERVER.send("POST", GENERATE, headers, body.as_bytes());
    for headers in
        [&[][..], &[("Content-Type", "application/x-www-form-urlencoded")], &[("Content-Type", "text/plain")]]
    {
        assert_eq!(send(headers).status, 200, "{headers:?}");
    }
    let address = format!("http://{}", SERVER.address);
    let origin = ("Origin", address.as_str());
    assert_eq!(send(&[origin, ("Content-Type", "application/json")]).status, 200);
    for headers in [&[origin][..], &[origin, ("Content-Type", "text/plain")], &[("Sec-Fetch-Site", "same-origin")]] {
        assert_eq!(error(&send(headers)).0, 415, "{headers:?}");
    }
    assert_eq!(error(&send(&[("Origin", "http://evil.example")])).0, 403);
    for (path, fields, param) in [
        (CHAT, json!({"messages": ["hi"]}), "messages[0]"),
        (CHAT, json!({"messages": [{"content": "hi"}]}), "messages[0].role"),
        (CHAT, json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (CHAT, json!({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}), "messages[0].images"),
        (
            CHAT,
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
            "messages[0].tool_calls[0].function.name",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]}),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (CHAT, json!({"tools": [{"type": "function"}]}), "tools[0].function.name"),
        (CHAT, json!({"options": {"temperature": "hot"}}), "options.temperature"),
        (CHAT, json!({"options": {"num_predict": 1.5}}), "options.num_predict"),
        (CHAT, json!({"options": {"top_p": 2}}), "options.top_p"),
        (CHAT, json!({"options": {"stop": [5]}}), "options.stop"),
        (CHAT, json!({"options": {"mirostat": 2}}), "options.mirostat"),
        (CHAT, json!({"options": {"repeat_penalty": 1.1}}), "options.repeat_penalty"),
        (CHAT, json!({"options": {"repeat_penalty": -1, "repeat_last_n": -1}}), "options.repeat_penalty"),
        (CHAT, json!({"options": 5}), "options"),
        (CHAT, json!({"format": "xml"}), "format"),
        (CHAT, json!({"format": {"type": "nothing"}}), "format"),
        (CHAT, json!({"think": true}), "think"),
        (CHAT, json!({"think": "much"}), "think"),
        (CHAT, json!({"stream": "no"}), "stream"),
        (CHAT, json!({"top_logprobs": 3}), "top_logprobs"),
        (GENERATE, json!({"prompt": 5}), "prompt"),
        (GENERATE, json!({"prompt": "word ".repeat(3000)}), "prompt"),
        (GENERATE, json!({"template": "{{ .Prompt }}"}), "template"),
        (GENERATE, json!({"context": [1, 2]}), "context"),
        (GENERATE, json!({"images": ["x"]}), "images"),
        (GENERATE, json!({"suffix": "x"}), "suffix"),
    ] {
        let mut body = json!({"messages": [{"role": "user", "content": "a"}], "prompt": "a", "stream": false});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (status, message) = error(&SERVER.post(path, &body));
        assert_eq!(status, 400, "{fields}: {message}");
        assert!(message.starts_with(&format!("{param}: ")) && !message.contains('\n'), "{fields}: {message}");
    }
    let accepted = json!({"temperature": 0, "num_predict": 2, "repeat_penalty": 1.1, "repeat_last_n": -1, "mirostat": 0,
        "tfs_z": 1.0, "seed": -1, "num_gpu": 1, "stop": "x"});
    let body =
        json!({"messages": [{"role": "user", "content": "a"}], "options": accepted, "think": false, "format": ""});
    assert_eq!(SERVER.post(CHAT, &body).status, 200);
}
