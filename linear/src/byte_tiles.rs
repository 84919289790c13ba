//! Products of 8-bit integers on tile registers, for many rows.
//!
//! ```text
//! a step: one tile of 16 rows and one of 16 outputs, 32 inputs or 16        Σ = Σ w·a     i32, exact
//! y += Σ · (weight scale · row scale)                                       f32, fused, step after step
//! y += Σ a · (minimum · row scale)                                          if the weights have minima
//! ```
//!
//! Rows are regrouped into bands of sixteen once per product. A task unpacks blocks of a pair of panels to signed bytes that stay in
//! the L1 cache, and multiplies all bands with them. Integers are exact, and each output has the operations of the product with
//! vectors in their order, so both give the same bits for any number of rows. Sums pause in memory between two unpacked parts.

use std::cell::Cell;
use std::ops::Range;

use simd::int8::{self, DotIsa, DotLanes, GROUP, IntLanes, WithInts};
use simd::tiles::{BYTES, ByteLines, ByteRows, EMPTY, Registers, Tile};
use simd::{Isa, LANES, dispatch, on_tiles, prefetch_for_later};

use super::blocks::{Ahead, OUTPUTS, PAIR};
use super::output::Output;
use super::processor::Processor;
use super::rows::RowBlock;

/// Least number of rows of a band that is faster on tiles.
const MANY: usize = 13;

/// Blocks that are unpacked at a time: 24 KiB of bytes.
const AT_ONCE: usize = 24;

/// Most bytes of bands that are multiplied with a pair before the next bands, so that they stay in the L2 cache.
const PASS: usize = 1 << 20;

/// Most bands of a pass.
const BANDS_AT_ONCE: usize = 32;

/// A block of sixteen rows.
#[derive(Clone, Copy)]
#[repr(C)]
struct Band {
    rows: ByteRows,
    scales: [f32; LANES],
    /// Sums of the integers of each step.
    sums: [[f32; LANES]; 2],
}

/// A block of a panel.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Unpacked {
    /// The integers of the weights.
    pub lines: ByteLines,
    /// Scales of each step.
    pub scales: [[f32; LANES]; 2],
    /// What is added to weights, of each step.
    pub minima: [[f32; LANES]; 2],
}

impl Unpacked {
    /// Writes a line of weights without the offsets of its bytes.
    #[inline(always)]
    pub fn write<D: DotLanes>(to: &mut [u8; GROUP], weights: int8::Weights<D>, offsets: &[u8; GROUP]) {
        D::Sums::store(weights, to);
        to.iter_mut().zip(offsets).for_each(|(byte, offset)| *byte = byte.wrapping_sub(*offset));
    }
}

/// Memory of a thread.
struct Scratch {
    unpacked: [[Unpacked; PAIR]; AT_ONCE],
    /// Sums of bands.
    sums: Vec<[Tile; PAIR]>,
}

thread_local! {
    /// Bands of this thread's last product, reused by the next. They are taken out while in use, because a task of the product may
    /// itself run a product on this thread.
    static BANDS: Cell<Vec<Band>> = const { Cell::new(Vec::new()) };
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// Returns the bytes of scratch memory for a product of `rows` rows of `k` numbers with quantised weights on tiles, which is not
/// in [`scratch_bytes`](super::scratch_bytes); 0 if this CPU does not take them.
pub fn band_bytes(rows: usize, k: usize) -> usize {
    match DotIsa::Amx.is_available() {
        true => rows.div_ceil(LANES) * k.div_ceil(BYTES) * size_of::<Band>(),
        false => 0,
    }
}

/// Weights that are unpacked to signed bytes.
pub(super) trait Weights: Sync {
    /// Writes some blocks of a pair.
    fn unpack(&self, dot: DotIsa, pair: usize, blocks: Range<usize>, to: &mut [[Unpacked; PAIR]]);
    /// Returns what to prefetch while pair `pair` is multiplied with `bands` bands of rows.
    fn ahead(&self, pair: usize, bands: usize) -> Ahead;
}

/// Operands of a product.
pub(super) struct Product<'a> {
    pub x: &'a [RowBlock],
    pub rows: usize,
    pub weights: &'a dyn Weights,
    /// Whether a step has 16 inputs instead of 32.
    pub halves: bool,
    pub minima: bool,
    pub bias: Option<&'a [f32]>,
    pub out: Output,
    pub n: usize,
}

