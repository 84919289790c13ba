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
    /// Behind a call.
    Between,
    /// Text to the end.
    Text,
}

/// The parser. An answer may be JSON and no call, so only an object with the name of a function is one.
pub(super) struct Llama3 {
    state: State,
    /// What stood in front of the call under way: text, if it is none.
    lead: String,
    names: Vec<String>,
}

impl Llama3 {
    /// At the start of a text.
    pub fn new(names: Vec<String>) -> Llama3 {
        Llama3 { state: State::Start(String::new()), lead: String::new(), names }
    }

    fn take(&mut self, c: char, events: &mut Vec<ToolEvent>) {
        match &mut self.state {
            State::Start(held) => {
                let inner = held.trim_start();
                if c == '{' && (inner.is_empty() || inner == TAG) {
                    self.lead = std::mem::take(held);
                    self.call(c, events);
                    return;
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
                    Progress::Done => {
                        self.lead.clear();
                        self.state = State::Between;
                    }
                    Progress::Broken => self.give_up(events),
                }
            }
            State::Between if c.is_whitespace() || c == ';' || c == ',' => {}
            State::Between if c == '{' => self.call(c, events),
            State::Between | State::Text => {
                self.state = State::Text;
                append(events, ToolEvent::Text(c.to_string()));
            }
        }
    }

    fn call(&mut self, brace: char, events: &mut Vec<ToolEvent>) {
        self.state = State::Call(CallReader::new());
        self.take(brace, events);
    }

    fn give_up(&mut self, events: &mut Vec<ToolEvent>) {
        let state = std::mem::replace(&mut self.state, State::Text);
        if let State::Call(reader) = state {
            let raw = reader.into_text().map(|raw| std::mem::take(&mut self.lead) + &raw);
            append(events, ToolEvent::Text(raw.unwrap_or_default()));
        }
    }
}

impl ToolParser for Llama3 {
    fn push(&mut self, text: &str, events: &mut Vec<ToolEvent>) {
        text.chars().for_each(|c| self.take(c, events));
    }

    fn finish(&mut self, events: &mut Vec<ToolEvent>) {
        match &mut self.state {
            State::Start(held) => append(events, ToolEvent::Text(std::mem::take(held))),
            State::Call(_) => self.give_up(events),
            State::Between | State::Text => {}
        }
    }
}
