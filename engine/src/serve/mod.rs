//! Who asks and who watches: texts of requests, an engine on a thread of its own, batches, and what can be seen of it all.

mod handle;
mod held;
mod llm;
mod status;
mod text_engine;

pub use handle::{AsyncEngine, OutputStream, Watcher};
pub use llm::{Completion, CompletionOutput, Llm};
