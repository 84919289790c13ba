//! Output items, and the events that describe their growth.
//!
//! One item is open at a time. Output of another kind closes it: reasoning comes first, then text, then calls.

use std::sync::Arc;

use serde_json::{Value, json};

use super::super::app::{App, unix_seconds};
use super::super::assistant::{CallPiece, Piece};
use super::super::error::ApiError;
use super::super::json::Json;
use super::super::reply::Usage;

/// How a response ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// At the end of the model's output.
    Completed,
    /// At the token limit.
    Incomplete,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Status::Completed => "completed",
            Status::Incomplete => "incomplete",
        }
    }
}

/// An unfinished item.
enum Open {
    Reasoning { text: String },
    Message { text: String, logprobs: Vec<Json> },
    Call { call_id: String, name: String, arguments: String },
}

/// Writer of one response.
pub struct Writer {
    app: Arc<App>,
    /// Token counts so far.
    pub usage: Usage,
    reasoning_tokens: usize,
    /// Fields of the request that the response repeats.
    frame: Vec<(String, Json)>,
    id: String,
    created: u64,
    /// Finished items.
    output: Vec<Json>,
    /// Id and contents of the unfinished item.
    open: Option<(String, Open)>,
    /// Log probabilities of tokens whose text is incomplete.
    scores: Vec<Json>,
    ended: Option<Status>,
    next_number: u64,
}

impl Writer {
    /// Writer of the response to a prompt of this many tokens.
    pub fn new(app: &Arc<App>, frame: Vec<(String, Json)>, prompt_tokens: usize) -> Writer {
        Writer {
            app: app.clone(),
            usage: Usage { prompt_tokens, ..Usage::default() },
            reasoning_tokens: 0,
            frame,
            id: fresh_id(app, "resp"),
            created: unix_seconds(),
            output: Vec::new(),
            open: None,
            scores: Vec::new(),
            ended: None,
            next_number: 0,
        }
    }

