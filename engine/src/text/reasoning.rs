//! Thoughts between `<think>` and `</think>`, in front of the answer.

use super::marker::{MOST, Marker};

/// What begins the thoughts.
const OPEN: &str = "<think>";
/// What ends them.
const CLOSE: &str = "</think>";

/// A piece of text, split.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thought {
    /// Thoughts.
    pub reasoning: String,
    /// The answer.
    pub content: String,
}

enum State {
    /// White space, or the beginning of [`OPEN`].
    Start(String),
    /// In the thoughts; the white space at their beginning is left out.
    Thinking { close: Marker, begun: bool },
    /// Behind them: white space in front of the answer is left out.
    Between,
    /// In the answer, to the end.
    Answer,
}

/// Splits the thoughts of one sequence off its answer, as the text comes.
///
/// Thoughts stand in front of the answer or nowhere: a tag further back is text. White space around them belongs to
/// nobody. However the text is split, the pieces add up to the same.
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
    /// At the start of a text. `thinking` where the prompt has opened the thoughts already.
    pub fn new(thinking: bool) -> ReasoningParser {
        ReasoningParser(if thinking { State::thinking() } else { State::Start(String::new()) })
    }

    /// Whether a prompt ends within thoughts: some templates open them.
    pub fn is_opened_by(prompt: &str) -> bool {
        prompt.trim_end().ends_with(OPEN)
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, text: &str) -> Thought {
        let mut thought = Thought::default();
        text.chars().for_each(|c| self.read_char(c, &mut thought));
        thought
    }

    /// The text has ended: what was held back is what it is.
    pub fn finish(&mut self) -> Thought {
        match std::mem::replace(&mut self.0, State::Answer) {
            State::Start(held) => Thought { content: held, ..Thought::default() },
            State::Thinking { mut close, begun } => {
                let held = close.take();
                let reasoning = if begun { held.trim_end() } else { held.trim() };
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
                } else if !OPEN.starts_with(inner) || held.len() > MOST {
                    thought.content.push_str(held);
                    self.0 = State::Answer;
                }
            }
            State::Thinking { close, begun } => {
                let mut text = String::new();
                let closed = close.push(c, &mut text);
                let shown = if *begun { text.as_str() } else { text.trim_start() };
                *begun |= !shown.is_empty();
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
        State::Thinking { close: Marker::new(CLOSE), begun: false }
    }
}
