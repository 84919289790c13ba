//! The two loops over the panels of a task: tiles of up to four rows in registers.

use std::ops::Range;

use simd::{Isa, LANES, Lanes, dispatch, prefetch};

use super::lines::{Line, Lines};

/// Prefetch distance in bytes: each adapter's factors are short streams that are read once per step.
const AHEAD: usize = 2 << 10;

/// Start of numbers that several threads write, each its own.
#[derive(Clone, Copy)]
pub(super) struct Shared(*mut f32);
// SAFETY: the callers of `shrink` and `expand` promise that no two tasks touch the same numbers.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub fn new(numbers: &mut [f32]) -> Shared {
        Shared(numbers.as_mut_ptr())
    }
}

/// Up to sixteen numbers in each of several rows.
#[derive(Clone, Copy)]
pub(super) struct Cells {
    pub cells: Shared,
    /// The first number in row 0.
    pub first: usize,
    /// Numbers between rows.
    pub stride: usize,
}

/// Some ranks of the rows of t.
pub(super) struct Ranks<'a> {
    pub t: &'a [f32],
    pub stride: usize,
    pub ranks: Range<usize>,
}

/// Operands of the first loop.
struct Shrink<'a, W> {
    lines: &'a [W],
    inputs: usize,
    x: &'a [f32],
    rows: &'a [(u32, u32)],
    scales: &'a [f32],
    t: Cells,
}

/// Operands of the second loop.
struct Expand<'a, W> {
    /// Panels of the outputs.
    lines: &'a [W],
    t: &'a Ranks<'a>,
    rows: &'a [(u32, u32)],
    outputs: usize,
    y: Cells,
}

