//! Products of bfloat16 with stored weights in the arithmetic of tiles: a step of 16 to 128 inputs is a sum of products with the
//! numbers that codes stand for, and is then multiplied with its scale ([`scaled_tiles`](crate::scaled_tiles)).
//!
//! One or two rows are multiplied by vectors, in the same bits, which takes less time than to unpack codes to memory.

use std::cell::Cell;
use std::ops::Range;

use simd::int8::{IntLanes, WithInts};
use simd::pairs::{Emulated, PairLanes};
use simd::tiles::Tile;
use simd::{Lanes, Pairs, Portable, dispatch, dispatch_pairs, prefetch};

use super::format::{Codes, Offset};
use super::group::{Current, Group};
use super::panels::{FOURS, StoredPanels, planes};
use super::product::dispatch_cut;
use super::unpack::{AHEAD, Any, Codebook, Cut, E4m3, Planes, Table};
use crate::blocks::{OUTPUTS, PAIR};
use crate::form::Line;
use crate::output::Output;
use crate::pair_tiles::{self, Halves, round_tile};
use crate::processor::Processor;
use crate::quantize::BLOCK;
use crate::scaled_tiles::{Product, Tiles, Unpack};

/// Most rows that vectors multiply.
const FEW: usize = 2;

/// Magnitudes of activations, apart from zero, with which no sum or product of a step is subnormal or infinite, so that vectors have the
/// bits of tiles: numbers of codes are multiples of 2^-16, and vectors may multiply 2^26 times as much.
const SIMPLE: Range<f32> = f32::from_bits((127 - 97) << 23)..f32::from_bits((127 + 80) << 23);

