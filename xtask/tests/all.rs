//! The integration tests of the chores, in one program.
#![allow(clippy::unwrap_used)]

mod dependencies;
mod gpu_bundle;
mod reports;
mod tidy;
