//! Reads the calls of every format whose declaration has a [head](Spec::head).
//!
//! Text is held back while it may become the beginning of a call, up to the place where its arguments begin. The decision is a
//! function of the held text alone, so it does not depend on how the text was split. At most [`MAX_HEAD`] bytes are held back, so
//! a character costs a bounded number of comparisons.

use std::sync::Arc;

use super::format::{Encoding, Part, Place, Spec};
use super::values::Decoder;
use super::written::Step;
use super::{Tool, ToolEvent, ToolParser, append};
use crate::text::marker::MAX_HELD;

/// Greatest length of the text from the white space in front of a call to its arguments, in bytes.
const MAX_HEAD: usize = 4 * MAX_HELD;

/// What a text is, read as a list of parts.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Match {
    /// Something else.
    No,
    /// Perhaps the beginning of the parts.
    Begun,
    /// All parts, followed by what may be the next one. Holds the name of the function and the length of the parts.
    Whole(String, usize),
}

enum State {
    /// Outside of a call, with the text that is held back.
    Text { held: String, after_call: bool },
    /// Within the arguments.
    Arguments(Box<Decoder>),
    /// After the arguments, with the text since then.
    Tail(String),
}

/// See the [module](self).
pub(super) struct Marked {
    spec: &'static Spec,
    tools: Arc<[Tool]>,
    state: State,
    /// Nothing but white space has been read.
    at_start: bool,
    /// A call has been found, so white space at the end is dropped.
    called: bool,
}

impl Marked {
    /// Creates a parser for a text.
    pub fn new(spec: &'static Spec, tools: Arc<[Tool]>) -> Marked {
        let state = State::Text { held: String::new(), after_call: false };
        Marked { spec, tools, state, at_start: true, called: false }
    }

    /// Reads the beginning of a call, with `before` in front of its head.
    fn call(&self, before: &[Part], text: &str) -> Match {
        let (name, at) = match matched(before.iter().chain(self.spec.head), text, false) {
            Match::Whole(name, at) => (name, at),
            other => return other,
        };
        let is_known = || self.tools.iter().any(|tool| tool.name == name);
        if self.spec.place != Place::Anywhere && !is_known() {
            return Match::No;
        }
        match begins(self.spec, &text[at..]) {
            None => Match::Begun,
            Some(true) => Match::Whole(name, at),
            Some(false) => Match::No,
        }
    }

    /// Looks for a call, or the end of the calls, at the beginning of the text that is held back.
    fn decide(&self, held: &str, after_call: bool) -> Found {
        let inner = held.trim_start();
        if inner.is_empty() {
            return if held.len() > MAX_HELD { Found::Text } else { Found::Unknown };
        }
        if held.len() > MAX_HEAD {
            return Found::Text;
        }
        let space = held.len() - inner.len();
        let mut is_begun = false;
        let may_begin = match self.spec.place {
            Place::Anywhere => true,
            Place::StartOr(_) if self.at_start => true,
            Place::StartOr(Some(marker)) => inner.starts_with(marker) || marker.starts_with(inner),
            Place::StartOr(None) => false,
        };
        let mut heads = Vec::with_capacity(2);
        if may_begin {
            heads.push(self.call(self.spec.lead, inner));
        }
        if after_call {
            heads.push(self.call(self.spec.between, inner));
        }
        for head in heads {
            match head {
                Match::Whole(name, at) => return Found::Call(name, space + at),
                Match::Begun => is_begun = true,
                Match::No => {}
            }
        }
        if after_call && !self.spec.end.is_empty() {
            match matched(self.spec.end.iter(), inner, false) {
                Match::Whole(_, at) => return Found::End(space + at),
                Match::Begun => is_begun = true,
                Match::No => {}
            }
        }
        if is_begun { Found::Unknown } else { Found::Text }
    }

    /// Reads a character outside of a call.
    fn text(&mut self, held: &mut String, after_call: &mut bool, events: &mut Vec<ToolEvent>) -> Option<State> {
        loop {
            match self.decide(held, *after_call) {
                Found::Unknown => return None,
                Found::Call(name, at) => {
                    let tool = self.tools.iter().position(|tool| tool.name == name);
                    events.push(ToolEvent::Call { name });
                    (self.called, self.at_start) = (true, false);
                    let schema = tool.and_then(|at| self.tools[at].parameters.clone());
                    self.state = State::Arguments(Box::new(Decoder::new(self.spec.arguments, schema)));
                    let rest = held.split_off(at);
                    self.push(&rest, events);
                    return Some(std::mem::replace(&mut self.state, State::Tail(String::new())));
                }
                Found::End(at) => {
                    // What follows is text, in which calls may begin.
                    held.drain(..at);
                    *after_call = false;
                }
                Found::Text => {
                    let c = held.remove(0);
                    self.at_start &= c.is_whitespace();
                    *after_call = false;
                    append(events, ToolEvent::Text(c.to_string()));
                    if held.is_empty() {
                        return None;
                    }
                }
            }
        }
    }
}

/// What the held text is.
enum Found {
    Unknown,
    Call(String, usize),
    End(usize),
    Text,
}

