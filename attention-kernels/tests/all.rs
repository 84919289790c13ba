//! The integration tests of the kernels and their registry, in one program.
#![allow(clippy::unwrap_used)]

mod conformance;
mod plugin;
mod plugin_example;
#[path = "../../device/tests/support/mod.rs"]
mod support;
