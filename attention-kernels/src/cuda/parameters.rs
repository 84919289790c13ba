//! Parameters of the kernels: the structs of `csrc/args.cuh`, `csrc/chosen_args.cuh`, `csrc/cache_args.cuh`, `csrc/low_rank_args.cuh` and
//! `csrc/linear_args.cuh`, field for field, which kernels take by value, and conversions to their fields.

use device::Arg;

use crate::args::KvCache;
use crate::error::KernelError;
use crate::format::{CacheFormat, KvDtype};

device::kernel_structs! {
    /// Sizes and settings of an attention kernel. Strides are in elements.
    pub(super) struct AttentionShape: 120 bytes {
        pub query_stride: i64,
        pub block_stride: i64,
        pub head_stride: i64,
        pub token_stride: i64,
        pub scale: f32,
        pub soft_cap: f32,
        pub num_seqs: u32,
        pub num_heads: u32,
        pub num_kv_heads: u32,
        pub head_dim: u32,
        pub value_dim: u32,
        pub block_size: u32,
        pub max_blocks: u32,
        pub first_seq: u32,
        pub first_row: u32,
        pub query_len: u32,
        pub query_head: u32,
        pub window: u32,
        pub kv_format: u32,
        pub scale_stride: u32,
        pub sparse_block: u32,
        pub sparse_local: u32,
        pub sparse_stride: u32,
        pub sparse_step: u32,
        pub sparse_first: u32,
        pub sparse_by_kv_head: u32,
    }

    /// Sizes of an indexer, `csrc/chosen_args.cuh`.
    pub(super) struct IndexShape: 24 bytes {
        pub heads: u32,
        pub dim: u32,
        pub first: u32,
        pub most: u32,
        pub stride: u32,
        pub first_row: u32,
    }

    /// Sizes of a cache write. Strides are in elements.
    pub(super) struct CacheWriteShape: 56 bytes {
        pub source_stride: i64,
        pub block_stride: i64,
        pub head_stride: i64,
        pub token_stride: i64,
        pub num_kv_heads: u32,
        pub head_dim: u32,
        pub block_size: u32,
        pub kv_format: u32,
        pub scale_stride: u32,
        pub reserved: u32,
    }

    /// Sizes of block copies, in bytes.
    pub(super) struct BlockCopyShape: 24 bytes {
        pub source_stride: i64,
        pub target_stride: i64,
        pub block_bytes: i64,
    }

    /// Sizes of a low-rank addition.
    pub(super) struct LowRankShape: 24 bytes {
        pub slot_bytes: i64,
        pub inputs: u32,
        pub outputs: u32,
        pub width: u32,
        pub reserved: u32,
    }

    /// Sizes of a matrix product, and where its weights lie.
    pub(super) struct LinearShape: 64 bytes {
        pub panel_bytes: i64,
        pub rows: u32,
        pub n: u32,
        pub k: u32,
        pub y_stride: u32,
        pub y_is_float: u32,
        pub scales: u32,
        pub offsets: u32,
        pub groups: u32,
        pub group_shift: u32,
        pub scale_type: u32,
        pub offset_type: u32,
        pub zero: u32,
        pub experts: u32,
        pub top_k: u32,
    }

    /// Rows that become bytes.
    pub(super) struct RoundShape: 16 bytes {
        pub k: u32,
        pub format: u32,
        pub scale: f32,
        pub reserved: u32,
    }

    /// Sums of products of bytes that become numbers.
    pub(super) struct ScaleShape: 16 bytes {
        pub rows: u32,
        pub n: u32,
        pub format: u32,
        pub y_is_float: u32,
    }

    /// Sums of slices that are added.
    pub(super) struct SliceShape: 16 bytes {
        pub rows: u32,
        pub n: u32,
        pub slices: u32,
        pub y_is_float: u32,
    }

    /// Sizes of a conversion.
    pub(super) struct ConvertShape: 24 bytes {
        pub elements: i64,
        pub elements_per_scale: i64,
        pub num_scales: u32,
        pub format: u32,
    }
}

/// Converts a count to the type that kernels use.
pub(super) fn count(number: usize) -> Result<u32, KernelError> {
    u32::try_from(number).map_err(|_| KernelError::Shape {
        what: "size of a launch",
        found: number,
        expected: u32::MAX as usize,
    })
}

/// Returns the `KvFormat` of `csrc/args.cuh`.
pub(super) fn kv_format(variant: &'static str, format: CacheFormat) -> Result<u32, KernelError> {
    format.kv_code(variant, &KvDtype::ON_GPU)
}

/// Returns pointers to the scales of keys and of values; null if the cache has none.
pub(super) fn scale_pointers(cache: &KvCache) -> [Arg<'_>; 2] {
    cache.given_scales().map_or([Arg::null(); 2], |scales| scales.map(|scales| Arg::pointer(scales, 0)))
}
