//! Products of bfloat16 in the family of [`simd::tiles`].
//!
//! ```text
//! weights       panels of 16 outputs; a line is a pair of inputs of each output; 16 lines (32 inputs) are a B tile
//! activations   bands of 16 rows; 16 lines (32 inputs of each row) are an A tile
//! ```
//!
//! Rows of activations are padded to whole tiles and pairs of tiles, inputs with +0. Weights are not padded: the last panel stands for one
//! that is missing in a pair, and the tiles of a group that is not whole are copied. The order of each sum is that of the groups of 32
//! inputs, whatever the number of rows, the threads or the instruction set.
//!
//! - **Up to 16 rows**: A tiles stay in the L1 cache, and weights pass through at the speed of memory, two panels side by side. Tiles
//!   have as many rows as there are.
//! - **More rows**: the weights of two panels stay in the L1 cache while all rows of a pass stream past them from the L2 cache. More than
//!   [`RESIDENT`] groups of inputs are computed in equal parts, with sums in memory: a part of all rows meets that part of many panels
//!   before the next one, so that it stays in the L2 cache, however long a row is.
//!
//! Without AMX, vectors compute the same sums ([`Grouped`]). They differ from the definition where a number is subnormal, and in the
//! bits of a NaN: such outputs are computed again one by one ([`repair`]).

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

use simd::pairs::{PairLanes, Pairs, round_row};
use simd::tiles::{EMPTY, GROUP, Registers, add_group, are_normal, least_exponent};
use simd::{Isa, LANES, Lanes, Portable, dispatch, dispatch_pairs, on_tiles, prefetch, prefetch_for_later, tiles};

use super::activation::Activation;
use super::blocks::{OUTPUTS, PAIR};
use super::output::{Output, numbers};
use super::pack::Halves;
use super::processor::Processor;
use super::rows::RowBlock;
use super::scaled_tiles::equal;
use super::tile::{AHEAD, Task, Tile};

/// Groups of each of two panels that stay in the L1 cache: 36 KiB of 48.
const RESIDENT: usize = 18;

/// Most bands in a pass: a part of them has at most 576 KiB.
const BANDS: usize = 32;

/// Most blocks of sums that wait for the next part: 768 KiB, which the L2 cache holds beside the bands.
const WAITING: usize = 192;

/// Sums of 32 rows with 32 outputs: rows 0..16 with both panels, then rows 16..32.
type Block = [tiles::Tile; 4];

thread_local! {
    /// Rounded activations of this thread's last product, reused by the next. They are taken out while in use, because a task of
    /// the product may itself run a product on this thread.
    static ROUNDED: Cell<Vec<tiles::Tile>> = const { Cell::new(Vec::new()) };
    /// Sums of this thread's last task.
    static BLOCKS: Cell<Vec<Block>> = const { Cell::new(Vec::new()) };
}

/// Computes the product with tile registers: those of the CPU for [`Isa::Amx`], otherwise emulated ones.
pub(super) fn run(
    Processor { isa, pool, .. }: Processor<'_>,
    k: usize,
    (x, rows): (&[f32], usize),
    halves: &Halves,
    (bias, activation): (Option<&[f32]>, Option<Activation>),
    (out, n): (Output, usize),
) {
    let groups = k.div_ceil(GROUP);
    let bands = if rows > LANES { rows.div_ceil(2 * LANES) * 2 } else { 1 };
    let mut rounded = ROUNDED.take();
    // Only grows: old contents do not matter, also those of rows that fill a tile.
    rounded.resize(rounded.len().max(bands * groups), EMPTY);
    pool.chunks_mut(&mut rounded[..rows.div_ceil(LANES) * groups], groups, LANES * k * RowBlock::COST, |band, to| {
        let from = &x[band * LANES * k..rows.min((band + 1) * LANES) * k];
        dispatch_pairs!(isa, round_band(from: &[f32], k: usize, to: &mut [tiles::Tile]));
    });
    let (x, lines, pairs) = (&rounded[..bands * groups], &halves.lines[..], n.div_ceil(OUTPUTS));
    let [step, other] = if activation.is_some() { [1, pairs] } else { [PAIR, 1] };
    // A product of tiles takes about as long as that of one row with vectors.
    pool.ranges(pairs, rows.div_ceil(LANES) * k * OUTPUTS, |range| {
        let panels = range.start * step..range.end * step;
        let task =
            &OnTiles { x, rows, groups, lines, pairs: k.div_ceil(2), panels, step, other, activation, bias, out };
        let mut blocks = BLOCKS.take();
        // Activations have the bits of other operations on rows, which take the best vectors too.
        on_tiles!(isa, rows.min(LANES), |t| walk_on(Isa::best(), t, task, &mut blocks));
        BLOCKS.set(blocks);
    });
    ROUNDED.set(rounded);
}

