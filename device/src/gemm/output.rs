//! The output of a product, written by several threads.

use crate::simd::LANES;

/// The output, shared by threads that write disjoint columns of it.
#[derive(Clone, Copy)]
pub(super) struct Output {
    start: *mut f32,
    n: usize,
}
// SAFETY: each task writes only the columns of its own panels (see `Output::write`).
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

impl Output {
    /// Of rows of `n`.
    pub fn new(y: &mut [f32], n: usize) -> Output {
        Output { start: y.as_mut_ptr(), n }
    }

    /// Writes `values` (those that lie below n) to row `row`, panel `panel`.
    ///
    /// # Safety
    /// `row` is below the rows of y, and no other thread touches this panel's columns.
    #[inline(always)]
    unsafe fn write(self, row: usize, panel: usize, values: &[f32; LANES], bias: Option<&[f32]>) {
        let first = panel * LANES;
        let count = LANES.min(self.n.saturating_sub(first));
        for (lane, &value) in values.iter().enumerate().take(count) {
            let value = value + bias.map_or(0.0, |b| b[first + lane]);
            // SAFETY: inside row `row` of y; this panel's columns are the caller's alone.
            unsafe { *self.start.add(row * self.n + first + lane) = value };
        }
    }

    /// Writes a tile whose first row and panel these are.
    ///
    /// # Safety
    /// As of [`Output::write`], for all rows and panels of the tile.
    #[inline(always)]
    pub unsafe fn write_tile<const M: usize, const P: usize>(
        self,
        row: usize,
        panel: usize,
        values: &[[[f32; LANES]; P]; M],
        bias: Option<&[f32]>,
    ) {
        for (m, values) in values.iter().enumerate() {
            for (p, values) in values.iter().enumerate() {
                // SAFETY: as the caller vouches.
                unsafe { self.write(row + m, panel + p, values, bias) };
            }
        }
    }
}
