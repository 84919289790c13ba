//! Stored weights as a product takes them: float32 numbers, or signed bytes with a scale.
//!
//! A task unpacks some blocks of a pair to memory that stays in the L1 cache and multiplies them with all its rows. The floats
//! are the weights themselves, so a product has the bits of one with unpacked weights.
//!
//! The loops run over arrays of sixteen words and are compiled for the vectors of `L`.

use std::ops::Range;

use super::format::{Codes, OUTER, Offset, Scale, StoredFormat};
use super::panels::{FOURS, StoredPanels, every_byte, planes};
use crate::gemm::blocks::{OUTPUTS, PAIR};
use crate::gemm::form::Line;
use crate::gemm::quantize::BLOCK;
use crate::simd::int8::OFFSET;
use crate::simd::{LANES, Lanes, prefetch};

/// Distance of prefetched lines, in bytes.
const AHEAD: usize = 4 << 10;

/// Weights of a pair for 32 inputs: bytes, and numbers for each half of the inputs.
#[derive(Clone, Copy)]
pub(super) struct Bytes {
    /// As [`form::Bytes`](crate::gemm::form::Bytes): each value + 128.
    pub weights: [[Line; FOURS]; PAIR],
    /// Scales of the first half of the inputs and of the second.
    pub scales: [[[f32; LANES]; PAIR]; 2],
    /// What is added to the products with the scales.
    pub minima: [[[f32; LANES]; PAIR]; 2],
}

impl Bytes {
    pub const ZERO: Bytes = Bytes {
        weights: [[Line([0; 64]); FOURS]; PAIR],
        scales: [[[0.0; LANES]; PAIR]; 2],
        minima: [[[0.0; LANES]; PAIR]; 2],
    };
}

/// What the groups of a pair have.
struct Group {
    scales: [[f32; LANES]; PAIR],
    minima: [[f32; LANES]; PAIR],
    /// Zero point of codes below 8 bits, in every byte.
    zeros: [[u32; LANES]; PAIR],
    /// Zero point of 8-bit codes less 128.
    far_zeros: [[f32; LANES]; PAIR],
}

/// The half-precision, float or byte numbers of the 32 outputs in a header, widened by `widen`.
#[inline(always)]
fn numbers<const BYTES: usize>(header: &[u8], start: usize, index: usize, widen: impl Fn([u8; BYTES]) -> f32) -> Pairs {
    let bytes = header[start + index * OUTPUTS * BYTES..][..OUTPUTS * BYTES].as_chunks::<BYTES>().0;
    let mut out = [[0.0; LANES]; PAIR];
    for (out, bytes) in out.as_flattened_mut().iter_mut().zip(bytes) {
        *out = widen(*bytes);
    }
    out
}

type Pairs = [[f32; LANES]; PAIR];

