//! Tool calls in a stream of text, in the formats of the model families.
//!
//! | format | what a call looks like |
//! |---|---|
//! | `hermes` (Hermes, Qwen) | `<tool_call>` `{"name": "f", "arguments": {…}}` `</tool_call>`, text around it |
//! | `llama3_json` | the whole answer is `{"name": "f", "parameters": {…}}`, several with `;` between them |
//! | `mistral` | `[TOOL_CALLS]` `[{"name": "f", "arguments": {…}}, …]`, or `[TOOL_CALLS]f[ARGS]{…}`, text in front |
//!
//! Invariants: the events do not depend on how the text is split. No text is lost: everything that is not a call, its markup, or
//! white space or separators next to it is returned unchanged as text, including what only looked like a call. Each format is
//! also available as a grammar, whose texts always parse as calls.

mod grammar;
mod hermes;
mod json;
mod llama3;
mod mistral;

use std::str::FromStr;

use models::{ChatTemplate, Tokenizer};

pub use grammar::Tool;

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

/// Finds the calls in the text of one sequence.
pub trait ToolParser: Send {
    /// Reads the next character and appends to `events` what is certain.
    fn push_char(&mut self, c: char, events: &mut Vec<ToolEvent>);

    /// Reads the next piece of text and appends to `events` what is certain.
    fn push(&mut self, text: &str, events: &mut Vec<ToolEvent>) {
        text.chars().for_each(|c| self.push_char(c, events));
    }

    /// Ends the text and appends what was held back.
    fn finish(&mut self, events: &mut Vec<ToolEvent>);
}

/// The format in which a model writes its calls.
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
    /// The format that a chat template mentions; Hermes if it mentions none.
    pub fn of(template: Option<&ChatTemplate>) -> ToolFormat {
        let mentions = |text| template.is_some_and(|template| template.mentions(text));
        if mentions(mistral::MARKER) {
            ToolFormat::Mistral
        } else if !mentions(hermes::OPEN) && (mentions(llama3::TAG) || mentions("Environment: ipython")) {
            ToolFormat::Llama3Json
        } else {
            ToolFormat::Hermes
        }
    }

    /// Creates a parser for a text. `names` are the known functions: in formats without a marker, a call of another name is
    /// text.
    pub fn parser(self, names: Vec<String>) -> Box<dyn ToolParser> {
        match self {
            ToolFormat::Hermes => Box::new(hermes::Hermes::new()),
            ToolFormat::Llama3Json => Box::new(llama3::Llama3::new(names)),
            ToolFormat::Mistral => Box::new(mistral::Mistral::new(names)),
        }
    }

    /// The special token that marks a call, if the vocabulary has one. It must be kept in the text.
    pub fn special_marker(self, tokenizer: &Tokenizer) -> Option<u32> {
        let marker = match self {
            ToolFormat::Hermes => hermes::OPEN,
            ToolFormat::Llama3Json => llama3::TAG,
            ToolFormat::Mistral => mistral::MARKER,
        };
        tokenizer.token_to_id(marker).filter(|&id| tokenizer.is_special(id))
    }
}

/// Parses vLLM's name of the parser.
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

/// Appends an event. Consecutive pieces of text, or of arguments, become one piece.
fn append(events: &mut Vec<ToolEvent>, event: ToolEvent) {
    match (events.last_mut(), event) {
        (_, ToolEvent::Text(more) | ToolEvent::Arguments(more)) if more.is_empty() => {}
        (Some(ToolEvent::Text(text)), ToolEvent::Text(more)) => text.push_str(&more),
        (Some(ToolEvent::Arguments(text)), ToolEvent::Arguments(more)) => text.push_str(&more),
        (_, event) => events.push(event),
    }
}
