//! Models of a known shape with random weights, for tests, benchmarks and `cargo xtask bench-model`: a checkpoint folder and
//! GGUF files of the same weights.

mod files;
pub mod gguf;
mod shape;

pub use files::{write, write_head};
pub use shape::{Shape, Tensor};
