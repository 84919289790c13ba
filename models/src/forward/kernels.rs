//! The CUDA kernels of a decoder's layers (`csrc/`), each behind a safe wrapper that checks the sizes of its buffers.
//!
//! They run on `cuda` and `cuda-sim`. What a wrapper can not see on the host it trusts: indices of rows, positions and
//! slots, which lie on the device. Nothing here waits.

use attention_kernels::{CacheFormat, Dtype, KernelError, KvCache, KvDtype, KvScales};
use device::{Arg, Buffer, Device, Launch};

use crate::decoder::Activation;

/// The crate of the kernels, as it stands in file names.
pub const MODULE: &str = "models";

/// The name of an instance.
macro_rules! instance {
    ($kernel:literal, $dtype:expr) => {
        match $dtype {
            Dtype::F32 => concat!($kernel, "_f32"),
            Dtype::F16 => concat!($kernel, "_f16"),
            Dtype::Bf16 => concat!($kernel, "_bf16"),
        }
    };
}

/// Rows of a matrix `[any, width]` by their numbers: row i of `target` becomes row `indices[i]` (u32) of `source`.
///
/// # Errors
/// Buffers that are too small, and those of a launch; as everywhere here.
pub fn gather_rows(
    device: &dyn Device,
    dtype: Dtype,
    source: &Buffer,
    indices: &Buffer,
    target: &mut Buffer,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("indices of rows", indices, rows, size_of::<u32>())?;
    holds("gathered rows", target, rows * width, dtype.bytes())?;
    let shape = [count(width)?, 0];
    let args = [Arg::pointer(source, 0), Arg::pointer(indices, 0), Arg::pointer(target, 0), Arg::bytes(&shape)];
    launch(device, instance!("gather_rows", dtype), [count(rows)?, 1, 1], 128, &args)
}

/// Each row of `target` becomes `x / sqrt(mean(x²) + eps) * weight` of that row of `x`
/// (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019). `weight` is float32 `[width]`.
///
/// # Errors
/// See [`gather_rows`].
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

/// Adds `target` to `x`, rounded to the type, and makes `target` the norm ([`rms_norm`]) of the sum.
///
/// # Errors
/// See [`gather_rows`].
pub fn add_norm(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    target: &mut Buffer,
    weight: &Buffer,
    eps: f32,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    norm(device, instance!("add_norm", dtype), dtype, [x, target, weight], eps, (rows, width))
}

fn norm(
    device: &dyn Device,
    kernel: &str,
    dtype: Dtype,
    [x, target, weight]: [&Buffer; 3],
    eps: f32,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("rows to be normalised", x, rows * width, dtype.bytes())?;
    holds("normalised rows", target, rows * width, dtype.bytes())?;
    holds("weights of a norm", weight, width, size_of::<f32>())?;
    let shape = [count(width)?, eps.to_bits()];
    let args = [Arg::pointer(x, 0), Arg::pointer(target, 0), Arg::pointer(weight, 0), Arg::bytes(&shape)];
    launch(device, kernel, [count(rows)?, 1, 1], 256, &args)
}

/// `x += y`, rounded to the type, of rows of `width`.
///
/// # Errors
/// See [`gather_rows`].
pub fn add(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    y: &Buffer,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("sums", x, rows * width, dtype.bytes())?;
    holds("rows to be added", y, rows * width, dtype.bytes())?;
    let shape = [count(width)?, 0];
    let args = [Arg::pointer(x, 0), Arg::pointer(y, 0), Arg::bytes(&shape)];
    launch(device, instance!("add", dtype), [count(rows)?, count(width.div_ceil(2048))?, 1], 256, &args)
}

/// Each row of `table`, float32 `[rows, 2 * half]`, becomes cos(p·f) for all `half` frequencies f (float32), then sin(p·f), p
/// being its position (u32).
///
/// # Errors
/// See [`gather_rows`].
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
    let shape = [count(half)?, 0];
    let args = [Arg::pointer(positions, 0), Arg::pointer(frequencies, 0), Arg::pointer(table, 0), Arg::bytes(&shape)];
    launch(device, "rope_table", [count(rows)?, 1, 1], 128, &args)
}

/// What a layer does to its fused QKV rows before attention.
pub struct HeadsArgs<'a> {
    /// `[rows, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values. Queries are changed in place.
    pub qkv: &'a mut Buffer,
    /// Rows to work on.
    pub rows: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Weights of the query heads' RMS norm, float32 `[head_dim]`.
    pub query_norm: Option<&'a Buffer>,
    /// As of the queries.
    pub key_norm: Option<&'a Buffer>,
    /// Of those norms.
    pub eps: f32,
    /// Each row's [`rope_table`].
    pub rope: &'a Buffer,
    /// The cache that keys and values go to; its shape gives the other sizes.
    pub cache: &'a KvCache,
    /// `[rows]` i64 on the device, negative where nothing is written. `None`: keys, rotated, and values stay in `qkv`.
    pub slots: Option<&'a Buffer>,
}

