//! Products of weights that have a scale for some inputs, on tile registers.
//!
//! ```text
//! a step: one tile or some of 16 rows and 16 outputs, 32 inputs or 16 each  Σ = Σ w·a
//! y += Σ · (scale · row scale)                                              f32, fused, step after step
//! y += Σ a · (minimum · row scale)                                          if the weights have minima
//! ```
//!
//! The weights of a step are numbers that are exact as the [kind](Kind) of tile has them; rows of floats have no scales. Each output has
//! these operations in this order, whatever the number of rows, the threads or the instruction set.
//!
//! Rows are regrouped into bands of sixteen once per product. A task unpacks some steps of a pair of panels to memory that stays in the L1
//! cache, and multiplies all bands of a pass with them. If a row has more steps, the same ones of several pairs come before the next
//! steps, so that they stay in the L2 cache, and sums wait in memory.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use std::thread::LocalKey;

use simd::int8::{IntLanes, WithInts};
use simd::tiles::{EMPTY, Registers, Tile};
use simd::{Isa, LANES, Pairs, dispatch, prefetch_for_later};

use super::blocks::{Ahead, OUTPUTS, PAIR};
use super::form::Line;
use super::output::Output;
use super::processor::Processor;
use super::quantize::BLOCK;

/// Tiles of a panel that are unpacked at a time: at most 27 KiB for a pair.
const AT_ONCE: usize = 12;

/// Most bands of a pass.
const BANDS: usize = 32;

/// Most sums of a band with a pair that wait for the next steps: 768 KiB.
const WAITING: usize = 384;

/// A kind of numbers that tiles multiply.
pub(super) trait Kind: Sized + Sync + 'static {
    /// Sixteen rows of a tile.
    type A: Copy + Send + Sync;
    /// Sixteen outputs of a tile.
    type B: Copy;
    /// Zeros.
    const ZERO: (Self::A, Self::B);
    /// Whether rows have scales.
    const SCALES_ROWS: bool;

    /// Memory of a thread, reused by its next product.
    fn memory() -> &'static LocalKey<Memory<Self>>;
    /// Calls [`walk_on`] with tile registers for the kind.
    fn on_tiles(isa: Isa, task: &Task<'_, Self>, scratch: &mut Scratch<Self>);
    /// Adds products to tile NOW.
    fn add<const NOW: usize>(t: &mut impl Registers, a: &Self::A, b: &Self::B);
    /// Loads sums of products.
    fn numbers<L: WithInts>(products: &Pairs) -> L;
}

/// A tile of sixteen rows. The first one of a step has its scales and sums.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Band<A> {
    pub rows: A,
    pub scales: [f32; LANES],
    /// Sums of the numbers of each row.
    pub sums: [f32; LANES],
}

/// A tile of a panel. The first one of a step has its scales and minima.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Unpacked<B> {
    pub lines: B,
    pub scales: [f32; LANES],
    /// What is added to weights.
    pub minima: [f32; LANES],
}

/// A tile of each of a pair of panels.
pub(super) type Tiles<K> = [Unpacked<<K as Kind>::B>; PAIR];

/// Memory of a thread. Bands are taken out while in use, because a task of the product may itself run a product on this thread.
pub(super) struct Memory<K: Kind> {
    bands: Cell<Vec<Band<K::A>>>,
    scratch: Cell<Option<Box<Scratch<K>>>>,
}

impl<K: Kind> Memory<K> {
    pub const fn new() -> Memory<K> {
        Memory { bands: Cell::new(Vec::new()), scratch: Cell::new(None) }
    }
}

/// Memory of a task.
pub(super) struct Scratch<K: Kind> {
    unpacked: [Tiles<K>; AT_ONCE],
    /// Sums of bands, for each pair that waits.
    sums: Vec<[Tile; PAIR]>,
}

/// Weights that are unpacked.
pub(super) trait Unpack<K: Kind>: Sync {
    /// Writes some tiles of a pair.
    fn unpack(&self, processor: Processor<'_>, pair: usize, tiles: Range<usize>, to: &mut [Tiles<K>]);
    /// Returns where some tiles of a pair lie, with its scales if they are the first; empty behind the last pair.
    fn lines(&self, pair: usize, tiles: Range<usize>) -> Range<*const Line>;
}

/// Operands of a product.
pub(super) struct Product<'a, K: Kind> {
    pub weights: &'a dyn Unpack<K>,
    pub rows: usize,
    /// Tiles of a row, which is a whole number of steps.
    pub tiles: usize,
    /// Tiles of a step.
    pub chain: usize,
    pub minima: bool,
    pub bias: Option<&'a [f32]>,
    pub out: Output,
    pub n: usize,
}

