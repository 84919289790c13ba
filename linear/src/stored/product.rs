//! The product with stored weights: activations as the weights take them, and the product with floats.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use simd::int8::WithInts;
use simd::{Isa, LANES, Lanes, Portable, dispatch};

use super::format::Codes;
use super::group::Group;
use super::integer::multiply;
use super::panels::StoredPanels;
use super::panels::planes;
use super::rounding::{Rounding, row_to_blocks, to_e4m3};
use super::steps;
use super::task::{ROWS, Task, end, start};
use super::unpack::{Any, Cut, E4m3, Planes, Sums, Table, Unpacked, unpack};
use crate::activations::with_activations;
use crate::blocks::{OUTPUTS, PAIR};
use crate::output::Output;
use crate::processor::Processor;
use crate::quantize::BLOCK;
use crate::rows::{RowBlock, Rows};
use crate::scaled_tiles::Product;
use crate::{byte_tiles, tile};

/// Blocks that are unpacked to memory at a time: 16 KiB of floats, which stay in the L1 cache.
const AT_ONCE: usize = 4;

/// Greatest number of rows that are multiplied with weights in registers; more share weights that are unpacked to memory.
const FEW: usize = 4;

/// Stored weights and the activations that they take.
pub(crate) struct Stored {
    pub panels: StoredPanels,
    pub rounding: Rounding,
    /// Column i of the weights belongs to input `order[i]`; `None`: input i.
    pub order: Option<Box<[u32]>>,
    /// Whether products with floats are those of tiles.
    pub on_tiles: bool,
}

impl Stored {
    /// The product of output `row` with a row of floats, in the arithmetic of tiles; `None`: in another.
    pub fn on_tiles(&self, row: usize, x: &[f32]) -> Option<f32> {
        let in_order = |order: &[u32]| order.iter().map(|input| x[*input as usize]).collect::<Vec<_>>();
        (self.on_tiles && !self.rounding.is_integer()).then(|| match &self.order {
            None => self.panels.on_tiles(row, x),
            Some(order) => self.panels.on_tiles(row, &in_order(order)),
        })
    }

    /// Writes row `row` as floats, in the order of the inputs.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        match &self.order {
            None => self.panels.copy_row(row, out, |column| column),
            Some(order) => self.panels.copy_row(row, out, |column| order[column] as usize),
        }
    }
}

/// Runs a kernel that is generic over the codes of a format.
macro_rules! dispatch_cut {
    ($dispatch:ident, $format:expr, $isa:expr, $kernel:ident($($arg:ident : $ty:ty),*)) => {{
        type Two = Planes<2, 0>;
        type Three = Planes<2, 1>;
        type Five = Planes<4, 1>;
        type Six = Planes<4, 2>;
        type Eight = Planes<8, 0>;
        match ($format.codes, planes($format.codes.bits())) {
            (Codes::E4m3, _) => $dispatch!($isa, $kernel::<E4m3: Cut>($($arg: $ty),*)),
            (_, [2, 0]) => $dispatch!($isa, $kernel::<Two: Cut>($($arg: $ty),*)),
            (_, [2, 1]) => $dispatch!($isa, $kernel::<Three: Cut>($($arg: $ty),*)),
            (_, [4, 0]) => $dispatch!($isa, $kernel::<Table: Cut>($($arg: $ty),*)),
            (_, [4, 1]) => $dispatch!($isa, $kernel::<Five: Cut>($($arg: $ty),*)),
            (_, [4, 2]) => $dispatch!($isa, $kernel::<Six: Cut>($($arg: $ty),*)),
            _ => $dispatch!($isa, $kernel::<Eight: Cut>($($arg: $ty),*)),
        }
    }};
}
pub(super) use dispatch_cut;

