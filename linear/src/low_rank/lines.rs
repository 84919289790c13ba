//! Factors packed in panels of sixteen rows.

use device::Dtype;
use simd::{LANES, Lanes};

use crate::format::{find_row, read_row};

/// Sixteen numbers of one column.
pub(super) trait Line: Copy + Sync {
    /// Widens the numbers.
    fn load<L: Lanes>(&self) -> L;
}

/// In float32.
#[derive(Clone, Copy)]
pub(super) struct Single([f32; LANES]);

/// In bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Brain([u16; LANES]);

/// In IEEE halves.
#[derive(Clone, Copy)]
pub(super) struct Half([u16; LANES]);

impl Line for Single {
    #[inline(always)]
    fn load<L: Lanes>(&self) -> L {
        L::load(&self.0)
    }
}

impl Line for Brain {
    #[inline(always)]
    fn load<L: Lanes>(&self) -> L {
        L::load_bf16(&self.0)
    }
}

impl Line for Half {
    #[inline(always)]
    fn load<L: Lanes>(&self) -> L {
        L::load_f16(&self.0)
    }
}

/// A matrix `[rows, columns]` in panels of 16 rows, padded with zeros: `panel[p][i]` holds column i of rows 16p..16p+16.
pub(super) enum Lines {
    Single(Vec<Single>),
    Brain(Vec<Brain>),
    Half(Vec<Half>),
}

impl Lines {
    /// Packs the stacked rows of the parts, whose number is `rows`. They keep their type if it is the same in all.
    pub fn pack(columns: usize, rows: usize, parts: &[(Dtype, &[u8])]) -> Lines {
        let count = rows.div_ceil(LANES) * columns;
        let same = parts.first().map(|(dtype, _)| *dtype).filter(|first| parts.iter().all(|(dtype, _)| dtype == first));
        let halves = |each: &mut dyn FnMut(usize, usize, u16)| {
            for row in 0..rows {
                let data = find_row(parts, columns, row).map_or(&[][..], |(_, data)| data);
                for (column, bytes) in data.as_chunks().0.iter().enumerate() {
                    each(row / LANES * columns + column, row % LANES, u16::from_le_bytes(*bytes));
                }
            }
        };
        match same {
            Some(Dtype::Bf16) => {
                let mut lines = vec![Brain([0; LANES]); count];
                halves(&mut |line, lane, number| lines[line].0[lane] = number);
                Lines::Brain(lines)
            }
            Some(Dtype::F16) => {
                let mut lines = vec![Half([0; LANES]); count];
                halves(&mut |line, lane, number| lines[line].0[lane] = number);
                Lines::Half(lines)
            }
            Some(Dtype::F32) | None => {
                let (mut lines, mut wide) = (vec![Single([0.0; LANES]); count], vec![0.0; columns]);
                for row in 0..rows {
                    read_row(parts, row, &mut wide);
                    let panel = &mut lines[row / LANES * columns..][..columns];
                    panel.iter_mut().zip(&wide).for_each(|(line, number)| line.0[row % LANES] = *number);
                }
                Lines::Single(lines)
            }
        }
    }

    /// Number of numbers, including padding.
    pub fn len(&self) -> usize {
        LANES
            * match self {
                Lines::Single(lines) => lines.len(),
                Lines::Brain(lines) => lines.len(),
                Lines::Half(lines) => lines.len(),
            }
    }

    /// Writes the numbers of all panels in a type, little-endian; `to` has exactly their size.
    pub fn write(&self, dtype: Dtype, to: &mut [u8]) {
        let to = to.chunks_exact_mut(LANES * dtype.bytes());
        match self {
            Lines::Single(lines) => to.zip(lines).for_each(|(to, line)| {
                dtype.convert(Dtype::F32, line.0.map(f32::to_le_bytes).as_flattened(), to);
            }),
            Lines::Brain(lines) => to.zip(lines).for_each(|(to, line)| {
                dtype.convert(Dtype::Bf16, line.0.map(u16::to_le_bytes).as_flattened(), to);
            }),
            Lines::Half(lines) => to.zip(lines).for_each(|(to, line)| {
                dtype.convert(Dtype::F16, line.0.map(u16::to_le_bytes).as_flattened(), to);
            }),
        }
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Lines::Single(lines) => size_of_val(&lines[..]),
            Lines::Brain(lines) => size_of_val(&lines[..]),
            Lines::Half(lines) => size_of_val(&lines[..]),
        }
    }
}
