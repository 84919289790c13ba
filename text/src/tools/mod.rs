//! Tool calls in a stream of text, in the formats of the model families.
//!
//! | file | what it owns |
//! |---|---|
//! | `format` | what a format consists of: names, models, markers, encoding of the arguments |
//! | `table` | all formats |
//! | `parser` | the parser of every format |
//! | `values`, `literal`, `types`, `written` | arguments, decoded to JSON |
//! | `json` | calls that are one JSON object |
//! | `grammar`, `schema` | the grammars of calls and of the text around them, and of arguments that are not JSON |
//!
//! Invariants: the events do not depend on how the text is split. No text is lost: everything that is not a call, its markup, or
//! white space or separators next to it is returned unchanged as text, including what only looked like a call. Each format is
//! also available as a grammar, whose texts always parse as calls.

mod format;
mod grammar;
mod json;
mod literal;
mod parser;
mod schema;
mod table;
mod types;
mod values;
mod written;

use std::str::FromStr;
use std::sync::Arc;

use crate::{ChatTemplate, Tokenizer};
use format::Spec;
pub use format::ToolFormat;
pub use grammar::{Calls, Tool};
pub(super) use json::ValueEnd;
pub use parser::ToolParser;
use table::SPECS;

/// An element of the text, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolEvent {
    /// Text outside of any call.
    Text(String),
    /// The beginning of a call.
    Call {
        /// Name of the function.
        name: String,
    },
    /// A piece of the last call's arguments, which are JSON text.
    Arguments(String),
}

impl ToolFormat {
    /// All formats, in the order in which templates are compared with them.
    pub fn all() -> impl Iterator<Item = ToolFormat> {
        SPECS.iter().map(|spec| spec.format)
    }

    /// The format that a chat template mentions, and the first text that tells it.
    pub fn of(template: &ChatTemplate) -> Option<(ToolFormat, &'static str)> {
        ToolFormat::of_texts(|text| template.mentions(text))
    }

    /// The format of a template of which `mentions` returns whether it contains a text.
    pub fn of_texts(mentions: impl Fn(&str) -> bool) -> Option<(ToolFormat, &'static str)> {
        SPECS.iter().find_map(|spec| {
            let texts = spec.template.iter().find(|texts| texts.iter().all(|text| mentions(text)))?;
            Some((spec.format, *texts.first()?))
        })
    }

    fn spec(self) -> &'static Spec {
        SPECS.iter().find(|spec| spec.format == self).unwrap_or(&SPECS[0])
    }

    /// vLLM's names of the parser, the preferred one first.
    pub fn names(self) -> &'static [&'static str] {
        self.spec().names
    }

    /// Models that write the format.
    pub fn models(self) -> &'static str {
        self.spec().models
    }

    /// A call of a function `f` with the argument `x` = 1.
    pub fn example(self) -> &'static str {
        self.spec().example
    }

    /// Creates a parser for a text. `tools` are the known functions: in formats without a marker, a call of another name is
    /// text, and in formats that do not write the types of values, schemas decide them.
    pub fn parser(self, tools: Arc<[Tool]>) -> ToolParser {
        ToolParser::new(self.spec(), tools)
    }

    /// Whether a marker of the format is a special token of the vocabulary. Special tokens must then be kept in the text.
    pub fn has_special_marker(self, tokenizer: &Tokenizer) -> bool {
        self.spec().markers().any(|text| special_token(tokenizer, text).is_some())
    }
}

/// The id of a special token.
pub(super) fn special_token(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    tokenizer.token_to_id(text).filter(|&id| tokenizer.is_special(id))
}

/// Parses vLLM's name of the parser.
impl FromStr for ToolFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<ToolFormat, String> {
        let named = SPECS.iter().find(|spec| spec.names.contains(&name)).map(|spec| spec.format);
        named.ok_or_else(|| {
            let names: Vec<&str> = SPECS.iter().flat_map(|spec| spec.names).copied().collect();
            format!("expected one of {}", names.join(", "))
        })
    }
}

/// Appends an event. Consecutive pieces of text, or of arguments, become one piece.
fn append(events: &mut Vec<ToolEvent>, event: ToolEvent) {
    match (events.last_mut(), event) {
        (_, ToolEvent::Text(more) | ToolEvent::Arguments(more)) if more.is_empty() => {}
        (Some(ToolEvent::Text(text)), ToolEvent::Text(more)) => text.push_str(&more),
        (Some(ToolEvent::Arguments(text)), ToolEvent::Arguments(more)) => text.push_str(&more),
        (_, event) => events.push(event),
    }
}
