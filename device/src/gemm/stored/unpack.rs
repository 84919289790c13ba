//! Stored weights as floats.
//!
//! A task unpacks some blocks of a pair to memory that stays in the L1 cache and multiplies them with all its rows. The floats
//! are the weights themselves, so a product has the bits of one with unpacked weights.
//!
//! The loops run over arrays of sixteen words and are compiled for the vectors of `L`.

use std::ops::Range;

use super::format::{Codes, Offset};
use super::group::Group;
use super::panels::{FOURS, StoredPanels, every_byte, planes};
use crate::gemm::blocks::PAIR;
use crate::gemm::form::Line;
use crate::gemm::quantize::BLOCK;
use crate::simd::{LANES, Lanes, prefetch};

/// Distance of prefetched lines, in bytes.
const AHEAD: usize = 4 << 10;

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

// The loops over lanes share one index between several arrays. They are compiled for the vectors of `L`.
#[allow(clippy::needless_range_loop, clippy::extra_unused_type_parameters)]
#[inline(always)]
fn widen<L: Lanes, const LOW: u32, const HIGH: u32, const MINIMA: bool>(
    panels: &StoredPanels,
    pair: usize,
    blocks: Range<usize>,
    out: &mut [Vec<[f32; LANES]>; PAIR],
) {
    let (header, lines) = panels.pair(pair);
    let halves = panels.format.halves();
    let zero = panels.format.codes.zero();
    for (to, block) in blocks.enumerate() {
        let mut group = Group::of(panels, header, block * BLOCK);
        for panel in 0..PAIR {
            let lines = panel_of(panels, lines, block, panel);
            let Some(out) = out[panel][to * BLOCK..].first_chunk_mut::<BLOCK>() else { continue };
            for g in 0..FOURS {
                if halves && g % (FOURS / 2) == 0 {
                    group = Group::of(panels, header, block * BLOCK + g * 4);
                }
                let words = codes::<LOW, HIGH>(lines, g);
                let (scales, minima, points) = (&group.scales[panel], &group.minima[panel], &group.points[panel]);
                for i in 0..4 {
                    let mut numbers = [0.0; LANES];
                    for lane in 0..LANES {
                        let code = (words[lane] >> (8 * i) & 0xff) as i32;
                        numbers[lane] = ((code - zero) as f32 - points[lane]) * scales[lane];
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
            let zeros = L::load(&group.points[panel]).mul(L::splat(-1.0));
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
