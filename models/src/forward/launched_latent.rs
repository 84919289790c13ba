//! Latent attention as launches of the kernels in `csrc/latent.cu`.

use attention_kernels::{Dtype, KernelError};
use device::{Arg, Buffer, Device, DeviceError};

use super::kernels::{self, RotateArgs, at_least, count, holds, instance, launch};
use super::op::HeadRows;
use super::ops::{HeadProduct, HeadSizes, LatentRows};

device::kernel_structs! {
    /// The struct of the same name in `latent.cu`.
    struct HeadLinearShape: 28 bytes {
        rows: u32,
        n: u32,
        k: u32,
        from_row: u32,
        from_head: u32,
        to_row: u32,
        to_head: u32,
    }
    /// The struct of the same name in `latent.cu`.
    struct CopyHeadsShape: 20 bytes {
        width: u32,
        from_row: u32,
        from_head: u32,
        to_row: u32,
        to_head: u32,
    }
}

/// [`LayerOps::latent_rows`](super::ops::LayerOps::latent_rows).
pub(super) fn rows(
    device: &dyn Device,
    dtype: Dtype,
    positions: &Buffer,
    args: LatentRows<'_>,
) -> Result<(), KernelError> {
    let LatentRows { layer, latent, rows, queries, latents, norm, rope, out } = args;
    let (heads, dim) = (layer.heads.num_heads, layer.heads.head_dim);
    let (query_dim, rope_dim, rank) = (latent.nope_dim + latent.rope_dim, latent.rope_dim, latent.rank);
    kernels::norm_groups(device, dtype, latents, (0, 1, dim), norm.args(rows))?;
    let neighbours = layer.rope.as_ref().is_some_and(|rope| rope.interleaved);
    let rotate = rotation(device, dtype, positions, rows, (rope, rope_dim, neighbours));
    rotate(queries, latent.nope_dim, heads, query_dim)?;
    rotate(latents, rank, 1, dim)?;
    let row = (heads + 1) * dim;
    let rotated = HeadSizes { rows, heads, width: rope_dim, from: [heads * query_dim, query_dim], to: [row, dim] };
    copy_heads(device, dtype, rotated, (queries, latent.nope_dim), (&mut *out, rank))?;
    let key = HeadSizes { rows, heads: 1, width: dim, from: [dim, 0], to: [row, 0] };
    copy_heads(device, dtype, key, (latents, 0), (out, heads * dim))
}

/// Returns what rotates the elements from `first` on of `heads` heads of `head_dim` elements, which lie side by side in a row.
pub(super) fn rotation<'a>(
    device: &'a dyn Device,
    dtype: Dtype,
    positions: &'a Buffer,
    rows: usize,
    rope: (&'a Buffer, usize, bool),
) -> impl Fn(&mut Buffer, usize, usize, usize) -> Result<(), KernelError> + 'a {
    move |buffer, first, heads, head_dim| {
        let (stride, num_heads, rope) = (heads * head_dim, [heads, 0], Some(rope));
        let args =
            RotateArgs { heads: buffer, first, rows, stride, num_heads, head_dim, rope, growth: None, positions };
        kernels::rotate_heads(device, dtype, args)
    }
}

/// [`LayerOps::copy_heads`](super::ops::LayerOps::copy_heads).
pub(super) fn copy_heads(
    device: &dyn Device,
    dtype: Dtype,
    HeadSizes { rows, heads, width, from: from_strides, to: to_strides }: HeadSizes,
    (from, from_first): (&Buffer, usize),
    (to, to_first): (&mut Buffer, usize),
) -> Result<(), KernelError> {
    let end = |first: usize, [row, head]: [usize; 2]| match rows {
        0 => 0,
        _ => first + (rows - 1) * row + (heads - 1) * head + width,
    };
    holds("elements to copy from heads", from, end(from_first, from_strides), dtype.bytes())?;
    holds("elements to copy to heads", to, end(to_first, to_strides), dtype.bytes())?;
    let shape = CopyHeadsShape {
        width: count(width)?,
        from_row: count(from_strides[0])?,
        from_head: count(from_strides[1])?,
        to_row: count(to_strides[0])?,
        to_head: count(to_strides[1])?,
    };
    let (from, to) = (Arg::pointer(from, from_first * dtype.bytes()), Arg::pointer(to, to_first * dtype.bytes()));
    launch(
        device,
        instance!("copy_heads", dtype),
        [count(rows)?, count(heads)?, 1],
        128,
        &[from, to, Arg::bytes(&shape)],
    )
}

/// [`LayerOps::head_linear`](super::ops::LayerOps::head_linear).
pub(super) fn linear(device: &dyn Device, dtype: Dtype, args: HeadProduct<'_>) -> Result<(), KernelError> {
    let HeadProduct { linears, shape: [heads, n, k], rows, x, from, y, to, .. } = args;
    let weights = linears.first().and_then(|linear| linear.weights.numbers());
    let weights = weights.ok_or(DeviceError::NoMatrices(device.name()))?;
    holds("weights of heads", weights, heads * n * k, dtype.bytes())?;
    let within = |what: &'static str, at: &HeadRows, width: usize, buffer: &Buffer| {
        at_least(what, at.stride, heads.saturating_sub(1) * at.head_stride + width)?;
        holds(what, buffer, rows * at.stride, dtype.bytes())
    };
    within("inputs of heads", &from, k, x)?;
    within("outputs of heads", &to, n, y)?;
    let shape = HeadLinearShape {
        rows: count(rows)?,
        n: count(n)?,
        k: count(k)?,
        from_row: count(from.stride)?,
        from_head: count(from.head_stride)?,
        to_row: count(to.stride)?,
        to_head: count(to.head_stride)?,
    };
    let args = [Arg::pointer(x, 0), Arg::pointer(weights, 0), Arg::pointer(y, 0), Arg::bytes(&shape)];
    launch(device, instance!("head_linear", dtype), [count(n.div_ceil(8))?, count(heads)?, 1], 256, &args)
}
