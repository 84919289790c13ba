//! Products with float weights: a tile of M rows × P panels in registers, and the loop over all tiles.

use std::marker::PhantomData;
use std::ops::Range;

use simd::pairs::is_amd;
use simd::{LANES, Lanes, Pairs, Pool, prefetch};

use super::blocks::PAIR;
use super::output::{Output, numbers};

/// Bands of fewer rows are bound by memory, so they prefetch.
pub(super) const FEW_ROWS: usize = 12;

/// Most rows of a band.
const MOST_ROWS: usize = 12;

/// Prefetch distance in bytes.
pub(super) const AHEAD: usize = 4 << 10;

/// A part of a product: all rows, some panels.
pub(super) struct Task<'a, X, W> {
    /// `[rows, row]`.
    pub x: &'a [X],
    pub rows: usize,
    /// Elements of a row.
    pub row: usize,
    /// `[panels, lines]`.
    pub lines: &'a [W],
    pub panels: Range<usize>,
    pub bias: Option<&'a [f32]>,
    pub out: Output,
}

impl<X: Sync, W: Sync> Task<'_, X, W> {
    /// Calls `walk` for parts of the task, on all threads.
    pub fn run(&self, pool: &Pool, walk: impl Fn(&Task<'_, X, W>) + Sync) {
        let pairs = self.panels.len().div_ceil(PAIR);
        pool.ranges(pairs, self.x.len() * LANES * PAIR, |pairs| {
            let (start, end) = (self.panels.start + pairs.start * PAIR, self.panels.start + pairs.end * PAIR);
            walk(&Task { panels: start..end.min(self.panels.end), ..*self });
        });
    }
}

/// How a tile is summed.
pub(super) trait Tile {
    /// An element of a row of activations.
    type Number: Sync;
    /// A line of a panel.
    type Line: Sync;
    /// Sums of one row with sixteen outputs.
    type Sums: Lanes;
    /// Elements of a row that one line is multiplied with.
    const NUMBERS_PER_LINE: usize;
    /// Whether one shape of a tile is compiled instead of all that fill the registers, as without vectors.
    const IS_ONE_SHAPE: bool = false;
    /// Most rows of a band that need no more registers than there are.
    #[inline(always)]
    fn most_rows() -> usize {
        MOST_ROWS
    }
    /// Multiplies rows with panels that are not in a cache yet.
    fn accumulate<const M: usize, const P: usize>(
        x: [&[Self::Number]; M],
        w: [&[Self::Line]; P],
    ) -> [[Self::Sums; P]; M];
}

/// Sums of float32 activations, input after input.
pub(super) struct Floats<L, W>(PhantomData<(L, W)>);

impl<L: Lanes, W: Line> Tile for Floats<L, W> {
    type Number = f32;
    type Line = W;
    type Sums = L;
    const NUMBERS_PER_LINE: usize = W::INPUTS;
    const IS_ONE_SHAPE: bool = !L::VECTORS;

    /// Widening the second weights of pairs takes registers, and Intel's cores lose more by sums in memory than AMD's.
    #[inline(always)]
    fn most_rows() -> usize {
        if W::INPUTS == 2 && !is_amd() { 8 } else { MOST_ROWS }
    }

    #[inline(always)]
    fn accumulate<const M: usize, const P: usize>(x: [&[f32]; M], w: [&[W]; P]) -> [[L; P]; M] {
        accumulate::<L, W, M, P, true>(x, w, [[L::splat(0.0); P]; M])
    }
}

/// Covers rows × panels with tiles that fill the registers. Few rows are bound by memory, not by sums: they read two panels at
/// a time, because more parallel streams get less bandwidth. Sums take 24 of the 32 registers of AVX-512, otherwise 12 of 16.
/// The conditions on constants stand alone, so that tiles of other instruction sets are not compiled.
#[inline(always)]
pub(super) fn walk<T: Tile>(task: &Task<'_, T::Number, T::Line>) {
    let mut row = 0;
    while row < task.rows {
        let rows = (task.rows - row).min(T::most_rows());
        row += if T::IS_ONE_SHAPE {
            band::<T, 1, 1>(task, row)
        } else if rows < 4 {
            if rows < 2 { band::<T, 1, 2>(task, row) } else { band::<T, 2, 2>(task, row) }
        } else if T::Sums::MANY {
            match rows {
                12.. => band::<T, 12, 2>(task, row),
                8.. => band::<T, 8, 2>(task, row),
                _ => band::<T, 4, 2>(task, row),
            }
        } else if rows < 6 {
            band::<T, 4, 1>(task, row)
        } else {
            band::<T, 6, 1>(task, row)
        };
    }
}

