//! The instruction sets of x86-64 that this program's kernels are compiled for: `build.rs` chooses. A kernel that is entered for one
//! that is left out computes in the portable form.

/// Floats with AVX2.
pub const AVX2: bool = !cfg!(without_avx2);
/// Floats with AVX-512.
pub const AVX512: bool = !cfg!(without_avx512);
/// Pairs of bfloat16 as AVX512-BF16 multiplies them, computed with AVX2.
pub const AVX2_PAIRS: bool = !cfg!(without_avx2_pairs);
/// The same with AVX512-BF16.
pub const AVX512_BF16: bool = !cfg!(without_avx512_bf16);
/// Bytes with AVX2.
pub const AVX2_DOT: bool = !cfg!(without_avx2_dot);
/// Bytes with AVX-VNNI.
pub const AVX_VNNI: bool = !cfg!(without_avx_vnni);
/// Bytes with AVX512-VNNI.
pub const AVX512_VNNI: bool = !cfg!(without_avx512_vnni);
