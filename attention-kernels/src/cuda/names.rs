//! Names of the kernels' instances, as `csrc/instantiate.cuh` makes them.

use crate::format::{CacheFormat, Dtype, KvDtype};

/// The crate of the kernels, as it stands in file names.
pub const MODULE: &str = "attention_kernels";

/// The block sizes of which a tile of 128 tokens is a whole number.
pub const HOPPER_BLOCKS: [usize; 5] = [8, 16, 32, 64, 128];

/// The head sizes that kernels are compiled for.
pub(super) const HEAD_SIZES: [usize; 8] = [32, 64, 80, 96, 112, 128, 192, 256];

/// The instances of one kernel: by type, by cache class, by head size.
pub(super) struct Names([[[&'static str; 8]; 2]; 2]);

macro_rules! names {
    (@ $kernel:literal, $type:literal, $suffix:literal) => {
        [
            concat!($kernel, $type, "_h32", $suffix),
            concat!($kernel, $type, "_h64", $suffix),
            concat!($kernel, $type, "_h80", $suffix),
            concat!($kernel, $type, "_h96", $suffix),
            concat!($kernel, $type, "_h112", $suffix),
            concat!($kernel, $type, "_h128", $suffix),
            concat!($kernel, $type, "_h192", $suffix),
            concat!($kernel, $type, "_h256", $suffix),
        ]
    };
    ($kernel:literal) => {
        Names([
            [names!(@ $kernel, "_f16", ""), names!(@ $kernel, "_f16", "_kv8")],
            [names!(@ $kernel, "_bf16", ""), names!(@ $kernel, "_bf16", "_kv8")],
        ])
    };
}

pub(super) const DECODE: Names = names!("paged_decode");
pub(super) const GQA: Names = names!("paged_gqa");
pub(super) const PREFILL: Names = names!("paged_prefill");

impl Names {
    /// The instance for a cache; `None` if none is compiled.
    pub fn of(&self, format: CacheFormat, head_dim: usize) -> Option<&'static str> {
        let dtype = match format.dtype {
            Dtype::F32 => return None,
            Dtype::F16 => 0,
            Dtype::Bf16 => 1,
        };
        let size = HEAD_SIZES.iter().position(|&size| size == head_dim)?;
        Some(self.0[dtype][usize::from(format.kv_dtype.is_byte())][size])
    }
}

/// The kernel of Hopper.
pub(super) fn prefill_sm90(format: CacheFormat, head_dim: usize) -> Option<&'static str> {
    if format.kv_dtype != KvDtype::Same {
        return None;
    }
    match (format.dtype, head_dim) {
        (Dtype::F16, 64) => Some("prefill_sm90_f16_h64"),
        (Dtype::F16, 128) => Some("prefill_sm90_f16_h128"),
        (Dtype::Bf16, 64) => Some("prefill_sm90_bf16_h64"),
        (Dtype::Bf16, 128) => Some("prefill_sm90_bf16_h128"),
        _ => None,
    }
}

/// The kernel that folds partial results.
pub(super) fn reduce(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "paged_reduce_f32",
        Dtype::F16 => "paged_reduce_f16",
        Dtype::Bf16 => "paged_reduce_bf16",
    }
}

/// The kernel that writes a cache.
pub(super) fn reshape_and_cache(format: CacheFormat) -> &'static str {
    match (format.dtype, format.kv_dtype.is_byte()) {
        (Dtype::F32, false) => "reshape_and_cache_f32",
        (Dtype::F32, true) => "reshape_and_cache_f32_kv8",
        (Dtype::F16, false) => "reshape_and_cache_f16",
        (Dtype::F16, true) => "reshape_and_cache_f16_kv8",
        (Dtype::Bf16, false) => "reshape_and_cache_bf16",
        (Dtype::Bf16, true) => "reshape_and_cache_bf16_kv8",
    }
}

/// The kernel that converts to 8 bits, or back.
pub(super) fn convert_fp8(dtype: Dtype, quantise: bool) -> &'static str {
    match (dtype, quantise) {
        (Dtype::F32, true) => "convert_fp8_from_f32",
        (Dtype::F32, false) => "convert_fp8_to_f32",
        (Dtype::F16, true) => "convert_fp8_from_f16",
        (Dtype::F16, false) => "convert_fp8_to_f16",
        (Dtype::Bf16, true) => "convert_fp8_from_bf16",
        (Dtype::Bf16, false) => "convert_fp8_to_bf16",
    }
}
