//! The output of a product, shared by threads that write disjoint columns.

use crate::simd::LANES;

/// Pointer to the output `[rows, n]`.
#[derive(Clone, Copy)]
pub(super) struct Output {
    start: *mut f32,
    n: usize,
}
// SAFETY: each task writes only the columns of its own panels (see `Output::write_tile`).
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

impl Output {
    /// Wraps rows of `n` numbers.
    pub fn new(y: &mut [f32], n: usize) -> Output {
        Output { start: y.as_mut_ptr(), n }
    }

    /// Writes a tile at row `row` and panel `panel`, leaving out columns past n.
    ///
    /// # Safety
    /// All rows of the tile exist in y, and no other thread touches the columns of its panels.
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
                let first = (panel + p) * LANES;
                let count = LANES.min(self.n.saturating_sub(first));
                for (lane, &value) in values.iter().enumerate().take(count) {
                    let value = value + bias.map_or(0.0, |b| b[first + lane]);
                    // SAFETY: inside of row `row + m`, in a column that belongs to the caller.
                    unsafe { *self.start.add((row + m) * self.n + first + lane) = value };
                }
            }
        }
    }
}
