//! y += s·(x·Aᵀ)·Bᵀ: low-rank additions to a linear layer (LoRA, Hu et al., 2021), for the rows of several adapters at once.
//!
//! Each row of a step has its adapter or none. The rows of one adapter form groups of at most [`ROWS_PER_TASK`] rows, wherever they
//! lie in the step. One product is two loops over the pool's threads, whatever the number of adapters:
//!
//! ```text
//! shrink   t = s·(x·Aᵀ)   a task: one group of rows × 16 ranks        Aᵀ packed in panels of 16 ranks
//! expand   y += t·Bᵀ      a task: one group of rows × 512 outputs     B packed in panels of 16 outputs
//! ```
//!
//! **Row-invariance.** t and y are sums in float32 in an order that depends only on the adapter: over k in two sums (even and odd
//! k), and over the ranks. So a row's result depends on that row and its adapter alone, and rows without an adapter are not
//! touched.
//!
//! The factors keep their type. One task reads its panels once for four rows.

mod kernel;
mod lines;

use crate::error::LinearError;
use std::ops::Range;

use device::Dtype;
use lines::Lines;
use simd::{Isa, LANES, Pool};

/// Greatest number of rows of a task.
const ROWS_PER_TASK: usize = 16;

/// Panels of 16 outputs per task of the second loop.
const PANELS_PER_TASK: usize = 32;

/// The factor A of one or several parts of a layer.
#[derive(Clone, Copy)]
pub struct DownFactor<'a> {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Row-major `[rank, inputs]`, little-endian.
    pub data: &'a [u8],
    /// Factor s of the result.
    pub scale: f32,
}

/// The factor B of one part of a layer.
#[derive(Clone, Copy)]
pub struct UpFactor<'a> {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Row-major `[outputs, rank]`, little-endian.
    pub data: &'a [u8],
    /// The layer's output that the first row adds to.
    pub first_output: usize,
    /// Index of its [`DownFactor`].
    pub down: usize,
}

/// A packed low-rank addition to a layer of some inputs and outputs.
pub struct LowRank {
    inputs: usize,
    /// Ranks of all A together, padded to whole panels.
    width: usize,
    /// Panels of 16 ranks; each has a line of 16 per input.
    down: Lines,
    /// `[width]`.
    scales: Vec<f32>,
    up: Vec<UpPanels>,
}

/// The rows of B for consecutive outputs: panels of 16 outputs, each with a line of 16 numbers per rank.
pub struct UpPanels {
    /// The layer's outputs.
    pub outputs: Range<usize>,
    /// Ranks, counted over all A of the layer.
    pub ranks: Range<usize>,
    lines: Lines,
}

impl UpPanels {
    /// Number of numbers in the panels, including padding.
    pub fn numbers(&self) -> usize {
        self.lines.len()
    }

    /// Writes the panels `[ceil(outputs / 16), ranks, 16]` in a type.
    ///
    /// # Panics
    /// If `to` does not have their size.
    pub fn write(&self, dtype: Dtype, to: &mut [u8]) {
        assert_eq!(to.len(), self.numbers() * dtype.bytes(), "the panels of B");
        self.lines.write(dtype, to);
    }
}

