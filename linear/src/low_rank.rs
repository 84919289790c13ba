//! y += s·(x·Aᵀ)·Bᵀ: low-rank additions to a linear layer (LoRA, Hu et al., 2021), for the rows of several adapters at once.
//!
//! Each row of a step has its adapter or none. Rows of the same adapter, at most [`ROWS`] of them, are computed together wherever they
//! lie in the step:
//!
//! ```text
//! x of these rows ── A ──▶ t  [rows, ranks] ── · s ── B of each part ──▶ u  [rows, outputs] ── added to y of these rows
//! ```
//!
//! A and B are matrices as those of layers, and [`gemm`] multiplies with both in the arithmetic that they were packed for: if it rounds,
//! x and t·s are rounded to bfloat16.
//!
//! **Threads.** Each thread computes some of the rows. If there are few rows and adapters, all threads share each product instead.
//!
//! **Row-invariance.** A product has that of [`gemm`], so a row's result depends on that row and its adapter alone. Rows without an
//! adapter are not touched.

use std::cell::Cell;
use std::ops::Range;

use device::Dtype;
use simd::{Isa, LANES, Pool};

use crate::error::LinearError;
use crate::output::Output;
use crate::{Arithmetic, Gemm, PackedMatrix, Rows, WeightRows, gemm};

/// Greatest number of rows of a product.
const ROWS: usize = 32;

/// Greatest number of rows of a task of a device that launches kernels.
const ROWS_PER_TASK: usize = 16;

thread_local! {
    /// Memory of this thread's last product, reused by the next.
    static SCRATCH: Cell<Scratch> = const { Cell::new(Scratch { x: Vec::new(), t: Vec::new(), part: Vec::new(), u: Vec::new() }) };
}

/// Intermediate results of at most [`ROWS`] rows.
#[derive(Default)]
struct Scratch {
    /// Inputs, if the rows are not neighbours.
    x: Vec<f32>,
    t: Vec<f32>,
    /// The scaled ranks of t that one B takes.
    part: Vec<f32>,
    u: Vec<f32>,
}

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
    /// `[ranks, inputs]`, the ranks of all A together.
    down: PackedMatrix,
    /// Factor s of each rank, padded with zeros to whole panels.
    scales: Vec<f32>,
    up: Vec<UpPart>,
}

/// The rows of B for consecutive outputs.
pub struct UpPart {
    /// The layer's outputs.
    pub outputs: Range<usize>,
    /// Ranks, counted over all A of the layer.
    pub ranks: Range<usize>,
    /// `[outputs, ranks]`.
    weights: PackedMatrix,
}

impl UpPart {
    /// Number of numbers in panels of 16 outputs, including padding.
    pub fn numbers(&self) -> usize {
        numbers_in_panels(&self.weights)
    }

    /// Writes the panels `[ceil(outputs / 16), ranks, 16]` in a type.
    ///
    /// # Panics
    /// If `to` does not have their size.
    pub fn write(&self, dtype: Dtype, to: &mut [u8]) {
        write_panels(&self.weights, dtype, to);
    }
}

fn numbers_in_panels(matrix: &PackedMatrix) -> usize {
    matrix.n().next_multiple_of(LANES) * matrix.k()
}

/// Writes a matrix in panels of sixteen outputs in a type, little-endian: `[ceil(n / 16), k, 16]`, padded with zeros.
fn write_panels(matrix: &PackedMatrix, dtype: Dtype, to: &mut [u8]) {
    let size = dtype.bytes();
    assert_eq!(to.len(), numbers_in_panels(matrix) * size, "the panels of a factor");
    to.fill(0);
    let mut row = vec![0.0; matrix.k()];
    for output in 0..matrix.n() {
        matrix.copy_row(output, &mut row);
        let lines = to[output / LANES * matrix.k() * LANES * size..].chunks_exact_mut(LANES * size);
        for (line, number) in lines.zip(&row) {
            dtype.convert(Dtype::F32, &number.to_le_bytes(), &mut line[output % LANES * size..][..size]);
        }
    }
}

