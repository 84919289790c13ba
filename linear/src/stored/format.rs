//! Forms in which checkpoints store weights in few bits, and the values that they stand for.
//!
//! A row has a code for each input. Consecutive inputs form groups that share a scale, and perhaps a zero point or a minimum:
//!
//! ```text
//! weight = scale · (code − zero point) + minimum
//! ```
//!
//! The scale of some formats is itself a product of two numbers. Every product of a half-precision or bfloat16 scale and a
//! code is exact in float32, so a weight is rounded at most once, when its minimum is added or its scale is a float32.

use simd::small_float::{bf16_to_f32, e4m3_to_f32, f16_to_f32};

use crate::quantize::BLOCK;

/// Inputs that share the outer scale of [`Scale::Byte`] and [`Scale::SignedByte`].
pub(super) const OUTER: usize = 256;

/// A form of stored weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoredFormat {
    /// What the codes are.
    pub codes: Codes,
    /// Inputs in a group: 16, a multiple of 32, or at least as many as a row has.
    pub group: usize,
    /// Type of a group's scale.
    pub scale: Scale,
    /// What a group has in addition.
    pub offset: Offset,
}

/// What codes stand for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Codes {
    /// Unsigned integers.
    Integers {
        /// 2, 3, 4, 5, 6 or 8.
        bits: u32,
        /// Zero point of all groups, which is subtracted from the code; 128 for 8 bits.
        zero: u8,
    },
    /// 4-bit indices of integers in a table.
    Table(&'static [i8; 16]),
    /// 4-bit indices of floats in a table.
    Floats(&'static [f32; 16]),
    /// Floats of 8 bits: 1 sign bit, 4 exponent bits, 3 mantissa bits ([`small_float`](simd::small_float)).
    E4m3,
}

/// Type of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// A byte e that stands for 2^(e − 128).
    Exponent,
    /// An unsigned byte, times a half-precision number of 256 inputs.
    Byte,
    /// A signed byte, times a half-precision number of 256 inputs.
    SignedByte,
}

/// What is subtracted from codes, or added to products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offset {
    /// Nothing.
    None,
    /// A byte that is subtracted from the codes, after the zero point that all groups have. At most 64 for codes of less than 8
    /// bits, whose own zero point is then 0.
    ZeroPoint,
    /// A half-precision number that is added to the product.
    Minimum,
    /// An unsigned byte, times a half-precision number of 256 inputs, that is subtracted from the product.
    ByteMinimum,
}

impl Codes {
    /// Bits of a code.
    pub fn bits(self) -> u32 {
        match self {
            Codes::Integers { bits, .. } => bits,
            Codes::Table(_) | Codes::Floats(_) => 4,
            Codes::E4m3 => 8,
        }
    }

    /// The number that a code stands for, before scale and offset.
    pub(super) fn number(self, code: u8) -> f32 {
        match self {
            Codes::Integers { zero, .. } => f32::from(i16::from(code) - i16::from(zero)),
            Codes::Table(table) => f32::from(table[usize::from(code & 15)]),
            Codes::Floats(table) => table[usize::from(code & 15)],
            Codes::E4m3 => e4m3_to_f32(code),
        }
    }

    /// The zero point of all groups.
    pub(crate) fn zero(self) -> i32 {
        match self {
            Codes::Integers { zero, .. } => i32::from(zero),
            _ => 0,
        }
    }

    /// Whether products can be computed with 8-bit integers.
    pub fn are_integers(self) -> bool {
        matches!(self, Codes::Integers { .. } | Codes::Table(_))
    }
}

impl Scale {
    /// Bytes of a scale as it is stored.
    pub(super) fn bytes(self) -> usize {
        match self {
            Scale::F32 => 4,
            Scale::F16 | Scale::Bf16 => 2,
            Scale::Exponent | Scale::Byte | Scale::SignedByte => 1,
        }
    }

    /// Whether there are outer scales.
    pub(super) fn has_outer(self) -> bool {
        matches!(self, Scale::Byte | Scale::SignedByte)
    }

    /// The scale with these bits.
    #[inline(always)]
    pub(crate) fn value(self, bits: u32, outer: u16) -> f32 {
        match self {
            Scale::F32 => f32::from_bits(bits),
            Scale::F16 => f16_to_f32(bits as u16),
            Scale::Bf16 => bf16_to_f32(bits as u16),
            // 2^-128 and 2^-127 are subnormal.
            Scale::Exponent => f32::from_bits(if bits < 2 { 0x0020_0000 << bits } else { (bits - 1) << 23 }),
            Scale::Byte => f16_to_f32(outer) * f32::from(bits as u8),
            Scale::SignedByte => f16_to_f32(outer) * f32::from(bits as u8 as i8),
        }
    }
}

impl Offset {
    /// Bytes of an offset as it is stored.
    pub(super) fn bytes(self) -> usize {
        match self {
            Offset::None => 0,
            Offset::ZeroPoint | Offset::ByteMinimum => 1,
            Offset::Minimum => 2,
        }
    }

    /// What is added to the product, given the bits of the offset.
    #[inline(always)]
    pub(crate) fn minimum(self, bits: u32, outer: u16) -> f32 {
        match self {
            Offset::None | Offset::ZeroPoint => 0.0,
            Offset::Minimum => f16_to_f32(bits as u16),
            Offset::ByteMinimum => -(f16_to_f32(outer) * f32::from(bits as u8)),
        }
    }
}

