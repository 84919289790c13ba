//! The element types of GGUF tensors: how each stores a block of weights.
//!
//! A type unpacks a block to codes, scales and offsets ([`StoredFormat`]), which give the value of every weight as its definition
//! does, exactly.

use device::Dtype;
use linear::{Codes, Offset, Scale, StoredFormat, StoredRow};
use simd::small_float::e4m3_to_f32;

use super::codebook::{self, iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs};

/// A way to store weights: in blocks of `block` weights and `bytes` bytes.
#[derive(Clone, Copy)]
pub struct ElementType {
    /// Name, as tools print it.
    pub name: &'static str,
    /// Number in the file.
    pub id: u32,
    /// Weights in a block; a row is a whole number of blocks.
    pub block: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// What a block holds.
    pub(super) storage: Storage,
}

/// What the blocks of a type hold.
#[derive(Clone, Copy)]
pub(super) enum Storage {
    /// One number.
    Number(Dtype),
    /// Codes, with the function that unpacks a block.
    Codes(StoredFormat, fn(&[u8], Block<'_>)),
}

/// The part of a [`StoredRow`] that a block fills.
pub(super) struct Block<'a> {
    pub codes: &'a mut [u8],
    pub scales: &'a mut [u32],
    pub offsets: &'a mut [u32],
    pub outer: &'a mut [[u16; 2]],
}

/// All supported types.
pub const TYPES: [ElementType; 26] = [
    number("F32", 0, Dtype::F32),
    number("F16", 1, Dtype::F16),
    coded("Q4_0", 2, 18, simple(integers(4, 8), Scale::F16, Offset::None), q4_0),
    coded("Q4_1", 3, 20, simple(integers(4, 0), Scale::F16, Offset::Minimum), q4_1),
    coded("Q5_0", 6, 22, simple(integers(5, 16), Scale::F16, Offset::None), q5_0),
    coded("Q5_1", 7, 24, simple(integers(5, 0), Scale::F16, Offset::Minimum), q5_1),
    coded("Q8_0", 8, 34, simple(integers(8, 128), Scale::F16, Offset::None), q8_0),
    coded("Q2_K", 10, 84, nested(integers(2, 0), 16, Scale::Byte, Offset::ByteMinimum), q2_k),
    coded("Q3_K", 11, 110, nested(integers(3, 4), 16, Scale::SignedByte, Offset::None), q3_k),
    coded("Q4_K", 12, 144, nested(integers(4, 0), 32, Scale::Byte, Offset::ByteMinimum), q4_k),
    coded("Q5_K", 13, 176, nested(integers(5, 0), 32, Scale::Byte, Offset::ByteMinimum), q5_k),
    coded("Q6_K", 14, 210, nested(integers(6, 32), 16, Scale::SignedByte, Offset::None), q6_k),
    coded("IQ2_XXS", 16, 66, vectors(&codebook::IQ2, 32), iq2_xxs),
    coded("IQ2_XS", 17, 74, vectors(&codebook::IQ2, 16), iq2_xs),
    coded("IQ3_XXS", 18, 98, vectors(&codebook::IQ3_XXS, 32), iq3_xxs),
    coded("IQ1_S", 19, 50, vectors(&codebook::IQ1, 32), iq1_s),
    coded("IQ4_NL", 20, 18, simple(Codes::Table(&IQ4_NL), Scale::F16, Offset::None), q4_0),
    coded("IQ3_S", 21, 110, nested(Codes::Table(&codebook::IQ3_S), 32, Scale::Byte, Offset::None), iq3_s),
    coded("IQ2_S", 22, 82, vectors(&codebook::IQ2, 16), iq2_s),
    coded("IQ4_XS", 23, 136, nested(Codes::Table(&IQ4_NL), 32, Scale::SignedByte, Offset::None), iq4_xs),
    coded("IQ1_M", 29, 56, vectors(&codebook::IQ1, 16), iq1_m),
    number("BF16", 30, Dtype::Bf16),
    coded("TQ1_0", 34, 54, nested(integers(2, 1), 256, Scale::F16, Offset::None), tq1_0),
    coded("TQ2_0", 35, 66, nested(integers(2, 1), 256, Scale::F16, Offset::None), tq2_0),
    coded("MXFP4", 39, 17, simple(Codes::Table(&E2M1_DOUBLED), Scale::Exponent, Offset::None), mxfp4),
    ElementType { block: 64, ..coded("NVFP4", 40, 36, vectors(&E2M1_DOUBLED, 16), nvfp4) },
];

/// Values of the codes of IQ4_NL.
const IQ4_NL: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice the values of the codes of MXFP4 (E2M1, "OCP Microscaling Formats", 2023).
pub(crate) const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

const fn number(name: &'static str, id: u32, dtype: Dtype) -> ElementType {
    let bytes = if matches!(dtype, Dtype::F32) { 4 } else { 2 };
    ElementType { name, id, block: 1, bytes, storage: Storage::Number(dtype) }
}

const fn coded(
    name: &'static str,
    id: u32,
    bytes: usize,
    format: StoredFormat,
    unpack: fn(&[u8], Block<'_>),
) -> ElementType {
    // No block of 32 weights is larger than that of Q8_0, and none of 256 is as small.
    let block = if bytes <= 34 { 32 } else { 256 };
    ElementType { name, id, block, bytes, storage: Storage::Codes(format, unpack) }
}

const fn integers(bits: u32, zero: u8) -> Codes {
    Codes::Integers { bits, zero }
}

const fn simple(codes: Codes, scale: Scale, offset: Offset) -> StoredFormat {
    StoredFormat { codes, group: 32, scale, offset }
}

const fn nested(codes: Codes, group: usize, scale: Scale, offset: Offset) -> StoredFormat {
    StoredFormat { codes, group, scale, offset }
}

/// Codes of a codebook, each group with a scale in single precision: it is a product that half precision does not hold.
const fn vectors(table: &'static [i8; 16], group: usize) -> StoredFormat {
    nested(Codes::Table(table), group, Scale::F32, Offset::None)
}

impl std::fmt::Debug for ElementType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl ElementType {
    /// The type with this number.
    pub fn of_id(id: u32) -> Option<&'static ElementType> {
        const TABLE: &[ElementType] = &TYPES;
        TABLE.iter().find(|known| known.id == id)
    }

    /// The values of whole blocks. Bytes behind the last whole block are ignored.
    pub fn values(&self, data: &[u8]) -> Vec<f32> {
        self.scaled_values(data, 1.0)
    }

    /// [`ElementType::values`] with a factor, as [`ElementType::unpack`] has it.
    pub(super) fn scaled_values(&self, data: &[u8], factor: f32) -> Vec<f32> {
        let blocks = data.chunks_exact(self.bytes);
        let mut values = vec![0.0; blocks.len() * self.block];
        match self.storage {
            Storage::Number(dtype) => dtype.read_row(data, &mut values),
            Storage::Codes(format, _) => {
                let mut row = StoredRow::new(&format, self.block);
                for (block, values) in blocks.zip(values.chunks_exact_mut(self.block)) {
                    self.unpack(block, factor, &mut row);
                    row.values(&format, values);
                }
            }
        }
        values
    }

    /// Unpacks consecutive blocks to a row of as many weights. Scales in single precision are multiplied by `factor`.
    pub(super) fn unpack(&self, data: &[u8], factor: f32, row: &mut StoredRow) {
        let Storage::Codes(format, unpack) = self.storage else { return };
        let groups = self.block / format.group;
        let blocks = row.codes.chunks_exact_mut(self.block).zip(row.scales.chunks_exact_mut(groups));
        let (mut offsets, mut outer) = (row.offsets.chunks_exact_mut(groups), row.outer.chunks_exact_mut(1));
        for ((codes, scales), data) in blocks.zip(data.chunks_exact(self.bytes)) {
            let offsets = offsets.next().unwrap_or_default();
            unpack(data, Block { codes, scales, offsets, outer: outer.next().unwrap_or_default() });
        }
        if factor != 1.0 && format.scale == Scale::F32 {
            row.scales.iter_mut().for_each(|bits| *bits = (f32::from_bits(*bits) * factor).to_bits());
        }
    }
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Writes 32 codes of 4 bits in 16 bytes: the low nibbles are the first half.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// Adds fifth bits: bit j of four bytes belongs to code j.
fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    for (byte, codes) in bytes.iter().zip(codes.chunks_exact_mut(8)) {
        codes.iter_mut().enumerate().for_each(|(i, code)| *code |= (byte >> i & 1) << 4);
    }
}

/// Scale, codes: `d * (q - 8)`, or for IQ4_NL `d * IQ4_NL[q]`.
fn q4_0(b: &[u8], block: Block<'_>) {
    block.scales[0] = u16_at(b, 0).into();
    nibbles(&b[2..], block.codes);
}

/// Scale, minimum, codes: `d * q + m`.
fn q4_1(b: &[u8], block: Block<'_>) {
    (block.scales[0], block.offsets[0]) = (u16_at(b, 0).into(), u16_at(b, 2).into());
    nibbles(&b[4..], block.codes);
}

/// Scale, fifth bits, codes: `d * (q - 16)`.
fn q5_0(b: &[u8], block: Block<'_>) {
    block.scales[0] = u16_at(b, 0).into();
    nibbles(&b[6..], block.codes);
    fifth_bits(&b[2..6], block.codes);
}

/// Scale, minimum, fifth bits, codes: `d * q + m`.
fn q5_1(b: &[u8], block: Block<'_>) {
    (block.scales[0], block.offsets[0]) = (u16_at(b, 0).into(), u16_at(b, 2).into());
    nibbles(&b[8..], block.codes);
    fifth_bits(&b[4..8], block.codes);
}

/// Scale, signed integers: `d * q`.
fn q8_0(b: &[u8], block: Block<'_>) {
    block.scales[0] = u16_at(b, 0).into();
    block.codes.iter_mut().zip(&b[2..]).for_each(|(code, q)| *code = q.wrapping_add(128));
}

/// Exponent, codes: `2^(e - 128) * E2M1_DOUBLED[q]`.
fn mxfp4(b: &[u8], block: Block<'_>) {
    block.scales[0] = b[0].into();
    nibbles(&b[1..], block.codes);
}

/// Scales of 4 groups of 16 weights, floats of 4 and 3 bits without a sign, then for each group codes whose low nibbles are its first
/// half: `s / 2 * E2M1_DOUBLED[q]`. The tensor has a scale besides.
fn nvfp4(b: &[u8], block: Block<'_>) {
    let groups = block.codes.chunks_exact_mut(16).zip(block.scales).zip(b[..4].iter().zip(b[4..].chunks_exact(8)));
    for ((codes, bits), (scale, bytes)) in groups {
        // The sign counts for nothing but what is no number.
        let scale = match scale {
            0x7f => 0.0,
            0xff => 480.0,
            scale => e4m3_to_f32(scale & 0x7f),
        };
        *bits = (0.5 * scale).to_bits();
        let (low, high) = codes.split_at_mut(8);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
            (*low, *high) = (byte & 15, byte >> 4);
        }
    }
}

