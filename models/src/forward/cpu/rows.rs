//! Rows of buffers on a CPU.

use attention_kernels::KernelError;
use device::Buffer;
use linear::RowBlock;
use simd::Pool;

use super::PASS_COST;
use crate::forward::ops::HeadSizes;
use crate::forward::routing::Choice;

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
    threads: &Pool,
    HeadSizes { rows, heads, width, from: [from_row, from_head], to: [to_row, to_head] }: HeadSizes,
    (from, from_first): (&Buffer, usize),
    (to, to_first): (&mut Buffer, usize),
) -> Result<(), KernelError> {
    let (from, to) = (&from.host::<f32>()?[from_first..], &mut to.host_mut::<f32>()?[to_first..]);
    let end = to.len().min(rows * to_row);
    threads.chunks_mut(&mut to[..end], to_row, heads * width * PASS_COST, |row, to| {
        for head in 0..heads {
            to[head * to_head..][..width].copy_from_slice(&from[row * from_row + head * from_head..][..width]);
        }
    });
    Ok(())
}

/// Calls `f` with each chosen row of `x`, of `width` numbers, and the index of its choice.
pub(super) fn for_chosen(
    threads: &Pool,
    chosen: &[Choice],
    (x, width): (&mut [f32], usize),
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    // Rows that a thread looks up together.
    const SHARE: usize = 32;
    let work = chosen.len() * width * PASS_COST / x.len().div_ceil(SHARE * width).max(1);
    threads.chunks_mut(x, SHARE * width, work, |share, x| {
        let first = share * SHARE;
        let [begin, end] = [first, first + SHARE].map(|row| chosen.partition_point(|it| (it.row as usize) < row));
        for (index, choice) in (begin..end).zip(&chosen[begin..end]) {
            f(index, &mut x[(choice.row as usize - first) * width..][..width]);
        }
    });
}