impl LowRank {
    /// Packs the factors of a layer.
    ///
    /// # Errors
    /// [`LinearError::BadMatrix`] if a factor does not consist of whole rows, is empty, or a B names an A that does not exist.
    pub fn pack(inputs: usize, down: &[DownFactor<'_>], up: &[UpFactor<'_>]) -> Result<LowRank, LinearError> {
        let rows = |dtype: Dtype, data: &[u8], columns: usize| {
            let row = columns.checked_mul(dtype.bytes()).filter(|bytes| *bytes > 0)?;
            (!data.is_empty() && data.len().is_multiple_of(row)).then_some(data.len() / row)
        };
        let (mut ranks, mut scales) = (Vec::<Range<usize>>::new(), Vec::new());
        for factor in down {
            let rank = rows(factor.dtype, factor.data, inputs).ok_or(LinearError::BadMatrix(inputs))?;
            ranks.push(scales.len()..scales.len() + rank);
            scales.resize(scales.len() + rank, factor.scale);
        }
        let parts: Vec<(Dtype, &[u8])> = down.iter().map(|factor| (factor.dtype, factor.data)).collect();
        let lines = Lines::pack(inputs, scales.len(), &parts);
        scales.resize(scales.len().next_multiple_of(LANES), 0.0);
        let up = up.iter().map(|factor| {
            let ranks = ranks.get(factor.down).cloned().unwrap_or_default();
            let outputs = rows(factor.dtype, factor.data, ranks.len()).ok_or(LinearError::BadMatrix(ranks.len()))?;
            let lines = Lines::pack(ranks.len(), outputs, &[(factor.dtype, factor.data)]);
            Ok(UpPanels { outputs: factor.first_output..factor.first_output + outputs, ranks, lines })
        });
        let up = up.collect::<Result<_, LinearError>>()?;
        Ok(LowRank { inputs, width: scales.len(), down: lines, scales, up })
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        let up: usize = self.up.iter().map(|up| up.lines.bytes()).sum();
        self.down.bytes() + size_of_val(&self.scales[..]) + up
    }

    /// Number of inputs of the layer.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Factor s of each rank of all A together, padded with zeros to whole panels of 16.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Number of numbers in the panels of A, including padding.
    pub fn down_numbers(&self) -> usize {
        self.down.len()
    }

    /// Writes the panels of A, `[ranks / 16, inputs, 16]`, in a type.
    ///
    /// # Panics
    /// If `to` does not have their size.
    pub fn write_down(&self, dtype: Dtype, to: &mut [u8]) {
        assert_eq!(to.len(), self.down_numbers() * dtype.bytes(), "the panels of A");
        self.down.write(dtype, to);
    }

    /// The panels of B, part by part.
    pub fn up(&self) -> &[UpPanels] {
        &self.up
    }

    /// Returns an upper bound of the size in bytes of an addition to a layer of these inputs and outputs, for `parts` factors A
    /// of at most this rank.
    pub fn most_bytes(inputs: usize, outputs: usize, parts: usize, rank: usize) -> usize {
        let width = LowRank::most_width(parts, rank);
        // Each part's outputs are padded to a whole panel.
        4 * (width * inputs + (outputs + parts * LANES) * rank + width)
    }

    /// Returns the greatest number of elements of t in a row.
    pub fn most_width(parts: usize, rank: usize) -> usize {
        (parts * rank).next_multiple_of(LANES)
    }
}

/// The rows of a step by adapter. Reuse one from step to step: it keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct AdapterRows {
    /// Adapter and row, in order.
    rows: Vec<(u32, u32)>,
    /// The rows of each task.
    tasks: Vec<Range<usize>>,
}

impl AdapterRows {
    /// Sets the adapter of each row, in the order of the rows.
    pub fn set(&mut self, adapters: impl IntoIterator<Item = Option<u32>>) {
        self.rows.clear();
        let rows = adapters.into_iter().zip(0..);
        self.rows.extend(rows.filter_map(|(adapter, row)| Some((adapter?, row))));
        self.rows.sort_unstable();
        self.tasks.clear();
        let mut first = 0;
        while let Some((adapter, _)) = self.rows.get(first) {
            let most = &self.rows[first..self.rows.len().min(first + ROWS_PER_TASK)];
            let count = most.partition_point(|(other, _)| other == adapter);
            self.tasks.push(first..first + count);
            first += count;
        }
    }

    /// The tasks: an adapter, and at most 16 of its rows with their numbers in the step.
    pub fn tasks(&self) -> impl ExactSizeIterator<Item = (u32, &[(u32, u32)])> {
        self.tasks.iter().map(|task| {
            let rows = &self.rows[task.clone()];
            (rows.first().map_or(0, |(adapter, _)| *adapter), rows)
        })
    }

    /// Returns the greatest number of tasks of a step of so many rows with so many adapters.
    pub fn most_tasks(rows: usize, adapters: usize) -> usize {
        // Every adapter has at most one task that is not full.
        rows.min(rows / ROWS_PER_TASK + adapters)
    }

    /// Returns whether no row has an adapter.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Number of rows with an adapter.
    pub fn len(&self) -> usize {
        self.rows.len()
    }
}

