//! Rows of the stacked parts of a matrix, and parallel allocation of packed panels.

use crate::error::LinearError;
use std::mem::MaybeUninit;

use device::Dtype;
use simd::Pool;
use simd::allocator::use_large_pages;

/// Returns the total number of rows of all parts, which is at least one.
pub(super) fn rows(k: usize, parts: &[(Dtype, &[u8])]) -> Result<usize, LinearError> {
    let rows = |(format, data): &(Dtype, &[u8])| {
        let row_bytes = k.checked_mul(format.bytes()).filter(|&b| b > 0)?;
        data.len().is_multiple_of(row_bytes).then(|| data.len() / row_bytes)
    };
    parts.iter().map(rows).sum::<Option<usize>>().filter(|&rows| rows > 0).ok_or(LinearError::BadMatrix(k))
}

/// Returns row `index` of the stacked parts, or `None` past the last row.
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

/// Reads row `index` of the stacked parts as f32; zeros past the last row.
pub(super) fn read_row(parts: &[(Dtype, &[u8])], index: usize, row: &mut [f32]) {
    match find_row(parts, row.len(), index) {
        Some((format, data)) => format.read_row(data, row),
        None => row.fill(0.0),
    }
}

/// Allocates `panels` panels of `per_panel` elements and calls `write` for each on the pool. A panel is filled with `zero`
/// before `write` sees it. `work` is the cost of one panel in multiply-adds.
///
/// **First touch**: the thread that first writes a page gets it in its own NUMA node. The split over threads is the same as in
/// the product, so as a rule a panel is packed by the thread that later multiplies with it.
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
    let memory = &mut all.spare_capacity_mut()[..count];
    use_large_pages(memory);
    pool.chunks_mut(memory, per_panel, work, |panel, elements| {
        elements.fill(MaybeUninit::new(zero));
        // SAFETY: every element was initialised in the line above.
        write(panel, unsafe { &mut *(elements as *mut [MaybeUninit<T>] as *mut [T]) });
    });
    // SAFETY: all panels are whole, and each was initialised by its task.
    unsafe { all.set_len(count) };
    all
}
