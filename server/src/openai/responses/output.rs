//! Output items, and the events that describe their growth.
//!
//! One item is open at a time. Output of another kind closes it: reasoning comes first, then text, then calls.

use std::collections::VecDeque;
use std::sync::Arc;

use serde_json::{Value, json};
use store::unix_seconds;

use super::json::Json;
use crate::app::App;
use crate::http::ApiError;
use crate::reply::{Part, Usage};
use crate::request::Options;

/// How a response ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// At the end of the model's output.
    Completed,
    /// At the token limit.
    Incomplete,
    /// By its owner.
    Cancelled,
    /// With an error.
    Failed,
}

impl Status {
    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Status::Completed => "completed",
            Status::Incomplete => "incomplete",
            Status::Cancelled => "cancelled",
            Status::Failed => "failed",
        }
    }
}

/// What an item holds.
#[derive(Clone, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call { call_id: String, name: String, namespace: Option<String> },
}

/// The unfinished item.
struct Open {
    id: String,
    kind: Kind,
    /// Its text, or the arguments of a call.
    text: String,
    logprobs: Vec<Json>,
}

/// Writer of one response.
pub struct ResponseWriter {
    /// Name of the model or of the LoRA adapter.
    model: String,
    /// Token counts so far.
    pub usage: Usage,
    /// Functions that are in a namespace, and its name.
    pub namespaces: Arc<[(String, String)]>,
    /// Fields of the request that the response repeats.
    echoed: Vec<(String, Json)>,
    id: String,
    created: u64,
    /// It waits for its run.
    queued: bool,
    error: Option<Value>,
    /// Finished items.
    output: Vec<Json>,
    open: Option<Open>,
    /// Log probabilities of tokens whose text is incomplete.
    scores: Vec<Json>,
    ended: Option<(Status, u64)>,
    next_number: u64,
    /// Whether events are sent.
    streams: bool,
    /// Events that have not been sent: type and JSON.
    pub events: VecDeque<(String, Json)>,
}

impl ResponseWriter {
    /// Writer of the response with this id and time to a prompt of this many tokens.
    pub fn new(
        app: &App,
        (id, created): (String, u64),
        options: &Options,
        echoed: Vec<(String, Json)>,
        prompt_tokens: usize,
    ) -> ResponseWriter {
        ResponseWriter {
            model: options.adapter.as_ref().unwrap_or(&app.model).clone(),
            streams: options.stream,
            usage: Usage { prompt_tokens, ..Usage::default() },
            namespaces: Arc::default(),
            echoed,
            id,
            created,
            queued: false,
            error: None,
            output: Vec::new(),
            open: None,
            scores: Vec::new(),
            ended: None,
            next_number: 0,
            events: VecDeque::new(),
        }
    }

