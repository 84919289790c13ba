//! Tokens to text, one sequence at a time.
//!
//! ```text
//! token id ─▶ Detokenizer ─▶ whole characters ─▶ StopScanner ─▶ text that is final
//!             holds back an unfinished character  holds back what may become a stop string
//! ```
//!
//! [`TextStream`] combines the two. In a chat, a [`ReasoningParser`] separates the reasoning from the answer, and a [`ToolParser`]
//! finds the tool calls.
//!
//! Invariants: no delta contains a part of a character; the deltas of a sequence add up to the same text however its tokens are
//! distributed over steps; no part of a stop string is ever returned.
//!
//! Costs: a token costs time in proportion to its own text. At most three bytes plus the longest stop string are held back.

mod channels;
mod detokenizer;
mod marker;
mod reasoning;
mod stop;
mod stream;
mod structural_tag;
mod thought;
mod tools;
mod utf8;

pub use detokenizer::Detokenizer;
pub use reasoning::{ReasoningFormat, ReasoningParser};
pub use stop::{Scanned, StopScanner};
pub use stream::{TextDelta, TextStream};
pub use structural_tag::structural_tag;
pub use thought::Thought;
pub use tools::{Calls, Tool, ToolEvent, ToolFormat, ToolParser};
