//! The product of quantised weights with activations in 8 bits.
//!
//! ```text
//! a tile: M rows × a pair of panels (or one of it), block after block of 32 k
//!     Σ = Σ w·a                              i32, exact
//!     y += Σ · (weight scale · row scale)    f32, fused
//! ```
//!
//! **Row-invariance**: an output is one running sum over the blocks of k in order, independent of the tile, the other rows
//! and the threads. Each term is an exact integer times one rounded product of scales, so, unlike in the float product,
//! every instruction set gives the same bits.

use std::ops::Range;

use simd::int8::{DotLanes, Floats, GROUP, IntLanes};
use simd::{Lanes, dispatch_dot, prefetch};

use super::activations;
use super::blocks::{Ahead, Blocks, OUTPUTS, PAIR, Unit};
use super::byte_tiles::{self, Bytes};
use super::form::{Form, Line};
use super::output::Output;
use super::processor::Processor;
use super::quantize::BLOCK;
use super::rows::{RowBlock, Rows};
use super::scaled_tiles::{Product, Tiles, Unpack};

/// A part of the product: some rows, some pairs of panels.
struct Task<'a, F: Form> {
    x: &'a [RowBlock],
    weights: &'a Blocks<F>,
    rows: usize,
    /// Row of the output at which they start.
    first: usize,
    pairs: Range<usize>,
    bias: Option<&'a [f32]>,
    out: Output,
}

/// Bytes of activations that are multiplied with all panels of a task before the next ones: a quarter of the L2 cache of
/// current cores.
const ROWS_BYTES: usize = 256 << 10;