    /// The response in its current state.
    pub fn response(&self) -> Json {
        let running = if self.queued { "queued" } else { "in_progress" };
        let ended = self.ended.map(|(status, _)| status);
        let status = ended.map_or(running, Status::name);
        let incomplete = (ended == Some(Status::Incomplete)).then(|| json!({"reason": "max_output_tokens"}));
        let has_usage = ended.is_some_and(|status| status != Status::Failed);
        let usage = has_usage.then(|| {
            let mut details = self.usage.draft_details();
            details.insert("reasoning_tokens".into(), self.usage.reasoning_tokens.into());
            json!({
                "input_tokens": self.usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": self.usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": self.usage.completion_tokens,
                "output_tokens_details": details,
                "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
            })
        });
        let mut response = Json::from(json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": self.ended.filter(|(status, _)| *status == Status::Completed).map(|(_, at)| at),
            "error": self.error,
            "incomplete_details": incomplete,
            "model": self.model,
            "usage": usage,
        }));
        response.set("output", self.output.clone());
        self.echoed.iter().for_each(|(name, value)| response.set(name, value.clone()));
        response
    }

    /// Writes the events before any output. A response in the background waits first.
    pub fn open(&mut self, in_background: bool) {
        self.queued = in_background;
        self.emit_response("response.created");
        if in_background {
            self.emit_response("response.queued");
        }
        self.queued = false;
        self.emit_response("response.in_progress");
    }

    /// Sets a field that the response repeats.
    pub fn set(&mut self, name: &str, value: Value) {
        let mut echoed = Json::Object(std::mem::take(&mut self.echoed));
        echoed.set(name, value);
        if let Json::Object(fields) = echoed {
            self.echoed = fields;
        }
    }

    /// The response while it waits for its run.
    pub fn queued(&mut self) -> Json {
        self.queued = true;
        let response = self.response();
        self.queued = false;
        response
    }

    /// Appends a parsed delta; `scores` are the log probabilities of its tokens.
    pub fn write(&mut self, parts: Vec<Part>, scores: impl Iterator<Item = Json>) {
        self.scores.extend(scores);
        let has_text = parts.iter().any(|part| matches!(part, Part::Text(_)));
        for part in parts {
            match part {
                Part::Reasoning(text) => self.extend(Kind::Reasoning, &text),
                Part::Text(text) => self.extend(Kind::Message, &text),
                Part::Call { id, name, .. } => {
                    let namespace = self.namespaces.iter().find(|(function, _)| *function == name);
                    let namespace = namespace.map(|(_, namespace)| namespace.clone());
                    self.begin(Kind::Call { call_id: id, name, namespace });
                    self.scores.clear();
                }
                Part::Arguments { text, .. } => {
                    self.scores.clear();
                    if let Some(kind) = self.open.as_ref().map(|open| open.kind.clone()) {
                        self.extend(kind, &text);
                    }
                }
            }
        }
        if !has_text && self.open.as_ref().is_some_and(|open| open.kind == Kind::Reasoning) {
            self.scores.clear();
        }
    }

    /// Ends the response.
    pub fn close(&mut self, status: Status) {
        if self.open.is_none() && self.output.is_empty() && status != Status::Cancelled {
            self.begin(Kind::Message);
        }
        let is_text = self.open.as_ref().is_some_and(|open| open.kind == Kind::Message);
        if is_text && status == Status::Incomplete && !self.scores.is_empty() {
            // The last tokens have no text.
            self.extend(Kind::Message, "");
        }
        self.end_item(status);
        self.ended = Some((status, unix_seconds()));
        if status != Status::Cancelled {
            self.emit_response(&format!("response.{}", status.name()));
        }
    }

    /// Ends a failed response.
    pub fn fail(&mut self, error: &ApiError) {
        let error = &error.to_json()["error"];
        let code = if error["type"] == "server_error" { "server_error" } else { "invalid_prompt" };
        self.error = Some(json!({"code": code, "message": error["message"]}));
        self.ended = Some((Status::Failed, unix_seconds()));
        self.emit_response("response.failed");
    }

    /// Writes the last event again, with the response as it is now.
    pub fn repeat_last(&mut self) {
        let response = self.response();
        if let Some((_, event)) = self.events.back_mut() {
            event.set("response", response);
        }
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Appends text to the open item, which is a new one unless it is of this kind.
    fn extend(&mut self, kind: Kind, more: &str) {
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.begin(kind.clone());
        }
        let Some(open) = &mut self.open else { return };
        open.text += more;
        let mut fields = vec![("delta", Json::Value(more.into()))];
        if kind == Kind::Message {
            let scores = std::mem::take(&mut self.scores);
            open.logprobs.extend(scores.iter().cloned());
            fields.push(("logprobs", scores.into()));
        }
        self.emit_for_item(&format!("{}.delta", kind.event()), fields);
    }

    /// Opens an item and closes the previous one.
    fn begin(&mut self, kind: Kind) {
        self.end_item(Status::Completed);
        let id = item_id(kind.prefix(), &self.id, self.output.len());
        let open = Open { id, kind, text: String::new(), logprobs: Vec::new() };
        let (item, part) = (open.json("in_progress", false), open.part());
        self.open = Some(open);
        self.emit_item("response.output_item.added", item);
        if let Some(part) = part {
            self.emit_for_item("response.content_part.added", vec![("part", part)]);
        }
    }

    fn end_item(&mut self, status: Status) {
        let Some(open) = &self.open else { return };
        let (item, part, event) = (open.json(status.name(), true), open.part(), open.kind.event());
        let text = Json::Value(open.text.as_str().into());
        let fields = match &open.kind {
            Kind::Reasoning => vec![("text", text)],
            Kind::Message => vec![("text", text), ("logprobs", open.logprobs.clone().into())],
            Kind::Call { name, .. } => vec![("arguments", text), ("name", Json::Value(name.as_str().into()))],
        };
        self.emit_for_item(&format!("{event}.done"), fields);
        if let Some(part) = part {
            self.emit_for_item("response.content_part.done", vec![("part", part)]);
        }
        self.emit_item("response.output_item.done", item.clone());
        self.output.push(item);
        self.open = None;
    }

    /// Writes an event about the text of the open item.
    fn emit_for_item(&mut self, name: &str, mut fields: Vec<(&str, Json)>) {
        let Some(open) = &self.open else { return };
        fields.push(("item_id", Json::Value(open.id.as_str().into())));
        fields.push(("output_index", Json::Value(self.output.len().into())));
        if !matches!(open.kind, Kind::Call { .. }) {
            fields.push(("content_index", Json::Value(0.into())));
        }
        self.emit(name, fields);
    }

    /// Writes an event with an item.
    fn emit_item(&mut self, name: &str, item: Json) {
        self.emit(name, vec![("output_index", Json::Value(self.output.len().into())), ("item", item)]);
    }

    /// Writes an event with the response in its current state.
    fn emit_response(&mut self, name: &str) {
        let response = self.response();
        self.emit(name, vec![("response", response)]);
    }

    fn emit(&mut self, name: &str, fields: Vec<(&str, Json)>) {
        if !self.streams {
            return;
        }
        let mut event = Json::from(json!({"type": name, "sequence_number": self.next_number}));
        fields.into_iter().for_each(|(name, value)| event.set(name, value));
        self.next_number += 1;
        self.events.push_back((name.to_string(), event));
    }
}