/// Whether a text begins arguments; `None` if it is too short to tell.
fn begins(spec: &Spec, text: &str) -> Option<bool> {
    let inner = text.trim_start();
    let starts = |marker: &str| match inner.starts_with(marker) {
        true => Some(true),
        false if marker.starts_with(inner) => None,
        false => Some(false),
    };
    match spec.arguments {
        Encoding::Json | Encoding::Object(_) | Encoding::Bare(_) => starts("{"),
        Encoding::Tags { key, .. } => {
            let tail = spec.tail.iter().find_map(|part| match part {
                Part::Text(text) => Some(*text),
                _ => None,
            });
            match (starts(key), tail.map_or(Some(false), starts)) {
                (Some(true), _) | (_, Some(true)) => Some(true),
                (Some(false), Some(false)) => Some(false),
                _ => None,
            }
        }
        Encoding::Python => {
            if inner.starts_with(')') {
                return Some(true);
            }
            let name = inner.find(|c: char| c != '_' && !c.is_alphanumeric())?;
            let rest = inner[name..].trim_start();
            rest.chars().next().map(|c| name > 0 && c == '=')
        }
    }
}

/// Reads a text as parts. `is_whole` says that no text follows, so that what may be missing is missing.
fn matched<'a>(parts: impl Iterator<Item = &'a Part>, text: &str, is_whole: bool) -> Match {
    let (mut at, mut name) = (0, String::new());
    for part in parts {
        let rest = &text[at..];
        match part {
            Part::Text(marker) | Part::Usual(marker) | Part::Maybe(marker) => {
                if rest.starts_with(marker) {
                    at += marker.len();
                } else if marker.starts_with(rest) && (!is_whole || matches!(part, Part::Text(_))) {
                    return Match::Begun;
                } else if matches!(part, Part::Text(_)) {
                    return Match::No;
                }
            }
            Part::Space(_) => {
                at += rest.len() - rest.trim_start().len();
                if at == text.len() && !is_whole {
                    return Match::Begun;
                }
            }
            Part::Name(ends) => {
                let Some(end) = rest.find(|c| ends.contains(c)) else {
                    return if rest.len() > MAX_HELD { Match::No } else { Match::Begun };
                };
                let found = rest[..end].trim();
                if found.is_empty() || end > MAX_HELD {
                    return Match::No;
                }
                name = found.to_string();
                at += end;
            }
            Part::Index => {
                if let Some(digits) = rest.strip_prefix(':') {
                    at += 1 + digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
                    if at == text.len() {
                        return Match::Begun;
                    }
                }
            }
        }
    }
    Match::Whole(name, at)
}

impl ToolParser for Marked {
    fn push_char(&mut self, c: char, events: &mut Vec<ToolEvent>) {
        match std::mem::replace(&mut self.state, State::Tail(String::new())) {
            State::Text { mut held, mut after_call } => {
                held.push(c);
                let next = self.text(&mut held, &mut after_call, events);
                self.state = next.unwrap_or(State::Text { held, after_call });
            }
            State::Arguments(mut decoder) => {
                let mut json = String::new();
                let step = decoder.push(c, &mut json);
                append(events, ToolEvent::Arguments(json));
                match step {
                    Step::More => self.state = State::Arguments(decoder),
                    Step::Done(rest) => {
                        self.state = State::Tail(String::new());
                        self.end_of_arguments(rest, events);
                    }
                }
            }
            State::Tail(mut rest) => {
                rest.push(c);
                self.end_of_arguments(rest, events);
            }
        }
    }

    fn finish(&mut self, events: &mut Vec<ToolEvent>) {
        let text = State::Text { held: String::new(), after_call: false };
        match std::mem::replace(&mut self.state, text) {
            State::Text { mut held, after_call } => {
                if after_call && let Match::Whole(_, at) = matched(self.spec.end.iter(), held.trim_start(), true) {
                    held = held.trim_start()[at..].to_string();
                }
                if !self.called || !held.trim().is_empty() {
                    append(events, ToolEvent::Text(held));
                }
            }
            State::Tail(mut held) => {
                if let Match::Whole(_, at) = matched(self.spec.tail.iter(), &held, true) {
                    held = held.split_off(at);
                }
                if !held.trim().is_empty() {
                    append(events, ToolEvent::Text(held));
                }
            }
            State::Arguments(mut decoder) => {
                let mut json = String::new();
                decoder.finish(&mut json);
                append(events, ToolEvent::Arguments(json));
            }
        }
    }
}

impl Marked {
    /// Reads the text since the arguments as the end of a call. If it is something else, it is text.
    fn end_of_arguments(&mut self, rest: String, events: &mut Vec<ToolEvent>) {
        let after = match matched(self.spec.tail.iter(), &rest, false) {
            Match::Begun if rest.len() <= MAX_HEAD => {
                self.state = State::Tail(rest);
                return;
            }
            Match::Whole(_, at) => &rest[at..],
            Match::Begun | Match::No => &rest[..],
        };
        self.state = State::Text { held: String::new(), after_call: true };
        self.push(after, events);
    }
}
