//! The product with stored weights: activations as the weights take them, and the loops over rows, pairs and blocks.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use super::panels::StoredPanels;
use super::rounding::{Rounding, row_to_blocks, to_e4m3};
use super::unpack::{Bytes, to_bytes, to_floats};
use crate::gemm::activations::with_activations;
use crate::gemm::blocks::{Ahead, OUTPUTS, PAIR};
use crate::gemm::form;
use crate::gemm::integer::{self, UnitOf};
use crate::gemm::output::{Output, numbers};
use crate::gemm::processor::Processor;
use crate::gemm::quantize::BLOCK;
use crate::gemm::rows::{RowBlock, Rows};
use crate::gemm::tile;
use crate::simd::int8::{DotLanes, Floats};
use crate::simd::{LANES, Lanes};
use crate::{dispatch, dispatch_dot};

/// Blocks that are unpacked at a time: 16 KiB of floats.
const AT_ONCE: usize = 4;

/// Rows that are multiplied with unpacked blocks, so that they stay in the L2 cache.
const ROWS: usize = 96;

/// Several, so that a thread that loses its core leaves little work behind.
const TASKS_PER_THREAD: usize = 4;

/// Stored weights and the activations that they take.
pub(crate) struct Stored {
    pub panels: StoredPanels,
    pub rounding: Rounding,
    /// Column i of the weights belongs to input `order[i]`; `None`: input i.
    pub order: Option<Box<[u32]>>,
}

impl Stored {
    /// Writes row `row` as floats, in the order of the inputs.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        match &self.order {
            None => self.panels.copy_row(row, out, |column| column),
            Some(order) => self.panels.copy_row(row, out, |column| order[column] as usize),
        }
    }
}

thread_local! {
    /// Activations that this thread's last product rounded or reordered, reused by the next. They are taken out while in use,
    /// because a task of the product may itself run a product on this thread.
    static NUMBERS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static ROUNDED: Cell<Vec<RowBlock>> = const { Cell::new(Vec::new()) };
    /// Unpacked blocks.
    static FLOATS: RefCell<[Vec<[f32; LANES]>; PAIR]> = const { RefCell::new([Vec::new(), Vec::new()]) };
    static BYTES: RefCell<Vec<Bytes>> = const { RefCell::new(Vec::new()) };
}

/// A product, or a part of it: all rows, some pairs of panels.
struct Task<'a, X> {
    x: &'a [X],
    weights: &'a StoredPanels,
    rows: usize,
    pairs: Range<usize>,
    bias: Option<&'a [f32]>,
    out: Output,
}

