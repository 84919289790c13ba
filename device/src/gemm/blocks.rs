//! Quantised weights: how they lie in memory.
//!
//! ```text
//! a pair of panels: 32 outputs
//!   block 0  8 lines (8 bits) or 4 (4 bits) of outputs 0..16, 32 k       see `form`
//!            as many of outputs 16..32
//!            a line of scales, of all 32
//!   block 1  …
//! ```
//!
//! 17 or 9 bytes for every 16 weights. A tile reads a pair from its first byte to its last, so memory sees one stream for each
//! thread: of several side by side it gives two thirds as much.

use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;

use super::form::{Form, Line};
use super::format::{in_panels, read_row};
use super::quantize::{BLOCK, WeightBlock};
use crate::Dtype;
use crate::simd::{LANES, ask_for};
use crate::{Isa, Pool};

/// Panels of a pair.
pub(super) const PAIR: usize = 2;

/// Outputs of a pair.
pub(super) const OUTPUTS: usize = PAIR * LANES;

/// The scales of a panel in one block, little endian.
type Scales = [u8; 2 * LANES];

/// One block of a pair.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Unit<B> {
    /// Of each panel.
    pub weights: [B; PAIR],
    /// Of each panel.
    pub scales: [Scales; PAIR],
}

/// A matrix `[n, k]` in pairs of panels; zero beyond n and k.
pub(super) struct Blocks<F: Form> {
    units: Vec<Unit<F::Block>>,
    /// Of a row.
    pub blocks: usize,
}

impl<F: Form> Blocks<F> {
    /// Bytes of a packed `[n, k]`.
    pub fn packed_bytes(n: usize, k: usize) -> usize {
        n.div_ceil(OUTPUTS) * k.div_ceil(BLOCK) * size_of::<Unit<F::Block>>()
    }

    /// Packs the rows of the parts, which hold `n` whole rows together; a thread needs the memory of one row. `None` if
    /// a weight can not be stored.
    pub fn pack(pool: &Pool, n: usize, k: usize, parts: &[(Dtype, &[u8])]) -> Option<Self> {
        let blocks = k.div_ceil(BLOCK);
        let sound = AtomicBool::new(true);
        let isa = Isa::best();
        let empty = Unit { weights: [F::EMPTY; PAIR], scales: [[0; 2 * LANES]; PAIR] };
        let units =
            in_panels(pool, n.div_ceil(OUTPUTS), blocks, OUTPUTS * k, empty, |pair, units: &mut [Unit<F::Block>]| {
                let mut row = vec![0.0; k];
                let mut packed = vec![WeightBlock::ZERO; blocks];
                for output in 0..OUTPUTS {
                    read_row(parts, pair * OUTPUTS + output, &mut row);
                    if !F::quantize(isa, &row, &mut packed) {
                        sound.store(false, Ordering::Relaxed);
                    }
                    let (panel, lane) = (output / LANES, output % LANES);
                    for (unit, block) in units.iter_mut().zip(&packed) {
                        F::store(&mut unit.weights[panel], lane, &block.values);
                        unit.scales[panel][2 * lane..][..2].copy_from_slice(&block.scale.to_le_bytes());
                    }
                }
            });
        sound.into_inner().then_some(Blocks { units, blocks })
    }

    /// Bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.units[..])
    }

    /// Pair `pair`, block by block.
    #[inline(always)]
    pub fn pair(&self, pair: usize) -> &[Unit<F::Block>] {
        &self.units[pair * self.blocks..][..self.blocks]
    }

    /// What is to be asked for while pair `pair` is multiplied with `bands` bands of rows.
    #[inline(always)]
    pub fn ahead(&self, pair: usize, bands: usize) -> Ahead {
        const LINES_AHEAD: usize = 64;
        let lines = size_of::<Unit<F::Block>>() / size_of::<Line>();
        let range = self.units.as_ptr_range();
        // One band takes a pair as fast as it comes; of several the first is to find all of it there.
        let distance = if bands == 1 { LINES_AHEAD } else { self.blocks * lines };
        let start = range.start.wrapping_add(pair * self.blocks).cast::<Line>();
        let end = range.end.cast();
        Ahead { next: start.wrapping_add(distance).min(end), end, at_once: lines.div_ceil(bands) }
    }

    /// The integer and the scale of output `row` for input `column`.
    pub fn parts(&self, row: usize, column: usize) -> (i8, f16) {
        let (panel, lane) = (row % OUTPUTS / LANES, row % LANES);
        let unit = &self.pair(row / OUTPUTS)[column / BLOCK];
        (F::value(&unit.weights[panel], lane, column % BLOCK), scale(&unit.scales[panel], lane))
    }

    /// Output `row` as floats.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        let (panel, lane) = (row % OUTPUTS / LANES, row % LANES);
        for (unit, out) in self.pair(row / OUTPUTS).iter().zip(out.chunks_mut(BLOCK)) {
            let scale = scale(&unit.scales[panel], lane).to_f32();
            for (i, value) in out.iter_mut().enumerate() {
                *value = f32::from(F::value(&unit.weights[panel], lane, i)) * scale;
            }
        }
    }

    /// The weight of output `row` for input `column`.
    pub fn get(&self, row: usize, column: usize) -> f32 {
        let (value, scale) = self.parts(row, column);
        f32::from(value) * scale.to_f32()
    }
}

/// That of an output.
fn scale(scales: &Scales, lane: usize) -> f16 {
    f16::from_le_bytes([scales[2 * lane], scales[2 * lane + 1]])
}

/// Lines that will be read soon; see [`Blocks::ahead`].
pub(super) struct Ahead {
    next: *const Line,
    end: *const Line,
    at_once: usize,
}

impl Ahead {
    /// For who has been here before.
    pub fn nothing() -> Ahead {
        Ahead { next: std::ptr::null(), end: std::ptr::null(), at_once: 0 }
    }

    /// Asks for what is due with one block of one band.
    #[inline(always)]
    pub fn ask(&mut self) {
        for _ in 0..self.at_once {
            // Where nothing is left the last line again: cheaper than to ask whether.
            ask_for(self.next.cast());
            self.next = self.next.wrapping_add(1).min(self.end);
        }
    }
}
