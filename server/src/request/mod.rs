//! The typed request that every API reads its bodies into: fields, their limits, and what the request costs.
//!
//! | file | what it owns |
//! |---|---|
//! | `body`, `work` | receives bodies and reads them off the serving threads; tokenizes texts |
//! | `fields`, `raw` | readers of JSON fields, which also describe them |
//! | `options`, `structured`, `tools`, `messages`, `prompts` | sampling and limits; grammars; tools; conversations; prompts |
//! | `pooled` | requests for one vector of each prompt |
//! | `unsupported` | fields that are refused by name |
//! | `cost` | the memory and work of a request, computed before any work |

pub mod body;
mod cost;
mod fields;
mod messages;
mod options;
pub mod pooled;
pub mod prompts;
mod raw;
pub mod structured;
mod tools;
pub mod unsupported;
mod work;

pub use cost::{Cost, TOKEN_ID};
pub use fields::Fields;
pub use messages::{Conversation, EFFORTS, join_parts, template_kwargs};
pub use options::{MAX_SHORT, Options, StreamUsage, add_special_tokens, beside_output, truncate, user};
pub use prompts::Input;
pub use tools::{Tools, check_name};
pub use work::Work;
