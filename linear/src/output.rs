//! The output of a product, shared by threads that write disjoint columns.

// Loops over registers are most readable with an index that several arrays share.
#![allow(clippy::needless_range_loop)]

use simd::{LANES, Lanes, prefetch_to_write};

/// Some columns of the output `[rows, stride]`.
#[derive(Clone, Copy)]
pub(super) struct Output {
    start: *mut f32,
    stride: usize,
    n: usize,
}
// SAFETY: each task accesses only the columns of its own panels (see `Output::write_tile`).
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

impl Output {
    /// Wraps columns `first..first + n` of rows of `stride` numbers.
    ///
    /// # Panics
    /// If the rows do not have these columns.
    pub fn new(y: &mut [f32], stride: usize, first: usize, n: usize) -> Output {
        assert!(first + n <= stride && y.len().is_multiple_of(stride), "columns {first}..{} of {stride}", first + n);
        Output { start: y.as_mut_ptr().wrapping_add(first), stride, n }
    }

    /// Returns the rows behind the first `rows`.
    pub fn behind(self, rows: usize) -> Output {
        Output { start: self.start.wrapping_add(rows * self.stride), ..self }
    }

    /// Prefetches the columns of a panel in a row that is written next.
    #[inline(always)]
    pub fn prefetch(self, row: usize, panel: usize) {
        prefetch_to_write(self.start.wrapping_add(row * self.stride + panel * LANES).cast());
    }

    /// Writes a tile from row `row` on, leaving out columns past n.
    ///
    /// # Safety
    /// All rows of the tile exist in y, and no other thread touches the columns of its panels.
    #[inline(always)]
    pub unsafe fn write_tile<L: Lanes, const M: usize, const P: usize>(
        self,
        row: usize,
        panels: [usize; P],
        sums: [[L; P]; M],
        bias: Option<&[f32]>,
    ) {
        let whole = panels.iter().all(|panel| (panel + 1) * LANES <= self.n);
        if !whole {
            // SAFETY: as promised by the caller.
            return unsafe { self.write_part(row, panels, &numbers(sums), bias) };
        }
        let mut of_panels = [L::splat(0.0); P];
        if let Some(bias) = bias {
            for p in 0..P {
                if let Some(bias) = bias[panels[p] * LANES..].first_chunk() {
                    of_panels[p] = L::load(bias);
                }
            }
        }
        for m in 0..M {
            for p in 0..P {
                let to = self.start.wrapping_add((row + m) * self.stride + panels[p] * LANES).cast::<[f32; LANES]>();
                // SAFETY: sixteen numbers inside of row `row + m`, in columns that belong to the caller.
                sums[m][p].add(of_panels[p]).store(unsafe { &mut *to });
            }
        }
    }

    /// The part of [`Output::write_tile`] for panels of which some end past n.
    ///
    /// # Safety
    /// As for [`Output::write_tile`].
    unsafe fn write_part<const M: usize, const P: usize>(
        self,
        row: usize,
        panels: [usize; P],
        values: &[[[f32; LANES]; P]; M],
        bias: Option<&[f32]>,
    ) {
        for (m, values) in values.iter().enumerate() {
            for (panel, values) in panels.iter().zip(values) {
                let first = panel * LANES;
                let count = LANES.min(self.n.saturating_sub(first));
                for (lane, &value) in values.iter().enumerate().take(count) {
                    let value = value + bias.map_or(0.0, |b| b[first + lane]);
                    // SAFETY: inside of row `row + m`, in a column that belongs to the caller.
                    unsafe { *self.start.add((row + m) * self.stride + first + lane) = value };
                }
            }
        }
    }

    /// Adds numbers to columns of a row from `first` on.
    ///
    /// # Safety
    /// The row exists in y with these columns, and no other thread touches them.
    pub unsafe fn add(self, row: usize, first: usize, numbers: &[f32]) {
        let to = self.start.wrapping_add(row * self.stride + first);
        // SAFETY: as promised by the caller.
        let to = unsafe { std::slice::from_raw_parts_mut(to, numbers.len()) };
        to.iter_mut().zip(numbers).for_each(|(to, number)| *to += number);
    }

    /// Reads a tile, with zeros for columns past n.
    ///
    /// # Safety
    /// As for [`Output::write_tile`]; its columns have been written.
    #[inline(always)]
    pub unsafe fn read_tile<L: Lanes, const M: usize, const P: usize>(self, row: usize, panel: usize) -> [[L; P]; M] {
        let mut acc = [[L::splat(0.0); P]; M];
        for (m, acc) in acc.iter_mut().enumerate() {
            for (p, acc) in acc.iter_mut().enumerate() {
                let first = (panel + p) * LANES;
                let mut values = [0.0; LANES];
                for (lane, value) in values.iter_mut().enumerate().take(self.n.saturating_sub(first)) {
                    // SAFETY: inside of row `row + m`, in a column that belongs to the caller.
                    *value = unsafe { *self.start.add((row + m) * self.stride + first + lane) };
                }
                *acc = L::load(&values);
            }
        }
        acc
    }
}

/// The numbers of a tile. The loops are short enough to be unrolled. If they were not, the sums of a tile would stay in memory all
/// the time.
#[inline(always)]
pub(super) fn numbers<L: Lanes, const M: usize, const P: usize>(acc: [[L; P]; M]) -> [[[f32; LANES]; P]; M] {
    let mut values = [[[0.0; LANES]; P]; M];
    for m in 0..M {
        for p in 0..P {
            acc[m][p].store(&mut values[m][p]);
        }
    }
    values
}
