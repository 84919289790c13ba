//! Weights in the order in which the kernel reads them.

use std::fmt;

use half::{bf16, f16};

use super::blocks::Blocks;
use super::form::{Bytes, Nibbles};
use crate::simd::LANES;
use crate::{DeviceError, Pool};

/// How the numbers of a weight matrix are written in a checkpoint (little endian).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// 4 bytes a number.
    F32,
    /// 2 bytes, kept as they are.
    Bf16,
    /// 2 bytes, widened to 4 when packed.
    F16,
}

impl WeightFormat {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            WeightFormat::F32 => 4,
            WeightFormat::Bf16 | WeightFormat::F16 => 2,
        }
    }

    pub(super) fn read(self, data: &[u8], index: usize) -> f32 {
        match self {
            WeightFormat::F32 => {
                let at = index * 4;
                f32::from_le_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]])
            }
            WeightFormat::Bf16 => bf16::from_le_bytes([data[index * 2], data[index * 2 + 1]]).to_f32(),
            WeightFormat::F16 => f16::from_le_bytes([data[index * 2], data[index * 2 + 1]]).to_f32(),
        }
    }

    pub(super) fn read_row(self, data: &[u8], row: &mut [f32]) {
        let halves = data.as_chunks::<2>().0;
        match self {
            WeightFormat::F32 => {
                row.iter_mut().zip(data.as_chunks().0).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
            }
            WeightFormat::Bf16 => row.iter_mut().zip(halves).for_each(|(x, b)| *x = bf16::from_le_bytes(*b).to_f32()),
            WeightFormat::F16 => row.iter_mut().zip(halves).for_each(|(x, b)| *x = f16::from_le_bytes(*b).to_f32()),
        }
    }
}

/// What weights are made into while they are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// 8 bits in blocks of 32 along k, which share a scale in half precision: 8.5 bits a weight, as Q8_0 of GGUF files,
    /// with at most its squared error. Activations are brought to 8 bits in the same blocks before each product.
    Q8,
    /// 4 bits in the same blocks: 4.5 bits a weight, as Q4_0 of GGUF files, with at most its squared error. Activations as
    /// with [`Quantization::Q8`].
    Q4,
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Quantization::Q8 => "q8",
            Quantization::Q4 => "q4",
        })
    }
}

pub(super) enum Panels {
    F32(Vec<[f32; LANES]>),
    Bf16(Vec<[u16; LANES]>),
    Q8(Blocks<Bytes>),
    Q4(Blocks<Nibbles>),
}

/// A weight matrix `[n, k]` in panels of 16 outputs, zero beyond n: of floats, `panel[p][i]` holds column i of rows
/// 16p..16p+16.
pub struct PackedMatrix {
    n: usize,
    k: usize,
    pub(super) panels: Panels,
}

impl PackedMatrix {
    /// Packs the rows of one or more row-major `[n_i, k]` matrices, one below the other (as QKV or gate-up are fused).
    /// Stays in bfloat16 if every part is. `None` if a part does not hold whole rows of `k` numbers.
    pub fn pack(k: usize, parts: &[(WeightFormat, &[u8])]) -> Option<PackedMatrix> {
        let n = rows(k, parts)?;
        let lines = n.div_ceil(LANES) * k;
        let panels = if stay_bf16(parts.iter().map(|(format, _)| *format)) {
            let mut lines = vec![[0u16; LANES]; lines];
            fill(&mut lines, k, parts, |_, data, i| u16::from_le_bytes([data[i * 2], data[i * 2 + 1]]));
            Panels::Bf16(lines)
        } else {
            let mut lines = vec![[0f32; LANES]; lines];
            fill(&mut lines, k, parts, WeightFormat::read);
            Panels::F32(lines)
        };
        Some(PackedMatrix { n, k, panels })
    }