impl Group {
    /// The group that input `input` is in.
    #[inline(always)]
    fn of(panels: &StoredPanels, header: &[u8], input: usize) -> Group {
        let StoredPanels { format, layout, .. } = panels;
        let (index, outer) = (input / format.group, input / OUTER);
        let halves = |start| numbers(header, start, outer, |b| Scale::F16.value(u16::from_le_bytes(b).into(), 0));
        let mut scales = match format.scale {
            Scale::F32 => numbers(header, 0, index, f32::from_le_bytes),
            Scale::F16 => numbers(header, 0, index, |b| Scale::F16.value(u16::from_le_bytes(b).into(), 0)),
            Scale::Bf16 => numbers(header, 0, index, |b| Scale::Bf16.value(u16::from_le_bytes(b).into(), 0)),
            Scale::Exponent => numbers(header, 0, index, |[b]: [u8; 1]| Scale::Exponent.value(b.into(), 0)),
            Scale::Byte => numbers(header, 0, index, |[b]: [u8; 1]| f32::from(b)),
            Scale::SignedByte => numbers(header, 0, index, |[b]: [u8; 1]| f32::from(b as i8)),
        };
        if format.scale.has_outer() {
            multiply(&mut scales, &halves(layout.outer));
        }
        let mut minima = [[0.0; LANES]; PAIR];
        let (mut zeros, mut far_zeros) = ([[0; LANES]; PAIR], [[0.0; LANES]; PAIR]);
        match format.offset {
            Offset::None => {}
            Offset::Minimum => {
                minima = numbers(header, layout.offsets, index, |b| Scale::F16.value(u16::from_le_bytes(b).into(), 0));
            }
            Offset::ByteMinimum => {
                minima = numbers(header, layout.offsets, index, |[b]: [u8; 1]| -f32::from(b));
                multiply(&mut minima, &halves(layout.outer_minima));
            }
            Offset::ZeroPoint => {
                let points = numbers(header, layout.offsets, index, |[b]: [u8; 1]| f32::from(b));
                for (zero, point) in zeros.as_flattened_mut().iter_mut().zip(points.as_flattened()) {
                    *zero = *point as u32 * 0x0101_0101;
                }
                for (zero, point) in far_zeros.as_flattened_mut().iter_mut().zip(points.as_flattened()) {
                    *zero = point - f32::from(OFFSET);
                }
            }
        }
        if let Codes::Integers { bits, zero } = format.codes
            && bits < 8
            && zero > 0
        {
            zeros = [[u32::from(zero) * 0x0101_0101; LANES]; PAIR];
        }
        Group { scales, minima, zeros, far_zeros }
    }
}

#[inline(always)]
fn multiply(numbers: &mut Pairs, by: &Pairs) {
    for (number, by) in numbers.as_flattened_mut().iter_mut().zip(by.as_flattened()) {
        *number *= by;
    }
}

/// The codes of inputs 4g..4g+4 of a panel, as words with a code per byte.
#[inline(always)]
fn codes<const LOW: u32, const HIGH: u32>(block: &[Line], g: usize) -> [u32; LANES] {
    let mut words = shifted::<LOW>(block, g);
    if HIGH > 0 {
        let high = shifted::<HIGH>(&block[LOW as usize..], g);
        for lane in 0..LANES {
            words[lane] |= high[lane] << LOW;
        }
    }
    words
}

#[inline(always)]
fn shifted<const WIDTH: u32>(plane: &[Line], g: usize) -> [u32; LANES] {
    let bit = g as u32 * WIDTH;
    let mut words = [0; LANES];
    for (word, bytes) in words.iter_mut().zip(plane[bit as usize / 8].0.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes) >> (bit % 8) & every_byte(WIDTH);
    }
    words
}

/// How codes become bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Less the zero point, plus 128.
    Points,
    /// As they are: 8 bits with a zero point of 128.
    Whole,
    /// By a table.
    Table,
}

/// The bytes of inputs 4g..4g+4, each value + 128.
#[inline(always)]
fn bytes<L: Lanes>(kind: Kind, mut words: [u32; LANES], zeros: &[u32; LANES], table: &[i8; 16]) -> [u32; LANES] {
    match kind {
        // No byte borrows from the next: codes and zero points are at most 64.
        Kind::Points => {
            for lane in 0..LANES {
                words[lane] = (words[lane] | 0x8080_8080) - zeros[lane];
            }
        }
        Kind::Whole => {}
        Kind::Table => {
            let mut indices = [0; 4 * LANES];
            for (four, word) in indices.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                *four = word.to_le_bytes();
            }
            for (word, four) in words.iter_mut().zip(L::lookup(&indices, table).as_chunks::<4>().0) {
                *word = u32::from_le_bytes(*four) ^ 0x8080_8080;
            }
        }
    }
    words
}

/// Calls a function that is generic over the planes of the codes.
macro_rules! with_planes {
    ($format:expr, $function:ident ::<$l:ident, _>($($arg:expr),*)) => {
        match planes($format.codes.bits()) {
            [2, 0] => $function::<$l, 2, 0>($($arg),*),
            [2, 1] => $function::<$l, 2, 1>($($arg),*),
            [4, 0] => $function::<$l, 4, 0>($($arg),*),
            [4, 1] => $function::<$l, 4, 1>($($arg),*),
            [4, 2] => $function::<$l, 4, 2>($($arg),*),
            _ => $function::<$l, 8, 0>($($arg),*),
        }
    };
}

