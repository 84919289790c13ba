//! Quantised weights: how they lie in memory.
//!
//! ```text
//! a panel: 16 outputs
//!   block 0  8 lines (8 bits) or 4 (4 bits) of 16 outputs, 32 k       see `form`
//!   block 1  8 or 4 lines
//!   …
//!   scales   a line for every two blocks
//! ```
//!
//! 17 or 9 bytes for every 16 weights.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;

use super::WeightFormat;
use super::form::{Form, Line};
use super::pack::{in_panels, read_row};
use super::quantize::{BLOCK, WeightBlock};
use crate::simd::int8::GROUP;
use crate::simd::{LANES, ask_for};
use crate::{Isa, Pool};

/// The scales of one block, little endian.
type Scales = [u8; 2 * LANES];

/// A matrix `[n, k]` in panels of 16 outputs; zero beyond n and k.
pub(super) struct Blocks<F> {
    lines: Vec<Line>,
    /// Of a row.
    pub blocks: usize,
    form: PhantomData<F>,
}

impl<F: Form> Blocks<F> {
    fn lines_per_panel(blocks: usize) -> usize {
        blocks * F::LINES + blocks.div_ceil(2)
    }

    /// Bytes of a packed `[n, k]`.
    pub fn packed_bytes(n: usize, k: usize) -> usize {
        n.div_ceil(LANES) * Self::lines_per_panel(k.div_ceil(BLOCK)) * size_of::<Line>()
    }

    /// Packs the rows of the parts, which hold `n` whole rows together; a thread needs the memory of one row. `None` if
    /// a weight can not be stored.
    pub fn pack(pool: &Pool, n: usize, k: usize, parts: &[(WeightFormat, &[u8])]) -> Option<Self> {
        let blocks = k.div_ceil(BLOCK);
        let (panels, per_panel) = (n.div_ceil(LANES), Self::lines_per_panel(blocks));
        let sound = AtomicBool::new(true);
        let isa = Isa::best();
        let lines = in_panels(pool, panels, per_panel, LANES * k, Line([0; GROUP]), |panel, lines| {
            let mut row = vec![0.0; k];
            let mut packed = vec![WeightBlock::ZERO; blocks];
            let (weights, scales) = lines.split_at_mut(blocks * F::LINES);
            for lane in 0..LANES {
                read_row(parts, panel * LANES + lane, &mut row);
                if !F::quantize(isa, &row, &mut packed) {
                    sound.store(false, Ordering::Relaxed);
                }
                for (b, block) in packed.iter().enumerate() {
                    F::store(&mut weights[b * F::LINES..][..F::LINES], lane, &block.values);
                    let scales = &mut scales[b / 2].0[b % 2 * size_of::<Scales>()..];
                    scales[2 * lane..][..2].copy_from_slice(&block.scale.to_le_bytes());
                }
            }
        });
        sound.into_inner().then_some(Blocks { lines, blocks, form: PhantomData })
    }

    /// Bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.lines[..])
    }

    /// Panel `panel`.
    #[inline(always)]
    pub fn panel(&self, panel: usize) -> Panel<'_, F> {
        let per_panel = Self::lines_per_panel(self.blocks);
        let (weights, scales) = self.lines[panel * per_panel..][..per_panel].split_at(self.blocks * F::LINES);
        Panel { weights: F::blocks(weights), scales }
    }

    /// Some panels, to be asked for while others are multiplied with `bands` bands of rows.
    #[inline(always)]
    pub fn ahead(&self, panel: usize, panels: usize, bands: usize) -> Ahead {
        let per_panel = Self::lines_per_panel(self.blocks);
        let line = |panel: usize| self.lines.as_ptr().wrapping_add((panel * per_panel).min(self.lines.len() - 1));
        let at_once = (panels * per_panel).div_ceil(bands * self.blocks);
        Ahead { next: line(panel), last: line(panel + panels), at_once }
    }

    /// The integer and the scale of output `row` for input `column`.
    pub fn parts(&self, row: usize, column: usize) -> (i8, f16) {
        let (panel, lane, block) = (self.panel(row / LANES), row % LANES, column / BLOCK);
        (F::value(&panel.weights[block], lane, column % BLOCK), scale(&panel, block, lane))
    }

    /// Output `row` as floats.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        let (panel, lane) = (self.panel(row / LANES), row % LANES);
        for (b, out) in out.chunks_mut(BLOCK).enumerate() {
            let scale = scale(&panel, b, lane).to_f32();
            for (i, value) in out.iter_mut().enumerate() {
                *value = f32::from(F::value(&panel.weights[b], lane, i)) * scale;
            }
        }
    }

    /// The weight of output `row` for input `column`.
    pub fn get(&self, row: usize, column: usize) -> f32 {
        let (value, scale) = self.parts(row, column);
        f32::from(value) * scale.to_f32()
    }
}

/// The scale of an output in a block.
fn scale<F: Form>(panel: &Panel<'_, F>, block: usize, lane: usize) -> f16 {
    let scales = panel.scales(block);
    f16::from_le_bytes([scales[2 * lane], scales[2 * lane + 1]])
}

/// Lines that will be read soon; see [`Blocks::ahead`].
pub(super) struct Ahead {
    next: *const Line,
    last: *const Line,
    at_once: usize,
}

impl Ahead {
    /// Asks for what is due with one block of one band.
    #[inline(always)]
    pub fn ask(&mut self) {
        for _ in 0..self.at_once {
            // Where nothing is left the last line again: cheaper than to ask whether.
            ask_for(self.next.cast());
            self.next = self.next.wrapping_add(1).min(self.last);
        }
    }
}

/// Sixteen outputs.
pub(super) struct Panel<'a, F: Form> {
    /// Per block of k.
    pub weights: &'a [F::Block],
    scales: &'a [Line],
}

impl<'a, F: Form> Panel<'a, F> {
    /// The scales of block `block`.
    #[inline(always)]
    pub fn scales(&self, block: usize) -> &'a Scales {
        &self.scales[block / 2].0.as_chunks().0[block % 2]
    }
}
