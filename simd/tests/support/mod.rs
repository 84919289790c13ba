//! The instruction sets of this CPU, for the tests of every crate with vector code. Each that this CPU does not have is reported as not
//! run.
#![allow(dead_code)] // Each crate uses a part of it.

use simd::Isa;
use simd::int8::DotIsa;
use testkit::capability::Capability;
use testkit::not_run;

/// Returns the instruction sets of this CPU.
pub fn isas() -> impl Iterator<Item = Isa> {
    let all = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Neon];
    all.into_iter().filter(|isa| report_unavailable(isa, isa.is_available()))
}

/// Returns the instruction sets of this CPU for products of pairs.
pub fn pair_isas() -> impl Iterator<Item = Isa> {
    let all = [Isa::Portable, Isa::Avx2, Isa::Avx512Bf16];
    all.into_iter().filter(|isa| report_unavailable(isa, isa.is_available()))
}

/// Returns the instruction sets of this CPU for products of tiles.
pub fn tile_isas() -> impl Iterator<Item = Isa> {
    let all = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];
    all.into_iter().filter(|isa| report_unavailable(isa, isa.is_available()))
}

/// Returns the instruction sets of this CPU for products of bytes, and emulated tiles if it has no others.
pub fn dot_isas() -> impl Iterator<Item = DotIsa> {
    DotIsa::ALL.into_iter().filter(|isa| report_unavailable(isa, isa.is_available()) || *isa == DotIsa::Amx)
}

/// Reports the instruction set if it is not available. Capabilities have the names of instruction sets.
pub fn report_unavailable(isa: &impl ToString, is_available: bool) -> bool {
    let name = isa.to_string();
    if !is_available {
        let capability = Capability::named(&name).unwrap_or_else(|problem| panic!("{problem}"));
        not_run::report(capability, &format!("this CPU has no {name}"));
    }
    is_available
}