    /// Quantises the rows of the parts, one below the other, with the pool's threads. The only floats beside the source
    /// are a row for each thread.
    ///
    /// # Errors
    /// If a part does not hold whole rows of `k` numbers, or a weight can not be stored: no finite number, or a magnitude
    /// beyond 65504 times 127 (q8) or 8 (q4).
    pub fn quantize(
        pool: &Pool,
        quantization: Quantization,
        k: usize,
        parts: &[(WeightFormat, &[u8])],
    ) -> Result<PackedMatrix, DeviceError> {
        let n = rows(k, parts).ok_or(DeviceError::BadMatrix(k))?;
        let panels = match quantization {
            Quantization::Q8 => Blocks::pack(pool, n, k, parts).map(Panels::Q8),
            Quantization::Q4 => Blocks::pack(pool, n, k, parts).map(Panels::Q4),
        };
        Ok(PackedMatrix { n, k, panels: panels.ok_or(DeviceError::BadWeights(quantization))? })
    }

    /// Bytes of a packed `[n, k]` of parts in these formats.
    pub fn packed_bytes(
        n: usize,
        k: usize,
        formats: impl IntoIterator<Item = WeightFormat>,
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

    /// Outputs (rows of the weight matrix).
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs (columns of the weight matrix).
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(lines) => size_of_val(&lines[..]),
            Panels::Bf16(lines) => size_of_val(&lines[..]),
            Panels::Q8(blocks) => blocks.bytes(),
            Panels::Q4(blocks) => blocks.bytes(),
        }
    }

    /// The weight of output `row` for input `column`.
    ///
    /// # Panics
    /// If out of range.
    pub fn get(&self, row: usize, column: usize) -> f32 {
        let (line, lane) = (row / LANES * self.k + column, row % LANES);
        match &self.panels {
            Panels::F32(lines) => lines[line][lane],
            Panels::Bf16(lines) => bf16::from_bits(lines[line][lane]).to_f32(),
            Panels::Q8(blocks) => blocks.get(row, column),
            Panels::Q4(blocks) => blocks.get(row, column),
        }
    }

    /// Output row `row` of the matrix as floats, e.g. the embedding of a token whose matrix is also the output layer.
    ///
    /// # Panics
    /// If `row` is out of range or `out` is shorter than k.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n, "row {row} of {}", self.n);
        for (column, value) in out[..self.k].iter_mut().enumerate() {
            *value = self.get(row, column);
        }
    }
}

/// Whether floats are packed in two bytes.
fn stay_bf16(formats: impl IntoIterator<Item = WeightFormat>) -> bool {
    formats.into_iter().all(|format| format == WeightFormat::Bf16)
}

/// Rows of all parts together; `None` if one does not hold whole rows of `k` numbers.
fn rows(k: usize, parts: &[(WeightFormat, &[u8])]) -> Option<usize> {
    let rows = |(format, data): &(WeightFormat, &[u8])| {
        let row_bytes = k.checked_mul(format.bytes()).filter(|&b| b > 0)?;
        data.len().is_multiple_of(row_bytes).then(|| data.len() / row_bytes)
    };
    parts.iter().map(rows).sum()
}

/// Row `index` of the parts one below the other, zeros beyond the last.
pub(super) fn read_row(parts: &[(WeightFormat, &[u8])], mut index: usize, row: &mut [f32]) {
    for (format, data) in parts {
        let row_bytes = row.len() * format.bytes();
        if let Some(data) = data.chunks_exact(row_bytes).nth(index) {
            return format.read_row(data, row);
        }
        index -= data.len() / row_bytes;
    }
    row.fill(0.0);
}

/// Writes every number of `parts` to its lane.
fn fill<T: Copy>(
    lines: &mut [[T; LANES]],
    k: usize,
    parts: &[(WeightFormat, &[u8])],
    read: impl Fn(WeightFormat, &[u8], usize) -> T,
) {
    let mut n = 0;
    for &(format, data) in parts {
        let row_bytes = k * format.bytes();
        for row in data.chunks_exact(row_bytes) {
            let panel = &mut lines[n / LANES * k..][..k];
            for (column, line) in panel.iter_mut().enumerate() {
                line[n % LANES] = read(format, row, column);
            }
            n += 1;
        }
    }
}
