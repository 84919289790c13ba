//! The product with rows of 8-bit integers: codes are cut out of their planes in registers.
//!
//! ```text
//! Σ = Σ code·a                                               i32, exact
//! y += (Σ − zero point · Σ a) · (scale · row scale)          f32; the difference is exact, the rest fused
//! y += Σ a · (minimum · row scale)                           if the format has minima
//! ```
//!
//! The sums of a block stay below 2^24, so floats hold them, and every instruction set gives the same bits.

use std::ops::Range;

use simd::int8::{DotIsa, DotLanes, Floats, GROUP, IntLanes, OFFSET, PortableDot, Weights};
use simd::{Lanes, dispatch_dot, prefetch};

use super::format::{Codes, Offset, StoredFormat};
use super::group::{Current, Group};
use super::panels::{StoredPanels, code, codes, planes};
use super::task::{ROWS, Task, end, start};
use crate::blocks::{Ahead, PAIR};
use crate::byte_tiles::Bytes;
use crate::form::Line;
use crate::processor::Processor;
use crate::quantize::BLOCK;
use crate::rows::RowBlock;
use crate::scaled_tiles::{Tiles, Unpack};

/// Blocks whose groups are widened at a time.
const AT_ONCE: usize = 16;

/// How a line of weights comes from the codes of a block.
trait Cut: 'static {
    /// Bits of the weights: 8 with an [`OFFSET`], codes of at most 6 without.
    const BITS: u32;
    /// Inputs 8e..8e+8 of the lines of a panel.
    #[inline(always)]
    fn load<D: DotLanes>(lines: &[Line], e: usize, codebook: &Codebook) -> [Weights<D>; 2] {
        [Self::group::<D>(lines, 2 * e, codebook), Self::group::<D>(lines, 2 * e + 1, codebook)]
    }
    /// Inputs 4g..4g+4 of the lines of a panel.
    fn group<D: DotLanes>(lines: &[Line], g: usize, codebook: &Codebook) -> Weights<D>;
}

/// What codes stand for.
struct Codebook {
    codes: Codes,
    /// Bytes of the first 16 codes if they are indices of a table, with the offset of weights if the instructions take one.
    table: [u8; 16],
}

impl Codebook {
    #[inline(always)]
    fn new<D: DotLanes>(format: &StoredFormat) -> Codebook {
        let mut table = [0; 16];
        if let Codes::Table(numbers) = format.codes {
            for (to, number) in table.iter_mut().zip(numbers) {
                *to = (*number as u8).wrapping_add(D::start(OFFSET.into()) as u8);
            }
        }
        Codebook { codes: format.codes, table }
    }
}

/// Codes in one plane or two.
struct Planes<const LOW: u32, const HIGH: u32>;

impl<const LOW: u32, const HIGH: u32> Cut for Planes<LOW, HIGH> {
    const BITS: u32 = LOW + HIGH;
    #[inline(always)]
    fn group<D: DotLanes>(lines: &[Line], g: usize, _: &Codebook) -> Weights<D> {
        codes::<D::Sums, LOW, HIGH>(lines, g)
    }
}

/// Codes of 8 bits, with a zero point of 128.
struct Whole;

impl Cut for Whole {
    const BITS: u32 = 8;
    #[inline(always)]
    fn group<D: DotLanes>(lines: &[Line], g: usize, _: &Codebook) -> Weights<D> {
        D::load(&lines[g].0)
    }
}

/// Codes of 4 bits that are indices of a table.
struct Table;

impl Cut for Table {
    const BITS: u32 = 8;
    #[inline(always)]
    fn group<D: DotLanes>(lines: &[Line], g: usize, codebook: &Codebook) -> Weights<D> {
        D::Sums::look_up(codes::<D::Sums, 4, 0>(lines, g), &codebook.table)
    }
}

/// Codes of every kind, one at a time: slower, and one function instead of seven.
struct Any;

impl Cut for Any {
    const BITS: u32 = 8;
    #[inline(always)]
    fn group<D: DotLanes>(lines: &[Line], g: usize, codebook: &Codebook) -> Weights<D> {
        D::load(&std::array::from_fn(|i| {
            let number = codebook.codes.number(code(codebook.codes, lines, 4 * g + i % 4, i / 4));
            (number as i8 as u8).wrapping_add(OFFSET)
        }))
    }
}

/// Runs a kernel that is generic over the codes of a format.
macro_rules! dispatch_cut {
    ($dot:expr, $format:expr, $kernel:ident($($arg:ident : $ty:ty),*)) => {{
        type Two = Planes<2, 0>;
        type Three = Planes<2, 1>;
        type Four = Planes<4, 0>;
        type Five = Planes<4, 1>;
        type Six = Planes<4, 2>;
        match ($format.codes, planes($format.codes.bits())) {
            (Codes::Table(_), _) => dispatch_dot!($dot, $kernel::<Table: Cut>($($arg: $ty),*)),
            (_, [2, 0]) => dispatch_dot!($dot, $kernel::<Two: Cut>($($arg: $ty),*)),
            (_, [2, 1]) => dispatch_dot!($dot, $kernel::<Three: Cut>($($arg: $ty),*)),
            (_, [4, 0]) => dispatch_dot!($dot, $kernel::<Four: Cut>($($arg: $ty),*)),
            (_, [4, 1]) => dispatch_dot!($dot, $kernel::<Five: Cut>($($arg: $ty),*)),
            (_, [4, 2]) => dispatch_dot!($dot, $kernel::<Six: Cut>($($arg: $ty),*)),
            _ => dispatch_dot!($dot, $kernel::<Whole: Cut>($($arg: $ty),*)),
        }
    }};
}

