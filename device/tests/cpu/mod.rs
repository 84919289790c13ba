//! CPU code: vectors, matrix products and the thread pool, on every instruction set of this CPU. Each instruction set that this
//! CPU does not have is reported as not run.

mod gemm;
mod lanes;
mod low_rank;
mod pairs;
mod pool;
mod quantize;
mod quantized;
mod roofline;
mod rounded;
mod small_float;
mod speed;
mod stored;
mod tiles;

use device::Isa;
use device::simd::int8::DotIsa;
use testkit::capability::Capability;
use testkit::not_run;

use crate::support::stored::values;

/// Returns the instruction sets of this CPU.
fn isas() -> impl Iterator<Item = Isa> {
    let all = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Neon];
    all.into_iter().filter(|isa| report_unavailable(isa, isa.is_available()))
}

/// Returns the instruction sets of this CPU for products of pairs.
fn pair_isas() -> impl Iterator<Item = Isa> {
    let all = [Isa::Portable, Isa::Avx2, Isa::Avx512Bf16];
    all.into_iter().filter(|isa| report_unavailable(isa, isa.is_available()))
}

/// Returns the instruction sets of this CPU for products of tiles.
fn tile_isas() -> impl Iterator<Item = Isa> {
    let all = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];
    all.into_iter().filter(|isa| report_unavailable(isa, isa.is_available()))
}

/// Returns the instruction sets of this CPU for products of bytes.
fn dot_isas() -> impl Iterator<Item = DotIsa> {
    DotIsa::ALL.into_iter().filter(|isa| report_unavailable(isa, isa.is_available()))
}

/// Reports the instruction set if it is not available. Capabilities have the names of instruction sets.
fn report_unavailable(isa: &impl ToString, is_available: bool) -> bool {
    let name = isa.to_string();
    if !is_available {
        let capability = Capability::named(&name).unwrap_or_else(|problem| panic!("{problem}"));
        not_run::report(capability, &format!("this CPU has no {name}"));
    }
    is_available
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}
