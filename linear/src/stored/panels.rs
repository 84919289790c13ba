//! Memory layout of stored weights.
//!
//! ```text
//! a pair of panels: 32 outputs
//!   header   scales   [groups][32]      in the type of the format
//!            offsets  [groups][32]
//!            outer    [ceil(k / 256)][32] half-precision scales, then as many minima if the format has them
//!            padding to a line
//!   block 0  codes of 32 inputs × outputs 0..16, then of outputs 16..32
//!   block 1  …
//! ```
//!
//! Codes of b bits take b lines of 64 bytes per panel of a block. They are cut into planes of 4, 2 or 1 bits; 8-bit codes are
//! one plane. A line of a plane of w bits holds 32 / w inputs. It consists of one word of 32 bits per output, so that shifting
//! all words by the same number and masking them gives the codes of four inputs, one per byte:
//!
//! ```text
//! inputs 4g..4g+4 of a plane of w bits: line g·w / 8, shift (g·w) mod 8
//! bits    2    3      4    5      6      8
//! planes  2    2, 1   4    4, 1   4, 2   8
//! ```
//!
//! Codes that are floats of 8 bits are stored by inputs, `[32][16]`. So a task reads memory as one stream, and the matrix has the
//! size of the stored weights, but for outputs that pad the last pair and scales of less than a byte.

use crate::error::LinearError;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use simd::int8::{GROUP, IntLanes};
use simd::small_float::f32_to_bf16;
use simd::{LANES, Pool};

use super::format::{Codes, OUTER, Offset, StoredFormat, StoredRow, weight};
use crate::blocks::{Ahead, OUTPUTS, PAIR};
use crate::form::Line;
use crate::format::in_panels;
use crate::pair_tiles;
use crate::quantize::BLOCK;

/// Groups of four inputs in a block.
pub(super) const FOURS: usize = BLOCK / 4;

/// Widths of the two planes of codes with this many bits; the second may be 0.
pub(super) const fn planes(bits: u32) -> [u32; 2] {
    match bits {
        3 => [2, 1],
        5 => [4, 1],
        6 => [4, 2],
        _ => [bits, 0],
    }
}

/// A matrix `[n, k]` in pairs of panels, padded with zero codes and scales.
pub(crate) struct StoredPanels {
    pub format: StoredFormat,
    pub k: usize,
    lines: Vec<Line>,
    /// The numbers of codes of less than 8 bits, in bfloat16.
    pub(super) numbers: Box<[u16; 64]>,
    /// Offsets in the header, in bytes, and its lines.
    pub(super) layout: Layout,
}

/// Where the parts of a pair lie.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// First byte of the offsets.
    pub offsets: usize,
    /// First byte of the outer scales.
    pub outer: usize,
    /// First byte of the outer minima.
    pub outer_minima: usize,
    /// Lines of the header.
    pub header: usize,
    /// Lines of a panel in a block.
    pub block: usize,
    /// Lines of a pair.
    pub pair: usize,
}

impl Layout {
    fn new(format: &StoredFormat, k: usize) -> Layout {
        // Both halves of the last block are read, even if it has inputs of the first alone.
        let groups = format.groups(if format.halves() { k.next_multiple_of(BLOCK) } else { k });
        let offsets = groups * OUTPUTS * format.scale.bytes();
        let outer = offsets + groups * OUTPUTS * format.offset.bytes();
        let outer_bytes = if format.scale.has_outer() { k.div_ceil(OUTER) * OUTPUTS * size_of::<u16>() } else { 0 };
        let outer_minima = outer + outer_bytes;
        let end = outer_minima + if format.has_minimum() { outer_bytes } else { 0 };
        let (header, block) = (end.div_ceil(GROUP), format.codes.bits() as usize);
        Layout { offsets, outer, outer_minima, header, block, pair: header + k.div_ceil(BLOCK) * PAIR * block }
    }
}

impl StoredPanels {
    /// Bytes of a packed `[n, k]`.
    pub fn packed_bytes(format: &StoredFormat, n: usize, k: usize) -> usize {
        n.div_ceil(OUTPUTS) * Layout::new(format, k).pair * GROUP
    }

    /// Packs `n` rows; `read` writes one of them. Each thread allocates a pair of rows.
    ///
    /// # Errors
    /// [`LinearError::BadWeights`] if a weight is not finite.
    pub fn pack(
        pool: &Pool,
        format: StoredFormat,
        [n, k]: [usize; 2],
        read: impl Fn(usize, &mut StoredRow) + Sync,
    ) -> Result<StoredPanels, LinearError> {
        let layout = Layout::new(&format, k);
        let sound = AtomicBool::new(true);
        let write = |pair: usize, lines: &mut [Line]| {
            let mut row = StoredRow::new(&format, k);
            let (header, blocks) = lines.split_at_mut(layout.header);
            for output in 0..OUTPUTS.min(n - pair * OUTPUTS) {
                read(pair * OUTPUTS + output, &mut row);
                if !row.is_finite(&format) {
                    sound.store(false, Ordering::Relaxed);
                }
                write_header(&format, &layout, &row, output, as_bytes_mut(header));
                write_codes(&format, &layout, &row.codes, output, blocks);
            }
        };
        let lines = in_panels(pool, n.div_ceil(OUTPUTS), layout.pair, OUTPUTS * k, Line([0; GROUP]), write);
        match sound.into_inner() {
            true => Ok(StoredPanels { format, k, lines, layout, numbers: Box::new(numbers(format.codes)) }),
            false => Err(LinearError::NotFinite),
        }
    }

