//! Downloads checkpoints from the Hugging Face hub into the cache folder that other tools share.
//!
//! [`fetch`] returns the folder or GGUF file of a model such as `Qwen/Qwen3-0.6B`, and downloads what is missing:
//!
//! ```text
//! resolve the revision ─▶ list its files ─▶ select ─▶ per file: metadata ─▶ lock ─▶ download, verify ─▶ link ─▶ write the ref
//! ```
//!
//! - **Layout.** `models--ORG--NAME/` with `blobs/`, `refs/`, `snapshots/` and `.no_exist/`, and `.locks/` beside it, as `huggingface_hub`
//!   writes them. The locks are its own too, so both may download at once.
//! - **Trust.** A file enters `blobs/` only after its size and its hash are equal to those that the hub states. Names, hashes and sizes
//!   from the network are checked before they become a path or an allocation. Pickles are never downloaded.
//! - **Failures.** A broken transfer resumes where it ended, in this process or the next. The ref is written last, so a ref of this
//!   crate points to a whole snapshot.
//! - **Secrets.** The token goes to the endpoint only, never to the hosts that it redirects to, and no error or `Debug` output shows it.
//!
//! ```
//! use hub::{ModelId, Options};
//!
//! let model: ModelId = "Qwen/Qwen3-0.6B".parse()?;
//! // Offline, only the cache is used. `HF_HOME` and the other variables come from this function.
//! let variables = |name: &str| match name {
//!     "HF_HOME" => Some("/nonexistent".to_string()),
//!     "HF_HUB_OFFLINE" => Some("1".to_string()),
//!     _ => None,
//! };
//! let missing = hub::fetch(&Options::from_env(&variables)?, &model, &|_| {}).unwrap_err();
//! assert!(missing.to_string().starts_with("Qwen/Qwen3-0.6B: found no revision main in /nonexistent/hub"));
//! # Ok::<(), hub::HubError>(())
//! ```

mod cache;
mod client;
mod download;
mod error;
mod etag;
mod fetch;
mod id;
mod lock;
mod options;
mod outline;
mod path;
mod progress;
mod select;
mod snapshot;
mod url;

pub use error::HubError;
pub use fetch::fetch;
pub use id::{ModelId, Revision};
pub use options::{Options, Token};
pub use outline::{Needs, Wanted, outline};
pub use path::RepoPath;
pub use progress::Event;