impl LowRank {
    /// Packs the factors of a layer for products in an arithmetic. If it is exact, the factors keep their values.
    ///
    /// # Errors
    /// [`LinearError::BadMatrix`] if a factor does not consist of whole rows, is empty, or a B names an A that does not exist.
    pub fn pack(
        pool: &Pool,
        arithmetic: Arithmetic,
        inputs: usize,
        down: &[DownFactor<'_>],
        up: &[UpFactor<'_>],
    ) -> Result<LowRank, LinearError> {
        let pack = |k: usize, parts: &[WeightRows<'_>]| PackedMatrix::stored(pool, arithmetic, k, parts);
        let (mut ranks, mut scales, mut parts) = (Vec::<Range<usize>>::new(), Vec::new(), Vec::new());
        for factor in down {
            let rows = WeightRows::Numbers(factor.dtype, factor.data);
            let rank = rows.rows(inputs)?;
            ranks.push(scales.len()..scales.len() + rank);
            scales.resize(scales.len() + rank, factor.scale);
            parts.push(rows);
        }
        let down = pack(inputs, &parts)?;
        scales.resize(scales.len().next_multiple_of(LANES), 0.0);
        let up = up.iter().map(|factor| {
            let ranks = ranks.get(factor.down).cloned().unwrap_or_default();
            let weights = pack(ranks.len(), &[WeightRows::Numbers(factor.dtype, factor.data)])?;
            Ok(UpPart { outputs: factor.first_output..factor.first_output + weights.n(), ranks, weights })
        });
        Ok(LowRank { down, scales, up: up.collect::<Result<_, LinearError>>()? })
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        let up: usize = self.up.iter().map(|up| up.weights.bytes()).sum();
        self.down.bytes() + size_of_val(&self.scales[..]) + up
    }

    /// Number of inputs of the layer.
    pub fn inputs(&self) -> usize {
        self.down.k()
    }

    /// Factor s of each rank of all A together, padded with zeros to whole panels of 16.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Number of numbers in the panels of A, including padding.
    pub fn down_numbers(&self) -> usize {
        numbers_in_panels(&self.down)
    }

    /// Writes the panels of A, `[ranks / 16, inputs, 16]`, in a type.
    ///
    /// # Panics
    /// If `to` does not have their size.
    pub fn write_down(&self, dtype: Dtype, to: &mut [u8]) {
        write_panels(&self.down, dtype, to);
    }

    /// B, part by part.
    pub fn up(&self) -> &[UpPart] {
        &self.up
    }

    /// Returns an upper bound of the size in bytes of an addition to a layer of these inputs and outputs, for `parts` factors A
    /// of at most this rank.
    pub fn most_bytes(inputs: usize, outputs: usize, parts: usize, rank: usize) -> usize {
        let width = LowRank::most_width(parts, rank);
        // Each part's outputs are padded to a whole panel, and ranks may be padded to a pair.
        4 * (width * inputs.next_multiple_of(2) + (outputs + parts * LANES) * rank + width)
    }

    /// Returns the greatest number of ranks, padded to whole panels of 16.
    pub fn most_width(parts: usize, rank: usize) -> usize {
        (parts * rank).next_multiple_of(LANES)
    }

    /// Returns the most bytes of scratch memory that a thread keeps for layers of these inputs and outputs, for `parts` factors A of at
    /// most this rank.
    pub fn scratch_bytes(inputs: usize, outputs: usize, parts: usize, rank: usize) -> usize {
        size_of::<f32>() * ROWS * (inputs + LowRank::most_width(parts, rank) + rank + outputs)
    }

    /// Adds the products of at most [`ROWS`] rows.
    ///
    /// # Safety
    /// The rows exist in y with all outputs of the parts, and no other thread touches them.
    unsafe fn add(&self, isa: Isa, pool: &Pool, x: &[f32], first: usize, of_rows: &[(u32, u32)], y: Output) {
        let (inputs, count) = (self.inputs(), of_rows.len());
        let place = |row: u32| row as usize - first;
        let mut scratch = SCRATCH.take();
        let x = match of_rows {
            [(_, start), .., (_, end)] if (end - start) as usize + 1 != count => {
                scratch.x.clear();
                of_rows.iter().for_each(|(_, row)| scratch.x.extend(&x[place(*row) * inputs..][..inputs]));
                &scratch.x[..]
            }
            _ => &x[of_rows.first().map_or(0, |(_, row)| place(*row)) * inputs..][..count * inputs],
        };
        let ranks = self.down.n();
        scratch.t.resize(count * ranks, 0.0);
        gemm(isa, pool, Gemm { x: Rows::Numbers(x), weights: &self.down, bias: None, y: &mut scratch.t });
        for up in &self.up {
            scratch.part.clear();
            for t in scratch.t.chunks(ranks) {
                scratch.part.extend(t[up.ranks.clone()].iter().zip(&self.scales[up.ranks.clone()]).map(|(t, s)| t * s));
            }
            scratch.u.resize(count * up.outputs.len(), 0.0);
            let x = Rows::Numbers(&scratch.part);
            gemm(isa, pool, Gemm { x, weights: &up.weights, bias: None, y: &mut scratch.u });
            for ((_, row), u) in of_rows.iter().zip(scratch.u.chunks(up.outputs.len())) {
                // SAFETY: as promised by the caller.
                unsafe { y.add(place(*row), up.outputs.start, u) };
            }
        }
        SCRATCH.set(scratch);
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
}

/// Operands of one product.
pub struct LowRankProduct<'a> {
    /// Activations `[rows, inputs]` of adjacent rows of the step.
    pub x: &'a [f32],
    /// Number of inputs.
    pub inputs: usize,
    /// Outputs `[rows, outputs]`, which are added to.
    pub y: &'a mut [f32],
    /// Number of outputs.
    pub outputs: usize,
    /// The step's rows by adapter; those that are not in x are ignored.
    pub rows: &'a AdapterRows,
    /// The step's row that is the first of x and y.
    pub first: usize,
    /// The addition of each adapter to this layer; `None` if the adapter does not target it.
    pub adapters: &'a (dyn Fn(u32) -> Option<&'a LowRank> + Sync),
}

/// Computes the product, split over the pool's threads.
///
/// # Panics
/// If x and y are not of as many whole rows, an adapter is for another layer, or this CPU does not have `isa`.
pub fn low_rank(isa: Isa, pool: &Pool, product: LowRankProduct<'_>) {
    let LowRankProduct { x, inputs, y, outputs, rows: AdapterRows { rows, .. }, first, adapters } = product;
    let count = x.len() / inputs.max(1);
    assert!(x.len() == count * inputs && y.len() == count * outputs, "x and y must hold {count} rows");
    let y = Output::new(y, outputs, 0, outputs);
    let add = |of_rows: &[(u32, u32)]| {
        for of_adapter in of_rows.chunk_by(|a, b| a.0 == b.0) {
            let [start, end] =
                [first, first + count].map(|end| of_adapter.partition_point(|(_, row)| (*row as usize) < end));
            let of_adapter = &of_adapter[start..end];
            if of_adapter.is_empty() {
                continue;
            }
            let Some(adapter) = adapters(of_adapter[0].0) else { continue };
            let fits = adapter.inputs() == inputs && adapter.up.iter().all(|up| up.outputs.end <= outputs);
            assert!(fits, "the adapter is for another layer");
            for of_rows in of_adapter.chunks(ROWS) {
                // SAFETY: y has the rows and outputs, and each row belongs to one adapter and one task.
                unsafe { adapter.add(isa, pool, x, first, of_rows, y) };
            }
        }
    };
    let threads = pool.threads();
    let num_adapters = rows.chunk_by(|a, b| a.0 == b.0).count();
    if num_adapters < threads && rows.len() < threads * ROWS {
        return add(rows);
    }
    // A task's own products run on its thread.
    let most = rows.len().div_ceil(threads).clamp(1, ROWS);
    pool.run(rows.len().div_ceil(most), most * (inputs + outputs) * LANES, |task| {
        add(&rows[task * most..rows.len().min((task + 1) * most)]);
    });
}