/// Five weights in a byte, of which the last 4 bytes hold four, then the scale: `d * (q - 1)`. A byte is a fraction of 256 whose digits
/// to the base 3 are the weights.
fn tq1_0(b: &[u8], block: Block<'_>) {
    block.scales[0] = u16_at(b, 52).into();
    let (mut codes, powers) = (block.codes.iter_mut(), [1_u8, 3, 9, 27, 81]);
    for (bytes, digits) in [(&b[..32], 5), (&b[32..48], 5), (&b[48..52], 4)] {
        let all = powers[..digits].iter().flat_map(|power| bytes.iter().map(|byte| byte.wrapping_mul(*power)));
        all.zip(&mut codes).for_each(|(rest, code)| *code = ((u16::from(rest) * 3) >> 8) as u8);
    }
}

/// Codes of 2 bits, then the scale: `d * (q - 1)`.
fn tq2_0(b: &[u8], block: Block<'_>) {
    block.scales[0] = u16_at(b, 64).into();
    for (run, codes) in block.codes.chunks_exact_mut(32).enumerate() {
        let bytes = &b[run / 4 * 32..];
        codes.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte >> (run % 4 * 2) & 3);
    }
}

/// Scale, upper 2 bits of the scales of 8 runs, their lower 4 bits, codes: `d * (sc - 32) * IQ4_NL[q]`.
fn iq4_xs(b: &[u8], block: Block<'_>) {
    block.outer[0] = [u16_at(b, 0), 0];
    for (run, codes) in block.codes.chunks_exact_mut(32).enumerate() {
        let (low, upper) = (b[4 + run / 2] >> (run % 2 * 4) & 15, (u16_at(b, 2) >> (2 * run) & 3) as u8);
        block.scales[run] = (low | upper << 4).wrapping_sub(32).into();
        nibbles(&b[8 + 16 * run..][..16], codes);
    }
}

