//! Element types whose blocks hold indices of short vectors in a codebook: IQ1, IQ2 and IQ3.
//!
//! A vector has eight magnitudes of three kinds (of IQ1: eight of −1, 0 and 1) or four of eight kinds; signs are stored beside the
//! index. Unpacked, a weight is a code of 4 bits: its kind, and bit 3 for its sign. The codebooks are those of llama.cpp, which chose
//! their vectors from lattices by what real weights need; no rule gives them.

use simd::small_float::f16_to_f32;

use super::types::{Block, u16_at};

/// Values of the codes of IQ2 types.
pub(super) const IQ2: [i8; 16] = [8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0];

/// Values of the codes of IQ3_XXS.
pub(super) const IQ3_XXS: [i8; 16] = [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62];

/// Values of the codes of IQ3_S.
pub(super) const IQ3_S: [i8; 16] = [1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15];

/// Values of the codes of IQ1 types: eight times −1, 0 or 1, plus 1, or with bit 3 minus 1.
pub(super) const IQ1: [i8; 16] = [-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0];

/// Vectors of all codebooks, 16 bits each, little-endian: eight kinds of 2 bits, or four of 4 bits, the first lowest.
const VECTORS: &[u8; 2 * 4608] = include_bytes!("codebooks.bin");

/// The codebooks: the index of their first vector.
const OF_IQ1: usize = 0;
const OF_IQ2_XXS: usize = 2048;
const OF_IQ2_XS: usize = OF_IQ2_XXS + 256;
const OF_IQ2_S: usize = OF_IQ2_XS + 512;
const OF_IQ3_XXS: usize = OF_IQ2_S + 1024;
const OF_IQ3_S: usize = OF_IQ3_XXS + 256;

/// Writes the vector of an index. `high`: bit 3 of each code, the first lowest.
fn write<const BITS: usize>(codebook: usize, index: usize, high: u8, codes: &mut [u8]) {
    let vector = u16_at(VECTORS, 2 * (codebook + index));
    for (i, code) in codes.iter_mut().enumerate() {
        *code = (vector >> (BITS * i)) as u8 & ((1 << BITS) - 1) | (high >> i & 1) << 3;
    }
}

