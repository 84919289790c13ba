//! Structured output: a grammar for the text becomes masks of tokens.
//!
//! ```text
//! Grammar ─▶ Grammars: compile and compute the first mask, on a thread of its own ─▶ Matcher ─▶ Mask
//!                                                                                      ▲        │
//!                                                                                      └ token ◀┘
//! ```
//!
//! llguidance implements the grammars themselves (JSON schema, regular expressions, Lark; [`ebnf`] translates EBNF). This module passes it the vocabulary
//! as bytes, and isolates and bounds the compilation.
//!
//! Costs: the vocabulary is indexed with the first grammar (about a second per million tokens). A compiled grammar is cached and
//! forked for later requests with the same grammar. A mask is a walk through the matching part of the vocabulary, usually tens
//! of microseconds.

mod bounds;
mod compile;
mod cost;
mod ebnf;
pub(crate) mod lark;
mod lexemes;
mod matcher;
mod rules;
mod schema;
mod vocabulary;

pub use compile::Grammars;
pub use matcher::{Mask, Matcher};
pub(crate) use schema::with_default_options;
pub use schema::{with_options as with_schema_options, with_white_space};

/// Why a grammar is refused or cannot continue: one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(pub String);

/// A grammar for texts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// A JSON object.
    JsonObject,
    /// A JSON value that matches a JSON schema, given as JSON text. Keywords that cannot be enforced are left out and
    /// [named](Matcher::unenforced).
    JsonSchema(String),
    /// Like [`Grammar::JsonSchema`], but a keyword that cannot be enforced is refused.
    StrictSchema(String),
    /// A regular expression for the whole text, in the syntax of the `regex` crate, without look-around and back-references.
    Regex(String),
    /// One of these texts, none of them empty.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's variant of Lark, from its rule `start`.
    Lark(String),
    /// A context-free grammar in the EBNF of xgrammar and llama.cpp (GBNF), from its rule `root`.
    Ebnf(String),
    /// A grammar that binds after the reasoning; see [`ReasoningFormat::grammar`](crate::ReasoningFormat::grammar).
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
    /// A grammar whose text says which form it has: one that begins with `name ::=` is EBNF, any other is Lark.
    pub fn from_text(text: String) -> Grammar {
        if ebnf::is_ebnf(&text) { Grammar::Ebnf(text) } else { Grammar::Lark(text) }
    }

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
            Grammar::JsonSchema(text)
            | Grammar::StrictSchema(text)
            | Grammar::Regex(text)
            | Grammar::Lark(text)
            | Grammar::Ebnf(text) => text.len(),
            Grammar::Choice(choices) => choices.iter().map(String::len).sum(),
            Grammar::AfterReasoning { then, .. } => then.num_bytes(),
        }
    }
}

/// The first line of an error, whose text may include internal state and a stack trace, and the reason of a refused regular
/// expression, which is on a line of its own.
fn one_line(error: impl std::fmt::Display) -> String {
    const LONGEST: usize = 300;
    let text = format!("{error:#}");
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines.next().unwrap_or("the grammar cannot be used").trim_start_matches("panic: ");
    if line.contains("grammar.symbols.len()") {
        return "found a grammar of more than 65,000 symbols, expected fewer rules, alternatives or properties"
            .to_string();
    }
    if line == "NoExtensionBias" {
        return "nothing can follow: no text matches the whole grammar".to_string();
    }
    let reason =
        lines.find_map(|line| line.strip_prefix("error: ")).map(|reason| format!(" {reason}")).unwrap_or_default();
    line.chars().take(LONGEST).chain(reason.chars().take(LONGEST)).collect()
}
