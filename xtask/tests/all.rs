//! The integration tests of `xtask`, as one program.
#![allow(clippy::unwrap_used)]

mod chores;
mod gpu_bundle;
mod gpu_peers;
mod real_models;
mod reports;
mod tidy;
