//! The CUDA kernels of a decoder's layers (`csrc/`), each behind a safe wrapper that checks the sizes of its buffers.
//!
//! They run on `cuda` and `cuda-sim`. Row indices, positions and slots lie on the device, where a wrapper cannot check them:
//! the caller must. No wrapper waits for the device. All of them return an error if a buffer is too small or the launch fails.

use attention_kernels::{CacheFormat, Dtype, KernelError, KvCache, KvDtype, KvScales};
use device::{Arg, Buffer, Device, Launch};

use crate::decoder::Activation;

/// Name of the kernel library of this crate.
pub const MODULE: &str = "models";

/// Name of a kernel's instance for a type.
macro_rules! instance {
    ($kernel:literal, $dtype:expr) => {
        match $dtype {
            Dtype::F32 => concat!($kernel, "_f32"),
            Dtype::F16 => concat!($kernel, "_f16"),
            Dtype::Bf16 => concat!($kernel, "_bf16"),
        }
    };
}

/// Gathers rows of a matrix `[any, width]`: row i of `target` becomes row `indices[i]` (u32) of `source`.
pub fn gather_rows(
    device: &dyn Device,
    dtype: Dtype,
    source: &Buffer,
    indices: &Buffer,
    target: &mut Buffer,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("row indices", indices, rows, size_of::<u32>())?;
    holds("elements in the gathered rows", target, rows * width, dtype.bytes())?;
    let args = [Arg::pointer(source, 0), Arg::pointer(indices, 0), Arg::pointer(target, 0), Arg::from(count(width)?)];
    launch(device, instance!("gather_rows", dtype), [count(rows)?, 1, 1], 128, &args)
}

/// RMS norm of rows: each row of `target` becomes `x / sqrt(mean(x²) + eps) * weight` of that row of `x`
/// (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019). `weight` is float32 `[width]`.
pub fn rms_norm(
    device: &dyn Device,
    dtype: Dtype,
    x: &Buffer,
    target: &mut Buffer,
    weight: &Buffer,
    eps: f32,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    norm(device, instance!("rms_norm", dtype), dtype, [x, target, weight], eps, (rows, width))
}

/// Adds `target` to `x`, rounded to the type, then makes `target` the [`rms_norm`] of the sum.
pub fn fused_add_rms_norm(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    target: &mut Buffer,
    weight: &Buffer,
    eps: f32,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    norm(device, instance!("fused_add_rms_norm", dtype), dtype, [x, target, weight], eps, (rows, width))
}

fn norm(
    device: &dyn Device,
    kernel: &str,
    dtype: Dtype,
    [x, target, weight]: [&Buffer; 3],
    eps: f32,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("elements in the input of a norm", x, rows * width, dtype.bytes())?;
    holds("elements in the output of a norm", target, rows * width, dtype.bytes())?;
    holds("weights of a norm", weight, width, size_of::<f32>())?;
    let [x, target, weight] = [x, target, weight].map(|buffer| Arg::pointer(buffer, 0));
    let args = [x, target, weight, Arg::from(count(width)?), Arg::from(eps)];
    launch(device, kernel, [count(rows)?, 1, 1], 256, &args)
}

/// `x += y`, rounded to the type, for rows of `width` elements.
pub fn add(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    y: &Buffer,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("elements in the sum", x, rows * width, dtype.bytes())?;
    holds("elements to add", y, rows * width, dtype.bytes())?;
    let args = [Arg::pointer(x, 0), Arg::pointer(y, 0), Arg::from(count(width)?)];
    launch(device, instance!("add", dtype), [count(rows)?, count(width.div_ceil(2048))?, 1], 256, &args)
}

/// Rotary table: each row of `table`, float32 `[rows, 2 * half]`, becomes cos(p·f) for all `half` frequencies f (float32), then
/// sin(p·f), where p is the row's position (u32).
pub fn rope_table(
    device: &dyn Device,
    positions: &Buffer,
    frequencies: &Buffer,
    table: &mut Buffer,
    (rows, half): (usize, usize),
) -> Result<(), KernelError> {
    holds("positions", positions, rows, size_of::<u32>())?;
    holds("frequencies", frequencies, half, size_of::<f32>())?;
    holds("cosines and sines", table, rows * 2 * half, size_of::<f32>())?;
    let [positions, frequencies, table] = [positions, frequencies, table].map(|buffer| Arg::pointer(buffer, 0));
    launch(device, "rope_table", [count(rows)?, 1, 1], 128, &[positions, frequencies, table, Arg::from(count(half)?)])
}

/// Arguments of [`qk_norm_rope_cache`].
pub struct QkNormRopeCacheArgs<'a> {
    /// `[rows, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values. Queries are changed in place.
    pub qkv: &'a mut Buffer,
    /// Number of rows.
    pub rows: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Weights of the query heads' RMS norm, float32 `[head_dim]`; `None` for no norm.
    pub query_norm: Option<&'a Buffer>,
    /// Weights of the key heads' RMS norm, float32 `[head_dim]`; `None` for no norm.
    pub key_norm: Option<&'a Buffer>,
    /// Epsilon of both norms.
    pub eps: f32,
    /// [`rope_table`] of the rows.
    pub rope: &'a Buffer,
    /// Cache that keys and values are written to. Its shape gives the other sizes.
    pub cache: &'a KvCache,
    /// Slots on the device, i64 `[rows]`; a row with a negative slot is not written. `None`: rotated keys and values stay in `qkv`.
    pub slots: Option<&'a Buffer>,
}

