//! Products with float weights: a tile of M rows × P panels in registers, and the loop over all tiles.

use super::output::Output;
use super::pack::Panels;
use super::{Gemm, PackedMatrix, integer};
use crate::simd::int8::DotIsa;
use crate::simd::{LANES, Lanes, prefetch};
use crate::{Isa, Pool, dispatch};

/// Panels per task: enough to feed the widest tile several times, few enough to share among threads.
const PANELS_PER_TASK: usize = 16;

/// Bands of fewer rows are bound by memory, so they prefetch.
const FEW_ROWS: usize = 12;

/// Prefetch distance in bytes.
const AHEAD: usize = 4 << 10;

/// A line of a panel: sixteen weights for one k.
trait Line: Copy + Sync {
    fn load<L: Lanes>(&self) -> L;
}
impl Line for [f32; LANES] {
    #[inline(always)]
    fn load<L: Lanes>(&self) -> L {
        L::load(self)
    }
}
impl Line for [u16; LANES] {
    #[inline(always)]
    fn load<L: Lanes>(&self) -> L {
        L::load_bf16(self)
    }
}

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

pub(super) fn run(isa: Isa, dot: DotIsa, pool: &Pool, rows: usize, args: Gemm<'_>) {
    let weights: &PackedMatrix = args.weights;
    match &weights.panels {
        Panels::F32(lines) => run_lines(isa, pool, rows, args, lines),
        Panels::Bf16(lines) => run_lines(isa, pool, rows, args, lines),
        Panels::Q8(blocks) => integer::run(isa, dot, pool, rows, args, blocks),
        Panels::Q4(blocks) => integer::run(isa, dot, pool, rows, args, blocks),
    }
}

fn run_lines<W: Line>(isa: Isa, pool: &Pool, rows: usize, args: Gemm<'_>, lines: &[W]) {
    let (n, k) = (args.weights.n(), args.weights.k());
    let panels = n.div_ceil(LANES);
    let out = Output::new(args.y, n);
    let (x, bias) = (args.x.numbers(), args.bias);
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
    let w: [&[W]; P] = std::array::from_fn(|p| &task.lines[(panel + p) * k..][..k]);
    let mut acc = [[L::splat(0.0); P]; M];
    for i in 0..k {
        if M < FEW_ROWS {
            for w in w {
                prefetch(w.as_ptr().wrapping_add(i).wrapping_byte_add(AHEAD).cast());
            }
        }
        let weights: [L; P] = std::array::from_fn(|p| w[p][i].load());
        for m in 0..M {
            let value = L::splat(x[m][i]);
            for p in 0..P {
                acc[m][p] = value.mul_add(weights[p], acc[m][p]);
            }
        }
    }
    // These loops are short enough to be unrolled. If they were not, the sums would stay in memory through all of the above.
    let mut values = [[[0.0; LANES]; P]; M];
    for m in 0..M {
        for p in 0..P {
            acc[m][p].store(&mut values[m][p]);
        }
    }
    // SAFETY: rows row..row+M exist, and only this task writes these panels.
    unsafe { task.out.write_tile(row, panel, &values, task.bias) };
}
