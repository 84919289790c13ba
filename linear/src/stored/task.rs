//! Parts of a product with stored weights, and their sums.

use std::ops::Range;

use simd::Lanes;

use super::panels::StoredPanels;
use crate::output::Output;

/// Rows that are multiplied with some blocks before the next ones, so that they stay in the L2 cache.
pub(super) const ROWS: usize = 96;

/// A product, or a part of it: all rows, some pairs of panels.
pub(super) struct Task<'a, X> {
    pub x: &'a [X],
    pub weights: &'a StoredPanels,
    pub rows: usize,
    pub pairs: Range<usize>,
    pub bias: Option<&'a [f32]>,
    pub out: Output,
}

/// The sums of a tile before input `input`.
#[inline(always)]
pub(super) fn start<L: Lanes, X, const M: usize, const P: usize>(
    task: &Task<'_, X>,
    row: usize,
    panel: usize,
    input: usize,
) -> [[L; P]; M] {
    match input {
        0 => [[L::splat(0.0); P]; M],
        // SAFETY: rows row..row + M exist, only this task accesses these panels, and it has written them.
        _ => unsafe { task.out.read_tile(row, panel) },
    }
}

/// Writes the sums of a tile, with the bias if `input` is behind the last one.
#[inline(always)]
pub(super) fn end<L: Lanes, X, const M: usize, const P: usize>(
    task: &Task<'_, X>,
    row: usize,
    panel: usize,
    input: usize,
    acc: [[L; P]; M],
) {
    let bias = task.bias.filter(|_| input >= task.weights.k);
    // SAFETY: rows row..row + M exist, and only this task accesses these panels.
    unsafe { task.out.write_tile(row, std::array::from_fn(|p| panel + p), acc, bias) };
}
