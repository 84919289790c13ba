//! A third-party client: `ureq`, with its connection pool.

use std::io::{BufRead, BufReader};
use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::common::Server;

/// The demo model.
pub static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

pub const COMPLETIONS: &str = "/v1/completions";
pub const CHAT: &str = "/v1/chat/completions";

static AGENT: LazyLock<ureq::Agent> =
    LazyLock::new(|| ureq::Agent::config_builder().http_status_as_error(false).build().into());

/// Status, content type and body.
pub struct Answer {
    pub status: u16,
    pub media_type: String,
    pub body: String,
}

fn url(server: &Server, path: &str) -> String {
    format!("http://{}{path}", server.address)
}

fn read(result: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Answer {
    let mut response = result.unwrap();
    let media_type = response.headers().get("content-type").map_or("", |value| value.to_str().unwrap()).to_string();
    Answer { status: response.status().as_u16(), media_type, body: response.body_mut().read_to_string().unwrap() }
}

pub fn get(path: &str) -> Answer {
    read(AGENT.get(url(&SERVER, path)).call())
}

/// Posts bytes as JSON.
pub fn send(path: &str, body: &[u8]) -> Answer {
    read(AGENT.post(url(&SERVER, path)).header("Content-Type", "application/json").send(body))
}

/// Posts a request to the given server and expects 200.
pub fn ask_at(server: &Server, path: &str, body: &Value) -> Value {
    let text = body.to_string();
    let answer = read(AGENT.post(url(server, path)).header("Content-Type", "application/json").send(text.as_bytes()));
    assert_eq!(answer.status, 200, "{body}: {}", answer.body);
    assert_eq!(answer.media_type, "application/json");
    serde_json::from_str(&answer.body).unwrap()
}

/// Posts a request and expects 200.
pub fn ask(path: &str, body: &Value) -> Value {
    ask_at(&SERVER, path, body)
}

/// Returns the chunks of a stream; checks its head, and that `[DONE]` is the last line and occurs once.
pub fn stream(path: &str, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let text = body.to_string();
    let request = AGENT.post(url(&SERVER, path)).header("Content-Type", "application/json");
    let response = request.send(text.as_bytes()).unwrap();
    assert_eq!(response.status().as_u16(), 200, "{body}");
    assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    let lines = BufReader::new(response.into_body().into_reader()).lines().map(Result::unwrap);
    let mut data: Vec<String> = lines.filter_map(|line| line.strip_prefix("data: ").map(str::to_string)).collect();
    assert_eq!(data.pop().as_deref(), Some("[DONE]"));
    data.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The text of each choice, of either API.
pub fn texts(answer: &Value) -> Vec<String> {
    let text = |choice: &Value| {
        choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap_or_default().to_string()
    };
    answer["choices"].as_array().unwrap().iter().map(text).collect()
}

/// The first text.
pub fn text(path: &str, body: &Value) -> String {
    texts(&ask(path, body)).remove(0)
}

/// Token ids without special ones.
pub fn ids(text: &str) -> Vec<u64> {
    let found = ask("/tokenize", &json!({"prompt": text, "add_special_tokens": false}));
    found["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

/// `base` with the fields of `more`.
pub fn with(base: &Value, more: &Value) -> Value {
    let mut body = base.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A completion of sixteen greedy tokens.
pub fn completion() -> Value {
    json!({"prompt": "The red fox", "max_tokens": 16, "temperature": 0})
}

/// A chat of sixteen greedy tokens.
pub fn chat() -> Value {
    json!({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 16, "temperature": 0})
}