/// A part of a product: all bands, some pairs of panels.
struct Task<'a> {
    product: &'a Product<'a>,
    rows: usize,
    dot: DotIsa,
    bands: &'a [Band],
    /// Blocks of a row.
    blocks: usize,
    pairs: Range<usize>,
}

impl Product<'_> {
    /// Computes the rows for which tiles are faster than vectors, from the first on, and returns their number.
    pub fn run(&self, Processor { isa, dot, pool }: Processor<'_>) -> usize {
        let rest = self.rows % LANES;
        let rows = if rest < MANY { self.rows - rest } else { self.rows };
        if dot != DotIsa::Amx || rows == 0 {
            return 0;
        }
        let (blocks, count) = (self.x.len() / self.rows, rows.div_ceil(LANES));
        let mut bands = BANDS.take();
        const ZERO: Band = Band { rows: ByteRows([[0; BYTES]; LANES]), scales: [0.0; LANES], sums: [[0.0; LANES]; 2] };
        bands.resize(bands.len().max(count * blocks), ZERO);
        pool.chunks_mut(&mut bands[..count * blocks], blocks, LANES * blocks * BYTES, |band, to| {
            for row in 0..LANES {
                let x = self.x.chunks_exact(blocks).nth(band * LANES + row);
                for (b, to) in to.iter_mut().enumerate() {
                    to.set(row, x.map_or(&RowBlock::ZERO, |x| &x[b]), self.halves);
                }
            }
        });
        pool.ranges(self.n.div_ceil(OUTPUTS), rows * blocks * BYTES * OUTPUTS, |pairs| {
            let task = &Task { product: self, rows, dot, bands: &bands[..count * blocks], blocks, pairs };
            let mut scratch = SCRATCH.take().unwrap_or_else(Scratch::new);
            // Without vectors, tiles are emulated too.
            let unit = if isa == Isa::Portable { isa } else { Isa::Amx };
            match self.halves {
                true => on_tiles!(unit, [LANES, 16], |t| walk_on(isa, t, task, &mut scratch)),
                false => on_tiles!(unit, [LANES, 32], |t| walk_on(isa, t, task, &mut scratch)),
            }
            SCRATCH.set(Some(scratch));
        });
        BANDS.set(bands);
        rows
    }
}

impl Band {
    fn set(&mut self, row: usize, block: &RowBlock, halves: bool) {
        self.rows.0[row].as_chunks_mut().0.copy_from_slice(&block.values);
        self.scales[row] = block.scale;
        // −128 times the sums, exactly.
        let (first, all) = ((block.first_half / -128) as f32, (block.correction / -128) as f32);
        (self.sums[0][row], self.sums[1][row]) = if halves { (first, all - first) } else { (all, 0.0) };
    }
}

impl Scratch {
    fn new() -> Box<Scratch> {
        let zeros = [[0.0; LANES]; 2];
        let empty = Unpacked { lines: ByteLines([[0; GROUP]; BYTES / 4]), scales: zeros, minima: zeros };
        Box::new(Scratch { unpacked: [[empty; PAIR]; AT_ONCE], sums: Vec::new() })
    }
}

