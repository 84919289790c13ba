//! Vectors and the thread pool, on every instruction set of this CPU.
#![allow(clippy::unwrap_used)]

mod lanes;
mod pairs;
mod pool;
mod roofline;
mod small_float;
mod speed;
mod support;
mod tiles;
