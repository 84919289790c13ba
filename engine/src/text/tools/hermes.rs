//! Tool calls between `<tool_call>` and `</tool_call>`.

use super::json::{CallReader, Progress};
use super::{ToolEvent, ToolParser, append};
use crate::text::marker::Marker;

/// Marks the beginning of a call.
const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

enum State {
    /// Text in front of a call.
    Text(Marker),
    Call(CallReader),
    /// After a call, in front of [`CLOSE`].
    Close(Marker),
}

/// See the [module](self).
pub(super) struct Hermes {
    state: State,
    /// A call has been found, so white space between calls is dropped.
    called: bool,
}

impl Hermes {
    /// Creates a parser for a text.
    pub fn new() -> Hermes {
        Hermes { state: State::Text(Marker::new(OPEN)), called: false }
    }
}

impl ToolParser for Hermes {
    fn push_char(&mut self, c: char, events: &mut Vec<ToolEvent>) {
        match &mut self.state {
            State::Text(marker) => {
                let mut text = String::new();
                if marker.push(c, &mut text) {
                    self.state = State::Call(CallReader::new(marker.take()));
                }
                append(events, ToolEvent::Text(text));
            }
            State::Call(reader) => match reader.push(c, &|_| true, events) {
                Progress::More => {}
                Progress::Done => {
                    self.called = true;
                    self.state = State::Close(Marker::new(CLOSE));
                }
                Progress::Broken => {
                    let State::Call(reader) = std::mem::replace(&mut self.state, State::Text(Marker::new(OPEN))) else {
                        return;
                    };
                    // The last character may begin a call.
                    let mut text = reader.into_text();
                    text.pop();
                    append(events, ToolEvent::Text(text));
                    self.push_char(c, events);
                }
            },
            State::Close(marker) => {
                let mut text = String::new();
                if marker.push(c, &mut text) {
                    self.state = State::Text(Marker::new(OPEN));
                } else if !text.is_empty() {
                    // Not the closing tag: read it as text, in which a call may begin.
                    text += &marker.take();
                    self.state = State::Text(Marker::new(OPEN));
                    text.chars().for_each(|c| self.push_char(c, events));
                }
            }
        }
    }

    fn finish(&mut self, events: &mut Vec<ToolEvent>) {
        match std::mem::replace(&mut self.state, State::Text(Marker::new(OPEN))) {
            State::Text(mut marker) | State::Close(mut marker) => {
                let held = marker.take();
                if !self.called || !held.trim().is_empty() {
                    append(events, ToolEvent::Text(held));
                }
            }
            State::Call(reader) => self.called |= reader.finish(events),
        }
    }
}