/// Writes `scales * (x·Aᵀ)` for one panel of ranks: row i of `t` is that of `rows[i]` of x.
///
/// # Safety
/// `t` has a row for each of `rows`, and no other thread touches these cells.
#[allow(clippy::too_many_arguments)] // split once more it would only be another struct
pub(super) unsafe fn shrink(
    isa: Isa,
    down: &Lines,
    panel: usize,
    inputs: usize,
    x: &[f32],
    rows: &[(u32, u32)],
    scales: &[f32],
    t: Cells,
) {
    fn run<W: Line>(isa: Isa, lines: &[W], panel: usize, task: Shrink<'_, ()>) {
        let Shrink { inputs, x, rows, scales, t, .. } = task;
        let task = &Shrink { lines: &lines[panel * inputs..][..inputs], inputs, x, rows, scales, t };
        dispatch!(isa, shrink_rows::<W: Line>(task: &Shrink<'_, W>));
    }
    let task = Shrink { lines: &[], inputs, x, rows, scales, t };
    match down {
        Lines::Single(lines) => run(isa, lines, panel, task),
        Lines::Brain(lines) => run(isa, lines, panel, task),
        Lines::Half(lines) => run(isa, lines, panel, task),
    }
}

/// Adds `t·Bᵀ` to `outputs` outputs of the rows of y, which begin at the first of `panels`.
///
/// # Safety
/// Each of `rows` exists in y with so many outputs from its first cell on, and no other thread touches these.
pub(super) unsafe fn expand(
    isa: Isa,
    up: &Lines,
    panels: Range<usize>,
    t: &Ranks<'_>,
    rows: &[(u32, u32)],
    outputs: usize,
    y: Cells,
) {
    fn run<W: Line>(isa: Isa, lines: &[W], panels: Range<usize>, task: Expand<'_, ()>) {
        let Expand { t, rows, outputs, y, .. } = task;
        let rank = t.ranks.len();
        let task = &Expand { lines: &lines[panels.start * rank..panels.end * rank], t, rows, outputs, y };
        dispatch!(isa, expand_rows::<W: Line>(task: &Expand<'_, W>));
    }
    let task = Expand { lines: &[], t, rows, outputs, y };
    match up {
        Lines::Single(lines) => run(isa, lines, panels, task),
        Lines::Brain(lines) => run(isa, lines, panels, task),
        Lines::Half(lines) => run(isa, lines, panels, task),
    }
}

#[inline(always)]
fn shrink_rows<L: Lanes, W: Line>(task: &Shrink<'_, W>) {
    let mut row = 0;
    while row < task.rows.len() {
        row += match task.rows.len() - row {
            4.. if L::VECTORS => shrink_tile::<L, W, 4>(task, row),
            2.. if L::VECTORS => shrink_tile::<L, W, 2>(task, row),
            _ => shrink_tile::<L, W, 1>(task, row),
        };
    }
}

#[inline(always)]
fn shrink_tile<L: Lanes, W: Line, const M: usize>(task: &Shrink<'_, W>, row: usize) -> usize {
    let x: [&[f32]; M] = std::array::from_fn(|m| &task.x[task.rows[row + m].1 as usize * task.inputs..][..task.inputs]);
    // Two sums, so that the multiply-adds of a single row do not wait for each other.
    let mut sums = [[L::splat(0.0); 2]; M];
    let pairs = task.lines.as_chunks::<2>();
    // The same length as the lines, so that no index is checked in the loop.
    let x_pairs = x.map(|x| &x.as_chunks::<2>().0[..pairs.0.len()]);
    for (i, lines) in pairs.0.iter().enumerate() {
        prefetch(lines.as_ptr().wrapping_byte_add(AHEAD).cast());
        let weights = [lines[0].load::<L>(), lines[1].load::<L>()];
        for m in 0..M {
            sums[m][0] = L::splat(x_pairs[m][i][0]).mul_add(weights[0], sums[m][0]);
            sums[m][1] = L::splat(x_pairs[m][i][1]).mul_add(weights[1], sums[m][1]);
        }
    }
    if let [line] = pairs.1 {
        let weights = line.load::<L>();
        for m in 0..M {
            sums[m][0] = L::splat(x[m][task.inputs - 1]).mul_add(weights, sums[m][0]);
        }
    }
    let mut scales = [0.0; LANES];
    scales.copy_from_slice(task.scales);
    let scales = L::load(&scales);
    for (m, [even, odd]) in sums.into_iter().enumerate() {
        let Cells { cells, first, stride } = task.t;
        let mut values = [0.0; LANES];
        even.add(odd).mul(scales).store(&mut values);
        // SAFETY: as the caller of `shrink` promises, row `row + m` of t exists, and only this task touches these cells.
        unsafe { values.as_ptr().copy_to_nonoverlapping(cells.0.add(first + (row + m) * stride), LANES) };
    }
    M
}

#[inline(always)]
fn expand_rows<L: Lanes, W: Line>(task: &Expand<'_, W>) {
    let mut row = 0;
    while row < task.rows.len() {
        // Several panels at a time, because the sum over a few ranks is a short chain. As many sums as there are registers for.
        row += match task.rows.len() - row {
            4.. if L::MANY => expand_panels::<L, W, 4, 4>(task, row),
            4.. if L::VECTORS => expand_panels::<L, W, 4, 1>(task, row),
            2.. if L::MANY => expand_panels::<L, W, 2, 4>(task, row),
            2.. if L::VECTORS => expand_panels::<L, W, 2, 2>(task, row),
            _ => expand_panels::<L, W, 1, 4>(task, row),
        };
    }
}

#[inline(always)]
fn expand_panels<L: Lanes, W: Line, const M: usize, const P: usize>(task: &Expand<'_, W>, row: usize) -> usize {
    let panels = task.outputs.div_ceil(LANES);
    let mut panel = 0;
    while panel + P <= panels {
        expand_tile::<L, W, M, P>(task, row, panel);
        panel += P;
    }
    while panel < panels {
        expand_tile::<L, W, M, 1>(task, row, panel);
        panel += 1;
    }
    M
}

#[inline(always)]
fn expand_tile<L: Lanes, W: Line, const M: usize, const P: usize>(task: &Expand<'_, W>, row: usize, panel: usize) {
    let Ranks { t, stride, ranks } = task.t;
    let rank = ranks.len();
    let t: [&[f32]; M] = std::array::from_fn(|m| &t[(row + m) * stride + ranks.start..][..rank]);
    let lines: [&[W]; P] = std::array::from_fn(|p| &task.lines[(panel + p) * rank..][..rank]);
    let mut sums = [[L::splat(0.0); P]; M];
    for i in 0..rank {
        for lines in lines {
            prefetch(lines.as_ptr().wrapping_add(i).wrapping_byte_add(AHEAD).cast());
        }
        let mut weights = [L::splat(0.0); P];
        for p in 0..P {
            weights[p] = lines[p][i].load();
        }
        for m in 0..M {
            let value = L::splat(t[m][i]);
            for p in 0..P {
                sums[m][p] = value.mul_add(weights[p], sums[m][p]);
            }
        }
    }
    let Cells { cells, first, stride } = task.y;
    for (m, sums) in sums.into_iter().enumerate() {
        let start = first + task.rows[row + m].1 as usize * stride;
        for (p, sum) in sums.into_iter().enumerate() {
            let (at, count) = (start + (panel + p) * LANES, task.outputs - (panel + p) * LANES);
            if count >= LANES {
                // SAFETY: as below, for sixteen numbers; an array of floats has the alignment of a float.
                let y = unsafe { &mut *cells.0.add(at).cast::<[f32; LANES]>() };
                L::load(y).add(sum).store(y);
                continue;
            }
            let mut values = [0.0; LANES];
            sum.store(&mut values);
            for (lane, value) in values.into_iter().enumerate().take(count) {
                // SAFETY: as the caller of `expand` promises, the row exists with these outputs, and only this task touches them.
                unsafe { *cells.0.add(at + lane) += value };
            }
        }
    }
}
