//! Reads a call as models write it, `{"name": …, "arguments": {…}}`, one character at a time.
//!
//! The arguments are returned as they arrive. Only as much is checked as is needed to find their end: invalid JSON in the
//! arguments is left to the client.

use super::{ToolEvent, append};

/// Position of a character relative to a JSON value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Within the value, or in front of it.
    Inside,
    /// Its last character.
    Last,
    /// After the value; only there do numbers and words end.
    Behind,
}

/// Finds the end of one JSON value.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ValueEnd {
    /// Number of open brackets.
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// The value is a number or a word.
    bare: bool,
}

impl ValueEnd {
    /// Whether the text so far ends within a string.
    pub fn is_within_string(&self) -> bool {
        self.in_string
    }

    /// Whether the first character of the value has been read.
    fn has_begun(&self) -> bool {
        self.in_string || self.bare || self.depth > 0
    }

    /// Reads the next character.
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

/// Progress of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The call is incomplete.
    More,
    /// The character completes the call.
    Done,
    /// The text is not a call.
    Broken,
}

#[derive(Clone, Debug, Default)]
enum State {
    #[default]
    Start,
    KeyOrEnd,
    Key(ValueEnd),
    Colon,
    Value(ValueEnd),
}

/// The field whose value is being read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    #[default]
    Other,
}

/// Reads one call.
#[derive(Clone, Debug, Default)]
pub(super) struct CallReader {
    state: State,
    field: Field,
    /// Text of the key or the name that is being read.
    buffer: String,
    /// Text that was read and is in no event: before the call's first event everything, including the text in front of the
    /// call; afterwards what follows the last argument.
    raw: String,
    name: Option<String>,
    /// Arguments that are in no event yet, because the name is missing.
    arguments: String,
    /// The arguments are no object: JSON within a JSON string, or a word. They are read when they have ended.
    is_held: bool,
    has_arguments: bool,
    /// [`ToolEvent::Call`] was returned.
    announced: bool,
    /// Key of the name.
    name_key: &'static str,
    /// An object whose first key is another one is no call.
    name_first: bool,
}

impl CallReader {
    /// Creates a reader in front of the opening brace. `lead` is text before it that belongs to the call, if it is one.
    pub fn new(lead: String, name_key: &'static str, name_first: bool) -> CallReader {
        CallReader { raw: lead, name_key, name_first, ..CallReader::default() }
    }

    /// Reads the next character and appends to `events`. `known` returns whether a function of that name exists.
    pub fn push(&mut self, c: char, known: &dyn Fn(&str) -> bool, events: &mut Vec<ToolEvent>) -> Progress {
        self.raw.push(c);
        let progress = self.step(c, known);
        self.add_events(progress == Progress::Done, events);
        progress
    }

    /// After [`Progress::Broken`], returns the text that is in no event.
    pub fn into_text(self) -> String {
        self.raw
    }

    /// Whether the call has an event.
    pub fn has_called(&self) -> bool {
        self.announced
    }

    /// Ends the text within the call. Appends the rest of the arguments to `events`, or everything as text if the call has no
    /// event yet.
    pub fn finish(mut self, events: &mut Vec<ToolEvent>) {
        if !self.announced {
            return append(events, ToolEvent::Text(self.raw));
        }
        if self.is_held {
            self.arguments = unquoted(self.arguments);
        }
        append(events, ToolEvent::Arguments(self.arguments));
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
                        key if key == self.name_key => Field::Name,
                        "arguments" | "parameters" if !self.has_arguments => Field::Arguments,
                        _ => Field::Other,
                    };
                    if std::mem::take(&mut self.name_first) && self.field != Field::Name {
                        return Progress::Broken;
                    }
                    self.state = State::Colon;
                }
            }
            State::Colon if c.is_whitespace() => {}
            State::Colon if c == ':' => {
                self.buffer.clear();
                self.state = State::Value(ValueEnd::default());
            }
            State::Value(end) if matches!(c, ',' | '}' | ']') && !end.has_begun() => return Progress::Broken,
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

    /// Reads a character of a value.
    fn value(&mut self, c: char) {
        match self.field {
            Field::Name => self.buffer.push(c),
            Field::Arguments if !self.has_arguments && c.is_whitespace() => {}
            Field::Arguments => {
                self.is_held |= !self.has_arguments && c != '{';
                self.has_arguments = true;
                self.arguments.push(c);
            }
            Field::Other => {}
        }
    }

    /// Ends a value. Returns `false` if it cannot be that of a call.
    fn value_ended(&mut self, known: &dyn Fn(&str) -> bool) -> bool {
        self.state = State::KeyOrEnd;
        match self.field {
            Field::Name => {
                let name = serde_json::from_str::<String>(&self.buffer).ok();
                self.name = name.filter(|name| !name.is_empty() && known(name));
                self.name.is_some()
            }
            Field::Arguments if self.is_held => {
                self.is_held = false;
                // Text that is not a valid JSON string stays unchanged.
                if let Ok(text) = serde_json::from_str::<String>(&self.arguments) {
                    self.arguments = text;
                }
                if matches!(self.arguments.trim(), "" | "null") {
                    self.arguments = "{}".to_string();
                }
                true
            }
            _ => true,
        }
    }

    fn add_events(&mut self, done: bool, events: &mut Vec<ToolEvent>) {
        let Some(name) = &self.name else { return };
        if !self.announced && (self.has_arguments || done) {
            events.push(ToolEvent::Call { name: name.clone() });
            self.announced = true;
            self.raw.clear();
            if !self.has_arguments {
                self.arguments.push_str("{}");
            }
        }
        if self.announced && !self.is_held && !self.arguments.is_empty() {
            self.raw.clear();
            append(events, ToolEvent::Arguments(std::mem::take(&mut self.arguments)));
        }
    }
}

/// The text of a JSON string whose end is missing; unchanged if it is not one.
fn unquoted(string: String) -> String {
    // The longest escape sequence, `\u12ab`, may be cut anywhere.
    let ends = string.char_indices().rev().map(|(at, c)| at + c.len_utf8()).take(6);
    let text = |end: usize| serde_json::from_str::<String>(&format!("{}\"", string.get(..end)?)).ok();
    ends.into_iter().find_map(text).unwrap_or(string)
}
