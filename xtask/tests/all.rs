//! The integration tests of the chores, in one program.
#![allow(clippy::unwrap_used)]

mod build_kernels;
mod dependencies;
mod gpu_bundle;
mod tidy;
