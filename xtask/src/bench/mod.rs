//! `cargo xtask bench-cpu`: the comparison of Quire with llama.cpp on the same bits.

mod compare;

pub use compare::{Options, compare};
