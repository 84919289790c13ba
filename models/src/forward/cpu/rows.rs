//! Rows of buffers on a CPU.

use attention_kernels::KernelError;
use device::Buffer;
use linear::RowBlock;

use crate::forward::ops::HeadSizes;

/// Row i of `out` = row `rows[i]` of `x`, of `width` elements.
pub(super) fn gather_rows<'a>(
    x: &Buffer,
    rows: impl IntoIterator<Item = &'a u32>,
    width: usize,
    out: &mut Buffer,
) -> Result<(), KernelError> {
    let x = x.host::<f32>()?;
    for (row, out) in rows.into_iter().zip(out.host_mut::<f32>()?.chunks_mut(width)) {
        out.copy_from_slice(&x[*row as usize * width..][..width]);
    }
    Ok(())
}

/// Returns the first `rows` rows of `width` numbers in 8 bits, and the number of blocks per row.
pub(super) fn q8_rows(blocks: &mut Buffer, rows: usize, width: usize) -> Result<(&mut [RowBlock], usize), KernelError> {
    let per_row = width.div_ceil(RowBlock::LEN);
    Ok((&mut blocks.host_mut()?[..rows * per_row], per_row))
}

/// [`LayerOps::copy_heads`](crate::forward::ops::LayerOps::copy_heads).
pub(super) fn copy_heads(
    HeadSizes { rows, heads, width, from: [from_row, from_head], to: [to_row, to_head] }: HeadSizes,
    (from, from_first): (&Buffer, usize),
    (to, to_first): (&mut Buffer, usize),
) -> Result<(), KernelError> {
    let (from, to) = (from.host::<f32>()?, to.host_mut::<f32>()?);
    for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
        let from = &from[from_first + row * from_row + head * from_head..][..width];
        to[to_first + row * to_row + head * to_head..][..width].copy_from_slice(from);
    }
    Ok(())
}