/// Eight signs of which seven are stored: an even number of them is negative.
fn even(seven: u32) -> u8 {
    let seven = seven as u8 & 127;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// The bits of `d · (2 scale + 1) / divisor`, which is exact.
fn odd_scale(d: u16, scale: u32, divisor: f32) -> u32 {
    (f16_to_f32(d) * (2 * scale + 1) as f32 / divisor).to_bits()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// For each 32 weights four indices, then four times seven signs and a scale of 4 bits: `d (2 sc + 1) / 8 * IQ2[q]`.
pub(super) fn iq2_xxs(b: &[u8], block: Block<'_>) {
    for (run, codes) in block.codes.chunks_exact_mut(32).enumerate() {
        let (indices, signs) = (&b[2 + 8 * run..], u32_at(b, 6 + 8 * run));
        block.scales[run] = odd_scale(u16_at(b, 0), signs >> 28, 8.0);
        for (i, codes) in codes.chunks_exact_mut(8).enumerate() {
            write::<2>(OF_IQ2_XXS, indices[i].into(), even(signs >> (7 * i)), codes);
        }
    }
}

/// For each 8 weights an index of 9 bits and seven signs, then for each 16 a scale of 4 bits: as IQ2_XXS.
pub(super) fn iq2_xs(b: &[u8], block: Block<'_>) {
    quarter_scales(b, &b[66..], block.scales);
    for (i, codes) in block.codes.chunks_exact_mut(8).enumerate() {
        let index = u16_at(b, 2 + 2 * i);
        write::<2>(OF_IQ2_XS, usize::from(index & 511), even((index >> 9).into()), codes);
    }
}

/// Scales of 16 runs of 16 weights.
fn quarter_scales(b: &[u8], bytes: &[u8], scales: &mut [u32]) {
    for (run, scale) in scales.iter_mut().enumerate() {
        *scale = odd_scale(u16_at(b, 0), (bytes[run / 2] >> (run % 2 * 4) & 15).into(), 8.0);
    }
}

/// Indices, signs, upper 2 bits of the indices, scales: as IQ2_XS.
pub(super) fn iq2_s(b: &[u8], block: Block<'_>) {
    quarter_scales(b, &b[74..], block.scales);
    for (i, codes) in block.codes.chunks_exact_mut(8).enumerate() {
        let upper = b[66 + i / 4] >> (i % 4 * 2) & 3;
        write::<2>(OF_IQ2_S, usize::from(b[2 + i]) | usize::from(upper) << 8, b[34 + i], codes);
    }
}

/// Indices of four weights, then for each 32 weights four times seven signs and a scale of 4 bits:
/// `d (2 sc + 1) / 4 * IQ3_XXS[q]`.
pub(super) fn iq3_xxs(b: &[u8], block: Block<'_>) {
    for (run, codes) in block.codes.chunks_exact_mut(32).enumerate() {
        let signs = u32_at(b, 66 + 4 * run);
        block.scales[run] = odd_scale(u16_at(b, 0), signs >> 28, 4.0);
        for (i, codes) in codes.chunks_exact_mut(4).enumerate() {
            let of_four = even(signs >> (7 * (i / 2))) >> (i % 2 * 4);
            write::<4>(OF_IQ3_XXS, b[2 + 8 * run + i].into(), of_four, codes);
        }
    }
}

/// Indices, ninth bits of the indices, signs, scales of 32 weights: `d (2 sc + 1) * IQ3_S[q]`.
pub(super) fn iq3_s(b: &[u8], block: Block<'_>) {
    block.outer[0] = [u16_at(b, 0), 0];
    for (run, scale) in block.scales.iter_mut().enumerate() {
        *scale = u32::from(b[106 + run / 2] >> (run % 2 * 4) & 15) * 2 + 1;
    }
    for (i, codes) in block.codes.chunks_exact_mut(4).enumerate() {
        let ninth = b[66 + i / 8] >> (i % 8) & 1;
        write::<4>(OF_IQ3_S, usize::from(b[2 + i]) | usize::from(ninth) << 8, b[74 + i / 2] >> (i % 2 * 4), codes);
    }
}

/// Indices, then for each 32 weights upper bits of four indices, a scale of 3 bits and a sign: `d (2 sc + 1) / 8 * IQ1[q]`.
pub(super) fn iq1_s(b: &[u8], block: Block<'_>) {
    for (run, codes) in block.codes.chunks_exact_mut(32).enumerate() {
        let upper = u16_at(b, 34 + 2 * run);
        block.scales[run] = odd_scale(u16_at(b, 0), (upper >> 12 & 7).into(), 8.0);
        let high = if upper >> 15 == 0 { 0 } else { 255 };
        for (i, codes) in codes.chunks_exact_mut(8).enumerate() {
            let index = usize::from(b[2 + 4 * run + i]) | usize::from(upper >> (3 * i) & 7) << 8;
            write::<2>(OF_IQ1, index, high, codes);
        }
    }
}

/// Indices, upper bits and a sign of each index, scales of 3 bits of 16 weights in 16-bit words whose upper 4 bits are `d`: as IQ1_S.
pub(super) fn iq1_m(b: &[u8], block: Block<'_>) {
    let words: [u16; 4] = std::array::from_fn(|i| u16_at(b, 48 + 2 * i));
    let d = words.iter().rev().fold(0, |d, word| d << 4 | word >> 12);
    for (run, scale) in block.scales.iter_mut().enumerate() {
        *scale = odd_scale(d, (words[run / 4] >> (run % 4 * 3) & 7).into(), 8.0);
    }
    for (i, codes) in block.codes.chunks_exact_mut(8).enumerate() {
        let upper = b[32 + i / 2] >> (i % 2 * 4);
        let high = if upper & 8 == 0 { 0 } else { 255 };
        write::<2>(OF_IQ1, usize::from(b[i]) | usize::from(upper & 7) << 8, high, codes);
    }
}
