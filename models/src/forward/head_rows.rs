//! Wrapper of the kernel between the projections of an attention layer and its attention (`csrc/qk_norm_rope_cache.cu`).

use attention_kernels::{CacheFormat, Dtype, KernelError, KvCache, KvDtype, KvScales};
use device::{Arg, Buffer, Device};

use super::kernels::{at_least, count, holds, instance, launch, optional};

/// Arguments of [`qk_norm_rope_cache`].
pub struct QkNormRopeCacheArgs<'a> {
    /// Rows that begin with `[num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values. Queries are changed in place.
    pub qkv: &'a mut Buffer,
    /// Number of rows.
    pub rows: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of heads of keys, and of values, in a row: those of the cache, or none.
    pub num_kv_heads: usize,
    /// Weights of the query heads' RMS norm, float32 `[head_dim]`; `None` for no norm.
    pub query_norm: Option<&'a Buffer>,
    /// Weights of the key heads' RMS norm, float32 `[head_dim]`; `None` for no norm.
    pub key_norm: Option<&'a Buffer>,
    /// Epsilon of both norms.
    pub eps: f32,
    /// Elements from one row to the next.
    pub stride: usize,
    /// [`rope_table`](super::kernels::rope_table) of the rows; `None`: nothing is rotated.
    pub rope: Option<&'a Buffer>,
    /// What is subtracted from the keys behind the rotation, float32 `[num_kv_heads, head_dim]`.
    pub key_offset: Option<&'a Buffer>,
    /// Cache that keys and values are written to. Its shape gives the other sizes.
    pub cache: &'a KvCache,
    /// Slots on the device, i64 `[rows]`; a row with a negative slot is not written. `None`: rotated keys and values stay in `qkv`.
    pub slots: Option<&'a Buffer>,
}

device::kernel_structs! {
    /// The struct of the same name in `qk_norm_rope_cache.cu`.
    struct QkNormRopeCacheShape: 72 bytes {
        qkv_stride: i64,
        block_stride: i64,
        head_stride: i64,
        token_stride: i64,
        eps: f32,
        num_heads: u32,
        num_kv_heads: u32,
        head_dim: u32,
        lanes: u32,
        block_size: u32,
        kv_format: u32,
        scale_stride: u32,
        mixes: u32,
        reserved: u32,
    }
}

/// RMS norm of query and key heads where the model has it, rotary embedding of both (Su et al., "RoFormer", 2021; pairs
/// (i, i + head_dim / 2)), the offset of keys and their product with a Hadamard matrix where the cache has it ([`CacheFormat::mixes_keys`]), and the cache
/// write.
/// The head size must be even and at most 512.
pub fn qk_norm_rope_cache(device: &dyn Device, args: QkNormRopeCacheArgs<'_>) -> Result<(), KernelError> {
    let QkNormRopeCacheArgs { qkv, rows, num_heads, num_kv_heads, query_norm, key_norm, .. } = args;
    let QkNormRopeCacheArgs { eps, stride, rope, key_offset, cache, slots, .. } = args;
    let (shape, format) = (cache.shape, cache.format);
    let (dim, heads) = (shape.head_dim, num_heads + 2 * num_kv_heads);
    if dim % 2 != 0 {
        return Err(KernelError::Shape { what: "head size modulo 2", found: 1, expected: 0 });
    }
    at_least("greatest head size", 512, dim)?;
    at_least("elements between QKV rows", stride, heads * dim)?;
    holds("elements in the QKV rows", qkv, rows * stride, format.dtype.bytes())?;
    if let Some(rope) = rope {
        holds("cosines and sines", rope, rows * dim, size_of::<f32>())?;
    }
    for weight in query_norm.into_iter().chain(key_norm) {
        holds("weights of a head norm", weight, dim, size_of::<f32>())?;
    }
    if let Some(offset) = key_offset {
        holds("offsets of keys", offset, num_kv_heads * dim, size_of::<f32>())?;
    }
    for pages in cache.buffers() {
        at_least("bytes of the cache", pages.len_bytes(), shape.num_blocks * cache.block_bytes())?;
    }
    if let Some(slots) = slots {
        at_least("heads of keys in a row", num_kv_heads, shape.num_kv_heads)?;
        holds("slots", slots, rows, size_of::<i64>())?;
    }
    format.check_scaled_rows("qk_norm_rope_cache", &shape)?;
    let lanes = dim.div_ceil(16).next_power_of_two();
    let strides = format.strides(&shape);
    let shape = QkNormRopeCacheShape {
        qkv_stride: stride as i64,
        block_stride: strides.block as i64,
        head_stride: strides.head as i64,
        token_stride: strides.token as i64,
        eps,
        num_heads: count(num_heads)?,
        num_kv_heads: count(num_kv_heads)?,
        head_dim: count(dim)?,
        lanes: count(lanes)?,
        block_size: count(shape.block_size)?,
        kv_format: format.kv_code("qk_norm_rope_cache", &KvDtype::ON_GPU)?,
        scale_stride: cache.scales.as_ref().is_some_and(|scales| scales.per_head).into(),
        mixes: format.mixes_keys(dim).into(),
        reserved: 0,
    };
    let scales = |which: fn(&KvScales) -> &Buffer| optional(cache.scales.as_deref().map(which));
    let args = [
        Arg::pointer(qkv, 0),
        optional(query_norm),
        optional(key_norm),
        optional(rope),
        optional(key_offset),
        optional(slots.map(|_| &cache.keys)),
        optional(slots.map(|_| cache.values())),
        optional(slots),
        scales(|scales| &scales.keys),
        scales(|scales| &scales.values),
        Arg::bytes(&shape),
    ];
    let blocks = heads.div_ceil(128 / lanes);
    launch(device, qk_norm_rope_cache_kernel(format), [count(rows)?, count(blocks)?, 1], 128, &args)
}

fn qk_norm_rope_cache_kernel(format: CacheFormat) -> &'static str {
    match (format.dtype, format.kv_dtype.is_byte()) {
        (dtype, false) => instance!("qk_norm_rope_cache", dtype),
        (Dtype::F32, true) => "qk_norm_rope_cache_f32_kv8",
        (Dtype::F16, true) => "qk_norm_rope_cache_f16_kv8",
        (Dtype::Bf16, true) => "qk_norm_rope_cache_bf16_kv8",
    }
}
