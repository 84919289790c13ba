//! What the parsers of reasoning return.

/// A piece of text, split into reasoning and answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thought {
    /// Reasoning text.
    pub reasoning: String,
    /// Text of the answer.
    pub content: String,
}
