//! Decodes the arguments of a call to JSON text, one character at a time.
//!
//! Only as much is checked as is needed to find the end of the arguments: what is not a valid value is left to the client. Nesting
//! is bounded, and nothing is read twice.

use std::sync::Arc;

use super::Tool;
use super::format::{Encoding, TYPED};
use super::json::{Place, ValueEnd};
use super::literal::Literal;
use super::types::Types;
use super::written::{Step, escape, quote};
use crate::marker::MAX_HELD;

/// A decoder of one call's arguments.
pub(super) enum Decoder {
    /// JSON is returned as it is. Says whether its first character has been read.
    Json(ValueEnd, bool),
    Tags(Tags),
    Literal(Literal),
}

impl Decoder {
    /// Creates a decoder in front of the arguments. `tool` is the function, as a place in the list, if it is known.
    pub fn new(encoding: Encoding, tool: Option<(Arc<[Tool]>, usize)>) -> Decoder {
        match encoding {
            Encoding::Json | Encoding::Object { .. } => Decoder::Json(ValueEnd::default(), false),
            Encoding::Tags { key, key_end, value, value_end, has_lines, typed } => Decoder::Tags(Tags {
                tags: TagText { key, key_end, value, value_end, has_lines, typed },
                tool,
                has_argument: false,
                state: TagState::Between(String::new()),
            }),
            Encoding::Bare(quote) => Decoder::Literal(Literal::bare(quote)),
            Encoding::Python => Decoder::Literal(Literal::python()),
        }
    }

    /// Reads the next character and appends to the JSON text.
    pub fn push(&mut self, c: char, json: &mut String) -> Step {
        match self {
            Decoder::Json(_, false) if c.is_whitespace() => Step::More,
            // A call without arguments.
            Decoder::Json(_, false) if c != '{' => {
                json.push_str("{}");
                Step::Done(c.to_string())
            }
            Decoder::Json(end, has_begun) => {
                *has_begun = true;
                json.push(c);
                if end.push(c) == Place::Last { Step::Done(String::new()) } else { Step::More }
            }
            Decoder::Tags(tags) => tags.push(c, json),
            Decoder::Literal(literal) => literal.push(c, json),
        }
    }

    /// Ends the text within the arguments.
    pub fn finish(&mut self, json: &mut String) {
        match self {
            Decoder::Json(..) => {}
            Decoder::Tags(tags) => tags.finish(json),
            Decoder::Literal(literal) => literal.finish(json),
        }
    }
}

/// The texts of [`Encoding::Tags`].
#[derive(Clone, Copy)]
struct TagText {
    key: &'static str,
    key_end: &'static str,
    value: &'static str,
    value_end: &'static str,
    has_lines: bool,
    typed: bool,
}

/// Decodes [`Encoding::Tags`].
pub(super) struct Tags {
    tags: TagText,
    tool: Option<(Arc<[Tool]>, usize)>,
    has_argument: bool,
    state: TagState,
}

enum TagState {
    /// Between two arguments.
    Between(String),
    Key(String),
    /// Between a key and its value.
    Open(Types, String),
    /// In front of the first character of a value.
    Start(Types),
    /// Within a value of text, with what may be its end.
    Text(String),
    /// Within another value, with all of it.
    Other(Types, String),
}

impl Tags {
    fn push(&mut self, c: char, json: &mut String) -> Step {
        let TagText { key, key_end, value, value_end, has_lines, typed } = self.tags;
        match &mut self.state {
            TagState::Between(held) => {
                held.push(c);
                let inner = held.trim_start();
                if inner == key {
                    self.state = TagState::Key(String::new());
                } else if !key.starts_with(inner) || held.len() > MAX_HELD {
                    let rest = std::mem::take(held);
                    return self.end(rest, json);
                }
            }
            TagState::Key(held) => {
                held.push(c);
                if let Some(name) = held.strip_suffix(key_end) {
                    json.push_str(if self.has_argument { ", " } else { "{" });
                    self.has_argument = true;
                    let (name, is_text) = name.split_once(TYPED).filter(|_| typed).unwrap_or((name, ""));
                    quote(name.trim(), json);
                    json.push_str(": ");
                    let schema = self.tool.as_ref().and_then(|(tools, at)| tools[*at].parameters.as_ref());
                    let types = match is_text {
                        "true" => Types::TEXT,
                        "false" => Types::OTHER,
                        _ => Types::of_property(schema, name.trim()),
                    };
                    self.state =
                        if value.is_empty() { TagState::Start(types) } else { TagState::Open(types, String::new()) };
                } else if held.len() > MAX_HELD {
                    let rest = format!("{key}{held}");
                    return self.end(rest, json);
                }
            }
            TagState::Open(types, held) => {
                held.push(c);
                let inner = held.trim_start();
                if inner == value {
                    self.state = TagState::Start(*types);
                } else if !value.starts_with(inner) || held.len() > MAX_HELD {
                    json.push_str("null");
                    let rest = std::mem::take(held);
                    return self.end(rest, json);
                }
            }
            TagState::Start(types) => {
                self.state = if types.are_text() {
                    json.push('"');
                    TagState::Text(String::new())
                } else {
                    TagState::Other(*types, String::new())
                };
                if c != '\n' || !has_lines {
                    return self.push(c, json);
                }
            }
            TagState::Text(held) => {
                held.push(c);
                loop {
                    let inner = if has_lines { held.strip_prefix('\n').unwrap_or(held) } else { held.as_str() };
                    if inner == value_end {
                        json.push('"');
                        self.state = TagState::Between(String::new());
                        break;
                    }
                    if value_end.starts_with(inner) {
                        break;
                    }
                    escape(held.remove(0), json);
                }
            }
            TagState::Other(types, held) => {
                held.push(c);
                if let Some(found) = held.strip_suffix(value_end) {
                    let found = if has_lines { found.strip_suffix('\n').unwrap_or(found) } else { found };
                    types.write(found, json);
                    self.state = TagState::Between(String::new());
                }
            }
        }
        Step::More
    }

    /// Ends the arguments in front of `rest`.
    fn end(&mut self, rest: String, json: &mut String) -> Step {
        json.push_str(if self.has_argument { "}" } else { "{}" });
        Step::Done(rest)
    }

    fn finish(&mut self, json: &mut String) {
        match &self.state {
            TagState::Text(held) => held.chars().for_each(|c| escape(c, json)),
            TagState::Other(_, held) => json.push_str(held.trim()),
            _ => {}
        }
    }
}
