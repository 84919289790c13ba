//! A call as the models write it, `{"name": …, "arguments": {…}}`, read one character at a time.
//!
//! The arguments go out as they come; nothing else waits for the end of anything. It checks no more than it needs to find
//! the end: arguments that are no JSON are the client's to see, as with any other model.

use super::{ToolEvent, append};

/// Where a character stands to a JSON value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In it, or in front of it.
    Inside,
    /// Its last.
    Last,
    /// Behind it: numbers and words end only there.
    Behind,
}

/// Finds the end of one JSON value.
#[derive(Clone, Debug, Default)]
pub(super) struct ValueEnd {
    /// Brackets that are open.
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// A number, or a word.
    bare: bool,
}

impl ValueEnd {
    /// Takes the next character.
    pub fn push(&mut self, c: char) -> Place {
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return if !self.in_string && self.depth == 0 { Place::Last } else { Place::Inside };
        }
        if self.bare && self.depth == 0 && (c.is_whitespace() || matches!(c, ',' | '}' | ']')) {
            return Place::Behind;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                return if self.depth == 0 { Place::Last } else { Place::Inside };
            }
            _ => self.bare |= self.depth == 0 && !c.is_whitespace(),
        }
        Place::Inside
    }
}

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// More is needed.
    More,
    /// The character was its last.
    Done,
    /// This is no call.
    Broken,
}

#[derive(Clone, Debug)]
enum State {
    Start,
    KeyOrEnd,
    Key(ValueEnd),
    Colon,
    Value(ValueEnd),
}

/// What the value under way is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Other,
}

/// Reads one call.
#[derive(Clone, Debug)]
pub(super) struct CallReader {
    state: State,
    field: Field,
    /// Text of the key or the name under way.
    buffer: String,
    /// What was read and has not gone out in an event: everything with the text in front of the call before it has been told
    /// of, and what follows its last argument afterwards.
    raw: String,
    name: Option<String>,
    /// Arguments that have not gone out; they wait for the name.
    arguments: String,
    /// The arguments are a JSON text within a JSON string.
    quoted: bool,
    has_arguments: bool,
    /// The call has been told of.
    told: bool,
}

impl CallReader {
    /// A reader in front of the opening brace. `lead` is text in front of it that belongs to the call, if it becomes one.
    pub fn new(lead: String) -> CallReader {
        CallReader {
            state: State::Start,
            field: Field::Other,
            buffer: String::new(),
            raw: lead,
            name: None,
            arguments: String::new(),
            quoted: false,
            has_arguments: false,
            told: false,
        }
    }

    /// Takes the next character. Events go to `events`; `known` says whether a name is one that may be called.
    pub fn push(&mut self, c: char, known: &dyn Fn(&str) -> bool, events: &mut Vec<ToolEvent>) -> Progress {
        self.raw.push(c);
        let progress = self.step(c, known);
        self.tell(progress == Progress::Done, events);
        progress
    }

    /// After [`Progress::Broken`], returns what was read and is in no event.
    pub fn into_text(self) -> String {
        self.raw
    }

    /// The text has ended within the call: what is known of the call goes to `events`, or all of it as text if it has not been
    /// told of. Returns whether it has.
    pub fn finish(mut self, events: &mut Vec<ToolEvent>) -> bool {
        if !self.told {
            append(events, ToolEvent::Text(self.raw));
            return false;
        }
        if self.quoted {
            self.arguments = unquoted(self.arguments);
        }
        append(events, ToolEvent::Arguments(self.arguments));
        true
    }

    fn step(&mut self, c: char, known: &dyn Fn(&str) -> bool) -> Progress {
        match &mut self.state {
            State::Start if c.is_whitespace() => {}
            State::Start if c == '{' => self.state = State::KeyOrEnd,
            State::KeyOrEnd if c.is_whitespace() || c == ',' => {}
            State::KeyOrEnd if c == '}' => {
                return if self.name.is_some() { Progress::Done } else { Progress::Broken };
            }
            State::KeyOrEnd if c == '"' => {
                self.buffer = c.to_string();
                let mut end = ValueEnd::default();
                end.push(c);
                self.state = State::Key(end);
            }
            State::Key(end) => {
                self.buffer.push(c);
                if end.push(c) == Place::Last {
                    self.field = match self.buffer.trim_matches('"') {
                        "name" => Field::Name,
                        "arguments" | "parameters" => Field::Arguments,
                        _ => Field::Other,
                    };
                    self.state = State::Colon;
                }
            }
            State::Colon if c.is_whitespace() => {}
            State::Colon if c == ':' => {
                self.buffer.clear();
                self.state = State::Value(ValueEnd::default());
            }
            State::Value(end) => {
                let place = end.push(c);
                if place != Place::Behind {
                    self.value(c);
                }
                if place != Place::Inside && !self.value_ended(known) {
                    return Progress::Broken;
                }
                if place == Place::Behind {
                    return self.step(c, known);
                }
            }
            _ => return Progress::Broken,
        }
        Progress::More
    }

    /// A character of the value under way.
    fn value(&mut self, c: char) {
        match self.field {
            Field::Name => self.buffer.push(c),
            Field::Arguments if !self.has_arguments && c.is_whitespace() => {}
            Field::Arguments => {
                self.quoted |= !self.has_arguments && c == '"';
                self.has_arguments = true;
                self.arguments.push(c);
            }
            Field::Other => {}
        }
    }

    /// The value under way has ended. `false` if it can not be that of a call.
    fn value_ended(&mut self, known: &dyn Fn(&str) -> bool) -> bool {
        self.state = State::KeyOrEnd;
        match self.field {
            Field::Name => {
                self.name = serde_json::from_str::<String>(&self.buffer).ok().filter(|name| known(name));
                self.name.is_some()
            }
            Field::Arguments if self.quoted => {
                self.quoted = false;
                // Text that is no JSON string after all stays as it is.
                if let Ok(text) = serde_json::from_str::<String>(&self.arguments) {
                    self.arguments = text;
                }
                true
            }
            _ => true,
        }
    }

    fn tell(&mut self, done: bool, events: &mut Vec<ToolEvent>) {
        let Some(name) = &self.name else { return };
        if !self.told && (self.has_arguments || done) {
            events.push(ToolEvent::Call { name: name.clone() });
            self.told = true;
            self.raw.clear();
            if !self.has_arguments {
                self.arguments.push_str("{}");
            }
        }
        if self.told && !self.quoted && !self.arguments.is_empty() {
            self.raw.clear();
            append(events, ToolEvent::Arguments(std::mem::take(&mut self.arguments)));
        }
    }
}

/// The text of a JSON string whose end is missing; as it stands if it is none.
fn unquoted(string: String) -> String {
    // The longest escape, `\u12ab`, may be cut anywhere.
    let ends = string.char_indices().rev().map(|(at, c)| at + c.len_utf8()).take(6);
    let text = |end: usize| serde_json::from_str::<String>(&format!("{}\"", string.get(..end)?)).ok();
    ends.into_iter().find_map(text).unwrap_or(string)
}
