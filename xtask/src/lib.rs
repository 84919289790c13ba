//! Every chore of the workspace, behind `cargo xtask`.
//!
//! - [`ci`]: all that must pass before a change lands; [`parts`]: what of it took longest; [`flakes`]: tests that fail now and then;
//! - [`tidy`]: the rules of the house that no compiler checks;
//! - [`capability`]: what tests need beyond a Rust toolchain; [`not_run`]: tests that a machine cannot run; [`doctor`]: what
//!   this machine has;
//! - [`kernels`]: compiles the `.cu` sources; [`bundle`]: all of it for a GPU machine;
//! - [`mod@bench`]: models to measure with, and the comparison with a peer;
//! - [`conformance`]: a suite of the API, kept elsewhere, against our server; [`page_test`]: the web page in a browser.
//!
//! It is no part of the product. Only tests depend on it, and it depends on no other crate of the workspace: it reads their files.
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

/// For tests: whether they take full products, not the subset of an ordinary run. `QUIRE_TEST_ALL=1` asks for it.
pub fn everything() -> bool {
    std::env::var_os("QUIRE_TEST_ALL").is_some()
}