thread_local! {
    /// Activations that this thread's last product rounded or reordered, reused by the next. They are taken out while in use,
    /// because a task of the product may itself run a product on this thread.
    static NUMBERS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static ROUNDED: Cell<Vec<RowBlock>> = const { Cell::new(Vec::new()) };
    /// Unpacked blocks.
    static FLOATS: RefCell<Scratch> = const { RefCell::new([Vec::new(), Vec::new()]) };
    /// Widened scales and offsets.
    static GROUPS: RefCell<Vec<Group>> = const { RefCell::new(Vec::new()) };
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
    let bytes = |x: &[RowBlock]| {
        let (minima, tiles) = (panels.format.has_minimum(), panels.tiles());
        let on_tiles = Product { weights: panels, rows, tiles, chain: 1, minima, bias, out, n };
        let done = byte_tiles::run(processor, on_tiles, x, panels.format.halves());
        if done < rows {
            let (x, rows, out) = (&x[done * panels.blocks()..], rows - done, out.behind(done));
            processor.bytes(Task { x, weights: panels, rows, pairs: pairs.clone(), bias, out });
        }
    };
    match x {
        Rows::Blocks(x) => bytes(x),
        Rows::Numbers(x) => processor.with_numbers(x, weights, |x| {
            if weights.rounding.is_integer() {
                processor.with_blocks(x, weights, bytes);
            } else if weights.on_tiles {
                steps::run(processor, panels, (x, rows), bias, (out, n));
            } else {
                processor.floats(Task { x, weights: panels, rows, pairs: pairs.clone(), bias, out });
            }
        }),
    }
}

