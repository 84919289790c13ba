//! Every chore of the workspace, behind `cargo xtask`.
//!
//! - [`ci`]: all that must pass before a change lands; [`parts`]: what of it took longest; [`flakes`]: tests that fail now and then;
//! - [`tidy`]: the rules of the house that no compiler checks;
//! - [`doctor`]: what this machine has;
//! - [`build_kernels`]: compiles the `.cu` sources; [`bundle`]: all of it for a GPU machine;
//! - [`mod@bench`]: the comparison with a peer;
//! - [`conformance`]: a suite of the API, kept elsewhere, against our server; [`page_test`]: the web page in a browser.
//!
//! No crate depends on this one. Of the workspace it depends on `testkit` alone: it reads the files of the other crates.
//!
//! ```
//! use xtask::tidy::{File, Tree};
//! let file = File::new("kvblock/src/pool.rs", "use std::sync::Mutex;\n");
//! let tree = Tree { files: vec![file], packages: Vec::new() };
//! let messages: Vec<String> = tree.findings().iter().map(ToString::to_string).collect();
//! assert!(messages.iter().any(|message| message.starts_with("kvblock/src/pool.rs: found Mutex in kvblock")));
//! ```

pub mod bench;
pub mod build_kernels;
pub mod bundle;
mod cargo;
pub mod ci;
pub mod conformance;
pub mod doctor;
pub mod flakes;
pub mod page_test;
pub mod parts;
mod server;
pub mod tidy;
pub mod workspace;