/// A part of a product: all bands, some pairs of panels.
pub(super) struct Task<'a, K: Kind> {
    product: &'a Product<'a, K>,
    processor: Processor<'a>,
    bands: &'a [Band<K::A>],
    pairs: Range<usize>,
}

impl<K: Kind> Product<'_, K> {
    /// Computes the product; `set` writes a band of rows.
    pub fn run(&self, processor: Processor<'_>, set: impl Fn(usize, &mut [Band<K::A>]) + Sync) {
        let (pool, tiles, count) = (processor.pool, self.tiles, self.rows.div_ceil(LANES));
        let mut bands = K::memory().with(|memory| memory.bands.take());
        let zero = Band { rows: K::ZERO.0, scales: [0.0; LANES], sums: [0.0; LANES] };
        bands.resize(bands.len().max(count * tiles), zero);
        pool.chunks_mut(&mut bands[..count * tiles], tiles, LANES * tiles * BLOCK, set);
        pool.ranges(self.n.div_ceil(OUTPUTS), self.rows * tiles * BLOCK * OUTPUTS, |pairs| {
            let task = &Task { product: self, processor, bands: &bands[..count * tiles], pairs };
            let mut scratch = K::memory().with(|memory| memory.scratch.take()).unwrap_or_else(Scratch::new);
            K::on_tiles(processor.isa, task, &mut scratch);
            K::memory().with(|memory| memory.scratch.set(Some(scratch)));
        });
        K::memory().with(|memory| memory.bands.set(bands));
    }
}

impl<K: Kind> Task<'_, K> {
    /// Rows of the product.
    pub fn rows(&self) -> usize {
        self.product.rows
    }
}

impl<K: Kind> Scratch<K> {
    fn new() -> Box<Scratch<K>> {
        let empty = Unpacked { lines: K::ZERO.1, scales: [0.0; LANES], minima: [0.0; LANES] };
        Box::new(Scratch { unpacked: [[empty; PAIR]; AT_ONCE], sums: Vec::new() })
    }
}

/// What a task runs on.
pub(super) trait Unit {
    type Kind: Kind;
    type Registers: Registers;
    /// Rows of a band that are computed.
    const ROWS: usize;
}

/// [`Unit`] of these types.
pub(super) struct On<K, T, const ROWS: usize>(PhantomData<(K, T)>);

impl<K: Kind, T: Registers, const ROWS: usize> Unit for On<K, T, ROWS> {
    type Kind = K;
    type Registers = T;
    const ROWS: usize = ROWS;
}

/// Computes a task. Without vectors, tiles are emulated too.
pub(super) fn walk_on<K: Kind, T: Registers, const ROWS: usize>(
    isa: Isa,
    t: &mut T,
    task: &Task<'_, K>,
    scratch: &mut Scratch<K>,
) {
    walk_with::<On<K, T, ROWS>>(isa, t, task, scratch);
}

