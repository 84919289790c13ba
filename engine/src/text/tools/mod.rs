//! Tool calls in what a model writes: found while it streams, in the formats of the model families.
//!
//! | format | what a call looks like |
//! |---|---|
//! | `hermes` (Hermes, Qwen) | `<tool_call>` `{"name": "f", "arguments": {…}}` `</tool_call>`, text around it |
//! | `llama3_json` | the whole answer is `{"name": "f", "parameters": {…}}`, several with `;` between them |
//! | `mistral` | `[TOOL_CALLS]` `[{"name": "f", "arguments": {…}}, …]`, or `[TOOL_CALLS]f[ARGS]{…}`, text in front |
//!
//! Invariants: however the text is split, the events add up to the same. No text is lost: what is not a call, a part of its
//! markup, or white space or separators beside it comes out as text to the letter, and so does what only looked like a call.
//! The same format can be written as a grammar, so that what it holds is always parsed back into calls.

mod grammar;
mod hermes;
mod json;
mod llama3;
mod mistral;

use std::str::FromStr;

use models::{ChatTemplate, Tokenizer};

pub use grammar::Tool;

/// What a parser finds, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolEvent {
    /// Text outside of any call.
    Text(String),
    /// A call begins.
    Call {
        /// Name of the function.
        name: String,
    },
    /// A piece of the arguments of the last call, JSON text.
    Arguments(String),
}

/// Finds the calls in one sequence's text.
pub trait ToolParser: Send {
    /// Takes the next piece of text; what it makes certain goes behind `events`.
    fn push(&mut self, text: &str, events: &mut Vec<ToolEvent>);

    /// The text has ended: what was held back is what it is.
    fn finish(&mut self, events: &mut Vec<ToolEvent>);
}

/// How a model writes its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{…}</tool_call>`: Hermes, Qwen and most templates in ChatML.
    Hermes,
    /// Bare JSON: Llama 3.1 and later.
    Llama3Json,
    /// `[TOOL_CALLS]`: Mistral.
    Mistral,
}

impl ToolFormat {
    /// The format that a chat template speaks of; Hermes' where it speaks of none.
    pub fn of(template: Option<&ChatTemplate>) -> ToolFormat {
        let speaks_of = |text| template.is_some_and(|template| template.mentions(text));
        if speaks_of(mistral::MARKER) {
            ToolFormat::Mistral
        } else if !speaks_of(hermes::OPEN) && (speaks_of(llama3::TAG) || speaks_of("Environment: ipython")) {
            ToolFormat::Llama3Json
        } else {
            ToolFormat::Hermes
        }
    }

    /// A parser at the start of a text. `names` are the functions that may be called: where nothing else marks a call, other
    /// names make none.
    pub fn parser(self, names: Vec<String>) -> Box<dyn ToolParser> {
        match self {
            ToolFormat::Hermes => Box::new(hermes::Hermes::new()),
            ToolFormat::Llama3Json => Box::new(llama3::Llama3::new(names)),
            ToolFormat::Mistral => Box::new(mistral::Mistral::new(names)),
        }
    }

    /// The marker that must show in the text although its token is special, if the vocabulary has such a token.
    pub fn special_marker(self, tokenizer: &Tokenizer) -> Option<u32> {
        let marker = match self {
            ToolFormat::Hermes => hermes::OPEN,
            ToolFormat::Llama3Json => llama3::TAG,
            ToolFormat::Mistral => mistral::MARKER,
        };
        tokenizer.token_to_id(marker).filter(|&id| tokenizer.is_special(id))
    }
}

/// As vLLM calls its parsers.
impl FromStr for ToolFormat {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<ToolFormat, &'static str> {
        match name {
            "hermes" => Ok(ToolFormat::Hermes),
            "llama3_json" => Ok(ToolFormat::Llama3Json),
            "mistral" => Ok(ToolFormat::Mistral),
            _ => Err("expected hermes, llama3_json or mistral"),
        }
    }
}

/// Puts an event behind others; neighbours that are pieces of one thing become one piece.
fn append(events: &mut Vec<ToolEvent>, event: ToolEvent) {
    match (events.last_mut(), event) {
        (_, ToolEvent::Text(more) | ToolEvent::Arguments(more)) if more.is_empty() => {}
        (Some(ToolEvent::Text(text)), ToolEvent::Text(more)) => text.push_str(&more),
        (Some(ToolEvent::Arguments(text)), ToolEvent::Arguments(more)) => text.push_str(&more),
        (_, event) => events.push(event),
    }
}
