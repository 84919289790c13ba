//! Products of codes on Hopper (`csrc/linear_sm90.cu`): rows of x are brought to the order of the codes, then multiplied. The same for
//! experts (`csrc/experts_sm90.cu`), also with weights that are numbers.
//!
//! On an H200 the first take less time than `linear.cu` from 9 rows on, of small matrices from 33 on, and less than unpacking
//! ([`super::unpacked`]) up to 256. No GPU has run those of experts.

use device::{Arg, Buffer, Device, Launch, Tensor};
use linear::{TileOffset, TileSegment, Tiles};

use super::linear::{MOST_PARTS, Operands, add_slices};
use super::names::{MODULE, Name};
use super::parameters::{LinearShape, count};
use super::tiles::{form_name, of_weights, table};
use crate::error::{KernelError, at_least};
use crate::format::Dtype;
use crate::scratch::{LinearScratch, WIDE_ROWS, wide_slices};

/// Rows of a block, in the names of kernels.
const SIZES: [usize; 5] = [16, 32, 64, 128, 256];
const EXPERT_SIZES: [usize; 3] = [16, 64, 128];
/// Outputs of a block.
const OUTPUTS: usize = 128;
/// Inputs of a tile, and tiles of a box of x.
const TILE: usize = 64;
const TILES: u32 = 2;
/// Threads of a block, and bytes that a thread of `order_rows` moves at a time.
const THREADS: u32 = 256;
const VECTOR: usize = 16;

/// Whether the kernels multiply by weights of this form: scales have 16 bits, groups have 32 inputs or whole tiles, and those of 32 have no
/// offsets.
fn fits(TileSegment { first, form, .. }: &TileSegment) -> bool {
    let fits = match form.offset {
        TileOffset::None => form.group_shift >= 5,
        TileOffset::Zero => form.group_shift >= 6,
        TileOffset::Minimum => false,
    };
    // Adjacent outputs are stored together, and add_slices stores four.
    fits && form.scale != Dtype::F32 && first.is_multiple_of(4)
}

/// Whether a device has the kernels, and they multiply by matrices of this shape.
fn serves(device: &dyn Device, [n, k]: [usize; 2]) -> bool {
    let is_hopper = device.compute_capability().is_none_or(|capability| capability == (9, 0));
    is_hopper && k.is_multiple_of(TILE) && n.is_multiple_of(4)
}

/// Whether the kernels multiply so many rows by these weights. Where a row's bits must not depend on the number of rows, that does not
/// matter.
pub(super) fn takes(
    device: &dyn Device,
    tiles: &Tiles,
    [n, k]: [usize; 2],
    rows: usize,
    scratch: &LinearScratch,
) -> bool {
    let deterministic = device.features().deterministic;
    let slices = wide_slices([n, k], (!deterministic).then_some(rows));
    let is_right = deterministic || *WIDE_ROWS.end() >= rows && rows >= least_rows([n, k]);
    let has_memory = scratch.ordered_rows([n, k], slices) >= rows.min(*WIDE_ROWS.end());
    is_right && has_memory && serves(device, [n, k]) && tiles.segments().iter().all(fits)
}

/// Fewest rows for which they take less time than `linear.cu` does. On an H200 those of a matrix of 16 million weights take longer for
/// 16 and 32 rows, because their time is mostly that of three launches, and those of 25 million do not.
fn least_rows([n, k]: [usize; 2]) -> usize {
    const SMALL: usize = 16 << 20;
    if n * k <= SMALL { 33 } else { *WIDE_ROWS.start() }
}

/// Computes the products of as many rows at a time as the scratch memory holds.
pub(super) fn linear(
    device: &dyn Device,
    (tiles, dtype): (&Tiles, Dtype),
    (x, rows): (&Buffer, usize),
    bias: Option<&Buffer>,
    (y, output): (&mut Buffer, Dtype),
    [n, k]: [usize; 2],
    scratch: &mut LinearScratch,
) -> Result<(), KernelError> {
    let slices = wide_slices([n, k], (!device.features().deterministic).then_some(rows));
    let (most, row) = (scratch.ordered_rows([n, k], slices), k * dtype.bytes());
    at_least("rows that are brought to the order of codes at a time", most, 1)?;
    for first_row in (0..rows).step_by(most) {
        let rows = most.min(rows - first_row);
        let size = SIZES.into_iter().find(|size| rows <= *size).unwrap_or(SIZES[4]);
        let from = (Arg::pointer(x, first_row * row), Arg::null(), 1);
        // Whole blocks: boxes that are partly outside of a tensor take longer.
        let x = order(device, from, &scratch.rows, ([rows, k], dtype), (size, rows.next_multiple_of(size)))?;
        for segment in tiles.segments() {
            let (bias, y) = if slices > 1 {
                (Arg::null(), Arg::pointer(&scratch.wide, segment.first * size_of::<f32>()))
            } else {
                let bias = bias.map_or(Arg::null(), |bias| Arg::pointer(bias, segment.first * output.bytes()));
                (bias, Arg::pointer(y, (first_row * n + segment.first) * output.bytes()))
            };
            let shape = LinearShape {
                rows: count(rows)?,
                y_stride: count(n)?,
                y_is_float: (slices > 1 || output == Dtype::F32).into(),
                ..of_weights(Some(segment), [segment.n, k])?
            };
            let form = form_name(Some(&segment.form), dtype);
            device.launch(&Launch {
                module: MODULE,
                kernel: &Name::new(format_args!("linear_sm90_{form}_{dtype}_{size}")),
                grid: [count(segment.n.div_ceil(OUTPUTS))?, count(rows.div_ceil(size))?, count(slices)?],
                block: [THREADS, 1, 1],
                shared_bytes: 0,
                args: &[Arg::pointer(&segment.panels, 0), table(segment), bias, y, Arg::bytes(&shape), Arg::tensor(&x)],
            })?;
        }
        if slices > 1 {
            add_slices(device, scratch, (rows, n, slices), bias, (y, first_row, output), dtype)?;
        }
    }
    Ok(())
}