/// Rounds up to sixteen rows of `k` numbers to A tiles.
#[inline(always)]
fn round_band<D: PairLanes>(from: &[f32], k: usize, to: &mut [tiles::Tile]) {
    for (row, from) in from.chunks(k).enumerate() {
        for (group, tile) in from.chunks(GROUP).zip(&mut *to) {
            round_row::<D>(group, &mut tile[row].0);
        }
    }
}

/// A part of a product: all rows, some panels, of which two are computed together.
struct OnTiles<'a> {
    /// A tiles, `[bands, groups]`.
    x: &'a [tiles::Tile],
    rows: usize,
    groups: usize,
    /// `[panels, pairs]`.
    lines: &'a [Pairs],
    pairs: usize,
    panels: Range<usize>,
    /// Panels from the first of two to the first of the next two.
    step: usize,
    /// Panels from the first of two to the second.
    other: usize,
    /// The first of two is a gate of the second; the output has the columns of the first.
    activation: Option<Activation>,
    bias: Option<&'a [f32]>,
    out: Output,
}

impl OnTiles<'_> {
    /// Whether the last group is whole.
    fn is_whole(&self) -> bool {
        self.pairs.is_multiple_of(LANES)
    }

    /// Where the lines of a group of a panel begin, if there is such a panel.
    #[inline(always)]
    fn line(&self, panel: usize, group: usize) -> *const Pairs {
        self.lines.as_ptr().wrapping_add(panel * self.pairs + group * LANES)
    }

    /// The B tiles of some groups of a panel. If the last of them is not whole, they are copied.
    #[inline(always)]
    fn tiles<'b>(&'b self, panel: usize, groups: Range<usize>, copy: &'b mut [tiles::Tile]) -> &'b [tiles::Tile] {
        let panel = panel.min(self.lines.len() / self.pairs - 1);
        let lines = &self.lines[panel * self.pairs..][..self.pairs];
        let lines = &lines[groups.start * LANES..self.pairs.min(groups.end * LANES)];
        if let (tiles, []) = lines.as_chunks() {
            return tiles;
        }
        let copy = &mut copy[..groups.len()];
        let (own, rest) = copy.as_flattened_mut().split_at_mut(lines.len());
        own.copy_from_slice(lines);
        rest.fill(Pairs::ZERO);
        copy
    }

    /// Prefetches the outputs of two panels in a row.
    #[inline(always)]
    fn prefetch(&self, row: usize, panel: usize) {
        self.out.prefetch(row, panel);
        if self.activation.is_none() {
            self.out.prefetch(row, panel + 1);
        }
    }
}

