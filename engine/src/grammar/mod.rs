//! Structured output: a grammar for the text becomes masks of tokens, which are computed while the model computes logits.
//!
//! ```text
//! submit ─▶ Grammars: compile, on a thread of its own ─▶ Matcher ─▶ Guide: first mask ─┐ while the prompt is computed
//!                                                                                     ▼
//!           ┌─────────────▶ step: forward ─▶ logits ─▶ draw within the mask ─▶ accept(token)
//!           └── Guide: next mask on a mask thread, from the draw to the next draw ◀────┘
//! ```
//!
//! llguidance implements the grammars themselves (JSON schema, regular expressions, Lark). This module passes it the vocabulary
//! as bytes, isolates and bounds the compilation, and computes the masks in parallel with the forward pass.
//!
//! Costs: the vocabulary is indexed with the first grammar (about a second per million tokens). A compiled grammar is cached and
//! forked for later requests with the same grammar. A mask is a walk through the matching part of the vocabulary, usually tens
//! of microseconds.

mod compile;
mod cost;
mod guide;
mod matcher;
mod vocabulary;

pub use compile::Grammars;
pub(crate) use guide::{Guides, Limits, MaskThreads};

/// A grammar that the whole text must match.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StructuredOutput {
    /// The grammar.
    pub grammar: Grammar,
    /// API name of the field that specifies it, for error messages.
    pub param: &'static str,
}

/// A grammar for texts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// A JSON object.
    JsonObject,
    /// A JSON value that matches a JSON schema, given as JSON text.
    JsonSchema(String),
    /// A regular expression for the whole text, in the syntax of the `regex` crate, without look-around and back-references.
    Regex(String),
    /// One of these texts, none of them empty.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's variant of Lark, from its rule `start`.
    Lark(String),
    /// A grammar that binds after the reasoning; see [`ReasoningFormat::grammar`](crate::text::ReasoningFormat::grammar).
    AfterReasoning {
        /// Lark rules of the text in front, from the rule `before`.
        before: String,
        /// If the grammar of the answer allows this text, it applies from the first token.
        open: Option<String>,
        /// The grammar of the answer.
        then: Box<Grammar>,
    },
}

impl Grammar {
    /// The grammar of the answer, without reasoning in front.
    fn of_answer(&self) -> &Grammar {
        match self {
            Grammar::AfterReasoning { then, .. } => then.of_answer(),
            other => other,
        }
    }

    /// Size of the definition in bytes.
    pub fn num_bytes(&self) -> usize {
        match self {
            Grammar::JsonObject => 0,
            Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text.len(),
            Grammar::Choice(choices) => choices.iter().map(String::len).sum(),
            Grammar::AfterReasoning { then, .. } => then.num_bytes(),
        }
    }
}

/// Bounds the white space between two tokens of JSON: none, one space, or one line break with its indentation. JSON itself allows
/// any amount, and small models would fill the context with it. A schema's own `x-guidance` takes precedence.
pub(crate) fn with_bounded_whitespace(mut schema: serde_json::Value) -> serde_json::Value {
    const OPTIONS: &str = "x-guidance";
    if let serde_json::Value::Object(fields) = &mut schema
        && !fields.contains_key(OPTIONS)
    {
        fields.insert(OPTIONS.to_string(), serde_json::json!({"whitespace_pattern": r" |\r?\n[ \t]{0,64}"}));
    }
    schema
}

/// The first line of an error, whose text may include internal state and a stack trace.
fn one_line(error: impl std::fmt::Display) -> String {
    const LONGEST: usize = 300;
    let text = format!("{error:#}");
    let line = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("the grammar cannot be used");
    line.trim_start_matches("panic: ").chars().take(LONGEST).collect()
}
