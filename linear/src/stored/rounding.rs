//! How the activations of a product are rounded before it.

use simd::Lanes;
use simd::small_float::{e4m3_to_f32, f32_to_e4m3};

use crate::quantize::BLOCK;
use crate::rows::RowBlock;

/// Greatest number of the 8-bit floats.
const E4M3_MAX: f32 = 448.0;

/// How a product with stored weights rounds its activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rounding {
    /// Not at all.
    None,
    /// To 8-bit integers, with a scale for each 32 inputs ([`RowBlock`]). The default of weights quantised while loading.
    Blocks,
    /// To 8-bit integers, with a scale for each row: `round(x / s)` where s = max |x| / 127.
    Row,
    /// To floats of 8 bits (e4m3), with a scale for each so many inputs of a row: s = max |x| / 448.
    Floats(usize),
    /// To floats of 8 bits with this scale; magnitudes above 448 times the scale are clamped.
    Static(f32),
}

impl Rounding {
    /// Whether rounded activations are integers.
    pub fn is_integer(self) -> bool {
        matches!(self, Rounding::Blocks | Rounding::Row)
    }
}

/// Rounds a row to floats of 8 bits.
#[allow(clippy::extra_unused_type_parameters)] // `dispatch!` compiles it for the vectors of `L`
#[inline(always)]
pub(super) fn to_e4m3<L: Lanes>(rounding: Rounding, row: &mut [f32]) {
    match rounding {
        Rounding::Floats(width) => {
            for group in row.chunks_mut(width.max(1)) {
                let scale = greatest(group) / E4M3_MAX;
                group.iter_mut().for_each(|x| *x = rounded(*x, scale));
            }
        }
        Rounding::Static(scale) => row.iter_mut().for_each(|x| *x = rounded(*x, scale)),
        _ => {}
    }
}

/// `x` in steps of `scale`; a row of zeros stays zero, NaN stays NaN.
#[inline(always)]
fn rounded(x: f32, scale: f32) -> f32 {
    if scale == 0.0 { x } else { e4m3_to_f32(f32_to_e4m3(x / scale)) * scale }
}

/// The greatest magnitude; NaN if a number is NaN or infinite.
#[inline(always)]
fn greatest(numbers: &[f32]) -> f32 {
    let (greatest, poison) = numbers.iter().fold((0.0f32, 0.0f32), |(m, p), x| (m.max(x.abs()), p + x * 0.0));
    greatest + poison
}

/// Rounds a row to 8-bit integers with one scale ([`Rounding::Row`]); pads the last block with zeros.
#[allow(clippy::extra_unused_type_parameters)] // as above
#[inline(always)]
pub(super) fn row_to_blocks<L: Lanes>(row: &[f32], out: &mut [RowBlock]) {
    let scale = greatest(row) / 127.0;
    for (x, block) in row.chunks(BLOCK).zip(out) {
        *block = RowBlock { scale, ..RowBlock::ZERO };
        // NaN compares as false: its blocks are zero and their scale is NaN.
        if scale > 0.0 {
            for (value, x) in block.values.as_flattened_mut().iter_mut().zip(x) {
                *value = (x / scale).round_ties_even() as i8;
            }
        }
        let sum = |half: &[[i8; 4]]| half.as_flattened().iter().map(|value| i32::from(*value)).sum::<i32>();
        block.first_half = -128 * sum(&block.values[..4]);
        block.correction = block.first_half - 128 * sum(&block.values[4..]);
    }
}
