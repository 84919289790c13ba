//! Chooses the instruction sets that the kernels of the CPU are compiled for.
//!
//! A release build from source has those that kernels take on the machine that builds it, besides the portable form: each other one
//! would take a quarter of a minute. Builds for other machines (`--profile dist`, or another target), test builds and all others have
//! every instruction set.

use std::env;
use std::path::Path;

#[cfg(target_arch = "x86_64")]
#[path = "src/present.rs"]
mod present;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/present.rs");
    // target/<profile>/build/<package>/out
    let out = env::var_os("OUT_DIR").unwrap_or_default();
    let is_release = Path::new(&out).ancestors().nth(3).is_some_and(|profile| profile.ends_with("release"));
    let is_for_this_machine = env::var_os("HOST") == env::var_os("TARGET");
    for (name, is_taken) in taken() {
        println!("cargo::rustc-check-cfg=cfg(without_{name})");
        if is_release && is_for_this_machine && !is_taken {
            println!("cargo::rustc-cfg=without_{name}");
        }
    }
}

/// The instruction sets by the names in `src/compiled.rs`, and whether kernels take them on this machine: of floats, pairs and
/// bytes the best that it has.
#[cfg(target_arch = "x86_64")]
fn taken() -> Vec<(&'static str, bool)> {
    let (avx2, avx512, bf16) = (present::avx2(), present::avx512(), present::avx512_bf16());
    let vnni = present::avx512_vnni();
    let avx_vnni = !vnni && present::avx_vnni();
    vec![
        ("avx2", avx2 && !avx512),
        ("avx512", avx512),
        ("avx2_pairs", avx2 && !bf16),
        ("avx512_bf16", bf16),
        ("avx2_dot", avx2 && !vnni && !avx_vnni),
        ("avx_vnni", avx_vnni),
        ("avx512_vnni", vnni),
    ]
}

/// Elsewhere all are compiled.
#[cfg(not(target_arch = "x86_64"))]
fn taken() -> Vec<(&'static str, bool)> {
    ["avx2", "avx512", "avx2_pairs", "avx512_bf16", "avx2_dot", "avx_vnni", "avx512_vnni"]
        .map(|name| (name, true))
        .into()
}
