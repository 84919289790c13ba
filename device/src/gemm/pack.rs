//! Weights packed in the order in which the kernel reads them.

use half::bf16;

use super::blocks::Blocks;
use super::form::{Bytes, Nibbles};
use super::format::{find_row, in_panels, read_row, rows};
use super::quantization::Quantization;
use crate::Dtype;
use crate::simd::LANES;
use crate::{DeviceError, Pool};

pub(super) enum Panels {
    F32(Vec<[f32; LANES]>),
    Bf16(Vec<[u16; LANES]>),
    Q8(Blocks<Bytes>),
    Q4(Blocks<Nibbles>),
}

/// A weight matrix `[n, k]` in panels of 16 outputs, padded with zeros. In panels of floats, `panel[p][i]` holds column i of
/// rows 16p..16p+16.
pub struct PackedMatrix {
    n: usize,
    k: usize,
    pub(super) panels: Panels,
}

impl PackedMatrix {
    /// Packs the stacked rows of one or more row-major `[n_i, k]` matrices (as for fused QKV or gate-up weights) on the pool's
    /// threads. The result is bfloat16 if every part is, otherwise f32.
    ///
    /// # Errors
    /// [`DeviceError::BadMatrix`] if there are no rows, or a part does not consist of whole rows of `k` numbers.
    pub fn pack(pool: &Pool, k: usize, parts: &[(Dtype, &[u8])]) -> Result<PackedMatrix, DeviceError> {
        let n = rows(k, parts)?;
        let panels = n.div_ceil(LANES);
        let panels = if stay_bf16(parts.iter().map(|(format, _)| *format)) {
            Panels::Bf16(in_panels(pool, panels, k, LANES * k, [0; LANES], |panel, lines| {
                for lane in 0..LANES {
                    if let Some((_, row)) = find_row(parts, k, panel * LANES + lane) {
                        let numbers = row.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
                        lines.iter_mut().zip(numbers).for_each(|(line, number)| line[lane] = number);
                    }
                }
            }))
        } else {
            Panels::F32(in_panels(pool, panels, k, LANES * k, [0.0; LANES], |panel, lines| {
                let mut row = vec![0.0; k];
                for lane in 0..LANES {
                    read_row(parts, panel * LANES + lane, &mut row);
                    lines.iter_mut().zip(&row).for_each(|(line, number)| line[lane] = *number);
                }
            }))
        };
        Ok(PackedMatrix { n, k, panels })
    }

    /// Quantises the stacked rows of the parts on the pool's threads. Apart from the source, each thread holds one row of
    /// floats.
    ///
    /// # Errors
    /// [`DeviceError::BadMatrix`] if there are no rows, or a part does not consist of whole rows of `k` numbers;
    /// [`DeviceError::BadWeights`] if a weight is not finite, or its magnitude is above 65504 times 127 (q8) or 8 (q4).
    pub fn quantize(
        pool: &Pool,
        quantization: Quantization,
        k: usize,
        parts: &[(Dtype, &[u8])],
    ) -> Result<PackedMatrix, DeviceError> {
        let n = rows(k, parts)?;
        let panels = match quantization {
            Quantization::Q8 => Blocks::pack(pool, n, k, parts).map(Panels::Q8),
            Quantization::Q4 => Blocks::pack(pool, n, k, parts).map(Panels::Q4),
        };
        Ok(PackedMatrix { n, k, panels: panels.ok_or(DeviceError::BadWeights(quantization))? })
    }

    /// Returns the size in bytes of a packed `[n, k]` whose parts have these formats.
    pub fn packed_bytes(
        n: usize,
        k: usize,
        formats: impl IntoIterator<Item = Dtype>,
        quantization: Option<Quantization>,
    ) -> usize {
        let numbers = n.next_multiple_of(LANES) * k;
        match quantization {
            Some(Quantization::Q8) => Blocks::<Bytes>::packed_bytes(n, k),
            Some(Quantization::Q4) => Blocks::<Nibbles>::packed_bytes(n, k),
            None if stay_bf16(formats) => numbers * size_of::<u16>(),
            None => numbers * size_of::<f32>(),
        }
    }

    /// Number of outputs (rows of the weight matrix).
    pub fn n(&self) -> usize {
        self.n
    }

    /// Number of inputs (columns of the weight matrix).
    pub fn k(&self) -> usize {
        self.k
    }

    /// Returns whether the weights are quantised, which [`Rows::Blocks`](super::Rows::Blocks) needs.
    pub fn is_quantized(&self) -> bool {
        matches!(self.panels, Panels::Q8(_) | Panels::Q4(_))
    }

    /// Returns the number of bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(lines) => size_of_val(&lines[..]),
            Panels::Bf16(lines) => size_of_val(&lines[..]),
            Panels::Q8(blocks) => blocks.bytes(),
            Panels::Q4(blocks) => blocks.bytes(),
        }
    }

    /// Writes row `row` as floats, for example the embedding of a token whose matrix is also the output layer.
    ///
    /// # Panics
    /// If `row` is out of range or `out` is shorter than k.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n, "row {row} of {}", self.n);
        let (out, lane) = (&mut out[..self.k], row % LANES);
        let first = row / LANES * self.k;
        match &self.panels {
            Panels::F32(lines) => out.iter_mut().zip(&lines[first..]).for_each(|(x, line)| *x = line[lane]),
            Panels::Bf16(lines) => {
                out.iter_mut().zip(&lines[first..]).for_each(|(x, line)| *x = bf16::from_bits(line[lane]).to_f32());
            }
            Panels::Q8(blocks) => blocks.copy_row(row, out),
            Panels::Q4(blocks) => blocks.copy_row(row, out),
        }
    }
}

/// Returns whether floats are packed as bfloat16.
fn stay_bf16(formats: impl IntoIterator<Item = Dtype>) -> bool {
    formats.into_iter().all(|format| format == Dtype::Bf16)
}
