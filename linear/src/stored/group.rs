//! Scales and offsets of the groups of a pair of panels, widened to floats.

use std::ops::Range;

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

    /// Reads group `index` of a pair, whose header this is. What the format does not have is left as it is.
    #[inline(always)]
    pub fn read<L: Lanes>(&mut self, panels: &StoredPanels, header: &[u8], index: usize) {
        let StoredPanels { format, layout, .. } = panels;
        let outer = index * format.group / OUTER;
        let mut scales = match format.scale {
            Scale::F32 => {
                let [even, odd] = words(header, 0, index);
                [L::load(&even), L::load(&odd)]
            }
            Scale::F16 => halves::<L>(header, 0, index),
            Scale::Bf16 => {
                let [even, odd] = shorts(header, 0, index);
                [L::load_bf16(&even), L::load_bf16(&odd)]
            }
            Scale::Byte => integers::<L>(header, 0, index),
            Scale::SignedByte => {
                let [even, odd] = bytes(header, 0, index);
                [L::load_i8(&even), L::load_i8(&odd)]
            }
            Scale::Exponent => {
                let [even, odd] = integers::<L>(header, 0, index);
                [power(even), power(odd)]
            }
        };
        if format.scale.has_outer() {
            scales = multiply(scales, halves(header, layout.outer, outer));
        }
        store(scales, &mut self.scales);
        match format.offset {
            Offset::None => {}
            Offset::Minimum => store(halves::<L>(header, layout.offsets, index), &mut self.minima),
            Offset::ByteMinimum => {
                let outer = multiply(halves::<L>(header, layout.outer_minima, outer), [L::splat(-1.0); PAIR]);
                store(multiply(integers::<L>(header, layout.offsets, index), outer), &mut self.minima);
            }
            Offset::ZeroPoint => store(integers::<L>(header, layout.offsets, index), &mut self.points),
        }
    }
}

/// The power of two that byte e stands for, 2^(e − 128).
#[inline(always)]
fn power<L: Lanes>(byte: L) -> L {
    let exponents = byte.add(L::splat(-128.0));
    // The least two powers are subnormal.
    let (least, zero) = (L::splat(-126.0), L::splat(0.0));
    let below = zero.max(least.add(exponents.mul(L::splat(-1.0)))).mul(L::splat(-1.0));
    exponents.max(least).exp2_int().mul(below.exp2_int())
}

#[inline(always)]
fn multiply<L: Lanes>([a, b]: [L; PAIR], [c, d]: [L; PAIR]) -> [L; PAIR] {
    [a.mul(c), b.mul(d)]
}

#[inline(always)]
fn store<L: Lanes>([even, odd]: [L; PAIR], [to_even, to_odd]: &mut Pairs) {
    even.store(to_even);
    odd.store(to_odd);
}

/// The group of the tile that is unpacked.
pub(super) struct Current {
    pub group: Group,
    index: usize,
    inputs: Range<usize>,
}

impl Current {
    /// No group yet.
    pub const NONE: Current = Current { group: Group::ZERO, index: 0, inputs: 0..0 };

    /// Reads the group of a tile of a pair, and returns whether it is another one.
    #[inline(always)]
    pub fn enter<L: Lanes>(&mut self, panels: &StoredPanels, pair: usize, tile: usize) -> bool {
        // Inputs that pad the last block belong to the last group.
        let input = (tile * panels.format.tile()).min(panels.k - 1);
        let is_other = !self.inputs.contains(&input);
        if is_other {
            let group = panels.format.group;
            self.index = if input == self.inputs.end && input > 0 { self.index + 1 } else { input / group };
            let start = self.index * group;
            self.inputs = start..start.saturating_add(group);
            self.group.read::<L>(panels, panels.pair(pair).0, self.index);
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

/// Half-precision floats of both panels.
#[inline(always)]
fn halves<L: Lanes>(header: &[u8], start: usize, index: usize) -> [L; PAIR] {
    let [even, odd] = shorts(header, start, index);
    [L::load_f16(&even), L::load_f16(&odd)]
}

/// Unsigned bytes of both panels.
#[inline(always)]
fn integers<L: Lanes>(header: &[u8], start: usize, index: usize) -> [L; PAIR] {
    let [even, odd] = bytes(header, start, index);
    [L::load_u8(&even), L::load_u8(&odd)]
}

/// Numbers of both panels in a header, of which each output has one of `BYTES` bytes; `index` counts groups.
#[inline(always)]
fn chunks<const BYTES: usize>(header: &[u8], start: usize, index: usize) -> &[[u8; BYTES]] {
    header[start + index * OUTPUTS * BYTES..][..OUTPUTS * BYTES].as_chunks().0
}

/// Defines a function that reads numbers of a type. Its loop copies: the compiler makes vector loads of it.
macro_rules! numbers {
    ($name:ident: $number:ty) => {
        #[inline(always)]
        fn $name(header: &[u8], start: usize, index: usize) -> [[$number; LANES]; PAIR] {
            let mut out = [[<$number>::default(); LANES]; PAIR];
            let numbers = out.as_flattened_mut().iter_mut().zip(chunks(header, start, index));
            numbers.for_each(|(out, bytes)| *out = <$number>::from_le_bytes(*bytes));
            out
        }
    };
}
numbers!(bytes: u8);
numbers!(shorts: u16);
numbers!(words: f32);