    /// The response in its current state.
    pub fn response(&self) -> Json {
        let status = self.ended.map_or("in_progress", Status::name);
        let incomplete = (self.ended == Some(Status::Incomplete)).then(|| json!({"reason": "max_output_tokens"}));
        let usage = self.ended.map(|_| {
            json!({
                "input_tokens": self.usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": self.usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": self.usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
            })
        });
        let mut response = Json::from(json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": (self.ended == Some(Status::Completed)).then(unix_seconds),
            "error": null,
            "incomplete_details": incomplete,
            "model": self.app.model,
            "usage": usage,
        }));
        response.set("output", self.output.clone());
        self.frame.iter().for_each(|(name, value)| response.set(name, value.clone()));
        response
    }

    /// The first events of a stream.
    pub fn open(&mut self) -> Vec<Json> {
        ["response.created", "response.in_progress"].map(|name| self.whole(name)).into()
    }

    /// Appends a parsed delta of this many tokens; `scores` are their log probabilities.
    pub fn write(&mut self, piece: Piece, tokens: usize, scores: Vec<Json>) -> Vec<Json> {
        self.usage.completion_tokens += tokens;
        let mut events = Vec::new();
        self.scores.extend(scores);
        if !piece.reasoning.is_empty() {
            self.reasoning(piece.reasoning, &mut events);
        }
        if piece.content.is_empty() && matches!(self.open, Some((_, Open::Reasoning { .. }))) {
            self.reasoning_tokens += tokens;
            self.scores.clear();
        }
        if !piece.content.is_empty() {
            self.content(piece.content, &mut events);
        }
        for call in piece.calls {
            self.call(call, &mut events);
        }
        events
    }

    /// Ends the response.
    pub fn close(&mut self, status: Status) -> Vec<Json> {
        let mut events = Vec::new();
        if self.open.is_none() && self.output.is_empty() {
            self.begin(Open::Message { text: String::new(), logprobs: Vec::new() }, &mut events);
        }
        self.end_item(status, &mut events);
        self.ended = Some(status);
        events.push(self.whole(match status {
            Status::Completed => "response.completed",
            Status::Incomplete => "response.incomplete",
        }));
        events
    }

    /// Ends a failed stream.
    pub fn fail(&mut self, error: &ApiError) -> [Json; 1] {
        let error = &error.to_json()["error"];
        let code = if error["type"] == "server_error" { "server_error" } else { "invalid_prompt" };
        let mut response = self.response();
        response.set("status", Value::from("failed"));
        response.set("error", json!({"code": code, "message": error["message"]}));
        [self.event("response.failed", vec![("response", response)])]
    }

    fn reasoning(&mut self, more: String, events: &mut Vec<Json>) {
        if !matches!(self.open, Some((_, Open::Reasoning { .. }))) {
            self.begin(Open::Reasoning { text: String::new() }, events);
        }
        events.push(self.part("response.reasoning_text.delta", vec![("delta", text(&more))]));
        if let Some((_, Open::Reasoning { text })) = &mut self.open {
            *text += &more;
        }
    }

    fn content(&mut self, more: String, events: &mut Vec<Json>) {
        if !matches!(self.open, Some((_, Open::Message { .. }))) {
            self.begin(Open::Message { text: String::new(), logprobs: Vec::new() }, events);
        }
        let scores = std::mem::take(&mut self.scores);
        let fields = vec![("delta", text(&more)), ("logprobs", scores.clone().into())];
        events.push(self.part("response.output_text.delta", fields));
        if let Some((_, Open::Message { text, logprobs })) = &mut self.open {
            *text += &more;
            logprobs.extend(scores);
        }
    }

    fn call(&mut self, piece: CallPiece, events: &mut Vec<Json>) {
        if let Some((call_id, name)) = piece.begun {
            self.begin(Open::Call { call_id, name, arguments: String::new() }, events);
        }
        self.scores.clear();
        if !piece.arguments.is_empty() {
            events
                .push(self.of_item("response.function_call_arguments.delta", vec![("delta", text(&piece.arguments))]));
        }
        if let Some((_, Open::Call { arguments, .. })) = &mut self.open {
            *arguments += &piece.arguments;
        }
    }

    /// Opens an item and closes the previous one.
    fn begin(&mut self, item: Open, events: &mut Vec<Json>) {
        self.end_item(Status::Completed, events);
        let id = fresh_id(&self.app, item.prefix());
        let shown = item.json(&id, "in_progress", false);
        let part = item.content();
        self.open = Some((id, item));
        let index = Json::Value(self.output.len().into());
        events.push(self.event("response.output_item.added", vec![("output_index", index), ("item", shown)]));
        if let Some(part) = part {
            events.push(self.part("response.content_part.added", vec![("part", part)]));
        }
    }

    fn end_item(&mut self, status: Status, events: &mut Vec<Json>) {
        let Some((id, item)) = &self.open else { return };
        let (whole, part) = (item.json(id, status.name(), true), item.content());
        match item {
            Open::Reasoning { text: whole } => {
                let done = vec![("text", text(whole))];
                events.push(self.part("response.reasoning_text.done", done));
            }
            Open::Message { text: whole, logprobs } => {
                let done = vec![("text", text(whole)), ("logprobs", logprobs.clone().into())];
                events.push(self.part("response.output_text.done", done));
            }
            Open::Call { arguments, name, .. } => {
                let done = vec![("arguments", text(arguments)), ("name", text(name))];
                events.push(self.of_item("response.function_call_arguments.done", done));
            }
        }
        if let Some(part) = part {
            events.push(self.part("response.content_part.done", vec![("part", part)]));
        }
        let index = Json::Value(self.output.len().into());
        events.push(self.event("response.output_item.done", vec![("output_index", index), ("item", whole.clone())]));
        self.output.push(whole);
        self.open = None;
    }

    /// An event about the one content part of the open item.
    fn part(&mut self, name: &str, fields: Vec<(&str, Json)>) -> Json {
        let mut event = self.of_item(name, fields);
        event.set("content_index", Value::from(0));
        event
    }

    /// An event about the open item.
    fn of_item(&mut self, name: &str, fields: Vec<(&str, Json)>) -> Json {
        let (id, index) = (self.open.as_ref().map(|(id, _)| id.clone()), self.output.len());
        let mut event = self.event(name, fields);
        event.set("item_id", Value::from(id));
        event.set("output_index", Value::from(index));
        event
    }

    /// An event with the response in its current state.
    fn whole(&mut self, name: &str) -> Json {
        let response = self.response();
        self.event(name, vec![("response", response)])
    }

    fn event(&mut self, name: &str, fields: Vec<(&str, Json)>) -> Json {
        let mut event = Json::from(json!({"type": name, "sequence_number": self.next_number}));
        fields.into_iter().for_each(|(name, value)| event.set(name, value));
        self.next_number += 1;
        event
    }
}

fn text(text: &str) -> Json {
    Json::Value(text.into())
}

impl Open {
    fn prefix(&self) -> &'static str {
        match self {
            Open::Reasoning { .. } => "rs",
            Open::Message { .. } => "msg",
            Open::Call { .. } => "fc",
        }
    }

    /// The one content part of the item so far.
    fn content(&self) -> Option<Json> {
        match self {
            Open::Reasoning { text } => Some(json!({"type": "reasoning_text", "text": text}).into()),
            Open::Message { text, logprobs } => {
                let mut part = Json::from(json!({"type": "output_text", "text": text, "annotations": []}));
                part.set("logprobs", logprobs.clone());
                Some(part)
            }
            Open::Call { .. } => None,
        }
    }

    /// The item; `whole` if it has its content.
    fn json(&self, id: &str, status: &str, whole: bool) -> Json {
        let content: Vec<Json> = self.content().into_iter().filter(|_| whole).collect();
        let item = match self {
            Open::Reasoning { .. } => json!({"id": id, "type": "reasoning", "status": status, "summary": []}),
            Open::Message { .. } => json!({"id": id, "type": "message", "status": status, "role": "assistant"}),
            Open::Call { call_id, name, arguments } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name, "arguments": arguments,
            }),
        };
        let mut item = Json::from(item);
        if !matches!(self, Open::Call { .. }) {
            item.set("content", content);
        }
        item
    }
}

/// Returns a unique id. Ids of this API have an underscore after the prefix.
fn fresh_id(app: &App, prefix: &str) -> String {
    app.fresh_id(prefix).replacen('-', "_", 1)
}
