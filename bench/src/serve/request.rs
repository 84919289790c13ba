//! Sending one request and reading its answer, with the arrival time of every piece of text.
//!
//! Token counts are those of the server's `usage`, requested with `stream_options`. If a server sends none, pieces are counted
//! instead, and the report says so.

use std::time::Instant;

use serde_json::{Map, Value, json};

use super::Endpoint;
use super::dataset::{Prompt, Question};
use super::measure::Record;
use crate::client::{Server, printable};

/// Sends requests for one model of one server.
pub struct Sender {
    server: Server,
    model: String,
    endpoint: Endpoint,
    /// Fields of every request beside its prompt.
    fields: Map<String, Value>,
}

/// Name of the first model that the server lists.
///
/// # Errors
/// The server does not answer, or lists no model.
pub async fn first_model(server: &Server) -> Result<String, String> {
    let text = server.send("/v1/models", None).await?.text().await?;
    let list: Value = serde_json::from_str(&text).map_err(|error| format!("/v1/models: {error}"))?;
    let name = list["data"][0]["id"].as_str();
    name.map(printable)
        .ok_or_else(|| "/v1/models lists no model, expected at least one; name the model with --model".to_string())
}

impl Sender {
    /// A sender for this model of this server.
    pub fn new(server: Server, model: &str, endpoint: Endpoint, fields: Map<String, Value>) -> Sender {
        Sender { server, model: model.to_string(), endpoint, fields }
    }

    /// Sends a request and reads its answer. Times are seconds since `start`; `meant` is the scheduled time.
    pub async fn send(&self, question: &Question, start: Instant, meant: Instant) -> Record {
        let seconds = |at: Instant| at.duration_since(start).as_secs_f64();
        let mut record = Record { meant: seconds(meant), sent: seconds(Instant::now()), ..Record::default() };
        if let Err(problem) = self.read(question, &mut record, &seconds).await {
            record.problem = Some(problem);
        }
        record.end = seconds(Instant::now());
        if !record.counted_by_usage {
            (record.prompt_tokens, record.output_tokens) = (question.length, record.pieces.len());
        }
        record
    }

    async fn read(
        &self,
        question: &Question,
        record: &mut Record,
        seconds: &impl Fn(Instant) -> f64,
    ) -> Result<(), String> {
        let (path, body) = self.body(question);
        let mut answer = self.server.send(path, Some(body.to_string())).await?;
        while let Some(data) = answer.event().await? {
            if data == "[DONE]" {
                return Ok(());
            }
            let chunk: Value =
                serde_json::from_str(&data).map_err(|error| format!("found an event that is not JSON: {error}"))?;
            if let Some(message) = chunk["error"]["message"].as_str() {
                return Err(printable(message));
            }
            if has_output(&chunk["choices"][0]) {
                record.pieces.push(seconds(Instant::now()));
                let choice = &chunk["choices"][0];
                let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
                record.text.push_str(text.unwrap_or_default());
            }
            if let Some(output) = chunk["usage"]["completion_tokens"].as_u64() {
                let prompt = chunk["usage"]["prompt_tokens"].as_u64().unwrap_or(0);
                (record.prompt_tokens, record.output_tokens) = (prompt as usize, output as usize);
                record.counted_by_usage = true;
            }
        }
        Err("the stream ended without [DONE]".to_string())
    }

    fn body(&self, question: &Question) -> (&'static str, Value) {
        let mut body = json!({
            "model": self.model,
            "max_tokens": question.output,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        self.fields.iter().for_each(|(name, value)| body[name] = value.clone());
        let (path, field, prompt) = match (self.endpoint, &question.prompt) {
            (Endpoint::Chat, Prompt::Text(text)) => {
                ("/v1/chat/completions", "messages", json!([{"role": "user", "content": text}]))
            }
            (Endpoint::Completions, Prompt::Text(text)) => ("/v1/completions", "prompt", json!(text)),
            // `dataset::read` refuses token ids for chats.
            (_, Prompt::Tokens(tokens)) => ("/v1/completions", "prompt", json!(tokens)),
        };
        body[field] = prompt;
        (path, body)
    }
}

/// Whether an event carries output: text, reasoning or a part of a tool call. The first event of a chat has only the role.
fn has_output(choice: &Value) -> bool {
    let filled = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
    let delta = &choice["delta"];
    filled(&choice["text"])
        || ["content", "reasoning_content", "reasoning"].iter().any(|name| filled(&delta[name]))
        || delta["tool_calls"].is_array()
}
