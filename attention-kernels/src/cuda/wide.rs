//! Products of codes on Hopper (`csrc/linear_sm90.cu`): rows of x are brought to the order of the codes, then multiplied.
//!
//! On an H200 they take less time than `linear.cu` from 9 rows on, and less than unpacking ([`super::unpacked`]) up to 256.

use device::{Arg, Buffer, Device, Launch, Tensor};
use linear::{TileOffset, TileSegment, Tiles};

use super::linear::add_slices;
use super::names::{MODULE, Name};
use super::parameters::{LinearShape, count};
use super::tiles::{form_name, of_weights, table};
use crate::error::{KernelError, at_least};
use crate::format::Dtype;
use crate::scratch::{LinearScratch, WIDE_ROWS, wide_slices};

/// Rows of a block, in the names of kernels.
const SIZES: [usize; 5] = [16, 32, 64, 128, 256];
/// Outputs of a block.
const OUTPUTS: usize = 128;
/// Inputs of a tile, and tiles of a box of x.
const TILE: usize = 64;
const TILES: u32 = 2;
/// Threads of a block, and inputs that a thread of `order_rows` moves at a time.
const THREADS: u32 = 256;
const ORDERED: usize = 32;

/// Whether the kernels multiply so many rows by these weights: scales have 16 bits, groups have 32 inputs or whole tiles, and those of
/// 32 have no offsets. Where a row's bits must not depend on the number of rows, that does not matter.
pub(super) fn takes(
    device: &dyn Device,
    tiles: &Tiles,
    [n, k]: [usize; 2],
    rows: usize,
    scratch: &LinearScratch,
) -> bool {
    let deterministic = device.features().deterministic;
    let slices = wide_slices([n, k], (!deterministic).then_some(rows));
    let is_right = deterministic || WIDE_ROWS.contains(&rows);
    let is_hopper = device.compute_capability().is_none_or(|capability| capability == (9, 0));
    let fits = |TileSegment { first, form, .. }: &TileSegment| {
        let fits = match form.offset {
            TileOffset::None => form.group_shift >= 5,
            TileOffset::Zero => form.group_shift >= 6,
            TileOffset::Minimum => false,
        };
        // Adjacent outputs are stored together, and add_slices stores four.
        fits && form.scale != Dtype::F32 && first.is_multiple_of(4)
    };
    let has_memory = scratch.ordered_rows([n, k], slices) >= rows.min(*WIDE_ROWS.end());
    is_right
        && is_hopper
        && has_memory
        && k.is_multiple_of(TILE)
        && n.is_multiple_of(4)
        && tiles.segments().iter().all(fits)
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
        let sets = rows * k / ORDERED;
        device.launch(&Launch {
            module: MODULE,
            kernel: "order_rows",
            grid: [count(sets.div_ceil(THREADS as usize))?, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: &[Arg::pointer(x, first_row * row), Arg::pointer(&scratch.rows, 0), Arg::from(count(sets)?)],
        })?;
        let size = SIZES.into_iter().find(|size| rows <= *size).unwrap_or(SIZES[4]);
        // Whole blocks: boxes that are partly outside of a tensor take longer.
        let in_blocks = rows.next_multiple_of(size);
        let x = Tensor {
            buffer: &scratch.rows,
            sizes: [TILE, in_blocks, k / TILE, 1],
            strides: [row, TILE * dtype.bytes(), in_blocks * row],
            tile: [TILE as u32, size as u32, TILES, 1],
        };
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
