//! The integration tests of the kernels and their registry, in one program.
#![allow(clippy::unwrap_used)]

mod conformance;
mod costs;
mod plugin_example;
#[path = "../src/runs.rs"]
mod runs;
mod selection;
#[path = "../../device/tests/support/mod.rs"]
mod support;
#[path = "../src/tables.rs"]
mod tables;
mod trials;
