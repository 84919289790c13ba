//! Reasoning between `<think>` and `</think>`, in front of the answer.

use super::marker::{MAX_HELD, Marker};

/// Marks the beginning of the reasoning.
const OPEN: &str = "<think>";
/// Marks its end.
const CLOSE: &str = "</think>";

/// A piece of text, split into reasoning and answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thought {
    /// Reasoning text.
    pub reasoning: String,
    /// Text of the answer.
    pub content: String,
}

enum State {
    /// Only white space or the beginning of [`OPEN`] has been read.
    Start(String),
    /// Within the reasoning. White space at its beginning is dropped.
    Thinking { close: Marker, has_text: bool },
    /// After the reasoning. White space in front of the answer is dropped.
    Between,
    /// Within the answer, until the end.
    Answer,
}

/// Separates the reasoning of one sequence from its answer, in a text that arrives in pieces.
///
/// Reasoning is recognised only in front of the answer: a later tag is text. White space around the reasoning is dropped. The
/// result does not depend on how the text is split into pieces.
///
/// ```
/// use engine::text::ReasoningParser;
///
/// let mut parser = ReasoningParser::new(false);
/// let first = parser.push("<think>2 + 2");
/// let second = parser.push(" = 4.</think>\n\nFour.");
/// assert_eq!(first.reasoning + &second.reasoning, "2 + 2 = 4.");
/// assert_eq!(second.content, "Four.");
/// ```
pub struct ReasoningParser(State);

impl ReasoningParser {
    /// Creates a parser for a text. `thinking` says that the prompt ends within the reasoning.
    pub fn new(thinking: bool) -> ReasoningParser {
        ReasoningParser(if thinking { State::thinking() } else { State::Start(String::new()) })
    }

    /// Whether a prompt ends with the opening tag, as some chat templates do.
    pub fn is_opened_by(prompt: &str) -> bool {
        prompt.trim_end().ends_with(OPEN)
    }

    /// Reads the next piece of text.
    pub fn push(&mut self, text: &str) -> Thought {
        let mut thought = Thought::default();
        text.chars().for_each(|c| self.read_char(c, &mut thought));
        thought
    }

    /// Ends the text, and returns what was held back.
    pub fn finish(&mut self) -> Thought {
        match std::mem::replace(&mut self.0, State::Answer) {
            State::Start(held) => Thought { content: held, ..Thought::default() },
            State::Thinking { mut close, has_text } => {
                let held = close.take();
                let reasoning = if has_text { held.trim_end() } else { held.trim() };
                Thought { reasoning: reasoning.to_string(), ..Thought::default() }
            }
            State::Between | State::Answer => Thought::default(),
        }
    }

    fn read_char(&mut self, c: char, thought: &mut Thought) {
        match &mut self.0 {
            State::Start(held) => {
                held.push(c);
                let inner = held.trim_start();
                if inner == OPEN {
                    self.0 = State::thinking();
                } else if !OPEN.starts_with(inner) || held.len() > MAX_HELD {
                    thought.content.push_str(held);
                    self.0 = State::Answer;
                }
            }
            State::Thinking { close, has_text } => {
                let mut text = String::new();
                let closed = close.push(c, &mut text);
                let shown = if *has_text { text.as_str() } else { text.trim_start() };
                *has_text |= !shown.is_empty();
                thought.reasoning.push_str(shown);
                if closed {
                    self.0 = State::Between;
                }
            }
            State::Between if c.is_whitespace() => {}
            State::Between | State::Answer => {
                self.0 = State::Answer;
                thought.content.push(c);
            }
        }
    }
}

impl State {
    fn thinking() -> State {
        State::Thinking { close: Marker::new(CLOSE), has_text: false }
    }
}
