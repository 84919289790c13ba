//! Rows of quantised modules.
//!
//! "Word": a little-endian number of 32 bits that holds 32 / b codes of b bits, the first in its lowest bits.

use std::borrow::Cow;
use std::sync::Arc;

use linear::{StoredRow, StoredRows};

/// A table of little-endian words `[rows, columns]`.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    pub data: &'a [u8],
    pub columns: usize,
}

impl Words<'_> {
    /// The code in field `index` of the numbers that start in a row and a column and go on every `step` words.
    fn code(&self, bits: u32, start: usize, step: usize, index: usize) -> u8 {
        let log = (32 / bits).trailing_zeros();
        let word = self.word(start + (index >> log) * step);
        field(word, bits, index & ((1 << log) - 1)) as u8
    }

    /// Reads codes from the fields of word `start` and of every `step`th one behind it, or those of some inputs.
    fn codes(&self, bits: u32, (start, step): (usize, usize), order: Option<&[u32]>, out: &mut [u8]) {
        match (order, bits) {
            (Some(order), _) => {
                out.iter_mut()
                    .zip(order)
                    .for_each(|(code, input)| *code = self.code(bits, start, step, *input as usize));
            }
            (None, 2) => self.spread::<2, 16>(start, step, out),
            (None, 4) => self.spread::<4, 8>(start, step, out),
            (None, _) => self.spread::<8, 4>(start, step, out),
        }
    }

    fn spread<const BITS: usize, const PER: usize>(&self, start: usize, step: usize, out: &mut [u8]) {
        let fields = |index| {
            let word = self.word(start + index * step);
            std::array::from_fn(|i| (word >> (i * BITS)) as u8 & (0xff >> (8 - BITS)))
        };
        let (words, rest) = out.as_chunks_mut::<PER>();
        let last: [u8; PER] = fields(words.len());
        words.iter_mut().enumerate().for_each(|(index, codes)| *codes = fields(index));
        rest.copy_from_slice(&last[..rest.len()]);
    }

    fn word(&self, index: usize) -> u32 {
        self.data.as_chunks::<4>().0.get(index).map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }

    /// The word of a row and a column.
    pub fn at(&self, row: usize, column: usize) -> u32 {
        self.word(row * self.columns + column)
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

/// GPTQ: words `[k / per, n]` of inputs.
pub(super) struct Gptq<'a> {
    pub bits: u32,
    pub codes: Words<'a>,
    pub zeros: Words<'a>,
    /// `[groups, n]`.
    pub scales: Scales<'a>,
    /// Column i of the codes belongs to input `order[i]`; without an order to input i.
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
        self.codes.codes(self.bits, (row, self.codes.columns), self.order.as_deref(), &mut out.codes);
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
    /// Column i of the codes belongs to input `order[i]`; without an order to input i.
    pub order: Option<Arc<[u32]>>,
}

impl StoredRows for Packed<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let per = 32 / self.bits as usize;
        self.codes.codes(self.bits, (row * self.codes.columns, 1), self.order.as_deref(), &mut out.codes);
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
