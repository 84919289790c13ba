//! The integration tests of devices and of the CUDA simulator, in one program.
#![allow(clippy::unwrap_used)]

mod backends;
mod simt;