/// Calls `each` for the 16 runs of 16 weights of a block whose 2-bit codes lie in 64 bytes as Q2_K's do: run, first byte (of 32 bytes
/// in each half), quarter of the half, which is half of the shift of the code.
fn runs(codes: &mut [u8], mut each: impl FnMut(usize, usize, usize, &mut [u8])) {
    for (run, codes) in codes.chunks_exact_mut(16).enumerate() {
        let (half, quarter, odd) = (run / 8, run / 2 % 4, run % 2);
        each(run, half * 32 + odd * 16, quarter, codes);
    }
}

/// Scales and minima of 16 runs, 2-bit codes, scale, scale of the minima: `d * sc * q - dmin * m`.
fn q2_k(b: &[u8], block: Block<'_>) {
    let (scales, codes) = (&b[..16], &b[16..80]);
    block.outer[0] = [u16_at(b, 80), u16_at(b, 82)];
    runs(block.codes, |run, byte, quarter, out| {
        (block.scales[run], block.offsets[run]) = ((scales[run] & 15).into(), (scales[run] >> 4).into());
        out.iter_mut().zip(&codes[byte..]).for_each(|(out, code)| *out = code >> (2 * quarter) & 3);
    });
}

/// High bits, 2-bit codes, 6-bit scales of 16 runs, scale: `d * (sc - 32) * (q - 4)`.
fn q3_k(b: &[u8], block: Block<'_>) {
    let (high, codes, scales) = (&b[..32], &b[32..96], &b[96..108]);
    block.outer[0] = [u16_at(b, 108), 0];
    runs(block.codes, |run, byte, quarter, out| {
        let low = scales[run % 8] >> (run / 8 * 4) & 15;
        let upper = scales[8 + run % 4] >> (run / 4 * 2) & 3;
        block.scales[run] = (low | upper << 4).wrapping_sub(32).into();
        let bit = run / 8 * 4 + quarter;
        for (out, (code, high)) in out.iter_mut().zip(codes[byte..].iter().zip(&high[byte % 32..])) {
            *out = code >> (2 * quarter) & 3 | (high >> bit & 1) << 2;
        }
    });
}

