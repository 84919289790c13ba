//! The typed request that every API reads its bodies into: fields, their limits, and what the request costs.
//!
//! | file | what it owns |
//! |---|---|
//! | `body`, `work` | receives bodies and reads them off the serving threads; tokenizes texts |
//! | `fields`, `raw` | readers of JSON fields, which also describe them |
//! | `options`, `search`, `structured`, `tools`, `messages`, `prompts` | sampling and limits; grammars; tools; conversations; prompts |
//! | `reasoning` | effort, limit and display of the reasoning |
//! | `infill` | prompts of models that fill in the middle of a text |
//! | `pooled` | requests for one vector of each prompt |
//! | `translation` | requests of other APIs, as requests of our routes |
//! | `unsupported` | fields that are refused by name |
//! | `cost` | the memory and work of a request, computed before any work |

pub mod body;
mod cost;
pub mod encoding;
mod fields;
mod infill;
mod messages;
mod options;
pub mod pooled;
pub mod prompts;
mod raw;
mod reasoning;
mod search;
pub mod structured;
mod tools;
mod translation;
pub mod unsupported;
mod work;

pub use cost::{Cost, TOKEN_ID};
pub use fields::Fields;
pub use infill::{Around, Infill};
pub use messages::{Conversation, join_parts, template_kwargs};
pub use options::{MAX_SHORT, Options, StreamUsage, add_special_tokens, alternatives, beside_output, truncate, user};
pub use prompts::Input;
pub use reasoning::Reasoning;
pub use tools::{Tools, check_name};
pub use translation::{EXTENSIONS, SAMPLING, Translation, repeat_penalty};
pub use unsupported::accept;
pub use work::Work;