/// Writes some blocks of a pair as floats, `[inputs][16]` for each panel.
#[inline(always)]
pub(super) fn to_floats<L: Lanes>(
    panels: &StoredPanels,
    pair: usize,
    blocks: Range<usize>,
    out: &mut [Vec<[f32; LANES]>; PAIR],
) {
    match panels.format.codes {
        Codes::E4m3 => e4m3_to_floats::<L>(panels, pair, blocks, out),
        _ if panels.format.codes.bits() == 4 && !panels.format.has_minimum() && !panels.format.halves() => {
            table_to_floats::<L>(panels, pair, blocks, out);
        }
        _ => with_planes!(panels.format, integers_to_floats::<L, _>(panels, pair, blocks, out)),
    }
}

/// Writes some blocks of a pair as bytes with scales. The format [takes bytes](StoredFormat::takes_bytes).
#[inline(always)]
pub(super) fn to_bytes<L: Lanes>(panels: &StoredPanels, pair: usize, blocks: Range<usize>, out: &mut [Bytes]) {
    with_planes!(panels.format, integers_to_bytes::<L, _>(panels, pair, blocks, out));
}

fn kind_of(format: &StoredFormat) -> (Kind, &'static [i8; 16]) {
    match format.codes {
        Codes::Table(table) => (Kind::Table, table),
        Codes::Integers { bits: 8, .. } => (Kind::Whole, &[0; 16]),
        _ => (Kind::Points, &[0; 16]),
    }
}

/// The lines of a panel of a block; prefetches those of a later one.
#[inline(always)]
fn panel_of<'a>(panels: &StoredPanels, lines: &'a [Line], block: usize, panel: usize) -> &'a [Line] {
    let count = panels.layout.block;
    let lines = &lines[(block * PAIR + panel) * count..][..count];
    for line in lines {
        prefetch(line.0.as_ptr().wrapping_byte_add(AHEAD));
    }
    lines
}

// The loops over lanes share one index between several arrays.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn integers_to_floats<L: Lanes, const LOW: u32, const HIGH: u32>(
    panels: &StoredPanels,
    pair: usize,
    blocks: Range<usize>,
    out: &mut [Vec<[f32; LANES]>; PAIR],
) {
    match panels.format.has_minimum() {
        true => widen::<L, LOW, HIGH, true>(panels, pair, blocks, out),
        false => widen::<L, LOW, HIGH, false>(panels, pair, blocks, out),
    }
}

#[allow(clippy::needless_range_loop)] // as above
#[inline(always)]
fn widen<L: Lanes, const LOW: u32, const HIGH: u32, const MINIMA: bool>(
    panels: &StoredPanels,
    pair: usize,
    blocks: Range<usize>,
    out: &mut [Vec<[f32; LANES]>; PAIR],
) {
    let (header, lines) = panels.pair(pair);
    let kind = if LOW == 8 { Kind::Whole } else { Kind::Points };
    let (halves, far) = (panels.format.halves(), LOW == 8 && panels.format.offset == Offset::ZeroPoint);
    for (to, block) in blocks.enumerate() {
        let mut group = Group::of(panels, header, block * BLOCK);
        for panel in 0..PAIR {
            let lines = panel_of(panels, lines, block, panel);
            let Some(out) = out[panel][to * BLOCK..].first_chunk_mut::<BLOCK>() else { continue };
            for g in 0..FOURS {
                if halves && g % (FOURS / 2) == 0 {
                    group = Group::of(panels, header, block * BLOCK + g * 4);
                }
                let words = bytes::<L>(kind, codes::<LOW, HIGH>(lines, g), &group.zeros[panel], &[0; 16]);
                let (scales, minima) = (&group.scales[panel], &group.minima[panel]);
                for i in 0..4 {
                    let mut numbers = [0.0; LANES];
                    for lane in 0..LANES {
                        // The byte without its offset of 128, extended by its sign.
                        let value = ((words[lane] ^ 0x8080_8080) << (24 - 8 * i)) as i32 >> 24;
                        numbers[lane] = value as f32;
                    }
                    if far {
                        for lane in 0..LANES {
                            numbers[lane] -= group.far_zeros[panel][lane];
                        }
                    }
                    for lane in 0..LANES {
                        numbers[lane] *= scales[lane];
                    }
                    if MINIMA {
                        for lane in 0..LANES {
                            numbers[lane] += minima[lane];
                        }
                    }
                    out[g * 4 + i] = numbers;
                }
            }
        }
    }
}

