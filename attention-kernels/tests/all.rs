//! The integration tests of the kernels and their registry, in one program.
#![allow(clippy::unwrap_used)]

mod block_sparse;
mod conformance;
mod costs;
mod inlined;
mod plugin_example;
mod selection;
#[path = "../../device/tests/support/mod.rs"]
mod support;
mod tables;
mod trials;
#[path = "../../linear/tests/weights.rs"]
mod weights;
mod work;