/// Brings rows of `x` to the order of the codes: those of assignments in `order`, each of which is row `order / top_k`, or all in theirs.
/// Returns the tensor of `in_blocks` rows of which blocks of `size` are boxes.
fn order<'a>(
    device: &dyn Device,
    (x, order, top_k): (Arg<'_>, Arg<'_>, usize),
    ordered: &'a Buffer,
    ([rows, k], dtype): ([usize; 2], Dtype),
    (size, in_blocks): (usize, usize),
) -> Result<Tensor<'a>, KernelError> {
    let row = k * dtype.bytes();
    let vectors = rows * row / VECTOR;
    at_least("rows in the order of codes", ordered.len_bytes() / row.max(1), in_blocks)?;
    let to = Arg::pointer(ordered, 0);
    device.launch(&Launch {
        module: MODULE,
        kernel: "order_rows",
        grid: [count(vectors.div_ceil(THREADS as usize))?, 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: &[x, to, order, Arg::from(count(vectors)?), Arg::from(count(row / VECTOR)?), Arg::from(count(top_k)?)],
    })?;
    Ok(Tensor {
        buffer: ordered,
        sizes: [TILE, in_blocks, k / TILE, 1],
        strides: [row, TILE * dtype.bytes(), in_blocks * row],
        tile: [TILE as u32, size as u32, TILES, 1],
    })
}

/// Bytes of [`ExpertLinearArgs::ordered`](crate::ExpertLinearArgs::ordered): a block at the end may have rows behind the last one.
pub fn ordered_bytes(assignments: usize, k: usize, dtype: Dtype) -> usize {
    (assignments + EXPERT_SIZES[2]) * k * dtype.bytes()
}

/// Whether the kernels multiply the assignments of experts by matrices `[n, k]` of this form; `None`: numbers. On a device that is
/// deterministic their number does not matter.
pub(super) fn takes_experts(
    device: &dyn Device,
    segment: Option<&TileSegment>,
    shape: [usize; 2],
    (assignments, experts): (usize, usize),
) -> bool {
    let is_right = device.features().deterministic || assignments >= WIDE_ROWS.start() * experts;
    is_right && serves(device, shape) && segment.is_none_or(fits)
}

/// Computes the products of experts.
pub(super) fn experts(
    device: &dyn Device,
    (segment, dtype): (Option<&TileSegment>, Dtype),
    operands: &Operands<'_>,
    shape: &LinearShape,
    ordered: &Buffer,
) -> Result<(), KernelError> {
    let Operands { x, weights, table, bias, y, assignments: [by_expert, starts] } = *operands;
    let [assignments, experts, n, k, top_k] =
        [shape.rows, shape.experts, shape.n, shape.k, shape.top_k].map(|number| number as usize);
    let each = assignments.div_ceil(experts);
    let size = EXPERT_SIZES.into_iter().find(|size| each <= *size).unwrap_or(EXPERT_SIZES[2]);
    // Each expert with assignments has at most one part that is not full.
    let parts = (assignments / size + experts).min(assignments);
    at_least("parts of the products of experts", MOST_PARTS, parts)?;
    let x = order(device, (x, by_expert, top_k), ordered, ([assignments, k], dtype), (size, assignments + size))?;
    let form = form_name(segment.map(|segment| &segment.form), dtype);
    Ok(device.launch(&Launch {
        module: MODULE,
        kernel: &Name::new(format_args!("experts_sm90_{form}_{dtype}_{size}")),
        grid: [count(n.div_ceil(OUTPUTS))?, count(parts)?, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: &[weights, table, bias, y, by_expert, starts, Arg::bytes(shape), Arg::tensor(&x)],
    })?)
}
