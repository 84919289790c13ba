//! Rows of quantised modules.
//!
//! "Word": a little-endian number of 32 bits that holds 32 / b codes of b bits, the first in its lowest bits.

use std::borrow::Cow;
use std::sync::Arc;

use device::gemm::{StoredRow, StoredRows};

/// A table of little-endian words `[rows, columns]`.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    pub data: &'a [u8],
    pub columns: usize,
}

impl Words<'_> {
    /// The word of a row and a column.
    pub fn at(&self, row: usize, column: usize) -> u32 {
        self.data.as_chunks::<4>().0.get(row * self.columns + column).map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }
}

/// A table of scales `[rows, columns]`, of 1, 2 or 4 bytes each.
pub(super) struct Scales<'a> {
    pub data: Cow<'a, [u8]>,
    pub columns: usize,
    pub bytes: usize,
}

impl Scales<'_> {
    /// The bits of the scale in a row and a column.
    pub fn at(&self, row: usize, column: usize) -> u32 {
        let bytes = self.data.get((row * self.columns + column) * self.bytes..).unwrap_or_default();
        bytes.iter().take(self.bytes).rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte))
    }
}

/// Column i of the codes belongs to input `order[i]`; without an order to input i.
fn input(order: &Option<Arc<[u32]>>, column: usize) -> usize {
    order.as_ref().map_or(column, |order| order[column] as usize)
}

/// GPTQ: words `[k / per, n]` of inputs.
pub(super) struct Gptq<'a> {
    pub bits: u32,
    pub codes: Words<'a>,
    pub zeros: Words<'a>,
    /// `[groups, n]`.
    pub scales: Scales<'a>,
    pub order: Option<Arc<[u32]>>,
    /// Added to stored zero points.
    pub zero_bias: u32,
}

/// The code in field `field` of a word.
fn field(word: u32, bits: u32, field: usize) -> u32 {
    word >> (field as u32 * bits) & ((1 << bits) - 1)
}

impl Gptq<'_> {
    /// The zero point of a group and an output.
    pub fn zero(&self, group: usize, output: usize) -> u32 {
        let per = 32 / self.bits as usize;
        field(self.zeros.at(group, output / per), self.bits, output % per) + self.zero_bias
    }
}

impl StoredRows for Gptq<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let per = 32 / self.bits as usize;
        if self.order.is_none() {
            for (word, codes) in out.codes.chunks_mut(per).enumerate() {
                let word = self.codes.at(word, row);
                codes.iter_mut().enumerate().for_each(|(i, code)| *code = field(word, self.bits, i) as u8);
            }
        } else {
            for (column, code) in out.codes.iter_mut().enumerate() {
                let input = input(&self.order, column);
                *code = field(self.codes.at(input / per, row), self.bits, input % per) as u8;
            }
        }
        out.scales.iter_mut().enumerate().for_each(|(group, bits)| *bits = self.scales.at(group, row));
        out.offsets.iter_mut().enumerate().for_each(|(group, bits)| *bits = self.zero(group, row));
    }
}

/// AWQ: words `[k, n / 8]` of outputs in a peculiar order.
pub(super) struct Awq<'a> {
    pub codes: Words<'a>,
    pub zeros: Words<'a>,
    /// `[groups, n]`.
    pub scales: Scales<'a>,
}

/// Field of a word in which AWQ stores each of eight outputs.
const AWQ_FIELDS: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

impl StoredRows for Awq<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let at = |words: &Words<'_>, index: usize| field(words.at(index, row / 8), 4, AWQ_FIELDS[row % 8]);
        out.codes.iter_mut().enumerate().for_each(|(input, code)| *code = at(&self.codes, input) as u8);
        out.scales.iter_mut().enumerate().for_each(|(group, bits)| *bits = self.scales.at(group, row));
        out.offsets.iter_mut().enumerate().for_each(|(group, bits)| *bits = at(&self.zeros, group));
    }
}

/// compressed-tensors: words `[n, ceil(k / per)]` of inputs.
pub(super) struct Packed<'a> {
    pub bits: u32,
    pub codes: Words<'a>,
    /// Words `[ceil(n / per), groups]` of outputs.
    pub zeros: Option<Words<'a>>,
    /// `[n, groups]`, or one for all.
    pub scales: RowScales<'a>,
    pub order: Option<Arc<[u32]>>,
}

impl StoredRows for Packed<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let per = 32 / self.bits as usize;
        for (column, code) in out.codes.iter_mut().enumerate() {
            let input = input(&self.order, column);
            *code = field(self.codes.at(row, input / per), self.bits, input % per) as u8;
        }
        self.scales.read(row, out);
        if let Some(zeros) = &self.zeros {
            let zero = |group| field(zeros.at(row / per, group), self.bits, row % per);
            out.offsets.iter_mut().enumerate().for_each(|(group, bits)| *bits = zero(group));
        }
    }
}

/// Scales of rows or of blocks of rows: row r of the weights has row r / `height` of the scales.
pub(super) struct RowScales<'a> {
    pub scales: Scales<'a>,
    /// Rows that share scales.
    pub height: usize,
}

impl RowScales<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let row = row / self.height;
        out.scales.iter_mut().enumerate().for_each(|(group, bits)| *bits = self.scales.at(row, group));
    }
}

/// Bytes `[n, k]`, plus a constant.
pub(super) struct Bytes<'a> {
    pub codes: &'a [u8],
    pub k: usize,
    /// Added to bytes and zero points: 128 for signed integers.
    pub plus: u8,
    pub scales: RowScales<'a>,
    /// Signed bytes `[n, groups]`.
    pub zeros: Option<Scales<'a>>,
}

impl StoredRows for Bytes<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let codes = self.codes.get(row * self.k..).unwrap_or_default();
        out.codes.iter_mut().zip(codes).for_each(|(code, byte)| *code = byte.wrapping_add(self.plus));
        self.scales.read(row, out);
        if let Some(zeros) = &self.zeros {
            let zero = |group| u32::from((zeros.at(row, group) as u8).wrapping_add(self.plus));
            out.offsets.iter_mut().enumerate().for_each(|(group, bits)| *bits = zero(group));
        }
    }
}

/// Bytes of two 4-bit codes each, `[n, k / 2]`.
pub(super) struct Nibbles<'a> {
    pub codes: &'a [u8],
    pub k: usize,
    /// Whether the high half of a byte comes first.
    pub high_first: bool,
    /// `[n, groups]`.
    pub scales: Scales<'a>,
}

impl StoredRows for Nibbles<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let bytes = self.codes.get(row * self.k / 2..).unwrap_or_default();
        for (codes, byte) in out.codes.chunks_mut(2).zip(bytes) {
            let halves = if self.high_first { [byte >> 4, byte & 15] } else { [byte & 15, byte >> 4] };
            codes.iter_mut().zip(halves).for_each(|(code, half)| *code = half);
        }
        out.scales.iter_mut().enumerate().for_each(|(group, bits)| *bits = self.scales.at(row, group));
    }
}
