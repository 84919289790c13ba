//! Tokens become text, one sequence at a time.
//!
//! ```text
//! token id ─▶ Detokenizer ─▶ whole characters ─▶ StopScanner ─▶ text that is final
//!             holds back an unfinished character  holds back what may become a stop string
//! ```
//!
//! [`TextStream`] joins the two. In a chat, a [`ReasoningParser`] splits off the thoughts and a [`ToolParser`] reads
//! the calls.
//!
//! Invariants: no delta holds a part of a character; the deltas of a sequence add up to the same
//! text however its tokens are spread over steps; a stop string never shows, not even its beginning.
//!
//! Costs: a token costs what its own text costs. At most three bytes plus the longest stop string are held, whatever the model
//! writes.

mod detokenizer;
mod marker;
mod reasoning;
mod stop;
mod stream;
mod tools;
mod utf8;

pub use detokenizer::Detokenizer;
pub use reasoning::{ReasoningParser, Thought};
pub use stop::{Scanned, StopScanner};
pub use stream::{TextDelta, TextStream};
pub use tools::{Tool, ToolEvent, ToolFormat, ToolParser};
