//! The CUDA kernels of a decoder's layers (`csrc/`), each behind a safe wrapper that checks the sizes of its buffers.
//!
//! They run on `cuda` and `cuda-sim`. Row indices, positions and slots lie on the device, where a wrapper cannot check them:
//! the caller must. No wrapper waits for the device. All of them return an error if a buffer is too small or the launch fails.

use attention_kernels::{Dtype, KernelError};
use device::{Arg, Buffer, Device, Launch};

pub use super::head_rows::{QkNormRopeCacheArgs, qk_norm_rope_cache};
use crate::decoder::{Activation, QueryGrowth};

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
pub(super) use instance;

device::kernel_structs! {
    /// The struct of the same name in `gather.cu`.
    struct GatherShape: 12 bytes {
        width: u32,
        offset: u32,
        scale: f32,
    }
    /// The struct of the same name in `norm.cu`.
    struct NormShape: 20 bytes {
        width: u32,
        stride: u32,
        weights: u32,
        eps: f32,
        scale: f32,
    }
    /// The struct of the same name in `rope.cu`.
    struct RotateShape: 32 bytes {
        stride: u32,
        head_dim: u32,
        dims: u32,
        neighbours: u32,
        num_heads: u32,
        original: u32,
        first: u32,
        beta: f32,
    }
    /// The struct of the same name in `activation.cu`.
    struct ActivationShape: 32 bytes {
        width: u32,
        gate_stride: u32,
        up_stride: u32,
        activation: u32,
        limit: f32,
        negative: f32,
        beta: f32,
        eps: f32,
    }
}

/// Gathers rows of a matrix `[any, width]`: row i of `target` becomes `scale` times row `indices[i]` (u32) of `source`.
pub fn gather_rows(
    device: &dyn Device,
    dtype: Dtype,
    source: &Buffer,
    indices: &Buffer,
    scale: f32,
    target: &mut Buffer,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    gather(device, instance!("gather_rows", dtype), dtype, [source, indices, target], (0, scale), (rows, width))
}

/// Adds rows of a matrix `[any, width]`: row `indices[i] + offset` of `source` to row i of `target`.
pub fn add_gathered_rows(
    device: &dyn Device,
    dtype: Dtype,
    source: &Buffer,
    (indices, offset): (&Buffer, usize),
    target: &mut Buffer,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    let kernel = instance!("add_gathered_rows", dtype);
    gather(device, kernel, dtype, [source, indices, target], (offset, 1.0), (rows, width))
}

fn gather(
    device: &dyn Device,
    kernel: &str,
    dtype: Dtype,
    [source, indices, target]: [&Buffer; 3],
    (offset, scale): (usize, f32),
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("row indices", indices, rows, size_of::<u32>())?;
    holds("elements in the gathered rows", target, rows * width, dtype.bytes())?;
    let shape = GatherShape { width: count(width)?, offset: count(offset)?, scale };
    let [source, indices, target] = [source, indices, target].map(|buffer| Arg::pointer(buffer, 0));
    launch(device, kernel, [count(rows)?, 1, 1], 128, &[source, indices, target, Arg::bytes(&shape)])
}

/// A norm of groups of elements of a row.
#[derive(Clone, Copy)]
pub struct NormArgs<'a> {
    /// Float32: one for each element of a group, or of all groups.
    pub weight: &'a Buffer,
    /// Float32, as many as weights.
    pub bias: Option<&'a Buffer>,
    /// Term added to the mean of the squares.
    pub eps: f32,
    /// Whether the mean is subtracted first: a layer norm. Otherwise it is an RMS norm.
    pub centre: bool,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a group.
    pub width: usize,
}

/// Norm of rows of `groups` groups: each row of `target` becomes the norm of that row of `x`.
pub fn norm(
    device: &dyn Device,
    dtype: Dtype,
    x: &Buffer,
    target: &mut Buffer,
    groups: usize,
    args: NormArgs<'_>,
) -> Result<(), KernelError> {
    let kernel = if args.centre { instance!("layer_norm", dtype) } else { instance!("rms_norm", dtype) };
    launch_norm(device, kernel, dtype, [(x, 0), (target, 0)], (groups, groups * args.width), 1.0, args)
}

