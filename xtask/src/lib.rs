//! Every chore of the workspace, behind `cargo xtask`.
//!
//! What it is: [`mod@bench`] (models to measure with, and the comparison with a peer), [`ci`] (all that must pass before a
//! change lands), [`conformance`] (a suite of the API, kept elsewhere, against our server), [`kernels`] (compiles the `.cu`
//! sources), [`bundle`] (all of it for a GPU machine), [`capability`] (what
//! tests need beyond a toolchain), [`not_run`] (tests that a machine cannot run), [`tidy`] (the
//! rules of the house that no compiler checks) and [`doctor`] (what this machine has). What it is not: part of the
//! product. No crate depends on it but for tests that build a host library of kernels, and it depends on none of them:
//! it reads their files.
//!
//! ```
//! use xtask::tidy::{File, Tree};
//! let tree = Tree { files: vec![File::new("kvblock/src/pool.rs", "fn first(ids: &[u32]) -> u32 {\n    *ids.first().unwrap()\n}\n")] };
//! let messages: Vec<String> = tree.findings().iter().map(ToString::to_string).collect();
//! assert!(messages.iter().any(|message| message.starts_with("kvblock/src/pool.rs:2: .unwrap() in library code")));
//! ```

pub mod bench;
pub mod bundle;
pub mod capability;
pub mod ci;
pub mod conformance;
pub mod doctor;
pub mod flakes;
pub mod kernels;
pub mod not_run;
pub mod page_test;
pub mod parts;
pub mod tidy;
pub mod workspace;
