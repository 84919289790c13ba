//! Memory layout of quantised weights.
//!
//! ```text
//! a pair of panels: 32 outputs
//!   block 0  8 lines (8 bits) or 4 lines (4 bits) of outputs 0..16, 32 k       see `form`
//!            as many lines of outputs 16..32
//!            a line of scales of all 32 outputs
//!   block 1  …
//! ```
//!
//! 17 or 9 bytes per 16 weights. A tile reads a pair from its first byte to its last, so each thread reads memory as one
//! stream: several streams per thread get only two thirds of the bandwidth.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use device::Dtype;
use half::f16;
use simd::{Isa, LANES, Pool};

use super::form::{Form, Line};
use super::format::{in_panels, read_row};
use super::quantize::{BLOCK, WeightBlock, quantize_row};

/// Panels in a pair.
pub(super) const PAIR: usize = 2;

/// Outputs in a pair.
pub(super) const OUTPUTS: usize = PAIR * LANES;

/// One block of a pair: weights and scales of each panel.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Unit<B> {
    pub weights: [B; PAIR],
    /// Bits of half-precision numbers.
    pub scales: [[u16; LANES]; PAIR],
}

/// A matrix `[n, k]` in pairs of panels, padded with zeros.
pub(super) struct Blocks<F: Form> {
    units: Vec<Unit<F::Block>>,
    /// Blocks in a row.
    pub blocks: usize,
}

impl<F: Form> Blocks<F> {
    /// Returns the size in bytes of a packed `[n, k]`.
    pub fn packed_bytes(n: usize, k: usize) -> usize {
        n.div_ceil(OUTPUTS) * k.div_ceil(BLOCK) * size_of::<Unit<F::Block>>()
    }

    /// Packs the `n` rows of all parts; each thread allocates one row. Returns `None` if a weight cannot be stored.
    pub fn pack(pool: &Pool, n: usize, k: usize, parts: &[(Dtype, &[u8])]) -> Option<Self> {
        let blocks = k.div_ceil(BLOCK);
        let sound = AtomicBool::new(true);
        let isa = Isa::best();
        let empty = Unit { weights: [F::EMPTY; PAIR], scales: [[0; LANES]; PAIR] };
        let units =
            in_panels(pool, n.div_ceil(OUTPUTS), blocks, OUTPUTS * k, empty, |pair, units: &mut [Unit<F::Block>]| {
                let mut row = vec![0.0; k];
                let mut packed = vec![WeightBlock::ZERO; blocks];
                for output in 0..OUTPUTS {
                    read_row(parts, pair * OUTPUTS + output, &mut row);
                    if !quantize_row(isa, F::QUANTIZATION, &row, &mut packed) {
                        sound.store(false, Ordering::Relaxed);
                    }
                    let (panel, lane) = (output / LANES, output % LANES);
                    for (unit, block) in units.iter_mut().zip(&packed) {
                        F::store(&mut unit.weights[panel], lane, &block.values);
                        unit.scales[panel][lane] = block.scale.to_bits();
                    }
                }
            });
        sound.into_inner().then_some(Blocks { units, blocks })
    }

    /// Returns the number of bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.units[..])
    }

    /// Returns the blocks of pair `pair`.
    #[inline(always)]
    pub fn pair(&self, pair: usize) -> &[Unit<F::Block>] {
        &self.units[pair * self.blocks..][..self.blocks]
    }

    /// Returns what to prefetch while pair `pair` is multiplied with `bands` bands of rows.
    #[inline(always)]
    pub fn ahead(&self, pair: usize, bands: usize) -> Ahead {
        let lines = size_of::<Unit<F::Block>>() / size_of::<Line>();
        let range = self.units.as_ptr_range();
        let start = range.start.wrapping_add(pair * self.blocks);
        Ahead::new(start.cast()..range.end.cast(), [self.blocks * lines, lines], bands)
    }

    /// Returns where some blocks of a pair lie, of those that exist.
    pub fn lines(&self, pair: usize, blocks: Range<usize>) -> Range<*const Line> {
        let units = self.units.get(pair * self.blocks..).unwrap_or_default();
        let Range { start, end } = units[blocks.start.min(units.len())..blocks.end.min(units.len())].as_ptr_range();
        start.cast()..end.cast()
    }

    /// Returns the integers and the scale of block `block` of output `row`.
    pub fn block(&self, row: usize, block: usize) -> ([i8; BLOCK], f32) {
        let (panel, lane) = (row % OUTPUTS / LANES, row % LANES);
        let unit = &self.pair(row / OUTPUTS)[block];
        let values = std::array::from_fn(|i| F::value(&unit.weights[panel], lane, i));
        (values, f16::from_bits(unit.scales[panel][lane]).to_f32())
    }

    /// Writes output `row` as floats.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let (values, scale) = self.block(row, block);
            out.iter_mut().zip(values).for_each(|(out, value)| *out = f32::from(value) * scale);
        }
    }
}

/// Lines to prefetch; see [`Blocks::ahead`].
pub(super) struct Ahead {
    next: *const Line,
    end: *const Line,
    at_once: usize,
}

impl Ahead {
    /// What to prefetch while the first pair of `lines` is multiplied with `bands` bands of rows. It has `pair` lines, and each of
    /// its blocks `block`.
    #[inline(always)]
    pub fn new(lines: Range<*const Line>, [pair, block]: [usize; 2], bands: usize) -> Ahead {
        const LINES_AHEAD: usize = 64;
        // A single band reads at the speed of memory. Of several bands, the first should find the whole next pair in cache.
        let distance = if bands == 1 { LINES_AHEAD } else { pair };
        let Range { start, end } = lines;
        let [next, end] = [distance, distance + pair].map(|lines| start.wrapping_add(lines).min(end));
        Ahead { next, end, at_once: block.div_ceil(bands) }
    }

    /// Prefetches lines while [`Ahead::prefetch`] is called so many times.
    #[inline(always)]
    pub fn over(Range { start, end }: Range<*const Line>, calls: usize) -> Ahead {
        let lines = (end as usize).saturating_sub(start as usize) / size_of::<Line>();
        Ahead { next: start, end, at_once: lines.div_ceil(calls) }
    }

    /// Prefetches nothing.
    pub fn nothing() -> Ahead {
        Ahead { next: std::ptr::null(), end: std::ptr::null(), at_once: 0 }
    }

    /// Prefetches the lines that are due with one block of one band, each with `prefetch`.
    #[inline(always)]
    pub fn prefetch(&mut self, prefetch: impl Fn(*const u8)) {
        for _ in 0..self.at_once {
            // At the end this repeats the last line, which is cheaper than a branch.
            prefetch(self.next.cast());
            self.next = self.next.wrapping_add(1).min(self.end);
        }
    }
}
