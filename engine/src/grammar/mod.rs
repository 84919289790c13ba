//! Structured output: what a text must match becomes a mask of tokens, computed while the model computes logits.
//!
//! ```text
//! submit ─▶ Grammars: compile, on a thread of its own ─▶ Matcher ─▶ Guide: first mask ─┐ while the prompt is computed
//!                                                                                     ▼
//!           ┌─────────────▶ step: forward ─▶ logits ─▶ draw within the mask ─▶ accept(token)
//!           └── Guide: next mask on a mask thread, from the draw to the next draw ◀────┘
//! ```
//!
//! The grammars themselves (JSON schema, regular expressions, Lark) are llguidance's; this module gives it the vocabulary
//! as bytes, keeps compilation away from everybody else and bounds it, and runs the masks beside the forward pass.
//!
//! Costs: the vocabulary is indexed with the first grammar (about a second per million tokens); a compiled grammar is kept
//! and forked for the next request that has the same. A mask is a walk through the part of the vocabulary that can match,
//! tens of microseconds mostly.

mod compile;
mod cost;
mod guide;
mod matcher;
mod vocabulary;

pub use compile::Grammars;
pub(crate) use guide::{Guides, MaskThreads};

/// What a text must match as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StructuredOutput {
    /// The rule.
    pub grammar: Grammar,
    /// API name of the field that asked for it, named in errors.
    pub param: &'static str,
}

/// A rule for texts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// A JSON object.
    JsonObject,
    /// A JSON value that a JSON schema (as JSON text) accepts.
    JsonSchema(String),
    /// A regular expression in the syntax of the `regex` crate, for the whole text; no look-around, no back-references.
    Regex(String),
    /// One of these texts, none of them empty.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's variant of Lark, from its rule `start`.
    Lark(String),
}

impl Grammar {
    /// Bytes of its definition.
    fn len(&self) -> usize {
        match self {
            Grammar::JsonObject => 0,
            Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text.len(),
            Grammar::Choice(choices) => choices.iter().map(String::len).sum(),
        }
    }
}

/// Between two tokens of JSON there is nothing, one blank, or one line break with its indentation, as printers write it:
/// JSON itself allows blanks without end, and small models write them to the limit. A schema may say otherwise.
pub(crate) fn laid_out(mut schema: serde_json::Value) -> serde_json::Value {
    const OPTIONS: &str = "x-guidance";
    if let serde_json::Value::Object(fields) = &mut schema
        && !fields.contains_key(OPTIONS)
    {
        fields.insert(OPTIONS.to_string(), serde_json::json!({"whitespace_pattern": r" |\r?\n[ \t]{0,64}"}));
    }
    schema
}
