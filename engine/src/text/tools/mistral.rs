//! Calls behind `[TOOL_CALLS]`: a list of objects, or a name and its arguments.

use super::json::{CallReader, Place, Progress, ValueEnd};
use super::{ToolEvent, ToolParser, append};
use crate::text::marker::Marker;

/// What begins the calls.
pub(super) const MARKER: &str = "[TOOL_CALLS]";
/// Between a name and its arguments, from 2025 on.
const ARGS: &str = "[ARGS]";
const ID: &str = "[CALL_ID]";

enum State {
    Text(Marker),
    /// Behind the marker.
    Open,
    /// In the list, between calls.
    List,
    Call(CallReader),
    /// A name, as far as it has come.
    Name(String),
    Arguments(ValueEnd),
}

/// The parser.
pub(super) struct Mistral {
    state: State,
    called: bool,
}

impl Mistral {
    /// At the start of a text.
    pub fn new() -> Mistral {
        Mistral { state: State::Text(Marker::new(MARKER)), called: false }
    }

    fn take(&mut self, c: char, events: &mut Vec<ToolEvent>) {
        match &mut self.state {
            State::Text(marker) => {
                let mut text = String::new();
                if marker.push(c, &mut text) {
                    self.state = State::Open;
                }
                append(events, ToolEvent::Text(text));
            }
            State::Open if c.is_whitespace() => {}
            State::Open if c == '[' => self.state = State::List,
            State::Open if c != '{' => self.state = State::Name(c.to_string()),
            State::List if c.is_whitespace() || c == ',' => {}
            State::Open | State::List if c == '{' => {
                self.state = State::Call(CallReader::new());
                self.take(c, events);
            }
            State::Open | State::List => {
                self.state = State::Text(Marker::new(MARKER));
                if c != ']' {
                    self.take(c, events);
                }
            }
            State::Call(reader) => match reader.push(c, &|_| true, events) {
                Progress::More => {}
                Progress::Done => {
                    self.called = true;
                    self.state = State::List;
                }
                Progress::Broken => self.give_up(events),
            },
            State::Name(name) if c == '{' => {
                let bare = name.trim_end().trim_end_matches(ARGS);
                let name = bare.split(ID).next().unwrap_or_default().trim().to_string();
                events.push(ToolEvent::Call { name });
                self.called = true;
                self.state = State::Arguments(ValueEnd::default());
                self.take(c, events);
            }
            State::Name(name) => name.push(c),
            State::Arguments(end) => {
                append(events, ToolEvent::Arguments(c.to_string()));
                if end.push(c) == Place::Last {
                    self.state = State::Text(Marker::new(MARKER));
                }
            }
        }
    }

    fn give_up(&mut self, events: &mut Vec<ToolEvent>) {
        let raw = match std::mem::replace(&mut self.state, State::Text(Marker::new(MARKER))) {
            State::Call(reader) => reader.into_text(),
            State::Name(name) => Some(name),
            _ => None,
        };
        match raw {
            Some(raw) => append(events, ToolEvent::Text(raw)),
            None => self.called = true,
        }
    }
}

impl ToolParser for Mistral {
    fn push(&mut self, text: &str, events: &mut Vec<ToolEvent>) {
        text.chars().for_each(|c| self.take(c, events));
    }

    fn finish(&mut self, events: &mut Vec<ToolEvent>) {
        match &mut self.state {
            State::Text(marker) => {
                let held = marker.take();
                if !self.called || !held.trim().is_empty() {
                    append(events, ToolEvent::Text(held));
                }
            }
            State::Call(_) | State::Name(_) => self.give_up(events),
            State::Open | State::List | State::Arguments(_) => {}
        }
    }
}
