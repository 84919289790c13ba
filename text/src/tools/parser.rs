//! Reads the calls of every format.
//!
//! Text is held back while it may become the beginning of a call, up to the place where its arguments begin. The decision is a
//! function of the held text alone, so it does not depend on how the text was split. At most [`MAX_HEAD`] bytes are held back, so
//! a character costs a bounded number of comparisons. A call that is one JSON object is held back up to its name.

use std::sync::Arc;

use super::format::{Encoding, Part, Place, Spec};
use super::json::{CallReader, Progress};
use super::literal::ends_word;
use super::values::Decoder;
use super::written::Step;
use super::{Tool, ToolEvent, append};
use crate::marker::MAX_HELD;

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
    /// Within a call that is one JSON object.
    Object(Box<CallReader>),
    /// Within the arguments.
    Arguments(Box<Decoder>),
    /// After the arguments, with the text since then.
    Tail(String),
}

/// Finds the calls in the text of one sequence.
pub struct ToolParser {
    spec: &'static Spec,
    /// The variant of the format that the last call has.
    variant: &'static Spec,
    tools: Arc<[Tool]>,
    state: State,
    /// Nothing but white space has been read.
    at_start: bool,
    /// A call has been found, so white space at the end is dropped.
    called: bool,
}

impl ToolParser {
    /// Creates a parser for a text.
    pub(super) fn new(spec: &'static Spec, tools: Arc<[Tool]>) -> ToolParser {
        let state = State::Text { held: String::new(), after_call: false };
        ToolParser { spec, variant: spec, tools, state, at_start: true, called: false }
    }

    /// Reads the next piece of text and appends to `events` what is certain.
    pub fn push(&mut self, text: &str, events: &mut Vec<ToolEvent>) {
        text.chars().for_each(|c| self.push_char(c, events));
    }

    /// Ends the text and appends what was held back.
    pub fn finish(&mut self, events: &mut Vec<ToolEvent>) {
        match std::mem::replace(&mut self.state, text()) {
            State::Text { held, after_call } => {
                let rest = if after_call { self.after_calls(&held) } else { &held };
                if !self.called || !rest.trim().is_empty() {
                    append(events, ToolEvent::Text(rest.to_string()));
                }
            }
            State::Object(reader) => reader.finish(events),
            State::Arguments(mut decoder) => {
                let mut json = String::new();
                decoder.finish(&mut json);
                append(events, ToolEvent::Arguments(json));
            }
            State::Tail(mut held) => {
                if let Match::Whole(_, at) = matched(self.variant.tail, &held, true) {
                    held = held.split_off(at);
                }
                if !held.trim().is_empty() {
                    append(events, ToolEvent::Text(held));
                }
            }
        }
    }

    fn push_char(&mut self, c: char, events: &mut Vec<ToolEvent>) {
        match std::mem::replace(&mut self.state, text()) {
            State::Text { mut held, mut after_call } => {
                held.push(c);
                let next = self.read_text(&mut held, &mut after_call, events);
                self.state = next.unwrap_or(State::Text { held, after_call });
            }
            State::Object(mut reader) => {
                let is_named = |name: &str| self.variant.place == Place::Anywhere || self.knows(name);
                let progress = reader.push(c, &is_named, events);
                self.called |= reader.has_called();
                match progress {
                    Progress::More => self.state = State::Object(reader),
                    Progress::Done => self.end_of_arguments(String::new(), events),
                    Progress::Broken => {
                        // The last character may begin a call.
                        let mut held = reader.into_text();
                        held.pop();
                        append(events, ToolEvent::Text(held));
                        self.push_char(c, events);
                    }
                }
            }
            State::Arguments(mut decoder) => {
                let mut json = String::new();
                let step = decoder.push(c, &mut json);
                append(events, ToolEvent::Arguments(json));
                match step {
                    Step::More => self.state = State::Arguments(decoder),
                    Step::Done(rest) => self.end_of_arguments(rest, events),
                }
            }
            State::Tail(mut rest) => {
                rest.push(c);
                self.end_of_arguments(rest, events);
            }
        }
    }