impl StoredFormat {
    /// Number of groups of a row of `k` inputs.
    pub fn groups(&self, k: usize) -> usize {
        k.div_ceil(self.group)
    }

    /// Inputs at whose multiples rows of `k` inputs can be cut into rows of this format: groups, outer groups and blocks of activations
    /// stay whole.
    pub fn grain(&self, k: usize) -> usize {
        let outer = if self.scale.has_outer() { OUTER } else { BLOCK };
        // A scale of the whole row is that of its pieces.
        if self.group >= k { outer } else { self.group.max(outer) }
    }

    /// Whether a group has fewer inputs than a block of quantised activations.
    pub(super) fn halves(&self) -> bool {
        self.group < 32
    }

    /// Inputs of a tile.
    pub(super) fn tile(&self) -> usize {
        if self.halves() { BLOCK / 2 } else { BLOCK }
    }

    /// Steps of a group that are summed in floats before the scale of that sum is multiplied: up to four.
    pub(super) fn chain(&self) -> usize {
        [4, 2]
            .into_iter()
            .find(|steps| self.group.is_multiple_of(steps * BLOCK) || self.group == usize::MAX)
            .unwrap_or(1)
    }

    /// Whether a constant is added to products.
    pub(super) fn has_minimum(&self) -> bool {
        matches!(self.offset, Offset::Minimum | Offset::ByteMinimum)
    }

    /// Whether products with 8-bit activations exist for it.
    pub fn takes_bytes(&self) -> bool {
        self.codes.are_integers() && !(self.codes.bits() == 8 && self.offset == Offset::ZeroPoint)
    }
}

/// One row in its stored form.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredRow {
    /// `[k]`.
    pub codes: Vec<u8>,
    /// `[groups]` bits of the scales.
    pub scales: Vec<u32>,
    /// `[groups]` bits of the offsets; empty if there are none.
    pub offsets: Vec<u32>,
    /// `[ceil(k / 256)]` bits of the outer scale and the outer minimum; empty if the scale has none.
    pub outer: Vec<[u16; 2]>,
}

impl StoredRow {
    /// A row of `k` zeros in this format.
    pub fn new(format: &StoredFormat, k: usize) -> StoredRow {
        let groups = format.groups(k);
        StoredRow {
            codes: vec![0; k],
            scales: vec![0; groups],
            offsets: vec![0; if format.offset == Offset::None { 0 } else { groups }],
            outer: vec![[0; 2]; if format.scale.has_outer() { k.div_ceil(OUTER) } else { 0 }],
        }
    }

    /// Copies the piece of a row of this format that begins at input `first`, a multiple of its [grain](StoredFormat::grain).
    pub fn copy_cut(&mut self, format: &StoredFormat, whole: &StoredRow, first: usize) {
        fn copy<T: Copy>(to: &mut [T], from: &[T], first: usize) {
            let piece = from.get(first..).unwrap_or_default();
            to.iter_mut().zip(piece).for_each(|(to, from)| *to = *from);
        }
        let group = first / format.group;
        copy(&mut self.codes, &whole.codes, first);
        copy(&mut self.scales, &whole.scales, group);
        copy(&mut self.offsets, &whole.offsets, group);
        copy(&mut self.outer, &whole.outer, first / OUTER);
    }

    /// Bits of the outer scale and the outer minimum of a group.
    pub(crate) fn outer_of(&self, format: &StoredFormat, group: usize) -> [u16; 2] {
        self.outer.get(group * format.group / OUTER).copied().unwrap_or_default()
    }

    /// Whether all weights are finite: scales and what they are multiplied with, and codes that are floats.
    pub(crate) fn is_finite(&self, format: &StoredFormat) -> bool {
        let outer = |group| self.outer_of(format, group);
        let scales = self.scales.iter().enumerate().all(|(i, bits)| format.scale.value(*bits, outer(i)[0]).is_finite());
        let minima =
            self.offsets.iter().enumerate().all(|(i, bits)| format.offset.minimum(*bits, outer(i)[1]).is_finite());
        let codes = format.codes != Codes::E4m3 || self.codes.iter().all(|code| code & 0x7f != 0x7f);
        scales && minima && codes
    }

    /// Writes the weights of the row, of which it has as many as `out`.
    pub fn values(&self, format: &StoredFormat, out: &mut [f32]) {
        for (i, (out, code)) in out.iter_mut().zip(&self.codes).enumerate() {
            let group = i / format.group;
            let [outer, outer_minimum] = self.outer.get(i / OUTER).copied().unwrap_or_default();
            let offset = self.offsets.get(group).copied().unwrap_or(0);
            *out = weight(format, *code, (self.scales[group], outer), (offset, outer_minimum));
        }
    }
}

/// The weight of a code, given the bits of its scale and offset and of what they are multiplied with.
#[inline(always)]
pub(super) fn weight(format: &StoredFormat, code: u8, scale: (u32, u16), offset: (u32, u16)) -> f32 {
    let zero = if format.offset == Offset::ZeroPoint { offset.0 as f32 } else { 0.0 };
    let product = format.scale.value(scale.0, scale.1) * (format.codes.number(code) - zero);
    if format.has_minimum() { product + format.offset.minimum(offset.0, offset.1) } else { product }
}

/// Rows of a stored matrix, read one at a time.
pub trait StoredRows: Sync {
    /// Writes row `row` to `out`, which has the sizes of the format.
    fn read(&self, row: usize, out: &mut StoredRow);
}
