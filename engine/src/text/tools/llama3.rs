//! An answer that is nothing but calls: JSON objects, with `;` between them.

use super::json::{CallReader, Progress};
use super::{ToolEvent, ToolParser, append};
use crate::text::marker::MOST;

/// May stand in front of the first call.
pub(super) const TAG: &str = "<|python_tag|>";

enum State {
    /// Nothing but white space and the tag, or its beginning.
    Start(String),
    Call(CallReader),
    /// Behind a call; holds the separators since then.
    Between(String),
    /// Text to the end.
    Text,
}

/// The parser. An answer may be JSON and no call, so only an object with the name of a function is one.
pub(super) struct Llama3 {
    state: State,
    names: Vec<String>,
}

impl Llama3 {
    /// At the start of a text.
    pub fn new(names: Vec<String>) -> Llama3 {
        Llama3 { state: State::Start(String::new()), names }
    }

    fn read_char(&mut self, c: char, events: &mut Vec<ToolEvent>) {
        match &mut self.state {
            State::Start(held) => {
                let inner = held.trim_start();
                if c == '{' && (inner.is_empty() || inner == TAG) {
                    self.state = State::Call(CallReader::new(std::mem::take(held)));
                    return self.read_char(c, events);
                }
                let begins = c.is_whitespace() && (inner.is_empty() || inner == TAG);
                held.push(c);
                if held.len() > MOST || !begins && !TAG.starts_with(held.trim_start()) {
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
                self.read_char(c, events);
            }
            State::Between(held) => {
                held.push(c);
                if !c.is_whitespace() && c != ';' && c != ',' || held.len() > MOST {
                    append(events, ToolEvent::Text(std::mem::take(held)));
                    self.state = State::Text;
                }
            }
            State::Text => append(events, ToolEvent::Text(c.to_string())),
        }
    }
}

impl ToolParser for Llama3 {
    fn push(&mut self, text: &str, events: &mut Vec<ToolEvent>) {
        text.chars().for_each(|c| self.read_char(c, events));
    }

    fn finish(&mut self, events: &mut Vec<ToolEvent>) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Start(held) => append(events, ToolEvent::Text(held)),
            State::Call(reader) => drop(reader.finish(events)),
            State::Between(_) | State::Text => {}
        }
    }
}