/// Scale and minimum of run `j` of 32 weights, from the 12 bytes of Q4_K and Q5_K.
fn scale_and_min(s: &[u8], j: usize) -> (u8, u8) {
    match j {
        0..4 => (s[j] & 63, s[j + 4] & 63),
        _ => (s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4),
    }
}

/// Scale, scale of the minima, scales and minima of 8 runs, codes: `d * sc * q - dmin * m`.
fn q4_k(b: &[u8], block: Block<'_>) {
    q45_k(b, &b[16..], block);
}

/// Q4_K with fifth bits before the codes: bit j of byte i belongs to code i of run j.
fn q5_k(b: &[u8], block: Block<'_>) {
    let Block { codes, scales, offsets, outer } = block;
    q45_k(b, &b[48..], Block { codes: &mut *codes, scales, offsets, outer });
    for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
        codes.iter_mut().zip(&b[16..48]).for_each(|(code, byte)| *code |= (byte >> run & 1) << 4);
    }
}

fn q45_k(b: &[u8], bytes: &[u8], block: Block<'_>) {
    block.outer[0] = [u16_at(b, 0), u16_at(b, 2)];
    for (run, codes) in block.codes.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&b[4..16], run);
        (block.scales[run], block.offsets[run]) = (scale.into(), min.into());
        let bytes = &bytes[run / 2 * 32..];
        codes.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte >> (run % 2 * 4) & 15);
    }
}

/// Low 4 bits, upper 2 bits, signed scales of 16 runs, scale: `d * sc * (q - 32)`.
fn q6_k(b: &[u8], block: Block<'_>) {
    let (low, upper, scales) = (&b[..128], &b[128..192], &b[192..208]);
    block.outer[0] = [u16_at(b, 208), 0];
    runs(block.codes, |run, byte, quarter, out| {
        let (half, within) = (byte / 32, byte % 32);
        block.scales[run] = scales[run].into();
        let low = &low[half * 64 + quarter % 2 * 32 + within..];
        let upper = &upper[half * 32 + within..];
        for (out, (low, upper)) in out.iter_mut().zip(low.iter().zip(upper)) {
            *out = low >> (quarter / 2 * 4) & 15 | (upper >> (2 * quarter) & 3) << 4;
        }
    });
}
