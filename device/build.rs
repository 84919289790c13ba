//! Chooses the instruction sets that the kernels of the CPU are compiled for.
//!
//! A release build from source has those that kernels take on the machine that builds it, besides the portable form: each other one
//! would take a quarter of a minute. Builds for other machines (`--profile dist`, or another target), test builds and all others have
//! every instruction set.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
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

/// The instruction sets by the names in `src/simd/compiled.rs`, and whether kernels take them on this machine: of floats, pairs and
/// bytes the best that it has.
#[cfg(target_arch = "x86_64")]
fn taken() -> Vec<(&'static str, bool)> {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let bf16 = avx512 && is_x86_feature_detected!("avx512bf16");
    let vnni = avx512 && is_x86_feature_detected!("avx512vnni");
    let avx_vnni = avx2 && !vnni && is_x86_feature_detected!("avxvnni");
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