fn walk_on<T: Registers>(isa: Isa, t: &mut T, task: &Task<'_>, scratch: &mut Scratch) {
    dispatch!(isa, walk::<T: Registers>(t: &mut T, task: &Task<'_>, scratch: &mut Scratch));
}

#[inline(always)]
fn walk<L: WithInts, T: Registers>(t: &mut T, task: &Task<'_>, Scratch { unpacked, sums }: &mut Scratch) {
    let Task { product: &Product { weights, out, bias, .. }, rows, blocks, .. } = *task;
    // One band stays in the L1 cache from pair to pair.
    let most = if task.bands.len() == blocks { AT_ONCE / 2 } else { AT_ONCE };
    let at_once = blocks.div_ceil(blocks.div_ceil(most));
    let mut products = [EMPTY; 2];
    let pass = (PASS / size_of_val(&task.bands[..blocks])).clamp(1, BANDS_AT_ONCE) * blocks;
    for (i, bands) in task.bands.chunks(pass).enumerate() {
        let (first, count) = (i * pass / blocks * LANES, bands.len() / blocks);
        sums.resize(sums.len().max(count), [EMPTY; PAIR]);
        for pair in task.pairs.clone() {
            // Each band is multiplied with each panel.
            let mut next = weights.ahead(pair, PAIR * count);
            for begin in (0..blocks).step_by(at_once) {
                let part = begin..blocks.min(begin + at_once);
                let unpacked = &mut unpacked[..part.len()];
                weights.unpack(task.dot, pair, part.clone(), unpacked);
                for panel in 0..PAIR {
                    for ((x, sums), row) in bands.chunks_exact(blocks).zip(&mut *sums).zip((first..).step_by(LANES)) {
                        let sums = &mut sums[panel];
                        let operands = (&x[part.clone()], &*unpacked, panel);
                        multiply::<L, T>(t, task, begin > 0, operands, sums, &mut products, &mut next);
                        for (row, sums) in (row..rows).zip(&*sums).filter(|_| part.end == blocks) {
                            // SAFETY: the row exists, and only this task writes this panel.
                            unsafe { out.write_tile(row, [PAIR * pair + panel], [[L::load(sums.as_floats())]], bias) };
                        }
                    }
                }
            }
        }
    }
}

/// Blocks of a band, and those of a pair of which a panel is multiplied.
type Operands<'a> = (&'a [Band], &'a [[Unpacked; PAIR]], usize);

/// Adds the products of some blocks of a band and a panel to its sums, which start from zero unless `goes_on`.
#[inline(always)]
fn multiply<L: WithInts, T: Registers>(
    t: &mut T,
    task: &Task<'_>,
    goes_on: bool,
    operands: Operands<'_>,
    sums: &mut Tile,
    products: &mut [Tile; 2],
    next: &mut Ahead,
) {
    let mut acc = [L::splat(0.0); LANES];
    if goes_on {
        for (acc, sums) in acc.iter_mut().zip(&*sums) {
            *acc = L::load(sums.as_floats());
        }
    }
    let minima = task.product.minima;
    for step in (0..operands.0.len() * (BYTES / T::WIDTH) + 2).step_by(2) {
        stage::<L, T, 0, 1>(t, step, minima, operands, &mut acc, products, next);
        stage::<L, T, 1, 0>(t, step + 1, minima, operands, &mut acc, products, next);
    }
    for (acc, sums) in acc.into_iter().zip(sums) {
        acc.store(sums.as_floats_mut());
    }
}

/// Multiplies step `step`, adds the products of the step two before it to the sums, and stores those of the step before it. In this
/// order nothing waits for the unit. NOW is the parity of the step, so it is the part of a block that has two.
#[allow(clippy::needless_range_loop)] // one index for several arrays
#[inline(always)]
fn stage<L: WithInts, T: Registers, const NOW: usize, const BEFORE: usize>(
    t: &mut T,
    step: usize,
    minima: bool,
    (x, w, panel): Operands<'_>,
    acc: &mut [L; LANES],
    products: &mut [Tile; 2],
    next: &mut Ahead,
) {
    let (per_block, part) = (BYTES / T::WIDTH, NOW * T::WIDTH % BYTES / 16);
    if let (Some(x), Some(w)) = (x.get(step / per_block), w.get(step / per_block)) {
        t.zero::<NOW>();
        t.load_rows::<4, NOW>(&x.rows);
        t.load_lines::<6, NOW>(&w[panel].lines);
        t.add_byte_products::<NOW, 4, 6>();
        if part == 0 {
            next.prefetch(prefetch_for_later);
        }
    }
    let done = step.wrapping_sub(2) / per_block;
    if let (Some(x), Some(w)) = (x.get(done), w.get(done)) {
        let scales = L::load(&w[panel].scales[part]);
        for m in 0..LANES {
            let scale = scales.mul(L::splat(x.scales[m]));
            acc[m] = L::Ints::fused(L::load_i32(&products[NOW][m]), scale, acc[m]);
        }
        if minima {
            let minima = L::load(&w[panel].minima[part]);
            for m in 0..LANES {
                let minimum = minima.mul(L::splat(x.scales[m]));
                acc[m] = L::Ints::fused(L::splat(x.sums[part][m]), minimum, acc[m]);
            }
        }
    }
    if (1..=x.len() * per_block).contains(&step) {
        t.store::<BEFORE>(&mut products[BEFORE]);
    }
}