    /// Bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.lines[..])
    }

    /// Blocks of 32 inputs in a row.
    pub fn blocks(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    /// Tiles of a row.
    pub fn tiles(&self) -> usize {
        self.blocks() * (BLOCK / self.format.tile())
    }

    /// Lines of a panel that a tile is in, and the first group of four inputs of the tile in them.
    #[inline(always)]
    pub(super) fn tile(&self, pair: usize, panel: usize, tile: usize) -> (&[Line], usize) {
        let input = tile * self.format.tile();
        let lines = &self.pair(pair).1[(input / BLOCK * PAIR + panel) * self.layout.block..][..self.layout.block];
        (lines, input % BLOCK / 4)
    }

    /// Returns where some tiles of a pair lie, with the header if they are the first; empty behind the last pair.
    pub(super) fn lines(&self, pair: usize, tiles: Range<usize>) -> Range<*const Line> {
        let Layout { header, block, pair: all, .. } = self.layout;
        let lines = self.lines.get(pair * all..).unwrap_or_default();
        let line = |tile: usize| (header + tile * self.format.tile() * PAIR * block / BLOCK).min(lines.len());
        lines[if tiles.start == 0 { 0 } else { line(tiles.start) }..line(tiles.end)].as_ptr_range()
    }

    /// Header and codes of a pair.
    #[inline(always)]
    pub(super) fn pair(&self, pair: usize) -> (&[u8], &[Line]) {
        let (header, codes) = self.lines[pair * self.layout.pair..][..self.layout.pair].split_at(self.layout.header);
        (as_bytes(header), codes)
    }

    /// Returns what to prefetch while pair `pair` is multiplied with `bands` bands of rows.
    #[inline(always)]
    pub(super) fn ahead(&self, pair: usize, bands: usize) -> Ahead {
        let Range { start, end } = self.lines.as_ptr_range();
        let start = start.wrapping_add(pair * self.layout.pair);
        Ahead::new(start..end, [self.layout.pair, PAIR * self.layout.block], bands)
    }

    /// Code of input `i` of output `row`, and the bits of its scale and of its offset, each with those of what it is multiplied with.
    fn element(&self, row: usize, i: usize) -> (u8, (u32, u16), (u32, u16)) {
        let (header, lines) = self.pair(row / OUTPUTS);
        let (output, lane) = (row % OUTPUTS, row % LANES);
        let format = &self.format;
        let number = |start: usize, bytes: usize, index: usize| {
            let at = start + (index * OUTPUTS + output) * bytes;
            header[at..at + bytes].iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte))
        };
        let block = &lines[(i / BLOCK * PAIR + output / LANES) * self.layout.block..][..self.layout.block];
        let code = code(format.codes, block, i % BLOCK, lane);
        let (group, outer) = (i / format.group, i / OUTER);
        let scale = number(0, format.scale.bytes(), group);
        let offset = number(self.layout.offsets, format.offset.bytes(), group);
        let (mut outer_scale, mut outer_minimum) = (0, 0);
        if format.scale.has_outer() {
            outer_scale = number(self.layout.outer, 2, outer) as u16;
            if format.has_minimum() {
                outer_minimum = number(self.layout.outer_minima, 2, outer) as u16;
            }
        }
        (code, (scale, outer_scale), (offset, outer_minimum))
    }

    /// Writes output `row` as floats; column i of the weights goes to `out[place(i)]`.
    pub fn copy_row(&self, row: usize, out: &mut [f32], place: impl Fn(usize) -> usize) {
        for i in 0..self.k {
            let (code, scale, offset) = self.element(row, i);
            out[place(i)] = weight(&self.format, code, scale, offset);
        }
    }

    /// The product of output `row` with a row of activations in the order of the columns, as tiles compute it.
    pub fn on_tiles(&self, row: usize, x: &[f32]) -> f32 {
        let (mut sum, format) = (0.0, &self.format);
        let width = format.tile() * format.chain();
        for (step, x) in x.chunks(width).enumerate() {
            let number = |i: usize| format.codes.number(self.element(row, step * width + i).0);
            let numbers: Vec<f32> = (0..x.len()).map(number).collect();
            let (_, scale, offset) = self.element(row, step * width);
            let scale = format.scale.value(scale.0, scale.1);
            let minimum = match format.offset {
                Offset::None => None,
                Offset::ZeroPoint => Some(scale * -(offset.0 as f32)),
                _ => Some(format.offset.minimum(offset.0, offset.1)),
            };
            sum = pair_tiles::reference(sum, (x, &numbers, format.tile()), scale, minimum);
        }
        sum
    }
}

