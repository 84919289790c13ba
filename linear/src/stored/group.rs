//! Scales and offsets of the groups of a pair of panels, widened to floats.

use simd::{LANES, Lanes};

use super::format::{OUTER, Offset, Scale};
use super::panels::StoredPanels;
use crate::blocks::{OUTPUTS, PAIR};

/// Numbers that a group of inputs has for each output of a pair.
#[derive(Clone, Copy)]
pub(super) struct Group {
    /// What codes are multiplied with.
    pub scales: Pairs,
    /// What is added to the products.
    pub minima: Pairs,
    /// What is subtracted from codes, after the zero point that all groups have.
    pub points: Pairs,
}

/// A number for each output of a pair.
type Pairs = [[f32; LANES]; PAIR];

impl Group {
    /// Zeros.
    pub const ZERO: Group =
        Group { scales: [[0.0; LANES]; PAIR], minima: [[0.0; LANES]; PAIR], points: [[0.0; LANES]; PAIR] };

    /// Reads the group that input `input` of a pair is in, whose header this is. What the format does not have is left as it is.
    #[inline(always)]
    pub fn read<L: Lanes>(&mut self, panels: &StoredPanels, header: &[u8], input: usize) {
        let StoredPanels { format, layout, .. } = panels;
        let (index, outer) = (input / format.group, input / OUTER);
        for panel in 0..PAIR {
            let mut scales = match format.scale {
                Scale::F32 => L::load(&words(header, 0, index, panel)),
                Scale::F16 => L::load_f16(&shorts(header, 0, index, panel)),
                Scale::Bf16 => L::load_bf16(&shorts(header, 0, index, panel)),
                Scale::Byte => L::load_u8(&bytes(header, 0, index, panel)),
                Scale::SignedByte => L::load_i8(&bytes(header, 0, index, panel)),
                Scale::Exponent => {
                    let exponents = L::load_u8(&bytes(header, 0, index, panel)).add(L::splat(-128.0));
                    // The least two powers are subnormal.
                    let (least, zero) = (L::splat(-126.0), L::splat(0.0));
                    let below = zero.max(least.add(exponents.mul(L::splat(-1.0)))).mul(L::splat(-1.0));
                    exponents.max(least).exp2_int().mul(below.exp2_int())
                }
            };
            if format.scale.has_outer() {
                scales = scales.mul(L::load_f16(&shorts(header, layout.outer, outer, panel)));
            }
            scales.store(&mut self.scales[panel]);
            let offsets = layout.offsets;
            match format.offset {
                Offset::None => {}
                Offset::Minimum => {
                    L::load_f16(&shorts(header, offsets, index, panel)).store(&mut self.minima[panel]);
                }
                Offset::ByteMinimum => {
                    let outer = L::load_f16(&shorts(header, layout.outer_minima, outer, panel)).mul(L::splat(-1.0));
                    L::load_u8(&bytes(header, offsets, index, panel)).mul(outer).store(&mut self.minima[panel]);
                }
                Offset::ZeroPoint => L::load_u8(&bytes(header, offsets, index, panel)).store(&mut self.points[panel]),
            }
        }
    }
}

/// The group of the tile that is unpacked.
pub(super) struct Current {
    pub group: Group,
    index: usize,
}

impl Current {
    /// No group yet.
    pub const NONE: Current = Current { group: Group::ZERO, index: usize::MAX };

    /// Reads the group of a tile of a pair, and returns whether it is another one.
    #[inline(always)]
    pub fn enter<L: Lanes>(&mut self, panels: &StoredPanels, pair: usize, tile: usize) -> bool {
        // Inputs that pad the last block belong to the last group.
        let input = (tile * panels.format.tile()).min(panels.k - 1);
        let index = input / panels.format.group;
        let is_other = index != self.index;
        if is_other {
            self.index = index;
            self.group.read::<L>(panels, panels.pair(pair).0, input);
        }
        is_other
    }

    /// As [`Current::enter`]; then the minima are what zero points take from the sum of a row.
    #[inline(always)]
    pub fn enter_rounded<L: Lanes>(&mut self, panels: &StoredPanels, pair: usize, tile: usize) {
        if self.enter::<L>(panels, pair, tile) && panels.format.offset == Offset::ZeroPoint {
            let Group { scales, minima, points } = &mut self.group;
            for panel in 0..PAIR {
                let scales = L::load(&scales[panel]).mul(L::splat(-1.0));
                L::load(&points[panel]).mul(scales).store(&mut minima[panel]);
            }
        }
    }
}

/// Numbers of a panel in a header, of which each output has one of `BYTES` bytes; `index` counts groups.
#[inline(always)]
fn chunks<const BYTES: usize>(header: &[u8], start: usize, index: usize, panel: usize) -> &[[u8; BYTES]] {
    header[start + (index * OUTPUTS + panel * LANES) * BYTES..][..LANES * BYTES].as_chunks().0
}

// Loops that copy: the compiler makes vector loads of them.
#[inline(always)]
fn bytes(header: &[u8], start: usize, index: usize, panel: usize) -> [u8; LANES] {
    let mut out = [0; LANES];
    out.iter_mut().zip(chunks(header, start, index, panel)).for_each(|(out, bytes)| *out = u8::from_le_bytes(*bytes));
    out
}

#[inline(always)]
fn shorts(header: &[u8], start: usize, index: usize, panel: usize) -> [u16; LANES] {
    let mut out = [0; LANES];
    out.iter_mut().zip(chunks(header, start, index, panel)).for_each(|(out, bytes)| *out = u16::from_le_bytes(*bytes));
    out
}

#[inline(always)]
fn words(header: &[u8], start: usize, index: usize, panel: usize) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    out.iter_mut().zip(chunks(header, start, index, panel)).for_each(|(out, bytes)| *out = f32::from_le_bytes(*bytes));
    out
}
