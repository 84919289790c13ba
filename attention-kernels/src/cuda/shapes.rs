//! The argument structs of `csrc/args.cuh` and `csrc/cache_args.cuh`, field for field: kernels take them by value.

use device::Element;

/// What every attention kernel is called with, beside pointers. Strides are in elements.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AttentionShape {
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
    pub block_size: u32,
    pub max_blocks: u32,
    pub max_partitions: u32,
    pub window: u32,
    pub kv_format: u32,
    pub scale_stride: u32,
}

/// A cache write. Strides are in elements.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CacheWriteShape {
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

/// Copies of whole blocks, in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct BlockCopyShape {
    pub source_stride: i64,
    pub target_stride: i64,
    pub block_bytes: i64,
}

/// A conversion of a whole cache.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ConvertShape {
    pub elements: i64,
    pub elements_per_scale: i64,
    pub num_scales: u32,
    pub format: u32,
}

macro_rules! elements {
    ($($shape:ident: $bytes:literal),*) => {
        $(
            const _: () = assert!(size_of::<$shape>() == $bytes, "the size that csrc asserts");
            // SAFETY: numbers only, and `repr(C)` puts no padding between or behind them: their sizes add up to the struct's.
            unsafe impl Element for $shape {}
        )*
    };
}
elements!(AttentionShape: 80, CacheWriteShape: 56, BlockCopyShape: 24, ConvertShape: 24);
