//! Products with float weights: a tile of M rows × P panels in registers, and the loop over all tiles.

use super::output::{Output, numbers};
use super::pack::{Halves, Panels, Segment};
use super::processor::Processor;
use super::{rounded, stored};
use super::tile::{Line, accumulate};
use super::{Gemm, integer};
use crate::{Dtype, dispatch};
use crate::simd::{LANES, Lanes};

/// Panels per task: enough to feed the widest tile several times, few enough to share among threads.
pub(super) const PANELS_PER_TASK: usize = 16;

/// A part of the product: all rows, some panels.
struct Task<'a, W> {
    x: &'a [f32],
    k: usize,
    rows: usize,
    lines: &'a [W],
    first_panel: usize,
    panels: usize,
    bias: Option<&'a [f32]>,
    out: Output,
}

pub(super) fn run(processor: Processor<'_>, rows: usize, args: Gemm<'_>) {
    let Gemm { x, weights, bias, y } = args;
    for Segment { first, n, panels } in &weights.segments {
        let bias = bias.map(|bias| &bias[*first..first + n]);
        let out = (Output::new(y, weights.n(), *first, *n), *n);
        match panels {
            Panels::F32(lines) => run_lines(processor, weights.k(), (x.numbers(), rows), lines, bias, out),
            Panels::Bf16(Halves { lines, arithmetic: Dtype::Bf16 }) => {
                rounded::run(processor, weights.k(), (x.numbers(), rows), lines, bias, out);
            }
            Panels::Bf16(Halves { lines, .. }) => {
                run_lines(processor, weights.k(), (x.numbers(), rows), lines, bias, out);
            }
            Panels::Q8(blocks) => integer::run(processor, weights.k(), (x, rows), blocks, bias, out),
            Panels::Q4(blocks) => integer::run(processor, weights.k(), (x, rows), blocks, bias, out),
            Panels::Stored(panels) => stored::run(processor, panels, (x, rows), bias, out),
        }
    }
}

fn run_lines<W: Line>(
    Processor { isa, pool, .. }: Processor<'_>,
    k: usize,
    (x, rows): (&[f32], usize),
    lines: &[W],
    bias: Option<&[f32]>,
    (out, n): (Output, usize),
) {
    let panels = n.div_ceil(LANES);
    pool.run(panels.div_ceil(PANELS_PER_TASK), rows * k * LANES * PANELS_PER_TASK, |task| {
        let first_panel = task * PANELS_PER_TASK;
        let count = PANELS_PER_TASK.min(panels - first_panel);
        let task = &Task { x, k, rows, lines, first_panel, panels: count, bias, out };
        dispatch!(isa, walk::<W: Line>(task: &Task<'_, W>));
    });
}

/// Covers rows × panels with tiles that fill the registers. Few rows are bound by memory, not by sums: they read two panels at
/// a time, because more parallel streams get less bandwidth. Sums take 24 of the 32 registers of AVX-512, otherwise 12 of 16.
#[inline(always)]
fn walk<L: Lanes, W: Line>(task: &Task<'_, W>) {
    let mut row = 0;
    while row < task.rows {
        let left = task.rows - row;
        let step = match (L::MANY, left) {
            (true, 12..) => tiles::<L, W, 12, 2>(task, row),
            (true, 8..) => tiles::<L, W, 8, 2>(task, row),
            (true, 4..) => tiles::<L, W, 4, 2>(task, row),
            (false, 6..) => tiles::<L, W, 6, 1>(task, row),
            (_, 4..) => tiles::<L, W, 4, 1>(task, row),
            (_, 2..) => tiles::<L, W, 2, 2>(task, row),
            _ => tiles::<L, W, 1, 2>(task, row),
        };
        row += step;
    }
}

/// Computes a band of M rows over all panels of the task.
#[inline(always)]
fn tiles<L: Lanes, W: Line, const M: usize, const P: usize>(task: &Task<'_, W>, row: usize) -> usize {
    let mut panel = 0;
    while panel + P <= task.panels {
        tile::<L, W, M, P>(task, row, task.first_panel + panel);
        panel += P;
    }
    while panel < task.panels {
        tile::<L, W, M, 1>(task, row, task.first_panel + panel);
        panel += 1;
    }
    M
}

#[inline(always)]
fn tile<L: Lanes, W: Line, const M: usize, const P: usize>(task: &Task<'_, W>, row: usize, panel: usize) {
    let k = task.k;
    let x: [&[f32]; M] = std::array::from_fn(|m| &task.x[(row + m) * k..][..k]);
    let lines = k.div_ceil(W::INPUTS);
    let w: [&[W]; P] = std::array::from_fn(|p| &task.lines[(panel + p) * lines..][..lines]);
    let acc = accumulate::<L, W, M, P, true>(x, w, [[L::splat(0.0); P]; M]);
    // SAFETY: rows row..row+M exist, and only this task writes these panels.
    unsafe { task.out.write_tile(row, panel, &numbers(acc), task.bias) };
}