/// RMS norm of query and key heads where the model has it, rotary embedding of both (Su et al., "RoFormer", 2021; pairs
/// (i, i + head_dim / 2)), and the cache write.
///
/// # Errors
/// See [`gather_rows`], and heads of an odd size or of more than 512 elements.
pub fn heads(device: &dyn Device, args: HeadsArgs<'_>) -> Result<(), KernelError> {
    let HeadsArgs { rows, num_heads, cache, .. } = args;
    let (shape, format) = (cache.shape, cache.format);
    let (dim, heads) = (shape.head_dim, num_heads + 2 * shape.num_kv_heads);
    expect("head size modulo 2", dim % 2, 0)?;
    at_least("greatest head size", 512, dim)?;
    holds("fused rows", args.qkv, rows * heads * dim, format.dtype.bytes())?;
    holds("cosines and sines", args.rope, rows * dim, size_of::<f32>())?;
    for weight in args.query_norm.into_iter().chain(args.key_norm) {
        holds("weights of a head norm", weight, dim, size_of::<f32>())?;
    }
    for pages in [&cache.keys, &cache.values] {
        at_least("bytes of the cache", pages.len_bytes(), shape.num_blocks * cache.block_bytes())?;
    }
    if let Some(slots) = args.slots {
        holds("slots", slots, rows, size_of::<i64>())?;
    }
    format.check_scaled_rows("heads", &shape)?;
    let lanes = dim.div_ceil(16).next_power_of_two();
    let strides = format.strides(&shape);
    let per_head = cache.scales.as_ref().is_some_and(|scales| scales.per_head);
    let mut words = [0; 16];
    for (i, stride) in [heads * dim, strides.block, strides.head, strides.token].into_iter().enumerate() {
        // The device is little-endian.
        words[2 * i..2 * i + 2].copy_from_slice(&[stride as u32, (stride as u64 >> 32) as u32]);
    }
    words[8] = args.eps.to_bits();
    let counts = [num_heads, shape.num_kv_heads, dim, lanes, shape.block_size];
    for (word, number) in words[9..].iter_mut().zip(counts) {
        *word = count(number)?;
    }
    words[14] = format.kv_code("heads", &KvDtype::ON_GPU)?;
    words[15] = u32::from(per_head);
    let scales = |which: fn(&KvScales) -> &Buffer| optional(cache.scales.as_deref().map(which));
    let parameters = [
        Arg::pointer(args.qkv, 0),
        optional(args.query_norm),
        optional(args.key_norm),
        Arg::pointer(args.rope, 0),
        optional(args.slots.map(|_| &cache.keys)),
        optional(args.slots.map(|_| &cache.values)),
        optional(args.slots),
        scales(|scales| &scales.keys),
        scales(|scales| &scales.values),
        Arg::bytes(&words),
    ];
    let blocks = heads.div_ceil(128 / lanes);
    launch(device, heads_kernel(format), [count(rows)?, count(blocks)?, 1], 128, &parameters)
}

fn heads_kernel(format: CacheFormat) -> &'static str {
    match (format.dtype, format.kv_dtype.is_byte()) {
        (dtype, false) => instance!("heads", dtype),
        (Dtype::F32, true) => "heads_f32_kv8",
        (Dtype::F16, true) => "heads_f16_kv8",
        (Dtype::Bf16, true) => "heads_bf16_kv8",
    }
}

fn optional(buffer: Option<&Buffer>) -> Arg<'_> {
    buffer.map_or(Arg::null(), |buffer| Arg::pointer(buffer, 0))
}

/// `target = activation(gate) * up`, with `gate_up` rows of `[gate; width][up; width]`.
///
/// # Errors
/// See [`gather_rows`].
pub fn gate_mul(
    device: &dyn Device,
    dtype: Dtype,
    activation: Activation,
    gate_up: &Buffer,
    target: &mut Buffer,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("gates", gate_up, rows * 2 * width, dtype.bytes())?;
    holds("activations", target, rows * width, dtype.bytes())?;
    let shape = [count(width)?, activation as u32];
    let args = [Arg::pointer(gate_up, 0), Arg::pointer(target, 0), Arg::bytes(&shape)];
    launch(device, instance!("gate_mul", dtype), [count(rows)?, count(width.div_ceil(2048))?, 1], 256, &args)
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

fn expect(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found == expected { Ok(()) } else { Err(KernelError::Shape { what, found, expected }) }
}

/// A count as a kernel takes it.
fn count(number: usize) -> Result<u32, KernelError> {
    let expected = u32::MAX as usize;
    u32::try_from(number).map_err(|_| KernelError::Shape { what: "size of a launch", found: number, expected })
}
