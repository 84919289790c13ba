//! Scales and offsets of the groups of a pair of panels, widened to floats.

use super::format::{OUTER, Offset, Scale};
use super::panels::StoredPanels;
use crate::gemm::blocks::{OUTPUTS, PAIR};
use crate::simd::LANES;

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

/// The numbers of the 32 outputs in a header, widened by `widen`.
#[inline(always)]
fn numbers<const BYTES: usize>(header: &[u8], start: usize, index: usize, widen: impl Fn([u8; BYTES]) -> f32) -> Pairs {
    let bytes = header[start + index * OUTPUTS * BYTES..][..OUTPUTS * BYTES].as_chunks::<BYTES>().0;
    let mut out = [[0.0; LANES]; PAIR];
    for (out, bytes) in out.as_flattened_mut().iter_mut().zip(bytes) {
        *out = widen(*bytes);
    }
    out
}

impl Group {
    /// Zeros.
    pub const ZERO: Group =
        Group { scales: [[0.0; LANES]; PAIR], minima: [[0.0; LANES]; PAIR], points: [[0.0; LANES]; PAIR] };

    /// The group that input `input` of a pair is in, whose header this is.
    #[inline(always)]
    pub fn of(panels: &StoredPanels, header: &[u8], input: usize) -> Group {
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
        let (mut minima, mut points) = ([[0.0; LANES]; PAIR], [[0.0; LANES]; PAIR]);
        match format.offset {
            Offset::None => {}
            Offset::Minimum => {
                minima = numbers(header, layout.offsets, index, |b| Scale::F16.value(u16::from_le_bytes(b).into(), 0));
            }
            Offset::ByteMinimum => {
                minima = numbers(header, layout.offsets, index, |[b]: [u8; 1]| -f32::from(b));
                multiply(&mut minima, &halves(layout.outer_minima));
            }
            Offset::ZeroPoint => points = numbers(header, layout.offsets, index, |[b]: [u8; 1]| f32::from(b)),
        }
        Group { scales, minima, points }
    }
}

#[inline(always)]
fn multiply(numbers: &mut Pairs, by: &Pairs) {
    for (number, by) in numbers.as_flattened_mut().iter_mut().zip(by.as_flattened()) {
        *number *= by;
    }
}
