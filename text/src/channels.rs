//! The messages of an answer in OpenAI's harmony format, as gpt-oss writes it.
//!
//! ```text
//! <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
//! <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
//! ```
//!
//! The channel `analysis` is reasoning; every other message is answer. A message to a function keeps its markers, so that the parser
//! of the tool format finds it.

use super::marker::{HARMONY, MAX_HELD};
use super::thought::Thought;
use super::tools::ValueEnd;

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Content,
    /// A message to a function.
    Call,
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    /// In front of a message or in its header.
    Header(String),
    /// Within a message, with what may be the marker at its end.
    Body(Kind, String),
}

/// See the [module](self).
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Channels {
    state: State,
    /// Messages to functions keep their markers.
    has_calls: bool,
    /// A message of reasoning, and one of the answer, has been read.
    seen: [bool; 2],
    /// The JSON of a message to a function. Markers in its strings are text.
    json: ValueEnd,
}

impl Channels {
    /// Creates a parser for the text after a prompt, which may end within a message.
    pub fn new(prompt: &str) -> Channels {
        let last = prompt.rsplit(START).next().filter(|last| last.len() < prompt.len()).unwrap_or_default();
        let state = match last.split_once(MESSAGE) {
            Some((header, text)) if !HARMONY.iter().any(|end| text.contains(end)) => {
                State::Body(kind(header).0, String::new())
            }
            _ => State::Header(String::new()),
        };
        Channels { state, has_calls: true, seen: [false; 2], json: ValueEnd::default() }
    }

    /// Returns messages to functions as text without markers.
    pub fn ignore_calls(&mut self) {
        self.has_calls = false;
    }

    /// Reads the next character.
    pub fn push(&mut self, c: char, thought: &mut Thought) {
        match &mut self.state {
            State::Header(held) => {
                held.push(c);
                let inner = held.trim_start();
                let begins =
                    [START, CHANNEL, "to="].iter().any(|marker| inner.starts_with(marker) || marker.starts_with(inner));
                if !begins || held.len() > 2 * MAX_HELD {
                    let text = std::mem::take(held);
                    self.state = State::Body(Kind::Content, String::new());
                    text.chars().for_each(|c| self.push_body(c, thought));
                } else if let Some(header) = held.strip_suffix(MESSAGE) {
                    let (kind, name) = kind(header);
                    let (kind, name) = if self.has_calls { (kind, name) } else { (shown(kind), None) };
                    let name = name.map(str::to_string);
                    self.begin(kind, name, thought);
                }
            }
            State::Body(..) => self.push_body(c, thought),
        }
    }

    /// Whether the characters of `held`, the last that were read, belong to a message that is answer; `None` within a header.
    pub fn is_answer(&self, held: &str) -> Option<bool> {
        match &self.state {
            State::Header(_) => None,
            State::Body(kind, _) => Some(*kind != Kind::Reasoning && !held.ends_with(MESSAGE)),
        }
    }

    /// Whether the last character belongs to a message of reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Body(Kind::Reasoning, _))
    }

    /// Number of characters of a header, whose message is not known yet.
    pub fn num_undecided_chars(&self) -> usize {
        match &self.state {
            State::Header(held) => held.chars().count(),
            State::Body(..) => 0,
        }
    }

    /// Ends the text.
    pub fn finish(&mut self, thought: &mut Thought) {
        match std::mem::replace(&mut self.state, State::Header(String::new())) {
            State::Header(held) if held.trim().is_empty() => {}
            State::Header(held) => thought.content.push_str(&held),
            State::Body(kind, held) => write(kind, &held, thought),
        }
    }

    /// Begins a message. Two messages of one kind are separated by a line break.
    fn begin(&mut self, kind: Kind, name: Option<String>, thought: &mut Thought) {
        let seen = &mut self.seen[usize::from(kind != Kind::Reasoning)];
        match kind {
            Kind::Call => {
                self.json = ValueEnd::default();
                let name = name.unwrap_or_default();
                thought.content.push_str(&format!("{CHANNEL}commentary to=functions.{name}{MESSAGE}"));
            }
            _ if std::mem::replace(seen, true) => write(kind, "\n", thought),
            _ => {}
        }
        self.state = State::Body(kind, String::new());
    }

    fn push_body(&mut self, c: char, thought: &mut Thought) {
        let State::Body(kind, held) = &mut self.state else { return self.push(c, thought) };
        held.push(c);
        while self.json.is_within_string() && !held.is_empty()
            || !HARMONY.iter().any(|end| end.starts_with(held.as_str()))
        {
            let first = held.remove(0);
            if *kind == Kind::Call {
                self.json.push(first);
            }
            write(*kind, first.encode_utf8(&mut [0; 4]), thought);
        }
        if HARMONY.contains(&held.as_str()) {
            if *kind == Kind::Call {
                thought.content.push_str("<|call|>");
            }
            self.json = ValueEnd::default();
            let is_header = [START, CHANNEL].contains(&held.as_str());
            self.state = State::Header(if is_header { std::mem::take(held) } else { String::new() });
        }
    }
}

/// The kind of a message with this header, and the function that it is for.
fn kind(header: &str) -> (Kind, Option<&str>) {
    let word = |marker: &str| {
        let (_, behind) = header.split_once(marker)?;
        behind.split('<').next().map(str::trim)
    };
    // The type of the text may follow the recipient, and the recipient the channel.
    let types = [" json", " code"];
    let recipient = word("to=").map(|text| types.iter().find_map(|kind| text.strip_suffix(kind)).unwrap_or(text));
    let function = recipient.and_then(|recipient| recipient.strip_prefix("functions."));
    let channel = word(CHANNEL).and_then(|text| text.split_whitespace().next());
    match (function, channel) {
        (Some(name), _) => (Kind::Call, Some(name)),
        (None, Some("analysis")) => (Kind::Reasoning, None),
        _ => (Kind::Content, None),
    }
}

/// The kind of a message if those to functions are text.
fn shown(kind: Kind) -> Kind {
    if kind == Kind::Call { Kind::Content } else { kind }
}

fn write(kind: Kind, text: &str, thought: &mut Thought) {
    match kind {
        Kind::Reasoning => thought.reasoning.push_str(text),
        Kind::Content | Kind::Call => thought.content.push_str(text),
    }
}
