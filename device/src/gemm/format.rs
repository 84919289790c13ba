//! Numbers of checkpoints, row by row, and memory in panels.

use std::mem::MaybeUninit;

use half::{bf16, f16};

use crate::simd::small_float::{bf16_to_f32, f16_to_f32};
use crate::{DeviceError, Dtype, Pool};

impl Dtype {
    pub(super) fn read(self, data: &[u8], index: usize) -> f32 {
        match self {
            Dtype::F32 => {
                let at = index * 4;
                f32::from_le_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]])
            }
            Dtype::Bf16 => bf16::from_le_bytes([data[index * 2], data[index * 2 + 1]]).to_f32(),
            Dtype::F16 => f16::from_le_bytes([data[index * 2], data[index * 2 + 1]]).to_f32(),
        }
    }

    pub(super) fn read_row(self, data: &[u8], row: &mut [f32]) {
        let halves = data.as_chunks().0;
        match self {
            Dtype::F32 => {
                row.iter_mut().zip(data.as_chunks().0).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
            }
            Dtype::Bf16 => {
                row.iter_mut().zip(halves).for_each(|(x, bytes)| *x = bf16_to_f32(u16::from_le_bytes(*bytes)))
            }
            Dtype::F16 => row.iter_mut().zip(halves).for_each(|(x, bytes)| *x = f16_to_f32(u16::from_le_bytes(*bytes))),
        }
    }
}

/// Rows of all parts together, at least one.
pub(super) fn rows(k: usize, parts: &[(Dtype, &[u8])]) -> Result<usize, DeviceError> {
    let rows = |(format, data): &(Dtype, &[u8])| {
        let row_bytes = k.checked_mul(format.bytes()).filter(|&b| b > 0)?;
        data.len().is_multiple_of(row_bytes).then(|| data.len() / row_bytes)
    };
    parts.iter().map(rows).sum::<Option<usize>>().filter(|&rows| rows > 0).ok_or(DeviceError::BadMatrix(k))
}

/// Row `index` of the parts one below the other; `None` beyond the last.
pub(super) fn find_row<'a>(parts: &[(Dtype, &'a [u8])], k: usize, mut index: usize) -> Option<(Dtype, &'a [u8])> {
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
pub(super) fn read_row(parts: &[(Dtype, &[u8])], index: usize, row: &mut [f32]) {
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
