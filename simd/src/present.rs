//! What this CPU has, of the instruction sets of x86-64. It is a part of `build.rs` too, so it uses the standard library alone.

/// AVX2, FMA and F16C.
pub fn avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// AVX-512 F, BW, DQ and VL, and what [`avx2`] says.
pub fn avx512() -> bool {
    avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// AVX512-BF16.
pub fn avx512_bf16() -> bool {
    avx512() && is_x86_feature_detected!("avx512bf16")
}

/// AVX-VNNI.
pub fn avx_vnni() -> bool {
    avx2() && is_x86_feature_detected!("avxvnni")
}

/// AVX512-VNNI.
pub fn avx512_vnni() -> bool {
    avx512() && is_x86_feature_detected!("avx512vnni")
}