/// Adds `scale * target` to `x`, rounded to the type after each operation, then makes `target` the [`norm`] of the sum.
pub fn fused_add_norm(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    target: &mut Buffer,
    scale: f32,
    args: NormArgs<'_>,
) -> Result<(), KernelError> {
    let kernel =
        if args.centre { instance!("fused_add_layer_norm", dtype) } else { instance!("fused_add_rms_norm", dtype) };
    launch_norm(device, kernel, dtype, [(x, 0), (target, 0)], (1, args.width), scale, args)
}

/// Norms `groups` groups of each row of `x` in place. Rows are `stride` elements apart; the groups begin at element `first`.
pub fn norm_groups(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    (first, groups, stride): (usize, usize, usize),
    args: NormArgs<'_>,
) -> Result<(), KernelError> {
    let kernel = if args.centre { instance!("layer_norm", dtype) } else { instance!("rms_norm", dtype) };
    let first = first * dtype.bytes();
    launch_norm(device, kernel, dtype, [(x, first), (x, first)], (groups, stride), 1.0, args)
}

fn launch_norm(
    device: &dyn Device,
    kernel: &str,
    dtype: Dtype,
    rows_of: [(&Buffer, usize); 2],
    (groups, stride): (usize, usize),
    scale: f32,
    args: NormArgs<'_>,
) -> Result<(), KernelError> {
    let NormArgs { weight, bias, eps, rows, width, .. } = args;
    at_least("elements between the rows of a norm", stride, groups * width)?;
    for (buffer, first) in rows_of {
        let end = first / dtype.bytes() + rows.saturating_sub(1) * stride + groups * width;
        holds("elements in the rows of a norm", buffer, if rows == 0 { 0 } else { end }, dtype.bytes())?;
    }
    let weights = weight.len_bytes() / size_of::<f32>();
    if weights != width && weights != groups * width {
        return Err(KernelError::Shape { what: "weights of a norm", found: weights, expected: width });
    }
    if let Some(bias) = bias {
        holds("biases of a norm", bias, weights, size_of::<f32>())?;
    }
    let shape = NormShape { width: count(width)?, stride: count(stride)?, weights: count(weights)?, eps, scale };
    let [x, target] = rows_of.map(|(buffer, first)| Arg::pointer(buffer, first));
    let args = [x, target, Arg::pointer(weight, 0), optional(bias), Arg::bytes(&shape)];
    launch(device, kernel, [count(rows)?, count(groups)?, 1], 256, &args)
}

/// `x += scale * y`, rounded to the type after each operation, for rows of `width` elements.
pub fn add(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    y: &Buffer,
    scale: f32,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("elements in the sum", x, rows * width, dtype.bytes())?;
    holds("elements to add", y, rows * width, dtype.bytes())?;
    let args = [Arg::pointer(x, 0), Arg::pointer(y, 0), Arg::from(count(width)?), Arg::from(scale)];
    launch(device, instance!("add", dtype), [count(rows)?, count(width.div_ceil(2048))?, 1], 256, &args)
}

/// Rotary table: each row of `table`, float32 `[rows, 2 * half]`, becomes c·cos(p·f) for all `half` frequencies f (float32), then
/// c·sin(p·f), where p is the row's position (u32) and c the factor.
pub fn rope_table(
    device: &dyn Device,
    positions: &Buffer,
    frequencies: &Buffer,
    factor: f32,
    table: &mut Buffer,
    (rows, half): (usize, usize),
) -> Result<(), KernelError> {
    holds("positions", positions, rows, size_of::<u32>())?;
    holds("frequencies", frequencies, half, size_of::<f32>())?;
    holds("cosines and sines", table, rows * 2 * half, size_of::<f32>())?;
    let [positions, frequencies, table] = [positions, frequencies, table].map(|buffer| Arg::pointer(buffer, 0));
    let args = [positions, frequencies, table, Arg::from(count(half)?), Arg::from(factor)];
    launch(device, "rope_table", [count(rows)?, 1, 1], 128, &args)
}

