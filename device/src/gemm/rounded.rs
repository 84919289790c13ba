//! Products of bfloat16: activations are rounded once, then pairs are multiplied as [`crate::simd::pairs`] defines.
//!
//! Every output element is one running sum over the pairs of k in their order, whatever the number of rows, the tile, the threads
//! or the instruction set.

use std::cell::Cell;

use super::kernel::PANELS_PER_TASK;
use super::output::{Output, numbers};
use super::processor::Processor;
use super::rows::RowBlock;
use crate::dispatch_pairs;
use crate::simd::pairs::{PairLanes, Pairs};
use crate::simd::{LANES, Lanes, prefetch};

/// Bands of fewer rows are bound by memory, so they prefetch.
const FEW_ROWS: usize = 12;

/// Prefetch distance in bytes.
const AHEAD: usize = 4 << 10;

thread_local! {
    /// Rounded activations of this thread's last product, reused by the next. They are taken out while in use, because a task of
    /// the product may itself run a product on this thread.
    static ROUNDED: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
}

/// A part of the product: all rows, some panels.
struct Task<'a> {
    /// `[rows, pairs]`.
    x: &'a [u32],
    /// Pairs of a row.
    pairs: usize,
    rows: usize,
    lines: &'a [Pairs],
    first_panel: usize,
    panels: usize,
    bias: Option<&'a [f32]>,
    out: Output,
}

pub(super) fn run(
    Processor { isa, pool, .. }: Processor<'_>,
    k: usize,
    (x, rows): (&[f32], usize),
    lines: &[Pairs],
    bias: Option<&[f32]>,
    (out, n): (Output, usize),
) {
    let pairs = k.div_ceil(2);
    let mut rounded = ROUNDED.take();
    // Only grows: old contents do not matter.
    rounded.resize(rounded.len().max(rows * pairs), 0);
    pool.chunks_mut(&mut rounded[..rows * pairs], pairs, k * RowBlock::COST, |row, to| {
        let from = &x[row * k..][..k];
        dispatch_pairs!(isa, round(from: &[f32], to: &mut [u32]));
    });
    let (x, panels) = (&rounded[..rows * pairs], n.div_ceil(LANES));
    pool.run(panels.div_ceil(PANELS_PER_TASK), rows * k * LANES * PANELS_PER_TASK, |task| {
        let first_panel = task * PANELS_PER_TASK;
        let count = PANELS_PER_TASK.min(panels - first_panel);
        let task = &Task { x, pairs, rows, lines, first_panel, panels: count, bias, out };
        dispatch_pairs!(isa, walk(task: &Task<'_>));
    });
    ROUNDED.set(rounded);
}

/// Rounds a row; an odd one is padded with zero.
#[inline(always)]
fn round<D: PairLanes>(from: &[f32], to: &mut [u32]) {
    let (whole, rest) = from.as_chunks::<{ 2 * LANES }>();
    let (to, to_rest) = to.as_chunks_mut::<LANES>();
    for (from, to) in whole.iter().zip(to.iter_mut()) {
        D::round(from, to);
    }
    let (mut padded, mut last) = ([0.0; 2 * LANES], [0; LANES]);
    padded[..rest.len()].copy_from_slice(rest);
    D::round(&padded, &mut last);
    // A rest of 31 numbers fills sixteen pairs, so the last chunk may be whole.
    let at = whole.len();
    match to.get_mut(at) {
        Some(to) => *to = last,
        None => to_rest.copy_from_slice(&last[..to_rest.len()]),
    }
}

/// Covers rows × panels with tiles that fill the registers.
#[inline(always)]
fn walk<D: PairLanes>(task: &Task<'_>) {
    let mut row = 0;
    while row < task.rows {
        row += match (D::Floats::MANY, task.rows - row) {
            (true, 12..) => band::<D, 12, 2>(task, row),
            (true, 8..) => band::<D, 8, 2>(task, row),
            (_, 4..) => band::<D, 4, 2>(task, row),
            (_, 2..) => band::<D, 2, 2>(task, row),
            _ => band::<D, 1, 2>(task, row),
        };
    }
}

/// Computes M rows of all panels of the task.
#[inline(always)]
fn band<D: PairLanes, const M: usize, const P: usize>(task: &Task<'_>, row: usize) -> usize {
    let mut panel = 0;
    while panel + P <= task.panels {
        tile::<D, M, P>(task, row, task.first_panel + panel);
        panel += P;
    }
    while panel < task.panels {
        tile::<D, M, 1>(task, row, task.first_panel + panel);
        panel += 1;
    }
    M
}

#[inline(always)]
fn tile<D: PairLanes, const M: usize, const P: usize>(task: &Task<'_>, row: usize, panel: usize) {
    let pairs = task.pairs;
    let x: [&[u32]; M] = std::array::from_fn(|m| &task.x[(row + m) * pairs..][..pairs]);
    let w: [&[Pairs]; P] = std::array::from_fn(|p| &task.lines[(panel + p) * pairs..][..pairs]);
    let mut acc = [[D::Floats::splat(0.0); P]; M];
    for i in 0..pairs {
        if M < FEW_ROWS {
            for w in w {
                prefetch(w.as_ptr().wrapping_add(i).wrapping_byte_add(AHEAD).cast());
            }
        }
        let weights: [D::Words; P] = std::array::from_fn(|p| D::load(&w[p][i]));
        for m in 0..M {
            let value = D::splat(x[m][i]);
            for p in 0..P {
                acc[m][p] = D::dot(acc[m][p], value, weights[p]);
            }
        }
    }
    // SAFETY: rows row..row+M exist, and only this task writes these panels.
    unsafe { task.out.write_tile(row, panel, &numbers(acc), task.bias) };
}