/// Operands of one product.
pub struct LowRankProduct<'a> {
    /// Activations `[rows, inputs]`.
    pub x: &'a [f32],
    /// Number of inputs.
    pub inputs: usize,
    /// Outputs `[rows, outputs]`, which are added to.
    pub y: &'a mut [f32],
    /// Number of outputs.
    pub outputs: usize,
    /// Rows by adapter.
    pub rows: &'a AdapterRows,
    /// The addition of each adapter to this layer; `None` if the adapter does not target it.
    pub adapters: &'a (dyn Fn(u32) -> Option<&'a LowRank> + Sync),
    /// Scratch for t.
    pub t: &'a mut [f32],
    /// Greatest number of elements of t in a row.
    pub width: usize,
}

/// Computes the product, split over the pool's threads.
///
/// # Panics
/// If a row, an adapter's layer or the scratch does not have the stated size, or this CPU does not have `isa`.
pub fn low_rank(isa: Isa, pool: &Pool, product: LowRankProduct<'_>) {
    assert!(isa.is_available(), "this CPU does not have {isa}");
    let LowRankProduct { x, inputs, y, outputs, rows, adapters, t, width } = product;
    let last = rows.rows.iter().map(|(_, row)| *row as usize + 1).max().unwrap_or(0);
    assert!(x.len() >= last * inputs && y.len() >= last * outputs, "x and y must hold {last} rows");
    assert!(t.len() >= rows.len() * width, "the scratch must hold {} rows of {width}", rows.len());
    let of_task = |task: &Range<usize>| {
        let rows = &rows.rows[task.clone()];
        let adapter = adapters(rows.first()?.0)?;
        let fits = adapter.inputs == inputs && adapter.width <= width;
        assert!(fits && adapter.up.iter().all(|up| up.outputs.end <= outputs), "the adapter is for another layer");
        Some((rows, adapter))
    };
    let widest = rows.tasks.iter().filter_map(of_task).map(|(_, adapter)| adapter.width).max().unwrap_or(0);
    if widest == 0 {
        return;
    }
    let panels = widest / LANES;
    let shared = kernel::Shared::new(t);
    pool.run(rows.tasks.len() * panels, inputs * LANES * ROWS_PER_TASK / 2, |index| {
        let (task, panel) = (&rows.tasks[index / panels], index % panels);
        let Some((of_rows, adapter)) = of_task(task).filter(|(_, adapter)| panel * LANES < adapter.width) else {
            return;
        };
        let scales = &adapter.scales[panel * LANES..][..LANES];
        let t = kernel::Cells { cells: shared, first: task.start * width + panel * LANES, stride: width };
        // SAFETY: the scratch has a row for each row with an adapter, and each panel of a row belongs to one task.
        unsafe { kernel::shrink(isa, &adapter.down, panel, inputs, x, of_rows, scales, t) };
    });
    let t = &*t;
    let blocks = outputs.div_ceil(LANES * PANELS_PER_TASK);
    let shared = kernel::Shared::new(y);
    pool.run(rows.tasks.len() * blocks, widest * LANES * PANELS_PER_TASK * ROWS_PER_TASK / 2, |index| {
        let (task, block) = (&rows.tasks[index / blocks], index % blocks);
        let Some((of_rows, adapter)) = of_task(task) else { return };
        for up in &adapter.up {
            let panels = up.outputs.len().div_ceil(LANES);
            let first = block * PANELS_PER_TASK;
            // A part has fewer panels than the layer, so its last blocks are shorter or empty.
            let panels = first..panels.min(first + PANELS_PER_TASK);
            if panels.is_empty() {
                continue;
            }
            let start = panels.start * LANES;
            let count = up.outputs.len().min(panels.end * LANES) - start;
            let y = kernel::Cells { cells: shared, first: up.outputs.start + start, stride: outputs };
            let t = kernel::Ranks { t: &t[task.start * width..], stride: width, ranks: up.ranks.clone() };
            // SAFETY: the rows exist, the outputs lie inside of them, and each panel of a row belongs to one task.
            unsafe { kernel::expand(isa, &up.lines, panels, &t, of_rows, count, y) };
        }
    });
}