/// Arguments of [`rotate_heads`].
pub struct RotateArgs<'a> {
    /// Rows of query heads, then key heads; changed in place.
    pub heads: &'a mut Buffer,
    /// The first element of the first head, less than `head_dim`.
    pub first: usize,
    /// Number of rows.
    pub rows: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Numbers of query and key heads.
    pub num_heads: [usize; 2],
    /// Elements per head.
    pub head_dim: usize,
    /// The first `dims` elements of a head are rotated by a [`rope_table`]; `neighbours`: pairs are (2i, 2i + 1) instead of
    /// (i, i + dims / 2).
    pub rope: Option<(&'a Buffer, usize, bool)>,
    /// Growth of the queries with their position.
    pub growth: Option<QueryGrowth>,
    /// Positions of the rows (u32).
    pub positions: &'a Buffer,
}

/// Rotation of heads in place where [`qk_norm_rope_cache`] does not do it.
pub fn rotate_heads(device: &dyn Device, dtype: Dtype, args: RotateArgs<'_>) -> Result<(), KernelError> {
    let RotateArgs { heads, first, rows, stride, num_heads: [queries, keys], head_dim, rope, growth, positions } = args;
    at_least("elements between rows of heads", stride, (queries + keys) * head_dim)?;
    holds("elements in the rows of heads", heads, rows * stride, dtype.bytes())?;
    holds("positions", positions, rows, size_of::<u32>())?;
    let (table, dims, neighbours) = rope.map_or((None, 0, false), |(table, dims, is)| (Some(table), dims, is));
    at_least("elements of a head", head_dim, first + dims)?;
    table.map_or(Ok(()), |table| holds("cosines and sines", table, rows * dims, size_of::<f32>()))?;
    let growth = growth.unwrap_or(QueryGrowth { beta: 0.0, original_max_position_embeddings: 0, first: 0 });
    let shape = RotateShape {
        stride: count(stride)?,
        head_dim: count(head_dim)?,
        dims: count(dims)?,
        neighbours: neighbours.into(),
        num_heads: count(queries)?,
        original: count(growth.original_max_position_embeddings)?,
        first: growth.first,
        beta: growth.beta,
    };
    let heads = Arg::pointer(heads, first * dtype.bytes());
    let args = [heads, optional(table), Arg::pointer(positions, 0), Arg::bytes(&shape)];
    launch(device, instance!("rotate_heads", dtype), [count(rows)?, count(queries + keys)?, 1], 128, &args)
}

pub(super) fn optional(buffer: Option<&Buffer>) -> Arg<'_> {
    buffer.map_or(Arg::null(), |buffer| Arg::pointer(buffer, 0))
}

/// `target = activation(gate) * up`, or `activation(gate)` without `up`. A row of `gate` is `gate_stride` elements behind the one
/// before; the first of `up` begins at an element of its buffer.
pub fn activate(
    device: &dyn Device,
    dtype: Dtype,
    activation: Activation,
    (gate, gate_stride): (&Buffer, usize),
    up: Option<(&Buffer, usize, usize)>,
    target: &mut Buffer,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    for (buffer, stride, first) in [(gate, gate_stride, 0)].into_iter().chain(up) {
        at_least("elements between the rows of an activation", stride, first + width)?;
        holds("elements in the rows of an activation", buffer, rows * stride, dtype.bytes())?;
    }
    holds("elements in the activations", target, rows * width, dtype.bytes())?;
    let (activation, [limit, negative, beta, eps]) = match activation {
        Activation::Silu => (0, [0.0; 4]),
        Activation::Gelu => (1, [0.0; 4]),
        Activation::GeluTanh => (2, [0.0; 4]),
        Activation::Relu => (3, [0.0; 4]),
        Activation::Relu2 => (4, [0.0; 4]),
        Activation::ClampedSwiglu { limit } => (5, [limit, 0.0, 0.0, 0.0]),
        Activation::Xielu { positive, negative, beta, eps } => (6, [positive, negative, beta, eps]),
    };
    let (width_of_row, up_stride) = (count(width)?, count(up.map_or(0, |(_, stride, _)| stride))?);
    let gate_stride = count(gate_stride)?;
    let shape = ActivationShape { width: width_of_row, gate_stride, up_stride, activation, limit, negative, beta, eps };
    let up = up.map_or(Arg::null(), |(up, _, first)| Arg::pointer(up, first * dtype.bytes()));
    let args = [Arg::pointer(gate, 0), up, Arg::pointer(target, 0), Arg::bytes(&shape)];
    launch(device, instance!("activate", dtype), [count(rows)?, count(width.div_ceil(2048))?, 1], 256, &args)
}

