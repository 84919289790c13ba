//! Weights in the order in which the kernel reads them.

use std::fmt;
use std::mem::MaybeUninit;
use std::str::FromStr;

use half::{bf16, f16};

use super::blocks::Blocks;
use super::form::{Bytes, Nibbles};
use crate::simd::LANES;
use crate::simd::small_float::{bf16_to_f32, f16_to_f32};
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
        let halves = data.as_chunks().0;
        match self {
            WeightFormat::F32 => {
                row.iter_mut().zip(data.as_chunks().0).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
            }
            WeightFormat::Bf16 => {
                row.iter_mut().zip(halves).for_each(|(x, bytes)| *x = bf16_to_f32(u16::from_le_bytes(*bytes)))
            }
            WeightFormat::F16 => {
                row.iter_mut().zip(halves).for_each(|(x, bytes)| *x = f16_to_f32(u16::from_le_bytes(*bytes)))
            }
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

impl FromStr for Quantization {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Quantization, &'static str> {
        let known = [Quantization::Q8, Quantization::Q4].into_iter().find(|form| form.to_string() == name);
        known.ok_or("expected q8 or q4: weights in 8 or 4 bits with a scale for every 32")
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
    /// Packs the rows of one or more row-major `[n_i, k]` matrices, one below the other (as QKV or gate-up are fused), with
    /// the pool's threads. Stays in bfloat16 if every part is.
    ///
    /// # Errors
    /// If there are no rows, or a part does not hold whole ones of `k` numbers.
    pub fn pack(pool: &Pool, k: usize, parts: &[(WeightFormat, &[u8])]) -> Result<PackedMatrix, DeviceError> {
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

    /// Quantises the rows of the parts, one below the other, with the pool's threads. The only floats beside the source
    /// are a row for each thread.
    ///
    /// # Errors
    /// If there are no rows, a part does not hold whole ones of `k` numbers, or a weight can not be stored: no finite
    /// number, or a magnitude beyond 65504 times 127 (q8) or 8 (q4).
    pub fn quantize(
        pool: &Pool,
        quantization: Quantization,
        k: usize,
        parts: &[(WeightFormat, &[u8])],
    ) -> Result<PackedMatrix, DeviceError> {
        let n = rows(k, parts)?;
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

    /// Whether the weights are in blocks of integers, and so can be multiplied with [`Rows::Blocks`](super::Rows::Blocks).
    pub fn is_quantized(&self) -> bool {
        matches!(self.panels, Panels::Q8(_) | Panels::Q4(_))
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

/// Whether floats are packed in two bytes.
fn stay_bf16(formats: impl IntoIterator<Item = WeightFormat>) -> bool {
    formats.into_iter().all(|format| format == WeightFormat::Bf16)
}

/// Rows of all parts together, at least one.
fn rows(k: usize, parts: &[(WeightFormat, &[u8])]) -> Result<usize, DeviceError> {
    let rows = |(format, data): &(WeightFormat, &[u8])| {
        let row_bytes = k.checked_mul(format.bytes()).filter(|&b| b > 0)?;
        data.len().is_multiple_of(row_bytes).then(|| data.len() / row_bytes)
    };
    parts.iter().map(rows).sum::<Option<usize>>().filter(|&rows| rows > 0).ok_or(DeviceError::BadMatrix(k))
}

/// Row `index` of the parts one below the other; `None` beyond the last.
fn find_row<'a>(parts: &[(WeightFormat, &'a [u8])], k: usize, mut index: usize) -> Option<(WeightFormat, &'a [u8])> {
    for &(format, data) in parts {
        let row_bytes = k * format.bytes();
        if let Some(row) = data.chunks_exact(row_bytes).nth(index) {
            return Some((format, row));
        }
        index -= data.len() / row_bytes;
    }
    None
}

/// The same as floats, zeros beyond the last.
pub(super) fn read_row(parts: &[(WeightFormat, &[u8])], index: usize, row: &mut [f32]) {
    match find_row(parts, row.len(), index) {
        Some((format, data)) => format.read_row(data, row),
        None => row.fill(0.0),
    }
}

/// Memory of `panels` panels of `per_panel` elements each, which `write` fills; it finds them `zero`. **First touch**: the thread
/// that writes a panel first, and so has its pages near, is as a rule the one that will multiply with it: in both loops
/// each thread has one run of panels, all of about equal length. `work` is that of a panel, as multiply-adds.
pub(super) fn in_panels<T: Copy + Send + Sync>(
    pool: &Pool,
    panels: usize,
    per_panel: usize,
    work: usize,
    zero: T,
    write: impl Fn(usize, &mut [T]) + Sync,
) -> Vec<T> {
    let count = panels * per_panel;
    let mut all = Vec::with_capacity(count);
    pool.chunks_mut(&mut all.spare_capacity_mut()[..count], per_panel, work, |panel, elements| {
        elements.fill(MaybeUninit::new(zero));
        // SAFETY: written just now.
        write(panel, unsafe { &mut *(elements as *mut [MaybeUninit<T>] as *mut [T]) });
    });
    // SAFETY: whole panels, each of which has been written.
    unsafe { all.set_len(count) };
    all
}