/// Computes a part of a product; `groups` is memory that it reuses.
pub(super) fn multiply(dot: DotIsa, task: &Task<'_, RowBlock>, groups: &mut Vec<Group>) {
    groups.resize(2 * AT_ONCE, Group::ZERO);
    dispatch_cut!(dot, task.weights.format, walk(task: &Task<'_, RowBlock>, groups: &mut [Group]));
}

impl Unpack<Bytes> for StoredPanels {
    fn unpack(&self, processor: Processor<'_>, pair: usize, tiles: Range<usize>, to: &mut [Tiles<Bytes>]) {
        let (dot, from) = (processor.dot, &(self, pair, tiles));
        dispatch_cut!(dot, self.format, unpack(from: &(&StoredPanels, usize, Range<usize>), to: &mut [Tiles<Bytes>]));
    }
    fn lines(&self, pair: usize, tiles: Range<usize>) -> Range<*const Line> {
        StoredPanels::lines(self, pair, tiles)
    }
}

/// Unpacks some tiles of a pair to signed bytes.
#[inline(always)]
fn unpack<D: DotLanes, C: Cut>(from: &(&StoredPanels, usize, Range<usize>), to: &mut [Tiles<Bytes>]) {
    match Floats::<D>::VECTORS {
        true => bytes::<D, C>(from, to),
        false => bytes_without_vectors(from, to),
    }
}

fn bytes_without_vectors(from: &(&StoredPanels, usize, Range<usize>), to: &mut [Tiles<Bytes>]) {
    bytes::<PortableDot, Any>(from, to);
}

#[allow(clippy::needless_range_loop)] // one index for several arrays
#[inline(always)]
fn bytes<D: DotLanes, C: Cut>((panels, pair, tiles): &(&StoredPanels, usize, Range<usize>), to: &mut [Tiles<Bytes>]) {
    let format = &panels.format;
    let codebook = &Codebook::new::<D>(format);
    let zero = if C::BITS < 8 { format.codes.zero() as u8 } else { D::start(OFFSET.into()) as u8 };
    let fours = format.tile() / 4;
    let (mut current, mut offsets) = (Current::NONE, [[zero; GROUP]; PAIR]);
    for (tile, to) in tiles.clone().zip(to) {
        let is_other = current.enter::<Floats<D>>(panels, *pair, tile);
        let group = &current.group;
        if is_other && format.offset == Offset::ZeroPoint {
            for (offsets, points) in offsets.iter_mut().zip(group.points) {
                for (offsets, point) in offsets.as_chunks_mut::<4>().0.iter_mut().zip(points) {
                    *offsets = [zero + point as u8; 4];
                }
            }
        }
        for panel in 0..PAIR {
            (to[panel].scales, to[panel].minima) = (group.scales[panel], group.minima[panel]);
            let (lines, first) = panels.tile(*pair, panel, tile);
            for g in 0..fours {
                to[panel].write::<D>(g, C::group::<D>(lines, first + g, codebook), &offsets[panel]);
            }
        }
    }
}

/// Some blocks of a pair.
struct Blocks<'a> {
    pair: usize,
    range: Range<usize>,
    /// Codes of the pair.
    lines: &'a [Line],
    /// From the group of the first block on.
    groups: &'a [Group],
    codebook: &'a Codebook,
}

#[inline(always)]
fn walk<D: DotLanes, C: Cut>(task: &Task<'_, RowBlock>, groups: &mut [Group]) {
    match Floats::<D>::VECTORS {
        true => pairs::<D, C>(task, groups),
        false => without_vectors(task, groups),
    }
}

fn without_vectors(task: &Task<'_, RowBlock>, groups: &mut [Group]) {
    pairs::<PortableDot, Any>(task, groups);
}

// No closures: they are compiled without the instructions of `D`.
#[inline(always)]
fn pairs<D: DotLanes, C: Cut>(task: &Task<'_, RowBlock>, groups: &mut [Group]) {
    let format = &task.weights.format;
    let count = task.weights.blocks();
    let codebook = &Codebook::new::<D>(format);
    for first in (0..task.rows).step_by(ROWS) {
        let last = (first + ROWS).min(task.rows);
        for pair in task.pairs.clone() {
            let (header, lines) = task.weights.pair(pair);
            let mut next = task.weights.ahead(pair, (last - first).div_ceil(D::ROWS));
            for block in (0..count).step_by(AT_ONCE) {
                let range = block..(block + AT_ONCE).min(count);
                let first_group = range.start * BLOCK / format.group;
                let end_group = (range.end * BLOCK).min(task.weights.k).div_ceil(format.group);
                for (group, to) in (first_group..end_group).zip(groups.iter_mut()) {
                    to.read::<Floats<D>>(task.weights, header, group);
                }
                let blocks = &Blocks { pair, range, lines, groups, codebook };
                let mut row = first;
                while row < last {
                    row += match last - row {
                        6.. if D::WIDE => tile::<D, C, 6>(task, row, blocks, &mut next),
                        4.. if D::WIDE || D::ROWS == 4 => tile::<D, C, 4>(task, row, blocks, &mut next),
                        2.. => tile::<D, C, 2>(task, row, blocks, &mut next),
                        _ => tile::<D, C, 1>(task, row, blocks, &mut next),
                    };
                }
            }
        }
    }
}

/// Adds the products of M rows with some blocks of a pair to the output. Returns M.
#[inline(always)]
fn tile<D: DotLanes, C: Cut, const M: usize>(
    task: &Task<'_, RowBlock>,
    row: usize,
    blocks: &Blocks<'_>,
    next: &mut Ahead,
) -> usize {
    if D::WIDE {
        panels::<D, C, M, PAIR>(task, row, blocks, 0, next);
    } else {
        panels::<D, C, M, 1>(task, row, blocks, 0, next);
        panels::<D, C, M, 1>(task, row, blocks, 1, &mut Ahead::nothing());
    }
    M
}

// The loops over registers share one index between several arrays.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn panels<D: DotLanes, C: Cut, const M: usize, const P: usize>(
    task: &Task<'_, RowBlock>,
    row: usize,
    blocks: &Blocks<'_>,
    panel: usize,
    next: &mut Ahead,
) {
    let format = &task.weights.format;
    let (count, size) = (task.weights.blocks(), task.weights.layout.block);
    let x: [&[RowBlock]; M] = std::array::from_fn(|m| &task.x[(row + m) * count..][blocks.range.clone()]);
    let (halves, minima, points) = (format.halves(), format.has_minimum(), format.offset == Offset::ZeroPoint);
    let zero = format.codes.zero();
    let mut groups = blocks.groups.iter();
    let Some(mut group) = groups.next() else { return };
    // Inputs of the group that are left.
    let mut left = format.group - blocks.range.start * BLOCK % format.group;
    let first = blocks.pair * PAIR + panel;
    let mut acc = start::<Floats<D>, RowBlock, M, P>(task, row, first, blocks.range.start);
    for (b, block) in blocks.range.clone().enumerate() {
        next.prefetch(prefetch);
        let lines: [&[Line]; P] = std::array::from_fn(|p| &blocks.lines[(block * PAIR + panel + p) * size..][..size]);
        let mut starts = [0; M];
        let mut sums = D::begin::<M, P>(starts, C::BITS);
        for half in 0..2 {
            if left == 0 {
                left = format.group;
                group = groups.next().unwrap_or(group);
            }
            // The sum of the activations of this part of the block, times −128.
            let mut corrections = [0; M];
            for m in 0..M {
                corrections[m] = match (halves, half) {
                    (false, _) => x[m][b].correction,
                    (true, 0) => x[m][b].first_half,
                    (true, _) => x[m][b].correction - x[m][b].first_half,
                };
            }
            if half == 0 || halves {
                for m in 0..M {
                    starts[m] = if C::BITS < 8 { corrections[m] / 128 * zero } else { D::start(corrections[m]) };
                }
                sums = D::begin(starts, C::BITS);
            }
            for e in half * (BLOCK / 16)..(half + 1) * (BLOCK / 16) {
                let mut rows = [&[[0; 4]; 2]; M];
                for m in 0..M {
                    rows[m] = x[m][b].eight(e);
                }
                let mut weights = [C::load::<D>(lines[0], e, blocks.codebook); P];
                for p in 1..P {
                    weights[p] = C::load::<D>(lines[p], e, blocks.codebook);
                }
                D::add(&mut sums, weights, rows, C::BITS);
            }
            left -= BLOCK / 2;
            if half == 0 && !halves {
                continue;
            }
            let sums = D::by_rows(sums, starts, C::BITS);
            for m in 0..M {
                let row_scale = Floats::<D>::splat(x[m][b].scale);
                for p in 0..P {
                    let scale = Floats::<D>::load(&group.scales[panel + p]).mul(row_scale);
                    acc[m][p] = match points {
                        true => {
                            let points = Floats::<D>::load(&group.points[panel + p]);
                            let less = points.mul(Floats::<D>::splat((corrections[m] / 128) as f32));
                            D::Sums::fused(sums[m][p].to_floats().add(less), scale, acc[m][p])
                        }
                        false => sums[m][p].scale_add(scale, acc[m][p]),
                    };
                    if minima {
                        let sum = D::Sums::splat(corrections[m] / -128);
                        let minimum = Floats::<D>::load(&group.minima[panel + p]).mul(row_scale);
                        acc[m][p] = sum.scale_add(minimum, acc[m][p]);
                    }
                }
            }
        }
    }
    end(task, row, first, blocks.range.end * BLOCK, acc);
}