impl Kind {
    /// Prefix of the item's id.
    fn prefix(&self) -> &'static str {
        match self {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call { .. } => "fc",
        }
    }

    /// Name of the events about its text, without their suffix.
    fn event(&self) -> &'static str {
        match self {
            Kind::Reasoning => "response.reasoning_text",
            Kind::Message => "response.output_text",
            Kind::Call { .. } => "response.function_call_arguments",
        }
    }
}

impl Open {
    /// The one content part so far; `None` for a call.
    fn part(&self) -> Option<Json> {
        match self.kind {
            Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": self.text}).into()),
            Kind::Message => {
                let mut part = Json::from(json!({"type": "output_text", "text": self.text, "annotations": []}));
                part.set("logprobs", self.logprobs.clone());
                Some(part)
            }
            Kind::Call { .. } => None,
        }
    }

    /// The item; `whole` if it has its content.
    fn json(&self, status: &str, whole: bool) -> Json {
        let Open { id, text, .. } = self;
        let mut item = Json::from(match &self.kind {
            Kind::Reasoning => json!({"id": id, "type": "reasoning", "status": status, "summary": []}),
            Kind::Message => json!({"id": id, "type": "message", "status": status, "role": "assistant"}),
            Kind::Call { call_id, name, .. } => {
                json!({"id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name, "arguments": text})
            }
        });
        if let Kind::Call { namespace: Some(namespace), .. } = &self.kind {
            item.set("namespace", Value::from(namespace.as_str()));
        }
        if !matches!(self.kind, Kind::Call { .. }) {
            item.set("content", self.part().into_iter().filter(|_| whole).collect::<Vec<Json>>());
        }
        item
    }
}

/// The beginning of the id of a response.
const RESPONSE: &str = "resp_";

/// The id of item number `index` of a response. It tells the response ([`response_of`]).
fn item_id(prefix: &str, response: &str, index: usize) -> String {
    format!("{prefix}_{}_{index}", response.trim_start_matches(RESPONSE))
}

/// The id of the response that an item was written by, if its id is of that form.
pub fn response_of(item: &str) -> Option<String> {
    let (item, index) = item.rsplit_once('_')?;
    let is_index = !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit());
    item.split_once('_').filter(|_| is_index).map(|(_, response)| format!("{RESPONSE}{response}"))
}

#[cfg(test)]
#[path = "../../../tests/unit/response_items.rs"]
mod tests;
