//! `cargo xtask bench-model` and `cargo xtask bench-cpu`: models of a known shape to measure with, and the comparison of
//! Quire with llama.cpp on the same bits.

mod compare;
mod gguf;
mod model;
mod shape;

pub use compare::{Options, compare};
pub use model::{write, write_head};
pub use shape::Shape;
