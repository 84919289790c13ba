//! The instruction sets that unit tests run on: those of this CPU. Every other one is reported as not run.
#![cfg(test)]

use testkit::capability::Capability;
use testkit::not_run;

use super::Isa;
use super::int8::DotIsa;

/// Instruction sets of this CPU.
pub fn isas() -> impl Iterator<Item = Isa> {
    let all = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Neon];
    all.into_iter().filter(|isa| is_here(isa, isa.is_available()))
}

/// Instruction sets of this CPU for products of bytes.
pub fn dot_isas() -> impl Iterator<Item = DotIsa> {
    DotIsa::ALL.into_iter().filter(|isa| is_here(isa, isa.is_available()))
}

/// Reports the instruction set if it is not here. Capabilities have the names of instruction sets.
fn is_here(isa: &impl ToString, is_available: bool) -> bool {
    let name = isa.to_string();
    if !is_available {
        let capability = Capability::named(&name).unwrap_or_else(|problem| panic!("{problem}"));
        not_run::report(capability, &format!("this CPU has no {name}"));
    }
    is_available
}
