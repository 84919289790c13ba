//! The integration tests of `testkit`, as one program.
#![allow(clippy::unwrap_used)]

mod build_kernels;