/// `x *= factor` for rows of `width` elements.
pub fn scale(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    factor: f32,
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("elements to scale", x, rows * width, dtype.bytes())?;
    let args = [Arg::pointer(x, 0), Arg::from(count(width)?), Arg::from(factor)];
    launch(device, instance!("scale", dtype), [count(rows)?, count(width.div_ceil(2048))?, 1], 256, &args)
}

/// `x *= sigmoid(gate)` for rows of `width` elements; the gate ends each row of `gates`, of `stride` elements.
pub fn gate(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    (gates, stride): (&Buffer, usize),
    (rows, width): (usize, usize),
) -> Result<(), KernelError> {
    holds("elements to gate", x, rows * width, dtype.bytes())?;
    at_least("elements between gates", stride, width)?;
    holds("elements in the rows of gates", gates, rows * stride, dtype.bytes())?;
    let args = [Arg::pointer(x, 0), Arg::pointer(gates, 0), Arg::from(count(width)?), Arg::from(count(stride)?)];
    launch(device, instance!("gate", dtype), [count(rows)?, count(width.div_ceil(2048))?, 1], 256, &args)
}

/// Clamps the first `width` elements of rows of `stride` elements to -limit..=limit.
pub fn clamp(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    limit: f32,
    (rows, width, stride): (usize, usize, usize),
) -> Result<(), KernelError> {
    at_least("elements between clamped rows", stride, width)?;
    holds("elements to clamp", x, rows * stride, dtype.bytes())?;
    let args = [Arg::pointer(x, 0), Arg::from(count(width)?), Arg::from(count(stride)?), Arg::from(limit)];
    launch(device, instance!("clamp", dtype), [count(rows)?, count(width.div_ceil(2048))?, 1], 256, &args)
}

/// Multiplies float32 logits by `scale`, then caps each x to `c * tanh(x / c)` if `soft_cap` is `Some(c)`.
pub fn finish_logits(
    device: &dyn Device,
    logits: &mut Buffer,
    number: usize,
    scale: f32,
    soft_cap: Option<f32>,
) -> Result<(), KernelError> {
    holds("logits", logits, number, size_of::<f32>())?;
    let args =
        [Arg::pointer(logits, 0), Arg::from(number as u64), Arg::from(scale), Arg::from(soft_cap.unwrap_or(0.0))];
    launch(device, "finish_logits", [count(number.div_ceil(256))?, 1, 1], 256, &args)
}

pub(super) fn launch(
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

pub(super) fn holds(what: &'static str, buffer: &Buffer, elements: usize, bytes: usize) -> Result<(), KernelError> {
    at_least(what, buffer.len_bytes() / bytes, elements)
}

pub(super) fn at_least(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found >= expected { Ok(()) } else { Err(KernelError::Shape { what, found, expected }) }
}

/// A size as a 32-bit kernel argument.
pub(super) fn count(number: usize) -> Result<u32, KernelError> {
    let expected = u32::MAX as usize;
    u32::try_from(number).map_err(|_| KernelError::Shape { what: "size of a launch", found: number, expected })
}