fn walk_on<T: Registers>(isa: Isa, t: &mut T, task: &OnTiles<'_>, blocks: &mut Vec<Block>) {
    dispatch!(isa, walk::<T: Registers>(t: &mut T, task: &OnTiles<'_>, blocks: &mut Vec<Block>));
}

#[inline(always)]
fn walk<L: Lanes, T: Registers>(t: &mut T, task: &OnTiles<'_>, blocks: &mut Vec<Block>) {
    let (bands, waiting) = (task.x.len() / task.groups, if task.groups > RESIDENT { WAITING } else { 1 });
    // Copies of the groups of two panels.
    let copies = if task.is_whole() { 0 } else { (PAIR * task.groups).div_ceil(4) };
    blocks.resize(blocks.len().max(waiting + copies), [EMPTY; 4]);
    let (blocks, copies) = blocks.split_at_mut(waiting);
    let copies = &mut copies.as_flattened_mut()[..];
    if bands == 1 {
        return few::<L, T>(t, task, &mut blocks[0], copies);
    }
    for first in (0..bands).step_by(BANDS) {
        many::<L, T>(t, task, first..bands.min(first + BANDS), blocks, copies);
    }
}

/// Writes a row's sums with two panels, unless the row only fills a tile.
#[inline(always)]
fn finish<L: Lanes>(task: &OnTiles<'_>, row: usize, panel: usize, sums: [&Pairs; PAIR]) {
    if row >= task.rows {
        return;
    }
    let Some(activation) = task.activation else {
        for (i, sums) in sums.into_iter().enumerate() {
            // SAFETY: the row exists, and only this task writes these panels.
            unsafe { task.out.write_tile(row, [panel + i], [[L::load(sums.as_floats())]], task.bias) };
        }
        return;
    };
    let [gate, up] = [(panel, sums[0]), (panel + task.other, sums[1])].map(|(panel, sums)| {
        let bias = task.bias.and_then(|bias| bias[panel * LANES..].first_chunk()).unwrap_or(&[0.0; LANES]);
        (sums.as_floats(), bias)
    });
    let gate = L::load(gate.0).add(L::load(gate.1));
    let up = L::load(up.0).add(L::load(up.1));
    // SAFETY: as above.
    unsafe { task.out.write_tile(row, [panel], [[activation.apply(gate, up)]], None) };
}

/// Writes some of the rows of a block, the first of which is row `row`.
#[inline(always)]
fn finish_block<L: Lanes>(task: &OnTiles<'_>, row: usize, panel: usize, block: &Block, rows: Range<usize>) {
    for i in rows {
        let half = i / LANES * PAIR;
        finish::<L>(task, row + i, panel, [&block[half][i % LANES], &block[half + 1][i % LANES]]);
    }
}

/// Multiplies one band.
#[inline(always)]
fn few<L: Lanes, T: Registers>(t: &mut T, task: &OnTiles<'_>, sums: &mut Block, copies: &mut [tiles::Tile]) {
    let (of_b, of_c) = copies.split_at_mut(copies.len() / PAIR);
    for first in task.panels.clone().step_by(task.step) {
        t.zero::<0>();
        t.zero::<1>();
        let b = task.tiles(first, 0..task.groups, of_b);
        let c = task.tiles(first + task.other, 0..task.groups, of_c);
        for (group, (a, (b, c))) in task.x.iter().zip(b.iter().zip(c)).enumerate() {
            let ahead = [0, task.other].map(|other| task.line(first + other, group).wrapping_byte_add(AHEAD));
            for line in 0..LANES {
                prefetch(ahead[0].wrapping_add(line).cast());
                prefetch(ahead[1].wrapping_add(line).cast());
            }
            t.load::<4>(a);
            t.load::<6>(b);
            t.add_products::<0, 4, 6>();
            t.load::<7>(c);
            t.add_products::<1, 4, 7>();
        }
        t.store::<0>(&mut sums[0]);
        t.store::<1>(&mut sums[1]);
        finish_block::<L>(task, 0, first, sums, 0..task.rows);
    }
}

/// Sums that are in the tile registers.
struct Current {
    /// Index of their block.
    block: usize,
    /// First of their rows.
    row: usize,
    /// First of their panels, if they are complete.
    panel: Option<usize>,
}

/// Multiplies a pass of bands. Stores and vectors overlap with products only if they are near each other: old sums are stored
/// between the first products of the next ones, and their rows are written between the later products, each a block after it was
/// prefetched: outputs of many rows lie in memory or in the cache of another core.
#[inline(always)]
fn many<L: Lanes, T: Registers>(
    t: &mut T,
    task: &OnTiles<'_>,
    bands: Range<usize>,
    blocks: &mut [Block],
    copies: &mut [tiles::Tile],
) {
    let (of_b, of_d) = copies.split_at_mut(copies.len() / PAIR);
    let (groups, steps) = (task.groups, bands.len() / PAIR);
    let resident = equal(groups, RESIDENT);
    let has_parts = resident < groups;
    // Panels whose sums wait together.
    let most = if has_parts { WAITING / steps * task.step } else { task.panels.len() };
    let at_once = equal(task.panels.len(), most).next_multiple_of(task.step);
    let mut current: Option<Current> = None;
    for panels in task.panels.clone().step_by(at_once).map(|first| first..task.panels.end.min(first + at_once)) {
        for begin in (0..groups).step_by(resident) {
            let part = begin..groups.min(begin + resident);
            let (lines, rows) = (LANES.div_ceil(steps), (PAIR * LANES).div_ceil(part.len()));
            for (i, first) in panels.clone().step_by(task.step).enumerate() {
                let b = task.tiles(first, part.clone(), of_b);
                let d = task.tiles(first + task.other, part.clone(), of_d);
                // The same part of the next two panels moves from memory to the L2 cache.
                let mut ahead = [0, task.other].map(|other| task.line(first + task.step + other, begin));
                for step in 0..steps {
                    let [a, c] = [0, 1].map(|i| &task.x[(bands.start + PAIR * step + i) * groups..][part.clone()]);
                    // Only sums of parts are read again.
                    let block = if has_parts { i * steps + step } else { 0 };
                    let start = (bands.start + PAIR * step) * LANES;
                    let (mut is_first, mut row) = (true, 0);
                    for ((a, c), (b, d)) in a.iter().zip(c).zip(b.iter().zip(d)) {
                        for _ in 0..lines {
                            for ahead in &mut ahead {
                                prefetch_for_later(ahead.cast());
                                *ahead = ahead.wrapping_add(1);
                            }
                        }
                        let exchange =
                            is_first.then(|| (current.as_ref().map(|it| it.block), (begin > 0).then_some(block)));
                        is_first = false;
                        t.stream::<4>(a);
                        t.load::<6>(b);
                        product::<0, 4, 6>(t, blocks, exchange);
                        t.stream::<5>(c);
                        product::<2, 5, 6>(t, blocks, exchange);
                        t.load::<7>(d);
                        product::<1, 4, 7>(t, blocks, exchange);
                        product::<3, 5, 7>(t, blocks, exchange);
                        let end = (PAIR * LANES).min(row + rows);
                        if let Some(Current { block, row: at, panel: Some(panel) }) = current {
                            finish_block::<L>(task, at, panel, &blocks[block], row..end);
                        }
                        if part.end == groups {
                            (row..end).for_each(|row| task.prefetch(start + row, first));
                        }
                        row = end;
                    }
                    current = Some(Current { block, row: start, panel: (part.end == groups).then_some(first) });
                }
            }
        }
    }
    if let Some(Current { block, row, panel: Some(panel) }) = current {
        let [a, b, c, d] = &mut blocks[block];
        t.store::<0>(a);
        t.store::<1>(b);
        t.store::<2>(c);
        t.store::<3>(d);
        finish_block::<L>(task, row, panel, &blocks[block], 0..PAIR * LANES);
    }
}

/// Adds products to the sums of tile C. `exchange`: first stores the old sums to a block, and loads those of a block, or starts from
/// zero.
#[inline(always)]
fn product<const C: usize, const A: usize, const B: usize>(
    t: &mut impl Registers,
    blocks: &mut [Block],
    exchange: Option<(Option<usize>, Option<usize>)>,
) {
    if let Some((old, new)) = exchange {
        if let Some(block) = old {
            t.store::<C>(&mut blocks[block][C]);
        }
        match new {
            Some(block) => t.load::<C>(&blocks[block][C]),
            None => t.zero::<C>(),
        }
    }
    t.add_products::<C, A, B>();
}

/// Sums in the order of tiles, with vectors.
pub(super) struct Grouped<D>(PhantomData<D>);

impl<D: PairLanes> Tile for Grouped<D> {
    type Number = u32;
    type Line = Pairs;
    type Sums = D::Floats;
    const NUMBERS_PER_LINE: usize = 1;

    /// Each output takes three registers.
    #[inline(always)]
    fn most_rows() -> usize {
        4
    }

    #[inline(always)]
    fn accumulate<const M: usize, const P: usize>(
        x: [&[u32]; M],
        w: [&[Pairs]; P],
        ahead: [*const Pairs; P],
    ) -> [[D::Floats; P]; M] {
        let zero = D::Floats::splat(0.0);
        let mut sums = [[zero; P]; M];
        let pairs = x.first().map_or(0, |x| x.len());
        // The compiler sees that no index is out of bounds.
        let (x, w) = (x.map(|x| &x[..pairs]), w.map(|w| &w[..pairs]));
        for first in (0..pairs).step_by(LANES) {
            let (mut even, mut odd) = ([[zero; P]; M], [[zero; P]; M]);
            for i in first..pairs.min(first + LANES) {
                for p in 0..P {
                    prefetch(ahead[p].wrapping_add(i).cast());
                    let (low, high) = (D::Floats::load_half::<false>(&w[p][i]), D::Floats::load_half::<true>(&w[p][i]));
                    for m in 0..M {
                        let value = x[m][i];
                        let a = D::Floats::splat(f32::from_bits(value << 16));
                        let b = D::Floats::splat(f32::from_bits(value & 0xffff_0000));
                        even[m][p] = a.mul_add(low, even[m][p]);
                        odd[m][p] = b.mul_add(high, odd[m][p]);
                    }
                }
            }
            for m in 0..M {
                for p in 0..P {
                    sums[m][p] = sums[m][p].add(even[m][p].add(odd[m][p]));
                }
            }
        }
        sums
    }
}

/// Computes outputs of a task again that vectors may have computed with other bits than the definition. `least`: the
/// [`least_exponent`] of each panel.
pub(super) fn repair(task: &Task<'_, u32, Pairs>, pairs: Range<usize>, least: &[u32]) {
    for (row, x) in task.x.chunks(task.row).enumerate() {
        let of_row = least_exponent(x.iter().copied());
        for panel in pairs.clone().flat_map(|pair| [0, 1].map(|second| task.panel(pair, second))).flatten() {
            // SAFETY: the row exists, and only this task accesses this panel, which it has written.
            let found = unsafe { task.out.read_tile::<Portable<true>, 1, 1>(row, panel) };
            let is_nan = numbers(found).as_flattened().as_flattened().iter().any(|sum| sum.is_nan());
            if are_normal(of_row, least[panel]) && !is_nan {
                continue;
            }
            let lines = &task.lines[panel * task.row..][..task.row];
            let sums = std::array::from_fn(|output| {
                let groups = x.chunks(LANES).zip(lines.chunks(LANES));
                groups
                    .fold(0.0, |sum, (x, w)| add_group(sum, x.iter().copied().zip(w.iter().map(|line| line.0[output]))))
            });
            // SAFETY: as above.
            unsafe { task.out.write_tile(row, [panel], [[Portable::<true>::load(&sums)]], task.bias) };
        }
    }
}
