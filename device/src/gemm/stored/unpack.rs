//! Stored weights as floats.
//!
//! A task unpacks some blocks of a pair to memory that stays in the L1 cache and multiplies them with all its rows. The floats
//! are the weights themselves, so a product has the bits of one with unpacked weights.

use std::ops::Range;

use super::format::{Codes, Offset};
use super::group::Group;
use super::panels::{FOURS, StoredPanels, codes, planes};
use crate::gemm::blocks::PAIR;
use crate::gemm::form::Line;
use crate::gemm::quantize::BLOCK;
use crate::simd::int8::IntLanes;
use crate::simd::{LANES, Lanes, prefetch};

/// Distance of prefetched lines, in bytes.
const AHEAD: usize = 4 << 10;

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

#[inline(always)]
fn widen<L: Lanes, const LOW: u32, const HIGH: u32, const MINIMA: bool>(
    panels: &StoredPanels,
    pair: usize,
    blocks: Range<usize>,
    out: &mut [Vec<[f32; LANES]>; PAIR],
) {
    let (header, lines) = panels.pair(pair);
    let halves = panels.format.halves();
    let zero = L::splat(panels.format.codes.zero() as f32);
    for (to, block) in blocks.enumerate() {
        let mut group = Group::of(panels, header, block * BLOCK);
        for panel in 0..PAIR {
            let lines = panel_of(panels, lines, block, panel);
            let Some(out) = out[panel][to * BLOCK..].first_chunk_mut::<BLOCK>() else { continue };
            for g in 0..FOURS {
                if halves && g % (FOURS / 2) == 0 {
                    group = Group::of(panels, header, block * BLOCK + g * 4);
                }
                let words = codes::<L::Ints, LOW, HIGH>(lines, g);
                let scales = L::load(&group.scales[panel]);
                let minima = L::load(&group.minima[panel]);
                let zeros = L::load(&group.points[panel]).add(zero).mul(L::splat(-1.0));
                for (i, out) in out[g * 4..][..4].iter_mut().enumerate() {
                    let number = L::Ints::byte(words, i).add(zeros).mul(scales);
                    let number = if MINIMA { number.add(minima) } else { number };
                    number.store(out);
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
