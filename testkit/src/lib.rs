//! What the tests of several crates share.
//!
//! - [`capability`]: what a test may need beyond a Rust toolchain, and whether this machine has it;
//! - [`not_run`]: reports of tests that this machine cannot run;
//! - [`kernels`]: compiles the `.cu` sources, with nvcc or as host code for the simulator;
//! - `kv_events` (feature `kv-events`): an independent consumer of KV events;
//! - [`model`]: models of known shapes with random weights;
//! - [`mod@reference`]: the reference checkpoints;
//! - [`real_models`]: trained checkpoints, and what they must answer;
//! - [`tensors`]: checkpoints of random tensors;
//! - [`markdown`]: tables of pages that tests compare with the code;
//! - [`workspace`]: where the files of the workspace are.
//!
//! Libraries never depend on this crate: it is a dev-dependency of the other crates and a dependency of `xtask`. It depends on no
//! other crate of the workspace.
//!
//! ```
//! use testkit::capability::Capability;
//!
//! // A test that needs a C++ compiler reports where there is none, and passes.
//! fn kernels_run() {
//!     let Some(folder) = testkit::kernels::host::folder_for_tests() else { return };
//!     assert!(folder.is_dir());
//! }
//! assert_eq!(Capability::named("cxx"), Ok(Capability::Cxx));
//! ```

pub mod adapters;
pub mod capability;
pub mod kernels;
#[cfg(feature = "kv-events")]
pub mod kv_events;
pub mod markdown;
pub mod model;
pub mod not_run;
pub mod real_models;
pub mod reference;
pub mod tensors;
pub mod workspace;

/// Returns whether tests run all combinations of settings instead of the subset of an ordinary run: whether `QUIRE_TEST_ALL` is set.
pub fn everything() -> bool {
    std::env::var_os("QUIRE_TEST_ALL").is_some()
}

/// Returns a function that puts a path before an error.
fn at(path: &std::path::Path) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{}: {error}", path.display())
}
