//! Ways to run an engine: on a thread of its own ([`AsyncEngine`]) or on the caller's ([`Llm`]), with text in place of token ids.

mod adapters;
mod answer_buffer;
mod channel;
mod constraint;
mod handle;
mod later_sequences;
mod llm;
mod outbox;
mod sleep;
mod status;
mod text_engine;
mod thread;
mod wakers;

pub use channel::{OutputStream, Watcher};
pub use constraint::GrammarConstraint;
pub use handle::AsyncEngine;
pub use llm::{Completion, CompletionOutput, Llm};
pub use status::EngineStatus;