/// Computes the columns of the output that belong to the weights.
pub(crate) fn run(
    processor: Processor<'_>,
    weights: &Stored,
    (x, rows): (Rows<'_>, usize),
    bias: Option<&[f32]>,
    (out, n): (Output, usize),
) {
    let (panels, pairs) = (&weights.panels, 0..n.div_ceil(OUTPUTS));
    let bytes = |x: &[RowBlock]| processor.bytes(Task { x, weights: panels, rows, pairs: pairs.clone(), bias, out });
    match x {
        Rows::Blocks(x) => bytes(x),
        Rows::Numbers(x) => processor.with_numbers(x, weights, |x| match weights.rounding.is_integer() {
            true => processor.with_blocks(x, weights, bytes),
            false => processor.floats(Task { x, weights: panels, rows, pairs: pairs.clone(), bias, out }),
        }),
    }
}

impl Processor<'_> {
    /// Runs the parts of a task on the pool.
    fn split<X: Sync>(self, whole: &Task<'_, X>, run: impl Fn(&Task<'_, X>) + Sync) {
        let pairs = whole.pairs.len();
        let tasks = pairs.min(self.pool.threads() * TASKS_PER_THREAD);
        let start = |task: usize| task * pairs / tasks;
        self.pool.run(tasks, whole.rows * whole.weights.k * OUTPUTS * pairs / tasks.max(1), |task| {
            run(&Task { pairs: start(task)..start(task + 1), ..*whole });
        });
    }

    fn floats(self, whole: Task<'_, f32>) {
        self.split(&whole, |task| {
            FLOATS.with_borrow_mut(|unpacked| {
                unpacked.iter_mut().for_each(|panel| panel.resize(AT_ONCE * BLOCK, [0.0; LANES]));
                dispatch!(self.isa, walk_floats(task: &Task<'_, f32>, unpacked: &mut [Vec<[f32; LANES]>; PAIR]));
            });
        });
    }

    fn bytes(self, whole: Task<'_, RowBlock>) {
        let halves = whole.weights.format.halves();
        self.split(&whole, |task| {
            BYTES.with_borrow_mut(|unpacked| {
                unpacked.resize(AT_ONCE, Bytes::ZERO);
                match halves {
                    true => {
                        dispatch_dot!(self.dot, walk_bytes::<Halves: Parts>(task: &Task<'_, RowBlock>, unpacked: &mut [Bytes]));
                    }
                    false => {
                        dispatch_dot!(self.dot, walk_bytes::<Whole: Parts>(task: &Task<'_, RowBlock>, unpacked: &mut [Bytes]));
                    }
                }
            });
        });
    }

    /// Calls `f` with the rows in the order of the columns, rounded to floats of 8 bits if the weights take those.
    fn with_numbers(self, x: &[f32], weights: &Stored, f: impl FnOnce(&[f32])) {
        let (k, rounding) = (weights.panels.k, weights.rounding);
        if weights.order.is_none() && !matches!(rounding, Rounding::Floats(_) | Rounding::Static(_)) {
            return f(x);
        }
        let mut changed = NUMBERS.take();
        changed.resize(x.len(), 0.0);
        self.pool.chunks_mut(&mut changed, k, k * RowBlock::COST, |row, out| {
            let x = &x[row * k..][..k];
            match &weights.order {
                Some(order) => out.iter_mut().zip(order).for_each(|(out, input)| *out = x[*input as usize]),
                None => out.copy_from_slice(x),
            }
            dispatch!(self.isa, to_e4m3(rounding: Rounding, out: &mut [f32]));
        });
        f(&changed);
        NUMBERS.set(changed);
    }

    /// Calls `f` with the rows in blocks.
    fn with_blocks(self, x: &[f32], weights: &Stored, f: impl FnOnce(&[RowBlock])) {
        let k = weights.panels.k;
        if weights.rounding == Rounding::Blocks {
            return with_activations(self.isa, self.pool, Rows::Numbers(x), k, f);
        }
        let blocks = k.div_ceil(BLOCK);
        let mut rounded = ROUNDED.take();
        rounded.resize(x.len() / k * blocks, RowBlock::ZERO);
        self.pool.chunks_mut(&mut rounded, blocks, k * RowBlock::COST, |row, out| {
            let x = &x[row * k..][..k];
            dispatch!(self.isa, row_to_blocks(x: &[f32], out: &mut [RowBlock]));
        });
        f(&rounded);
        ROUNDED.set(rounded);
    }
}

/// Multiplies with unpacked floats: some rows, a pair and some of its blocks at a time. Tiles have the sizes of those of dense
/// weights.
// No closures: they are compiled without the instructions of `L`.
#[inline(always)]
fn walk_floats<L: Lanes>(task: &Task<'_, f32>, unpacked: &mut [Vec<[f32; LANES]>; PAIR]) {
    let (k, blocks) = (task.weights.k, task.weights.blocks());
    for first in (0..task.rows).step_by(ROWS) {
        let last = (first + ROWS).min(task.rows);
        for pair in task.pairs.clone() {
            for block in (0..blocks).step_by(AT_ONCE) {
                let end = (block + AT_ONCE).min(blocks);
                to_floats::<L>(task.weights, pair, block..end, unpacked);
                let inputs = block * BLOCK..(end * BLOCK).min(k);
                let lines = [&unpacked[0][..inputs.len()], &unpacked[1][..inputs.len()]];
                let mut row = first;
                while row < last {
                    row += match (L::MANY, last - row) {
                        (true, 12..) => float_tile::<L, 12>(task, row, pair, inputs.clone(), lines),
                        (true, 8..) => float_tile::<L, 8>(task, row, pair, inputs.clone(), lines),
                        (_, 4..) => float_tile::<L, 4>(task, row, pair, inputs.clone(), lines),
                        (_, 2..) => float_tile::<L, 2>(task, row, pair, inputs.clone(), lines),
                        _ => float_tile::<L, 1>(task, row, pair, inputs.clone(), lines),
                    };
                }
            }
        }
    }
}

/// Adds the products of M rows with some inputs of a pair to the output. Returns M.
#[inline(always)]
fn float_tile<L: Lanes, const M: usize>(
    task: &Task<'_, f32>,
    row: usize,
    pair: usize,
    inputs: Range<usize>,
    lines: [&[[f32; LANES]]; PAIR],
) -> usize {
    let k = task.weights.k;
    let x: [&[f32]; M] = std::array::from_fn(|m| &task.x[(row + m) * k..][inputs.clone()]);
    match L::MANY {
        true => {
            let acc = start::<L, f32, M, PAIR>(task, row, pair * PAIR, inputs.start);
            end(task, row, pair * PAIR, inputs.end, tile::accumulate::<L, _, M, PAIR, false>(x, lines, acc));
        }
        // Sums of two panels do not fit the registers.
        false => {
            for (panel, lines) in lines.into_iter().enumerate() {
                let acc = start::<L, f32, M, 1>(task, row, pair * PAIR + panel, inputs.start);
                end(task, row, pair * PAIR + panel, inputs.end, tile::accumulate::<L, _, M, 1, false>(x, [lines], acc));
            }
        }
    }
    M
}

/// The sums of a tile before input `input`.
#[inline(always)]
fn start<L: Lanes, X, const M: usize, const P: usize>(
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
fn end<L: Lanes, X, const M: usize, const P: usize>(
    task: &Task<'_, X>,
    row: usize,
    panel: usize,
    input: usize,
    acc: [[L; P]; M],
) {
    let bias = task.bias.filter(|_| input >= task.weights.k);
    // SAFETY: rows row..row + M exist, and only this task accesses these panels.
    unsafe { task.out.write_tile(row, panel, &numbers(acc), bias) };
}

/// Parts of a block with scales of their own.
trait Parts: 'static {
    const COUNT: usize;
}

/// One part.
struct Whole;

impl Parts for Whole {
    const COUNT: usize = 1;
}

/// Two halves.
struct Halves;

impl Parts for Halves {
    const COUNT: usize = 2;
}

impl UnitOf<form::Bytes> for Bytes {
    #[inline(always)]
    fn weights(&self, panel: usize) -> &<form::Bytes as form::Form>::Block {
        &self.weights[panel]
    }
    #[inline(always)]
    fn scales<L: Lanes>(&self, panel: usize, part: usize) -> L {
        L::load(&self.scales[part][panel])
    }
    #[inline(always)]
    fn minima<L: Lanes>(&self, panel: usize, part: usize) -> L {
        L::load(&self.minima[part][panel])
    }
}

/// As [`walk_floats`], with bytes.
#[inline(always)]
fn walk_bytes<D: DotLanes, P: Parts>(task: &Task<'_, RowBlock>, unpacked: &mut [Bytes]) {
    let blocks = task.weights.blocks();
    for first in (0..task.rows).step_by(ROWS) {
        let last = (first + ROWS).min(task.rows);
        for pair in task.pairs.clone() {
            for block in (0..blocks).step_by(AT_ONCE) {
                let some = block..(block + AT_ONCE).min(blocks);
                let units = &mut unpacked[..some.len()];
                to_bytes::<Floats<D>>(task.weights, pair, some.clone(), units);
                let mut row = first;
                while row < last {
                    row += match last - row {
                        6.. if D::WIDE => byte_tile::<D, P, 6>(task, row, pair, some.clone(), units),
                        4.. if D::WIDE => byte_tile::<D, P, 4>(task, row, pair, some.clone(), units),
                        2.. => byte_tile::<D, P, 2>(task, row, pair, some.clone(), units),
                        _ => byte_tile::<D, P, 1>(task, row, pair, some.clone(), units),
                    };
                }
            }
        }
    }
}

/// As [`float_tile`], with bytes.
#[inline(always)]
fn byte_tile<D: DotLanes, P: Parts, const M: usize>(
    task: &Task<'_, RowBlock>,
    row: usize,
    pair: usize,
    blocks: Range<usize>,
    units: &[Bytes],
) -> usize {
    let count = task.weights.blocks();
    let x: [&[RowBlock]; M] = std::array::from_fn(|m| &task.x[(row + m) * count..][blocks.clone()]);
    let minima = task.weights.format.has_minimum();
    if D::WIDE {
        tile_of::<D, P, M, PAIR>(task, row, pair, 0, (x, minima), blocks, units);
    } else {
        for panel in 0..PAIR {
            tile_of::<D, P, M, 1>(task, row, pair, panel, (x, minima), blocks.clone(), units);
        }
    }
    M
}

#[inline(always)]
fn tile_of<D: DotLanes, S: Parts, const M: usize, const P: usize>(
    task: &Task<'_, RowBlock>,
    row: usize,
    pair: usize,
    panel: usize,
    (x, minima): ([&[RowBlock]; M], bool),
    blocks: Range<usize>,
    units: &[Bytes],
) {
    let (first, next) = (pair * PAIR + panel, &mut Ahead::nothing());
    let acc = start::<Floats<D>, RowBlock, M, P>(task, row, first, blocks.start);
    let acc = match S::COUNT {
        1 => integer::accumulate::<D, form::Bytes, _, M, P, 1>(x, units, panel, minima, acc, next),
        _ => integer::accumulate::<D, form::Bytes, _, M, P, 2>(x, units, panel, minima, acc, next),
    };
    end(task, row, first, blocks.end * BLOCK, acc);
}