    /// Whether a function of this name exists.
    fn knows(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.name == name)
    }

    /// Reads the beginning of a call, with `before` in front of its head.
    fn call(&self, spec: &Spec, before: &[Part], text: &str) -> Match {
        let (name, at) = match matched(before.iter().chain(spec.head), text, false) {
            Match::Whole(name, at) => (name, at),
            other => return other,
        };
        // The name of an object follows.
        let is_object = matches!(spec.arguments, Encoding::Object { .. });
        let is_plain = |name: &str| name.chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c));
        if !is_object && !self.knows(&name) && (spec.place != Place::Anywhere || !is_plain(&name)) {
            return Match::No;
        }
        match begins(spec, &text[at..]) {
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
        let may_begin = |spec: &&'static Spec| match spec.place {
            Place::Anywhere => true,
            Place::StartOr(_) if self.at_start => true,
            Place::StartOr(Some(marker)) => inner.starts_with(marker) || marker.starts_with(inner),
            Place::StartOr(None) => false,
        };
        let variants = std::iter::once(self.spec).chain(self.spec.variants).filter(may_begin);
        let next = after_call.then_some((self.variant, self.variant.between));
        for (spec, before) in variants.map(|spec| (spec, spec.lead)).chain(next) {
            match self.call(spec, before, inner) {
                Match::Whole(name, at) => return Found::Call(spec, name, space + at),
                Match::Begun => is_begun = true,
                Match::No => {}
            }
        }
        if after_call && !self.variant.end.is_empty() {
            match matched(self.variant.end, inner, false) {
                Match::Whole(_, at) => return Found::End(space + at),
                Match::Begun => is_begun = true,
                Match::No => {}
            }
        }
        if is_begun { Found::Unknown } else { Found::Text }
    }

    /// Reads a character outside of a call.
    fn read_text(&mut self, held: &mut String, after_call: &mut bool, events: &mut Vec<ToolEvent>) -> Option<State> {
        loop {
            match self.decide(held, *after_call) {
                Found::Unknown => return None,
                Found::Call(spec, name, at) => {
                    (self.variant, self.at_start) = (spec, false);
                    let rest = held.split_off(at);
                    self.state = if let Encoding::Object { name, name_first, .. } = spec.arguments {
                        State::Object(Box::new(CallReader::new(std::mem::take(held), name, name_first)))
                    } else {
                        self.called = true;
                        let tool = self.tools.iter().position(|tool| tool.name == name);
                        let tool = tool.map(|at| (self.tools.clone(), at));
                        events.push(ToolEvent::Call { name });
                        State::Arguments(Box::new(Decoder::new(spec.arguments, tool)))
                    };
                    self.push(&rest, events);
                    return Some(std::mem::replace(&mut self.state, text()));
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

    /// Reads the text since the arguments as the end of a call. If it is something else, it is text.
    fn end_of_arguments(&mut self, rest: String, events: &mut Vec<ToolEvent>) {
        let after = match matched(self.variant.tail, &rest, false) {
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

    /// The text after the end of the calls, where the whole text ends.
    fn after_calls<'a>(&self, held: &'a str) -> &'a str {
        let Spec { between, end, .. } = self.variant;
        let inner = held.trim_start();
        match (matched(*end, inner, true), matched(*between, held, true)) {
            (Match::Whole(_, at), _) if !end.is_empty() => &inner[at..],
            (_, Match::Whole(_, at)) if at == held.len() => "",
            _ => held,
        }
    }
}

fn text() -> State {
    State::Text { held: String::new(), after_call: false }
}

/// What the held text is.
enum Found {
    Unknown,
    /// A call of this variant: the name of its function, and where its arguments begin.
    Call(&'static Spec, String, usize),
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
    let either = |marker: &str| {
        // A call without arguments may end at once.
        let ends = spec.tail.iter().filter_map(Part::text).map(starts);
        ends.fold(starts(marker), |found, next| match (found, next) {
            (Some(true), _) | (_, Some(true)) => Some(true),
            (Some(false), Some(false)) => Some(false),
            _ => None,
        })
    };
    match spec.arguments {
        Encoding::Object { .. } | Encoding::Bare(_) => starts("{"),
        Encoding::Json => either("{"),
        Encoding::Tags { key, .. } => either(key),
        Encoding::Python => {
            if inner.starts_with(')') {
                return Some(true);
            }
            let name = inner.find(ends_word)?;
            let rest = inner[name..].trim_start();
            rest.chars().next().map(|c| name > 0 && c == '=')
        }
    }
}

/// Reads a text as parts. `is_whole` says that no text follows, so that what may be missing is missing.
fn matched<'a>(parts: impl IntoIterator<Item = &'a Part>, text: &str, is_whole: bool) -> Match {
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
            Part::Space(_) | Part::Separator(_) => {
                let is_passed = |c: char| c.is_whitespace() || matches!(part, Part::Separator(_)) && ",;".contains(c);
                at += rest.len() - rest.trim_start_matches(is_passed).len();
                if at == text.len() && !is_whole {
                    return Match::Begun;
                }
            }
            Part::Name(ends) => {
                let Some(end) = rest.find(|c| ends.contains(c)) else {
                    return if rest.trim().len() > MAX_HELD { Match::No } else { Match::Begun };
                };
                let found = rest[..end].trim();
                if found.is_empty() || found.len() > MAX_HELD {
                    return Match::No;
                }
                name = found.to_string();
                at += end;
            }
            Part::Id(marker) => {
                if let Some(id) = rest.strip_prefix(marker) {
                    at += marker.len() + id.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(id.len());
                    if at == text.len() && !is_whole {
                        return Match::Begun;
                    }
                } else if marker.starts_with(rest) && !is_whole {
                    return Match::Begun;
                }
            }
        }
    }
    Match::Whole(name, at)
}