/// Computes M rows of all panels of the task. Returns M.
#[inline(always)]
fn band<T: Tile, const M: usize, const P: usize>(task: &Task<'_, T::Number, T::Line>, row: usize) -> usize {
    let mut panels = task.panels.clone();
    while panels.len() >= P {
        tile::<T, M, P>(task, row, panels.start);
        panels.start += P;
    }
    for panel in panels {
        tile::<T, M, 1>(task, row, panel);
    }
    M
}

#[inline(always)]
fn tile<T: Tile, const M: usize, const P: usize>(task: &Task<'_, T::Number, T::Line>, row: usize, panel: usize) {
    let x: [&[T::Number]; M] = std::array::from_fn(|m| &task.x[(row + m) * task.row..][..task.row]);
    let lines = task.row.div_ceil(T::NUMBERS_PER_LINE);
    let w: [&[T::Line]; P] = std::array::from_fn(|p| &task.lines[(panel + p) * lines..][..lines]);
    let sums = T::accumulate::<M, P>(x, w);
    // SAFETY: rows row..row+M exist, and only this task writes these panels.
    unsafe { task.out.write_tile(row, panel, &numbers(sums), task.bias) };
}

/// A line of a panel: sixteen weights for each of some inputs.
pub(super) trait Line: Copy + Sync {
    /// Number of inputs, 1 or 2.
    const INPUTS: usize;
    /// The weights of the first input (`SECOND`: of the second).
    fn load<L: Lanes, const SECOND: bool>(&self) -> L;
}
impl Line for [f32; LANES] {
    const INPUTS: usize = 1;
    #[inline(always)]
    fn load<L: Lanes, const SECOND: bool>(&self) -> L {
        L::load(self)
    }
}
impl Line for Pairs {
    const INPUTS: usize = 2;
    #[inline(always)]
    fn load<L: Lanes, const SECOND: bool>(&self) -> L {
        L::load_half::<SECOND>(self)
    }
}

/// Adds the products of rows with panels, input after input. `FROM_MEMORY`: the panels are not in a cache yet.
#[inline(always)]
pub(super) fn accumulate<L: Lanes, W: Line, const M: usize, const P: usize, const FROM_MEMORY: bool>(
    x: [&[f32]; M],
    w: [&[W]; P],
    mut acc: [[L; P]; M],
) -> [[L; P]; M] {
    let k = x.first().map_or(0, |x| x.len());
    // The compiler sees that no index is out of bounds.
    let x = x.map(|x| &x[..k]);
    let w = w.map(|w| &w[..k.div_ceil(W::INPUTS)]);
    let whole = k / W::INPUTS;
    for i in 0..whole {
        if M < FEW_ROWS && FROM_MEMORY {
            for w in w {
                prefetch(w.as_ptr().wrapping_add(i).wrapping_byte_add(AHEAD).cast());
            }
        }
        acc = add::<L, W, M, P, false>(x, w, i, W::INPUTS * i, acc);
        if W::INPUTS == 2 {
            acc = add::<L, W, M, P, true>(x, w, i, W::INPUTS * i + 1, acc);
        }
    }
    if W::INPUTS * whole < k {
        acc = add::<L, W, M, P, false>(x, w, whole, k - 1, acc);
    }
    acc
}

/// Adds the products of one input.
#[inline(always)]
fn add<L: Lanes, W: Line, const M: usize, const P: usize, const SECOND: bool>(
    x: [&[f32]; M],
    w: [&[W]; P],
    line: usize,
    input: usize,
    mut acc: [[L; P]; M],
) -> [[L; P]; M] {
    let weights: [L; P] = std::array::from_fn(|p| w[p][line].load::<L, SECOND>());
    for m in 0..M {
        let value = L::splat(x[m][input]);
        for p in 0..P {
            acc[m][p] = value.mul_add(weights[p], acc[m][p]);
        }
    }
    acc
}