pub(super) fn run<F: Form>(
    processor: Processor<'_>,
    k: usize,
    (x, rows): (Rows<'_>, usize),
    weights: &Blocks<F>,
    bias: Option<&[f32]>,
    (out, n): (Output, usize),
) {
    let Processor { isa, dot, pool } = processor;
    activations::with_activations(isa, pool, x, k, |x| {
        let on_tiles = Product { weights, rows, tiles: weights.blocks, chain: 1, minima: false, bias, out, n };
        let done = byte_tiles::run(processor, on_tiles, x, false);
        if done == rows {
            return;
        }
        let (x, rows, out) = (&x[done * weights.blocks..], rows - done, out.behind(done));
        pool.ranges(n.div_ceil(OUTPUTS), rows * k * OUTPUTS, |pairs| {
            let task = &Task { x, weights, rows, first: 0, pairs, bias, out };
            dispatch_dot!(dot, walk::<F: Form>(task: &Task<'_, F>));
        });
    });
}

impl<F: Form> Unpack<Bytes> for Blocks<F> {
    fn unpack(&self, processor: Processor<'_>, pair: usize, tiles: Range<usize>, to: &mut [Tiles<Bytes>]) {
        let (dot, units) = (processor.dot, &self.pair(pair)[tiles]);
        dispatch_dot!(dot, unpack::<F: Form>(units: &[Unit<F::Block>], to: &mut [Tiles<Bytes>]));
    }
    fn lines(&self, pair: usize, tiles: Range<usize>) -> Range<*const Line> {
        Blocks::lines(self, pair, tiles)
    }
}

#[inline(always)]
fn unpack<D: DotLanes, F: Form>(units: &[Unit<F::Block>], to: &mut [Tiles<Bytes>]) {
    // What a sum starts from removes the offset of the weights.
    let offsets = [(-F::start::<D>(-128)) as u8; GROUP];
    for (unit, to) in units.iter().zip(to) {
        for (panel, to) in to.iter_mut().enumerate() {
            for e in 0..BLOCK / 8 {
                let [first, second] = F::load::<D>(&unit.weights[panel], e);
                to.write::<D>(2 * e, first, &offsets);
                to.write::<D>(2 * e + 1, second, &offsets);
            }
            Floats::<D>::load_finite_f16(&unit.scales[panel]).store(&mut to.scales);
        }
    }
}

/// The same product by plain loops, in the same order.
pub(super) fn reference<F: Form>(
    (x, y, bias): (Rows<'_>, &mut [f32], Option<&[f32]>),
    (n, k): (usize, usize),
    weights: &Blocks<F>,
) {
    let x = activations::rows_in_blocks(x, k);
    for (x, y) in x.chunks(weights.blocks).zip(y.chunks_mut(n)) {
        for (column, y) in y.iter_mut().enumerate() {
            let mut sum = 0.0f32;
            for (b, block) in x.iter().enumerate() {
                let (weights, scale) = weights.block(column, b);
                let products =
                    weights.iter().zip(block.values.as_flattened()).map(|(&w, &a)| i32::from(w) * i32::from(a));
                sum = (products.sum::<i32>() as f32).mul_add(scale * block.scale, sum);
            }
            *y = sum + bias.map_or(0.0, |bias| bias[column]);
        }
    }
}

/// Loops over panels outside and rows inside: the weights of a tile come from memory once, then from the L1 cache. Rows are
/// split so that they stay in the L2 cache from panel to panel.
#[inline(always)]
fn walk<D: DotLanes, F: Form>(task: &Task<'_, F>) {
    let at_once = (ROWS_BYTES / size_of_val(&task.x[..task.weights.blocks])).max(1).next_multiple_of(D::ROWS);
    for first in (0..task.rows).step_by(at_once) {
        let rows = at_once.min(task.rows - first);
        let x = &task.x[first * task.weights.blocks..][..rows * task.weights.blocks];
        all_pairs::<D, F>(&Task { x, rows, first: task.first + first, pairs: task.pairs.clone(), ..*task });
    }
}

/// Multiplies with one pair of panels while prefetching the next: only the first band to read a line waits for memory, and
/// the other bands leave memory idle.
#[inline(always)]
fn all_pairs<D: DotLanes, F: Form>(task: &Task<'_, F>) {
    for pair in task.pairs.clone() {
        let mut next = task.weights.ahead(pair, task.rows.div_ceil(D::ROWS));
        // The constant comes first, so that single panels are not compiled for wide registers.
        if !D::WIDE && task.rows > highest::<D>(PAIR) {
            bands::<D, F, 1>(task, pair, 0, &mut next);
            bands::<D, F, 1>(task, pair, 1, &mut Ahead::nothing());
        } else {
            bands::<D, F, PAIR>(task, pair, 0, &mut next);
        }
    }
}

/// Returns the greatest number of rows of a tile with `panels` panels.
#[inline(always)]
const fn highest<D: DotLanes>(panels: usize) -> usize {
    if D::WIDE || panels == 1 { D::ROWS } else { D::ROWS / 2 }
}

/// Multiplies all rows, in bands of nearly equal height, with `P` panels of a pair.
#[inline(always)]
fn bands<D: DotLanes, F: Form, const P: usize>(task: &Task<'_, F>, pair: usize, panel: usize, next: &mut Ahead) {
    const { assert!(D::ROWS <= 6, "a tile has at most 6 rows") };
    let mut row = 0;
    while row < task.rows {
        let left = task.rows - row;
        let height = left.div_ceil(left.div_ceil(const { highest::<D>(P) }));
        match height {
            // The conditions are constant, so impossible tiles are not compiled.
            6 if const { highest::<D>(P) >= 6 } => tile::<D, F, 6, P>(task, row, pair, panel, next),
            5 if const { highest::<D>(P) >= 5 } => tile::<D, F, 5, P>(task, row, pair, panel, next),
            4 if const { highest::<D>(P) >= 4 } => tile::<D, F, 4, P>(task, row, pair, panel, next),
            3 if const { highest::<D>(P) >= 3 } => tile::<D, F, 3, P>(task, row, pair, panel, next),
            2 if const { highest::<D>(P) >= 2 } => tile::<D, F, 2, P>(task, row, pair, panel, next),
            _ => tile::<D, F, 1, P>(task, row, pair, panel, next),
        }
        row += height;
    }
}

// The loops over registers share one index between several arrays.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn tile<D: DotLanes, F: Form, const M: usize, const P: usize>(
    task: &Task<'_, F>,
    row: usize,
    pair: usize,
    panel: usize,
    next: &mut Ahead,
) {
    let blocks = task.weights.blocks;
    let x: [&[RowBlock]; M] = std::array::from_fn(|m| &task.x[(row + m) * blocks..][..blocks]);
    let mut acc = [[Floats::<D>::splat(0.0); P]; M];
    for (b, unit) in task.weights.pair(pair).iter().enumerate() {
        next.prefetch(prefetch);
        let starts: [i32; M] = std::array::from_fn(|m| F::start::<D>(x[m][b].correction));
        let mut sums = D::begin::<M, P>(starts, F::BITS);
        for e in 0..BLOCK / 8 {
            // A loop instead of a closure: see `simd`.
            let mut weights = [F::load::<D>(&unit.weights[panel], e); P];
            for p in 1..P {
                weights[p] = F::load::<D>(&unit.weights[panel + p], e);
            }
            D::add(&mut sums, weights, std::array::from_fn(|m| x[m][b].eight(e)), F::BITS);
        }
        let sums = D::by_rows(sums, starts, F::BITS);
        let mut scales = [Floats::<D>::load_finite_f16(&unit.scales[panel]); P];
        for p in 1..P {
            scales[p] = Floats::<D>::load_finite_f16(&unit.scales[panel + p]);
        }
        for m in 0..M {
            let scale = Floats::<D>::splat(x[m][b].scale);
            for p in 0..P {
                acc[m][p] = sums[m][p].scale_add(scales[p].mul(scale), acc[m][p]);
            }
        }
    }
    let panels = std::array::from_fn(|p| PAIR * pair + panel + p);
    // SAFETY: rows row..row+M exist, and only this task writes these panels.
    unsafe { task.out.write_tile(task.first + row, panels, acc, task.bias) };
}
