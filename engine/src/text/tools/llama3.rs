//! Answers that consist of tool calls only: JSON objects, separated by `;`.

use super::json::{CallReader, Progress};
use super::{ToolEvent, ToolParser, append};
use crate::text::marker::MAX_HELD;

/// May precede the first call.
const TAG: &str = "<|python_tag|>";

enum State {
    /// Only white space and the tag, or its beginning, has been read.
    Start(String),
    Call(CallReader),
    /// After a call, with the separators since then.
    Between(String),
    /// Text until the end.
    Text,
}

/// See the [module](self). An answer may be JSON without being a call, so only an object with the name of a known function is
/// one.
pub(super) struct Llama3 {
    state: State,
    names: Vec<String>,
}

impl Llama3 {
    /// Creates a parser for a text.
    pub fn new(names: Vec<String>) -> Llama3 {
        Llama3 { state: State::Start(String::new()), names }
    }
}

impl ToolParser for Llama3 {
    fn push_char(&mut self, c: char, events: &mut Vec<ToolEvent>) {
        match &mut self.state {
            State::Start(held) => {
                let inner = held.trim_start();
                if c == '{' && (inner.is_empty() || inner == TAG) {
                    self.state = State::Call(CallReader::new(std::mem::take(held)));
                    return self.push_char(c, events);
                }
                let begins = c.is_whitespace() && (inner.is_empty() || inner == TAG);
                held.push(c);
                if held.len() > MAX_HELD || !begins && !TAG.starts_with(held.trim_start()) {
                    append(events, ToolEvent::Text(std::mem::take(held)));
                    self.state = State::Text;
                }
            }
            State::Call(reader) => {
                let names = &self.names;
                match reader.push(c, &|name| names.iter().any(|known| known == name), events) {
                    Progress::More => {}
                    Progress::Done => self.state = State::Between(String::new()),
                    Progress::Broken => {
                        if let State::Call(reader) = std::mem::replace(&mut self.state, State::Text) {
                            append(events, ToolEvent::Text(reader.into_text()));
                        }
                    }
                }
            }
            State::Between(held) if c == '{' => {
                self.state = State::Call(CallReader::new(std::mem::take(held)));
                self.push_char(c, events);
            }
            State::Between(held) => {
                held.push(c);
                if !c.is_whitespace() && c != ';' && c != ',' || held.len() > MAX_HELD {
                    append(events, ToolEvent::Text(std::mem::take(held)));
                    self.state = State::Text;
                }
            }
            State::Text => append(events, ToolEvent::Text(c.to_string())),
        }
    }

    fn finish(&mut self, events: &mut Vec<ToolEvent>) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Start(held) => append(events, ToolEvent::Text(held)),
            State::Call(reader) => drop(reader.finish(events)),
            State::Between(_) | State::Text => {}
        }
    }
}
