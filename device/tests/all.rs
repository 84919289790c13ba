//! The integration tests of devices, CPU code and the CUDA simulator, in one program.
#![allow(clippy::unwrap_used)]

mod backends;
mod collective;
#[path = "support/allocations.rs"]
mod counter;
mod cpu;
mod profile;
mod resources;
mod simt;
mod support;
mod upload;