device::kernel_structs! {
    /// The struct of the same name in `qk_norm_rope_cache.cu`.
    struct QkNormRopeCacheShape: 64 bytes {
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
    }
}

/// RMS norm of query and key heads where the model has it, rotary embedding of both (Su et al., "RoFormer", 2021; pairs
/// (i, i + head_dim / 2)), and the cache write.
/// The head size must be even and at most 512.
pub fn qk_norm_rope_cache(device: &dyn Device, args: QkNormRopeCacheArgs<'_>) -> Result<(), KernelError> {
    let QkNormRopeCacheArgs { qkv, rows, num_heads, query_norm, key_norm, eps, rope, cache, slots } = args;
    let (shape, format) = (cache.shape, cache.format);
    let (dim, heads) = (shape.head_dim, num_heads + 2 * shape.num_kv_heads);
    if dim % 2 != 0 {
        return Err(KernelError::Shape { what: "head size modulo 2", found: 1, expected: 0 });
    }
    at_least("greatest head size", 512, dim)?;
    holds("elements in the QKV rows", qkv, rows * heads * dim, format.dtype.bytes())?;
    holds("cosines and sines", rope, rows * dim, size_of::<f32>())?;
    for weight in query_norm.into_iter().chain(key_norm) {
        holds("weights of a head norm", weight, dim, size_of::<f32>())?;
    }
    for pages in cache.buffers() {
        at_least("bytes of the cache", pages.len_bytes(), shape.num_blocks * cache.block_bytes())?;
    }
    if let Some(slots) = slots {
        holds("slots", slots, rows, size_of::<i64>())?;
    }
    format.check_scaled_rows("qk_norm_rope_cache", &shape)?;
    let lanes = dim.div_ceil(16).next_power_of_two();
    let strides = format.strides(&shape);
    let shape = QkNormRopeCacheShape {
        qkv_stride: (heads * dim) as i64,
        block_stride: strides.block as i64,
        head_stride: strides.head as i64,
        token_stride: strides.token as i64,
        eps,
        num_heads: count(num_heads)?,
        num_kv_heads: count(shape.num_kv_heads)?,
        head_dim: count(dim)?,
        lanes: count(lanes)?,
        block_size: count(shape.block_size)?,
        kv_format: format.kv_code("qk_norm_rope_cache", &KvDtype::ON_GPU)?,
        scale_stride: cache.scales.as_ref().is_some_and(|scales| scales.per_head).into(),
    };
    let scales = |which: fn(&KvScales) -> &Buffer| optional(cache.scales.as_deref().map(which));
    let args = [
        Arg::pointer(qkv, 0),
        optional(query_norm),
        optional(key_norm),
        Arg::pointer(rope, 0),
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

fn optional(buffer: Option<&Buffer>) -> Arg<'_> {
    buffer.map_or(Arg::null(), |buffer| Arg::pointer(buffer, 0))
}

/// `target = activation(gate) * up`; a row of `gate_up` is `[gate; width][up; width]`.
pub fn act_and_mul(
    device: &dyn Device,
    dtype: Dtype,
    activation: Activation,
    gate_up: &Buffer,
    target: &mut Buffer,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("elements in the gate and up rows", gate_up, rows * 2 * width, dtype.bytes())?;
    holds("elements in the activations", target, rows * width, dtype.bytes())?;
    let kernel = match activation {
        Activation::Silu => instance!("silu_and_mul", dtype),
        Activation::GeluTanh => instance!("gelu_tanh_and_mul", dtype),
    };
    let args = [Arg::pointer(gate_up, 0), Arg::pointer(target, 0), Arg::from(count(width)?)];
    launch(device, kernel, [count(rows)?, count(width.div_ceil(2048))?, 1], 256, &args)
}

fn launch(
    device: &dyn Device,
    kernel: &str,
    grid: [u32; 3],
    threads: u32,
    args: &[Arg<'_>],
) -> Result<(), KernelError> {
    if grid.contains(&0) {
        return Ok(());
    }
    Ok(device.launch(&Launch { module: MODULE, kernel, grid, block: [threads, 1, 1], shared_bytes: 0, args })?)
}

fn holds(what: &'static str, buffer: &Buffer, elements: usize, bytes: usize) -> Result<(), KernelError> {
    at_least(what, buffer.len_bytes() / bytes, elements)
}

fn at_least(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found >= expected { Ok(()) } else { Err(KernelError::Shape { what, found, expected }) }
}

/// A size as a 32-bit kernel argument.
fn count(number: usize) -> Result<u32, KernelError> {
    let expected = u32::MAX as usize;
    u32::try_from(number).map_err(|_| KernelError::Shape { what: "size of a launch", found: number, expected })
}
