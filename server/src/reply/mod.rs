//! From the requests of the engine to their events.
//!
//! | file | what it owns |
//! |---|---|
//! | `run` | the engine requests of a call, merged into one stream of events, and its token counts |
//! | `stream` | events of the engine, translated to those of an API |
//! | `envelope`, `vector` | the fields and the form of vectors that responses share |
//! | `assistant` | parses text into an assistant message: reasoning, content, tool calls |

mod assistant;
mod envelope;
mod run;
pub mod stream;
mod vector;

pub use assistant::{Assistant, CallPiece, Part, Piece, arguments_object};
pub use envelope::{Envelope, prompt_usage, response_id};
pub use run::{Run, Usage, failed, fix};
pub use stream::Translator;
pub use vector::respond as respond_vectors;