/// 4-bit codes without minima, by a table of the numbers that they stand for.
#[inline(always)]
fn table_to_floats<L: Lanes>(
    panels: &StoredPanels,
    pair: usize,
    blocks: Range<usize>,
    out: &mut [Vec<[f32; LANES]>; PAIR],
) {
    let (header, lines) = panels.pair(pair);
    let mut table = [0.0; LANES];
    for (code, number) in table.iter_mut().enumerate() {
        *number = panels.format.codes.number(code as u8);
    }
    let points = panels.format.offset == Offset::ZeroPoint;
    for (to, block) in blocks.enumerate() {
        let group = Group::of(panels, header, block * BLOCK);
        for panel in 0..PAIR {
            let lines = panel_of(panels, lines, block, panel);
            let scales = L::load(&group.scales[panel]);
            // Group::of has them less 128, exactly.
            let mut zeros = L::load(&group.far_zeros[panel]).add(L::splat(f32::from(OFFSET)));
            zeros = zeros.mul(L::splat(if points { -1.0 } else { 0.0 }));
            let Some(out) = out[panel][to * BLOCK..].first_chunk_mut::<BLOCK>() else { continue };
            for (line, out) in lines.iter().zip(out.as_chunks_mut::<8>().0) {
                for (i, out) in out.iter_mut().enumerate() {
                    let shift = (i as u32 % 4) * 8 + (i as u32 / 4) * 4;
                    let mut number = L::lookup_floats(&line.0, shift, &table);
                    if points {
                        number = number.add(zeros);
                    }
                    number.mul(scales).store(out);
                }
            }
        }
    }
}

#[allow(clippy::needless_range_loop)] // as above
#[inline(always)]
fn integers_to_bytes<L: Lanes, const LOW: u32, const HIGH: u32>(
    panels: &StoredPanels,
    pair: usize,
    blocks: Range<usize>,
    out: &mut [Bytes],
) {
    let (header, lines) = panels.pair(pair);
    let (kind, table) = kind_of(&panels.format);
    for (block, out) in blocks.zip(out) {
        let mut group = Group::of(panels, header, block * BLOCK);
        (out.scales, out.minima) = ([group.scales; 2], [group.minima; 2]);
        let both = [panel_of(panels, lines, block, 0), panel_of(panels, lines, block, 1)];
        for g in 0..FOURS {
            if g == FOURS / 2 && panels.format.halves() {
                group = Group::of(panels, header, block * BLOCK + BLOCK / 2);
                (out.scales[1], out.minima[1]) = (group.scales, group.minima);
            }
            for panel in 0..PAIR {
                let words = codes::<LOW, HIGH>(both[panel], g);
                let words = bytes::<L>(kind, words, &group.zeros[panel], table);
                for (four, word) in out.weights[panel][g].0.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                    *four = word.to_le_bytes();
                }
            }
        }
    }
}

#[inline(always)]
fn e4m3_to_floats<L: Lanes>(
    panels: &StoredPanels,
    pair: usize,
    blocks: Range<usize>,
    out: &mut [Vec<[f32; LANES]>; PAIR],
) {
    let (header, lines) = panels.pair(pair);
    for (to, block) in blocks.enumerate() {
        let group = Group::of(panels, header, block * BLOCK);
        for panel in 0..PAIR {
            let scales = L::load(&group.scales[panel]);
            let codes = panel_of(panels, lines, block, panel).iter().flat_map(|line| line.0.as_chunks::<LANES>().0);
            for (out, codes) in out[panel][to * BLOCK..].iter_mut().zip(codes) {
                L::load_e4m3(codes).mul(scales).store(out);
            }
        }
    }
}
