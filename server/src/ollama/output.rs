//! Answers: one JSON object, or a stream of JSON lines whose last one has the counts.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use engine::{Delta, FinishReason};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::ERRORS;
use crate::app::App;
use crate::http::ApiError;
use crate::http::json::put;
use crate::http::sse::Framing;
use crate::openai::chat::Prepared;
use crate::openai::logprobs;
use crate::reply::{Assistant, Part, Translator, Usage, arguments_object};

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// With `message`.
    Chat,
    /// With `response`.
    Completion,
}

/// What a line adds to an answer.
#[derive(Default)]
struct Added {
    content: String,
    thinking: String,
    calls: Vec<Value>,
    logprobs: Vec<Box<RawValue>>,
}

/// A call whose arguments are incomplete: they are sent whole.
struct Open {
    index: usize,
    id: String,
    name: String,
    arguments: String,
}

/// Writer of one answer, whole or as a stream.
pub struct Writer {
    app: Arc<App>,
    assistant: Assistant,
    kind: Kind,
    model: String,
    streams: bool,
    /// Number of alternatives per token; `None` without log probabilities.
    top: Option<usize>,
    usage: Usage,
    began: Instant,
    /// When the prompt was computed.
    started: Option<Instant>,
    added: Added,
    open: Option<Open>,
    reason: &'static str,
    lines: Vec<u8>,
}

impl Writer {
    /// Writer of the answer to a request.
    pub fn new(app: &Arc<App>, chat: &Prepared, model: String, kind: Kind) -> Writer {
        Writer {
            app: app.clone(),
            assistant: chat.assistant(app),
            kind,
            model,
            streams: chat.options.stream,
            top: chat.options.params.sampling.logprobs,
            usage: Usage { prompt_tokens: chat.ids.len(), ..Usage::default() },
            began: Instant::now(),
            started: None,
            added: Added::default(),
            open: None,
            reason: "stop",
            lines: Vec::new(),
        }
    }

    /// The whole answer.
    pub fn whole(&mut self) -> Value {
        let added = std::mem::take(&mut self.added);
        let mut answer = line(&self.model, self.kind, added, true);
        answer.extend(self.counts());
        answer.into()
    }

    fn counts(&self) -> Map<String, Value> {
        let now = Instant::now();
        let started = self.started.unwrap_or(now);
        let counts = [
            ("done_reason", self.reason.into()),
            ("total_duration", nanoseconds(now - self.began)),
            ("load_duration", 0.into()),
            ("prompt_eval_count", self.usage.prompt_tokens.into()),
            ("prompt_eval_duration", nanoseconds(started - self.began)),
            ("eval_count", self.usage.completion_tokens.into()),
            ("eval_duration", nanoseconds(now - started)),
        ];
        counts.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }

    fn send(&mut self, line: &impl serde::Serialize) {
        put(&mut self.lines, line);
        self.lines.push(b'\n');
    }

    fn end_call(&mut self) {
        if let Some(Open { index, id, name, arguments }) = self.open.take() {
            let function = json!({"index": index, "name": name, "arguments": arguments_object(&arguments)});
            self.added.calls.push(json!({"id": id, "function": function}));
        }
    }

    fn add(&mut self, part: Part) {
        match part {
            Part::Reasoning(text) => self.added.thinking += &text,
            Part::Text(text) => {
                self.end_call();
                self.added.content += &text;
            }
            Part::Call { index, id, name } => {
                self.end_call();
                self.open = Some(Open { index, id, name, arguments: String::new() });
            }
            Part::Arguments { text, .. } => {
                if let Some(open) = &mut self.open {
                    open.arguments += &text;
                }
            }
        }
    }
}

impl Translator for Writer {
    const FRAMING: Framing = Framing::LINES;

    fn usage(&mut self) -> &mut Usage {
        &mut self.usage
    }

    fn started(&mut self) {
        self.started = Some(Instant::now());
    }

    fn delta(&mut self, _: usize, delta: &Delta) {
        let mut parts = Vec::new();
        self.assistant.read(&delta.text, delta.finish.is_some(), |part| parts.push(part));
        parts.into_iter().for_each(|part| self.add(part));
        if let Some(top) = self.top {
            let tokens = logprobs::token_texts(self.app.tokenizer(), &delta.tokens, top);
            self.added.logprobs.extend(tokens.filter_map(|token| RawValue::from_string(token).ok()));
        }
        if let Some(reason) = &delta.finish {
            self.end_call();
            self.reason = if *reason == FinishReason::Length { "length" } else { "stop" };
        }
        let Added { content, thinking, calls, logprobs } = &self.added;
        let is_empty = content.is_empty() && thinking.is_empty() && calls.is_empty() && logprobs.is_empty();
        if self.streams && !is_empty {
            let added = std::mem::take(&mut self.added);
            let line = line(&self.model, self.kind, added, false);
            self.send(&line);
        }
    }

    fn end(&mut self, failure: Option<ApiError>) {
        if !self.streams {
            return;
        }
        match failure {
            Some(error) => self.send(&(ERRORS.body)(&error)),
            None => {
                let last = self.whole();
                self.send(&last);
            }
        }
    }

    fn write(&mut self, lines: &mut Vec<u8>) -> bool {
        let is_empty = self.lines.is_empty();
        lines.append(&mut self.lines);
        !is_empty
    }
}

fn line(model: &str, kind: Kind, added: Added, done: bool) -> Map<String, Value> {
    let Added { content, thinking, calls, logprobs } = added;
    let mut answer = Map::new();
    let mut set = |name: &str, value: Value| drop(answer.insert(name.to_string(), value));
    set("model", model.into());
    set("created_at", time(SystemTime::now()).into());
    match kind {
        Kind::Chat => {
            let mut message = json!({"role": "assistant", "content": content});
            if !thinking.is_empty() {
                message["thinking"] = thinking.into();
            }
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            set("message", message);
        }
        Kind::Completion => {
            set("response", content.into());
            if !thinking.is_empty() {
                set("thinking", thinking.into());
            }
        }
    }
    if !logprobs.is_empty() {
        let entries = logprobs.iter().filter_map(|token| serde_json::from_str(token.get()).ok());
        set("logprobs", entries.collect::<Vec<Value>>().into());
    }
    set("done", done.into());
    answer
}

/// The answer to a request that only loads the model, or unloads it.
pub fn loaded(model: &str, kind: Kind, reason: &str) -> Value {
    let mut answer = line(model, kind, Added::default(), true);
    answer.insert("done_reason".into(), reason.into());
    answer.into()
}

/// A duration in nanoseconds.
pub fn nanoseconds(duration: Duration) -> Value {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).into()
}

/// A time as RFC 3339 writes it, with microseconds.
pub fn time(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86400, since.as_secs() % 86400);
    // Years begin in March, so that a leap day is the last of its year (Howard Hinnant, "chrono-compatible low-level date
    // algorithms", civil_from_days).
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = 400 * era + year + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:06}+00:00", since.subsec_micros())
}

#[cfg(test)]
#[path = "../../tests/unit/time.rs"]
mod tests;
