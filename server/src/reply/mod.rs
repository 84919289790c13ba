//! From the events of the engine to responses.
//!
//! | file | what it owns |
//! |---|---|
//! | `run` | the engine requests of a call, merged into one stream of events |
//! | `assistant` | parses text into an assistant message: reasoning, content, tool calls |
//! | `choice`, `logprobs`, `stream` | envelope, choices and usage; log probabilities; streams of chunks |

mod assistant;
pub mod choice;
pub mod logprobs;
pub mod run;
pub mod stream;

pub use assistant::{Assistant, Message, MessageDelta, Piece};
pub use choice::{Choice, Envelope, Field, Usage};
pub use logprobs::{Logprobs, Prompt, PromptLogprobs};
pub use run::Run;
pub use stream::{Chunks, Writer, block_if_large};