/// The numbers of codes of less than 8 bits, in bfloat16.
fn numbers(codes: Codes) -> [u16; 64] {
    let mut numbers = [0; 64];
    if codes.bits() < 8 {
        let of_codes = numbers.iter_mut().take(1 << codes.bits()).enumerate();
        of_codes.for_each(|(code, number)| *number = f32_to_bf16(codes.number(code as u8)));
    }
    numbers
}

fn as_bytes(lines: &[Line]) -> &[u8] {
    // SAFETY: a line is 64 bytes without padding.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), size_of_val(lines)) }
}

fn as_bytes_mut(lines: &mut [Line]) -> &mut [u8] {
    // SAFETY: as in `as_bytes`; any bytes are a line.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
}

fn write_header(format: &StoredFormat, layout: &Layout, row: &StoredRow, output: usize, header: &mut [u8]) {
    let mut write = |start: usize, bytes: usize, index: usize, bits: u32| {
        header[start + (index * OUTPUTS + output) * bytes..][..bytes].copy_from_slice(&bits.to_le_bytes()[..bytes]);
    };
    row.scales.iter().enumerate().for_each(|(i, bits)| write(0, format.scale.bytes(), i, *bits));
    row.offsets.iter().enumerate().for_each(|(i, bits)| write(layout.offsets, format.offset.bytes(), i, *bits));
    for (i, [scale, minimum]) in row.outer.iter().enumerate() {
        write(layout.outer, size_of::<u16>(), i, u32::from(*scale));
        if format.has_minimum() {
            write(layout.outer_minima, size_of::<u16>(), i, u32::from(*minimum));
        }
    }
}

/// Writes the codes of an output into blocks that were zero.
fn write_codes(format: &StoredFormat, layout: &Layout, codes: &[u8], output: usize, lines: &mut [Line]) {
    let (panel, lane) = (output / LANES, output % LANES);
    let blocks =
        lines.chunks_exact_mut(PAIR * layout.block).map(|pair| &mut pair[panel * layout.block..][..layout.block]);
    let bits = format.codes.bits();
    for (codes, block) in codes.chunks(BLOCK).zip(blocks) {
        let mut padded = [0; BLOCK];
        padded[..codes.len()].copy_from_slice(codes);
        if format.codes == Codes::E4m3 {
            let bytes = as_bytes_mut(block);
            padded.iter().enumerate().for_each(|(i, code)| bytes[i * LANES + lane] = *code);
            continue;
        }
        let [low, high] = planes(bits);
        for (g, four) in padded.as_chunks::<4>().0.iter().enumerate() {
            let four = u32::from_le_bytes(*four);
            or_into(block, lane, g as u32 * low, four & every_byte(low));
            if high > 0 {
                or_into(&mut block[low as usize..], lane, g as u32 * high, four >> low & every_byte(high));
            }
        }
    }
}

/// The codes of inputs 4g..4g+4 of a block's panel.
#[inline(always)]
pub(super) fn codes<I: IntLanes, const LOW: u32, const HIGH: u32>(block: &[Line], g: usize) -> I::Weights {
    let low = plane::<I, LOW>(block, g);
    if HIGH == 0 { low } else { I::join(low, plane::<I, HIGH>(&block[LOW as usize..], g), LOW) }
}

#[inline(always)]
fn plane<I: IntLanes, const WIDTH: u32>(lines: &[Line], g: usize) -> I::Weights {
    let bit = g as u32 * WIDTH;
    I::load_codes(&lines[bit as usize / 8].0, bit % 8, WIDTH)
}

/// A mask of the lowest `bits` bits of every byte.
const fn every_byte(bits: u32) -> u32 {
    0x0101_0101 * ((1 << bits) - 1)
}

fn or_into(plane: &mut [Line], lane: usize, bit: u32, four: u32) {
    let word = &mut plane[bit as usize / 8].0.as_chunks_mut::<4>().0[lane];
    *word = (u32::from_le_bytes(*word) | four << (bit % 8)).to_le_bytes();
}

/// The code of input `i` of a block's panel.
pub(super) fn code(codes: Codes, block: &[Line], i: usize, lane: usize) -> u8 {
    if codes == Codes::E4m3 {
        return as_bytes(block)[i * LANES + lane];
    }
    let [low, high] = planes(codes.bits());
    let plane = |plane: &[Line], width: u32| {
        let bit = i as u32 / 4 * width;
        plane[bit as usize / 8].0[lane * 4 + i % 4] >> (bit % 8) & ((1u32 << width) - 1) as u8
    };
    plane(block, low) | if high > 0 { plane(&block[low as usize..], high) << low } else { 0 }
}
