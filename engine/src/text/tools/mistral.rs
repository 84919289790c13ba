//! Tool calls after `[TOOL_CALLS]`: a list of objects, or a name and its arguments.

use super::json::{CallReader, Place, Progress, ValueEnd};
use super::{ToolEvent, ToolParser, append};
use crate::text::marker::{MAX_HELD, Marker};

/// Marks the beginning of the calls.
const MARKER: &str = "[TOOL_CALLS]";
/// Separates a name from its arguments, in models since 2025.
const ARGS: &str = "[ARGS]";
const ID: &str = "[CALL_ID]";

enum State {
    Text(Marker),
    /// After the marker, with the held marker and the white space around it.
    Open(String),
    /// After the bracket of a list, or after one of its calls.
    List(List, String),
    Call(List, CallReader),
    /// Within a name and its tags: the held marker, and the text since then.
    Name(String, String),
    Arguments(ValueEnd),
}

/// The list around a call.
#[derive(Clone, Copy)]
struct List {
    /// The list has a bracket.
    bracket: bool,
    /// The list contains a call.
    called: bool,
}

/// See the [module](self).
pub(super) struct Mistral {
    state: State,
    called: bool,
    names: Vec<String>,
}

impl Mistral {
    /// Creates a parser for a text.
    pub fn new(names: Vec<String>) -> Mistral {
        Mistral { state: text(), called: false, names }
    }

    /// Starts reading an object.
    fn call(&mut self, list: List, held: String, events: &mut Vec<ToolEvent>) {
        self.state = State::Call(list, CallReader::new(held));
        self.push_char('{', events);
    }

    /// Continues with a name, if it can be one.
    fn name(&mut self, held: String, mut name: String, events: &mut Vec<ToolEvent>) {
        if name.len() <= MAX_HELD && self.parse(&name).is_some() {
            self.state = State::Name(held, name);
        } else if let Some(last) = name.pop() {
            self.read_as_text(held + &name, last, events);
        }
    }

    /// The name of the call that begins with `text`, and whether only its arguments are missing; `None` if no call begins so.
    fn parse<'a>(&self, text: &'a str) -> Option<(&'a str, bool)> {
        let known = self.names.iter().map(String::as_str).filter(|name| !name.is_empty());
        let whole = known.clone().filter(|name| text.starts_with(name)).map(str::len);
        let lengths = whole.chain(Some(name_end(text)).filter(|end| *end > 0));
        let call = |length| Some((&text[..length], tags(&text[length..])?));
        let begun = known.clone().any(|name| name.starts_with(text)).then_some((text, false));
        lengths.filter_map(call).max_by_key(|(_, complete)| *complete).or(begun)
    }

    /// Returns what was held back as text, and reads `c` as text, in which calls may begin.
    fn read_as_text(&mut self, held: String, c: char, events: &mut Vec<ToolEvent>) {
        append(events, ToolEvent::Text(held));
        self.push_char(c, events);
    }
}

/// Length of a name that is not in the list of known names.
fn name_end(text: &str) -> usize {
    text.find(|c: char| !c.is_alphanumeric() && !"_-.:/".contains(c)).unwrap_or(text.len())
}

/// Whether the tags between a name and its arguments are complete; `None` if the text is something else.
fn tags(mut rest: &str) -> Option<bool> {
    let mut complete = true;
    for (tag, has_value) in [(ID, true), (ARGS, false)] {
        match rest.strip_prefix(tag) {
            Some(behind) => rest = &behind[if has_value { name_end(behind) } else { 0 }..],
            None if !rest.is_empty() && tag.starts_with(rest) => (complete, rest) = (false, ""),
            None => {}
        }
    }
    rest.trim_start().is_empty().then_some(complete)
}

fn text() -> State {
    State::Text(Marker::new(MARKER))
}

fn with(mut text: String, c: char) -> String {
    text.push(c);
    text
}

impl ToolParser for Mistral {
    fn push_char(&mut self, c: char, events: &mut Vec<ToolEvent>) {
        match std::mem::replace(&mut self.state, text()) {
            State::Text(mut marker) => {
                let mut shown = String::new();
                self.state = match marker.push(c, &mut shown) {
                    true => State::Open(marker.take()),
                    false => State::Text(marker),
                };
                append(events, ToolEvent::Text(shown));
            }
            State::Open(held) if c == '[' => {
                self.state = State::List(List { bracket: true, called: false }, held + "[")
            }
            State::Open(held) if c == '{' => self.call(List { bracket: false, called: false }, held, events),
            State::Open(held) if c.is_whitespace() && held.len() <= 2 * MAX_HELD => {
                self.state = State::Open(with(held, c))
            }
            State::Open(held) => self.name(held, c.to_string(), events),
            State::List(list, held) if c == '{' => self.call(list, held, events),
            State::List(list, _) if c == ']' && list.bracket && list.called => {}
            State::List(list, held) if (c.is_whitespace() || c == ',') && held.len() <= 2 * MAX_HELD => {
                self.state = State::List(list, with(held, c));
            }
            State::List(_, held) => self.read_as_text(held, c, events),
            State::Call(list, mut reader) => match reader.push(c, &|_| true, events) {
                Progress::More => self.state = State::Call(list, reader),
                Progress::Done => {
                    self.called = true;
                    self.state = State::List(List { called: true, ..list }, String::new());
                }
                Progress::Broken => {
                    let mut held = reader.into_text();
                    held.pop();
                    self.read_as_text(held, c, events);
                }
            },
            State::Name(held, name) if c == '{' => match self.parse(&name) {
                Some((name, true)) => {
                    events.push(ToolEvent::Call { name: name.to_string() });
                    self.called = true;
                    self.state = State::Arguments(ValueEnd::default());
                    self.push_char(c, events);
                }
                _ => self.read_as_text(held + &name, c, events),
            },
            State::Name(held, name) => self.name(held, with(name, c), events),
            State::Arguments(mut end) => {
                append(events, ToolEvent::Arguments(c.to_string()));
                if end.push(c) != Place::Last {
                    self.state = State::Arguments(end);
                }
            }
        }
    }

    fn finish(&mut self, events: &mut Vec<ToolEvent>) {
        match std::mem::replace(&mut self.state, text()) {
            State::Text(mut marker) => {
                let held = marker.take();
                if !self.called || !held.trim().is_empty() {
                    append(events, ToolEvent::Text(held));
                }
            }
            State::Open(held) | State::List(List { called: false, .. }, held) => append(events, ToolEvent::Text(held)),
            State::Name(held, name) => append(events, ToolEvent::Text(held + &name)),
            State::Call(_, reader) => self.called |= reader.finish(events),
            State::List(..) | State::Arguments(_) => {}
        }
    }
}
