//! The integration tests of devices and the CUDA simulator, in one program.
#![allow(clippy::unwrap_used)]

mod backends;
#[path = "support/allocations.rs"]
mod counter;
mod profile;
mod resources;
mod simt;
mod support;