thread_local! {
    /// Rounded rows of this thread's last product, reused by the next. They are taken out while in use, because a task of the product
    /// may itself run a product on this thread.
    static ROUNDED: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Computes a product with rows of floats.
pub(super) fn run(
    processor: Processor<'_>,
    panels: &StoredPanels,
    (x, rows): (&[f32], usize),
    bias: Option<&[f32]>,
    (out, n): (Output, usize),
) {
    let (format, chain) = (&panels.format, panels.format.chain());
    let tiles = panels.tiles().next_multiple_of(chain);
    let minima = format.has_minimum() || format.offset == Offset::ZeroPoint;
    let is_simple = |x: &f32| *x == 0.0 || SIMPLE.contains(&x.abs());
    if rows > FEW || !x.iter().all(is_simple) {
        let product = Product { weights: panels, rows, tiles, chain, minima, bias, out, n };
        return pair_tiles::run(processor, product, (x, panels.k), format.tile());
    }
    let mut rounded = ROUNDED.take();
    let row = tiles * (format.tile() + 1);
    rounded.resize(rounded.len().max(rows * row), 0.0);
    let (isa, width) = (processor.isa, format.tile());
    for (x, to) in x.chunks(panels.k).zip(rounded.chunks_mut(row)) {
        dispatch_pairs!(isa, round(x: &[f32], width: usize, to: &mut [f32]));
    }
    let x = &rounded[..rows * row];
    processor.pool.ranges(n.div_ceil(OUTPUTS), rows * panels.k * OUTPUTS, |pairs| {
        let task = &Few { panels, x, row, pairs, minima, bias, out };
        dispatch_cut!(dispatch, panels.format, isa, few(task: &Few<'_>));
    });
    ROUNDED.set(rounded);
}

/// Writes the rounded numbers of a row, with zeros up to a whole step, and the sum of each tile behind all of them.
#[inline(always)]
fn round<D: PairLanes>(x: &[f32], width: usize, to: &mut [f32]) {
    let (numbers, sums) = to.split_at_mut(to.len() / (width + 1) * width);
    let mut tiles = x.chunks(width);
    for (to, sum) in numbers.chunks_mut(width).zip(sums) {
        let mut pairs = Pairs::ZERO;
        *sum = round_tile::<D>(tiles.next().unwrap_or_default(), &mut pairs);
        for (to, pair) in to.chunks_mut(2).zip(pairs.0) {
            to.copy_from_slice(&[f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]);
        }
    }
}

/// A part of a product with few rows.
struct Few<'a> {
    panels: &'a StoredPanels,
    /// Rounded rows, as [`round`] writes them.
    x: &'a [f32],
    /// Elements of a row.
    row: usize,
    pairs: Range<usize>,
    minima: bool,
    bias: Option<&'a [f32]>,
    out: Output,
}

#[inline(always)]
fn few<L: WithInts, C: Cut>(task: &Few<'_>) {
    match task.x.len() / task.row {
        _ if !L::VECTORS => few_without_vectors(task),
        1 => rows::<L, C, 1>(task),
        _ => rows::<L, C, FEW>(task),
    }
}

fn few_without_vectors(task: &Few<'_>) {
    match task.x.len() / task.row {
        1 => rows::<Portable<true>, Any, 1>(task),
        _ => rows::<Portable<true>, Any, FEW>(task),
    }
}

/// Multiplies M rows.
#[allow(clippy::needless_range_loop)] // one index for several arrays
#[inline(always)]
fn rows<L: WithInts, C: Cut, const M: usize>(task: &Few<'_>) {
    let (panels, format) = (task.panels, &task.panels.format);
    let (width, chain) = (format.tile(), format.chain());
    let tiles = panels.tiles().next_multiple_of(chain);
    let codebook = Codebook::in_bf16(format.codes);
    let x: [(&[f32], &[f32]); M] = std::array::from_fn(|m| task.x[m * task.row..][..task.row].split_at(tiles * width));
    for pair in task.pairs.clone() {
        let (mut acc, mut current) = ([[L::splat(0.0); PAIR]; M], Current::NONE);
        for step in (0..panels.tiles()).step_by(chain) {
            current.enter_rounded::<L>(panels, pair, step);
            let Group { scales, minima, .. } = &current.group;
            let (mut products, mut of_rows) = ([[L::splat(0.0); PAIR]; M], [0.0; M]);
            for tile in step..(step + chain).min(panels.tiles()) {
                let [(left, first), (right, _)] = [panels.tile(pair, 0, tile), panels.tile(pair, 1, tile)];
                let (mut sums, from) = ([[[L::splat(0.0); 2]; PAIR]; M], tile * width);
                if first == 0 {
                    fours::<L, C, M, 0>([left, right], x.map(|x| &x.0[from..]), &codebook, &mut sums);
                }
                if 4 * first + width == BLOCK {
                    let from = from + width - BLOCK / 2;
                    fours::<L, C, M, { FOURS / 2 }>([left, right], x.map(|x| &x.0[from..]), &codebook, &mut sums);
                }
                for m in 0..M {
                    for panel in 0..PAIR {
                        let [even, odd] = sums[m][panel];
                        products[m][panel] = products[m][panel].add(even.add(odd));
                    }
                }
                for m in 0..M {
                    of_rows[m] += x[m].1[tile];
                }
            }
            for m in 0..M {
                for panel in 0..PAIR {
                    let scale = L::load(&scales[panel]);
                    let product = products[m][panel].mul(L::splat(1.0 / C::UNIT));
                    acc[m][panel] = L::Ints::fused(product, scale, acc[m][panel]);
                    if task.minima {
                        let of_row = L::splat(of_rows[m]);
                        acc[m][panel] = L::Ints::fused(of_row, L::load(&minima[panel]), acc[m][panel]);
                    }
                }
            }
        }
        // SAFETY: the rows exist, and only this task writes these panels.
        unsafe { task.out.write_tile(0, [PAIR * pair, PAIR * pair + 1], acc, task.bias) };
    }
}

/// Adds products with half of a block, from group of four inputs FIRST on, to the sums of even and of odd inputs.
#[allow(clippy::needless_range_loop)] // as above
#[inline(always)]
fn fours<L: WithInts, C: Cut, const M: usize, const FIRST: usize>(
    panels: [&[Line]; PAIR],
    x: [&[f32]; M],
    codebook: &Codebook,
    sums: &mut [[[L; 2]; PAIR]; M],
) {
    let of_panels = panels.map(|lines| if C::LINES == 0 { lines } else { &lines[..C::LINES] });
    for line in FIRST * C::LINES / FOURS..(FIRST + FOURS / 2) * C::LINES / FOURS {
        for lines in of_panels {
            prefetch(lines[line].0.as_ptr().wrapping_byte_add(AHEAD));
        }
    }
    let x = x.map(|x| x[..BLOCK / 2].as_chunks::<4>().0);
    for four in 0..FOURS / 2 {
        // Sums of both panels do not wait for each other.
        for panel in 0..PAIR {
            let numbers = C::whole::<L>(of_panels[panel], FIRST + four, codebook);
            for m in 0..M {
                let (x, [even, odd]) = (&x[m][four], &mut sums[m][panel]);
                *even = L::Ints::fused(L::splat(x[0]), numbers[0], *even);
                *odd = L::Ints::fused(L::splat(x[1]), numbers[1], *odd);
                *even = L::Ints::fused(L::splat(x[2]), numbers[2], *even);
                *odd = L::Ints::fused(L::splat(x[3]), numbers[3], *odd);
            }
        }
    }
}

impl Unpack<Halves> for StoredPanels {
    fn unpack(&self, processor: Processor<'_>, pair: usize, tiles: Range<usize>, to: &mut [Tiles<Halves>]) {
        let (isa, from) = (processor.isa, &(self, pair, tiles));
        dispatch_cut!(
            dispatch_pairs,
            self.format,
            isa,
            unpack(from: &(&StoredPanels, usize, Range<usize>), to: &mut [Tiles<Halves>])
        );
    }
    fn lines(&self, pair: usize, tiles: Range<usize>) -> Range<*const Line> {
        StoredPanels::lines(self, pair, tiles)
    }
}

#[inline(always)]
fn unpack<D: PairLanes, C: Cut>(from: &(&StoredPanels, usize, Range<usize>), to: &mut [Tiles<Halves>]) {
    match D::Floats::VECTORS {
        true => unpack_steps::<D, C>(from, to),
        false => unpack_without_vectors(from, to),
    }
}

fn unpack_without_vectors(from: &(&StoredPanels, usize, Range<usize>), to: &mut [Tiles<Halves>]) {
    unpack_steps::<Emulated, Any>(from, to);
}

/// Unpacks some tiles of a pair to numbers in bfloat16 with scales; those past the last block stay, which meet zeros.
#[inline(always)]
fn unpack_steps<D: PairLanes, C: Cut>(
    (panels, pair, tiles): &(&StoredPanels, usize, Range<usize>),
    to: &mut [Tiles<Halves>],
) {
    let (mut current, table) = (Current::NONE, D::table(&panels.numbers));
    for (tile, to) in (tiles.start..tiles.end.min(panels.tiles())).zip(to) {
        current.enter_rounded::<D::Floats>(panels, *pair, tile);
        for panel in 0..PAIR {
            (to[panel].scales, to[panel].minima) = (current.group.scales[panel], current.group.minima[panel]);
            let (lines, first) = panels.tile(*pair, panel, tile);
            let (codes, to) = (panels.format.codes, &mut to[panel].lines);
            match (panels.format.tile(), first) {
                (BLOCK, _) => pairs::<D, C, 0, 8>(codes, table, lines, to),
                (_, 0) => pairs::<D, C, 0, 4>(codes, table, lines, to),
                _ => pairs::<D, C, 4, 4>(codes, table, lines, to),
            }
        }
    }
}

/// Unpacks COUNT groups of four inputs, the first of which is FIRST.
#[inline(always)]
fn pairs<D: PairLanes, C: Cut, const FIRST: usize, const COUNT: usize>(
    codes: Codes,
    table: D::Table,
    lines: &[Line],
    to: &mut Tile,
) {
    for (g, to) in to.as_chunks_mut().0.iter_mut().enumerate().take(COUNT) {
        C::pairs::<D>(codes, table, lines, FIRST + g, to);
    }
}
