//! Weights in the order in which the kernel reads them.

use half::{bf16, f16};

use crate::simd::LANES;

/// How the numbers of a weight matrix are written in a checkpoint (little endian).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// 4 bytes a number.
    F32,
    /// 2 bytes, kept as they are.
    Bf16,
    /// 2 bytes, widened to 4 when packed.
    F16,
}

impl WeightFormat {
    fn bytes(self) -> usize {
        match self {
            WeightFormat::F32 => 4,
            WeightFormat::Bf16 | WeightFormat::F16 => 2,
        }
    }

    fn read(self, data: &[u8], index: usize) -> f32 {
        match self {
            WeightFormat::F32 => {
                let at = index * 4;
                f32::from_le_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]])
            }
            WeightFormat::Bf16 => bf16::from_le_bytes([data[index * 2], data[index * 2 + 1]]).to_f32(),
            WeightFormat::F16 => f16::from_le_bytes([data[index * 2], data[index * 2 + 1]]).to_f32(),
        }
    }
}

pub(super) enum Panels {
    F32(Vec<[f32; LANES]>),
    Bf16(Vec<[u16; LANES]>),
}

/// A weight matrix `[n, k]` in panels of 16 outputs: `panel[p][i]` holds column i of rows 16p..16p+16, zero beyond n.
pub struct PackedMatrix {
    n: usize,
    k: usize,
    pub(super) panels: Panels,
}

impl PackedMatrix {
    /// Packs the rows of one or more row-major `[n_i, k]` matrices, one below the other (as QKV or gate-up are fused).
    /// Stays in bfloat16 if every part is. `None` if a part does not hold whole rows of `k` numbers.
    pub fn pack(k: usize, parts: &[(WeightFormat, &[u8])]) -> Option<PackedMatrix> {
        let mut n = 0;
        for (format, data) in parts {
            let row_bytes = k.checked_mul(format.bytes()).filter(|&b| b > 0)?;
            if !data.len().is_multiple_of(row_bytes) {
                return None;
            }
            n += data.len() / row_bytes;
        }
        let lines = n.div_ceil(LANES) * k;
        let panels = if parts.iter().all(|(format, _)| *format == WeightFormat::Bf16) {
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