fn walk_with<U: Unit>(isa: Isa, t: &mut U::Registers, task: &Task<'_, U::Kind>, scratch: &mut Scratch<U::Kind>) {
    dispatch!(isa, walk::<U: Unit>(t: &mut U::Registers, task: &Task<'_, U::Kind>, scratch: &mut Scratch<U::Kind>));
}

#[inline(always)]
fn walk<L: WithInts, U: Unit>(t: &mut U::Registers, task: &Task<'_, U::Kind>, scratch: &mut Scratch<U::Kind>) {
    let (&Product { weights, tiles, chain, .. }, Scratch { unpacked, sums }) = (task.product, scratch);
    let at_once = equal(tiles / chain, AT_ONCE / chain) * chain;
    let part_from = |begin: usize| begin..(begin + at_once).min(tiles);
    let mut products = [EMPTY; 2];
    for (pass, bands) in task.bands.chunks(BANDS * tiles).enumerate() {
        let count = bands.len() / tiles;
        // Pairs whose sums wait together. One band reads weights in the order of memory.
        let waiting = if count == 1 || at_once == tiles { 1 } else { equal(task.pairs.len(), WAITING / count) };
        sums.resize(sums.len().max(waiting * count), [EMPTY; PAIR]);
        for first in task.pairs.clone().step_by(waiting) {
            for begin in (0..tiles).step_by(at_once) {
                let part = part_from(begin);
                for pair in first..(first + waiting).min(task.pairs.end) {
                    weights.unpack(task.processor, pair, part.clone(), unpacked);
                    let next = match begin + at_once {
                        next if waiting == 1 && next < tiles => weights.lines(pair, part_from(next)),
                        _ if waiting == 1 => weights.lines(pair + 1, part_from(0)),
                        _ => weights.lines(pair + 1, part.clone()),
                    };
                    // What is unpacked next moves from memory to the L2 cache.
                    let mut next = Ahead::over(next, part.len() * PAIR * count);
                    for (band, sums) in sums[(pair - first) * count..][..count].iter_mut().enumerate() {
                        let x = (&bands[band * tiles..][..tiles], (pass * BANDS + band) * LANES);
                        let weights = (&unpacked[..], pair, part.clone());
                        multiply::<L, U>(t, task, x, weights, (sums, &mut products), &mut next);
                    }
                }
            }
        }
    }
}

/// Returns the size of the fewest parts of a whole that have at most `most`, and nearly the same, each.
pub(super) fn equal(whole: usize, most: usize) -> usize {
    whole.div_ceil(whole.div_ceil(most))
}

/// Adds the products of a band, the first of whose rows is given, and a part of a pair to its sums, which start from zero with the first
/// part. After the last part they are written.
#[inline(always)]
fn multiply<L: WithInts, U: Unit>(
    t: &mut U::Registers,
    task: &Task<'_, U::Kind>,
    (band, row): (&[Band<<U::Kind as Kind>::A>], usize),
    (weights, pair, part): (&[Tiles<U::Kind>], usize, Range<usize>),
    (sums, products): (&mut [Tile; PAIR], &mut [Tile; 2]),
    next: &mut Ahead,
) {
    let &Product { tiles, chain, rows, minima, out, bias, .. } = task.product;
    let (rows, is_last) = (row..rows.min(row + U::ROWS), part.end == tiles);
    for (panel, sums) in sums.iter_mut().enumerate() {
        if is_last {
            rows.clone().for_each(|row| out.prefetch(row, PAIR * pair + panel));
        }
        let mut acc = [L::splat(0.0); LANES];
        if part.start > 0 {
            for m in 0..U::ROWS {
                acc[m] = L::load(sums[m].as_floats());
            }
        }
        let operands = (&band[part.clone()], weights, panel);
        for step in (0..part.len() / chain + 2).step_by(2) {
            stage::<L, U, 0, 1>(t, step, (chain, minima), operands, &mut acc, products, next);
            stage::<L, U, 1, 0>(t, step + 1, (chain, minima), operands, &mut acc, products, next);
        }
        for m in 0..U::ROWS {
            acc[m].store(sums[m].as_floats_mut());
        }
    }
    if is_last {
        let [even, odd] = sums;
        for (row, (even, odd)) in rows.zip(even.iter().zip(odd)) {
            let sums = [even, odd].map(|sums| L::load(sums.as_floats()));
            // SAFETY: the row exists, and only this task writes these panels.
            unsafe { out.write_tile(row, [PAIR * pair, PAIR * pair + 1], [sums], bias) };
        }
    }
}

/// Tiles of a band, and those of a pair of which a panel is multiplied.
type Operands<'a, K> = (&'a [Band<<K as Kind>::A>], &'a [Tiles<K>], usize);

/// Multiplies step `step`, adds the products of the step two before it to the sums, and stores those of the step before it. In this
/// order nothing waits for the unit. NOW is the parity of the step.
#[allow(clippy::needless_range_loop)] // one index for several arrays
#[inline(always)]
fn stage<L: WithInts, U: Unit, const NOW: usize, const BEFORE: usize>(
    t: &mut U::Registers,
    step: usize,
    (chain, minima): (usize, bool),
    (x, w, panel): Operands<'_, U::Kind>,
    acc: &mut [L; LANES],
    products: &mut [Tile; 2],
    next: &mut Ahead,
) {
    if let (Some(x), Some(w)) = (x.get(step * chain..(step + 1) * chain), w.get(step * chain..)) {
        t.zero::<NOW>();
        for (x, w) in x.iter().zip(w) {
            U::Kind::add::<NOW>(t, &x.rows, &w[panel].lines);
            next.prefetch(prefetch_for_later);
        }
    }
    let done = step.wrapping_sub(2).saturating_mul(chain);
    if let (Some(x), Some(w)) = (x.get(done), w.get(done)) {
        let of_row = |numbers: L, m: usize| match U::Kind::SCALES_ROWS {
            true => numbers.mul(L::splat(x.scales[m])),
            false => numbers,
        };
        let scales = L::load(&w[panel].scales);
        for m in 0..U::ROWS {
            let sums = U::Kind::numbers(&products[NOW][m]);
            acc[m] = L::Ints::fused(sums, of_row(scales, m), acc[m]);
        }
        if minima {
            let minima = L::load(&w[panel].minima);
            for m in 0..U::ROWS {
                acc[m] = L::Ints::fused(L::splat(x.sums[m]), of_row(minima, m), acc[m]);
            }
        }
    }
    if (1..=x.len() / chain).contains(&step) {
        t.store::<BEFORE>(&mut products[BEFORE]);
    }
}