impl Processor<'_> {
    /// Runs the parts of a task on the pool.
    fn split<X: Sync>(self, whole: &Task<'_, X>, run: impl Fn(&Task<'_, X>) + Sync) {
        let first = whole.pairs.start;
        self.pool.ranges(whole.pairs.len(), whole.rows * whole.weights.k * OUTPUTS, |pairs| {
            run(&Task { pairs: first + pairs.start..first + pairs.end, ..*whole });
        });
    }

    fn floats(self, whole: Task<'_, f32>) {
        self.split(&whole, |task| {
            FLOATS.with_borrow_mut(|unpacked| {
                unpacked.iter_mut().for_each(|panel| panel.resize(AT_ONCE * BLOCK, [0.0; LANES]));
                multiply_floats(self.isa, task, unpacked);
            });
        });
    }

    fn bytes(self, whole: Task<'_, RowBlock>) {
        self.split(&whole, |task| GROUPS.with_borrow_mut(|groups| multiply(self.dot, task, groups)));
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

type Scratch = [Vec<[f32; LANES]>; PAIR];

fn multiply_floats(isa: Isa, task: &Task<'_, f32>, unpacked: &mut Scratch) {
    // Few rows use a weight so seldom that it stays in a register.
    if task.rows <= FEW && task.weights.k.is_multiple_of(BLOCK) {
        dispatch_cut!(dispatch, task.weights.format, isa, walk_few(task: &Task<'_, f32>));
    } else {
        dispatch!(isa, walk(isa: Isa, task: &Task<'_, f32>, unpacked: &mut Scratch));
    }
}

/// Whether codes that are integers are converted instead of looked up, which takes several instructions on AVX2.
#[inline(always)]
fn converts<L: Lanes>(panels: &StoredPanels) -> bool {
    !L::MANY && matches!(panels.format.codes, Codes::Integers { .. })
}

#[inline(always)]
fn walk_few<L: WithInts, C: Cut>(task: &Task<'_, f32>) {
    if !L::VECTORS {
        few_rows_without_vectors(task);
    } else if converts::<L>(task.weights) {
        few_rows::<L, C::Integers>(task);
    } else {
        few_rows::<L, C>(task);
    }
}

fn few_rows_without_vectors(task: &Task<'_, f32>) {
    few_rows::<Portable, Any>(task);
}

/// Multiplies all rows and a pair at a time.
#[inline(always)]
fn few_rows<L: WithInts, C: Cut>(task: &Task<'_, f32>) {
    for pair in task.pairs.clone() {
        let mut row = 0;
        while row < task.rows {
            row += match task.rows - row {
                4.. if L::MANY => few::<L, C, 4>(task, row, pair),
                2.. => few::<L, C, 2>(task, row, pair),
                _ => few::<L, C, 1>(task, row, pair),
            };
        }
    }
}

/// Writes some blocks of a pair to memory.
fn unpack_blocks(isa: Isa, panels: &StoredPanels, pair: usize, blocks: Range<usize>, out: &mut Unpacked<'_>) {
    dispatch_cut!(
        dispatch,
        panels.format,
        isa,
        unpack_all(panels: &StoredPanels, pair: usize, blocks: Range<usize>, out: &mut Unpacked<'_>)
    );
}

#[inline(always)]
fn unpack_all<L: WithInts, C: Cut>(panels: &StoredPanels, pair: usize, blocks: Range<usize>, out: &mut Unpacked<'_>) {
    if !L::VECTORS {
        unpack_without_vectors(panels, pair, blocks, out);
    } else if converts::<L>(panels) {
        unpack::<L, C::Integers>(panels, pair, blocks, out);
    } else {
        unpack::<L, C>(panels, pair, blocks, out);
    }
}

fn unpack_without_vectors(panels: &StoredPanels, pair: usize, blocks: Range<usize>, out: &mut Unpacked<'_>) {
    unpack::<Portable, Any>(panels, pair, blocks, out);
}

/// Multiplies some rows and a pair at a time. Tiles have the sizes of those of dense weights.
// No closures: they are compiled without the instructions of `L`.
#[inline(always)]
fn walk<L: Lanes>(isa: Isa, task: &Task<'_, f32>, unpacked: &mut Scratch) {
    let (k, blocks) = (task.weights.k, task.weights.blocks());
    for first in (0..task.rows).step_by(ROWS) {
        let last = (first + ROWS).min(task.rows);
        for pair in task.pairs.clone() {
            for block in (0..blocks).step_by(AT_ONCE) {
                let end = (block + AT_ONCE).min(blocks);
                let [even, odd] = &mut *unpacked;
                unpack_blocks(isa, task.weights, pair, block..end, &mut Unpacked([even, odd]));
                let inputs = block * BLOCK..(end * BLOCK).min(k);
                let lines = [&even[..inputs.len()], &odd[..inputs.len()]];
                let mut row = first;
                while row < last {
                    row += match last - row {
                        12.. if L::MANY => float_tile::<L, 12>(task, row, pair, inputs.clone(), lines),
                        8.. if L::MANY => float_tile::<L, 8>(task, row, pair, inputs.clone(), lines),
                        4.. if L::VECTORS => float_tile::<L, 4>(task, row, pair, inputs.clone(), lines),
                        2.. if L::VECTORS => float_tile::<L, 2>(task, row, pair, inputs.clone(), lines),
                        _ => float_tile::<L, 1>(task, row, pair, inputs.clone(), lines),
                    };
                }
            }
        }
    }
}

/// Multiplies M rows with a pair. Returns M.
#[inline(always)]
fn few<L: WithInts, C: Cut, const M: usize>(task: &Task<'_, f32>, row: usize, pair: usize) -> usize {
    let k = task.weights.k;
    let x: [&[f32]; M] = std::array::from_fn(|m| &task.x[(row + m) * k..][..k]);
    let mut sums = Sums { x, sums: [[L::splat(0.0); PAIR]; M] };
    unpack::<L, C>(task.weights, pair, 0..task.weights.blocks(), &mut sums);
    end(task, row, pair * PAIR, k, sums.sums);
    M
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
            end(task, row, pair * PAIR, inputs.end, tile::accumulate::<L, _, M, PAIR>(x, lines, None, acc));
        }
        // Sums of two panels do not fit the registers.
        false => {
            for (panel, lines) in lines.into_iter().enumerate() {
                let acc = start::<L, f32, M, 1>(task, row, pair * PAIR + panel, inputs.start);
                end(task, row, pair * PAIR + panel, inputs.end, tile::accumulate::<L, _, M, 1>(x, [lines], None, acc));
            }
        }
    }
    M
}
