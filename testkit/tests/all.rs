//! The integration tests of `testkit`, as one program.
#![allow(clippy::unwrap_used)]

mod build_kernels;
mod kernels;
mod model;
mod not_run;
