//! The integration tests of weight matrices and their products, in one program: on every instruction set of this CPU, and uploads on every
//! device.
#![allow(clippy::unwrap_used)]

#[path = "../../device/tests/backends/fixture.rs"]
mod backends;
#[path = "../../simd/tests/support/mod.rs"]
mod cpu;
mod gemm;
mod gptq;
mod low_rank;
mod quantize;
mod quantized;
mod rounded;
mod stored;
#[path = "../../device/tests/support/mod.rs"]
mod support;
mod tiles;
mod upload;
mod weights;

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}
