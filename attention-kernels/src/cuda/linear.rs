//! Launches of matrix products with weights that are codes, and of products of experts.

use device::{Arg, Buffer, CudaError, Device, DeviceError, Factor, FactorType, Launch, Product, Slices};
use linear::{Matrix, PANEL};

use super::names::{MODULE, Name};
use super::parameters::{LinearShape, SliceShape, count};
use super::sums::sums;
use super::tiles::{form_name, of_weights, table};
use super::{rounded, unpacked, wide};
use crate::args::{ExpertLinearArgs, LinearArgs};
use crate::error::{KernelError, at_least, expect};
use crate::format::Dtype;
use crate::scratch::{LEAST_ROWS, LinearScratch, slices};

const NAME: &str = "cuda.linear";

/// Threads of a block.
const THREADS: u32 = 256;
/// Most parts of a launch: the bound of a grid's y axis.
pub(super) const MOST_PARTS: usize = 65535;
/// Outputs of a block of `linear_f32`.
const F32_OUTPUTS: usize = 8;

/// `linear_<form>_<type>_<name>`, of whose blocks each computes a panel of outputs of at most `rows` rows.
#[derive(Clone, Copy)]
struct Size {
    name: &'static str,
    rows: usize,
}

impl Size {
    /// The kernel whose blocks fit `rows` rows, or as many as any do.
    fn of(rows: usize) -> Size {
        const MANY: Size = Size { name: "many", rows: 32 };
        const SMALLER: [Size; 2] = [Size { name: "few", rows: 8 }, Size { name: "several", rows: 16 }];
        SMALLER.into_iter().find(|size| rows <= size.rows).unwrap_or(MANY)
    }
}

/// Computes a linear layer: with [`Device::product`] if its weights are numbers, if they and the rounded inputs have 8 bits
/// ([`rounded`]), or if unpacking the weights takes little time beside the product of many rows ([`unpacked`]); otherwise, and where the
/// device has no algorithm for the product, with `linear.cu`.
pub(super) fn linear(device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let LinearArgs { x, rows, weights, bias, y, output, scratch, .. } = args;
    let x = x.numbers(NAME)?;
    let (n, k, dtype) = (weights.n(), weights.k(), weights.dtype());
    holds("inputs of a product", x, rows * k, dtype)?;
    holds("outputs of a product", y, rows * n, output)?;
    if let Some(bias) = bias {
        holds("biases of a product", bias, n, output)?;
    }
    if let Some(matrix) = weights.bytes_and_scales() {
        let scratch = scratch.ok_or(KernelError::NotLoaded { variant: NAME, what: "memory for rounded rows" })?;
        return rounded::linear(device, matrix, (x, rows, dtype), bias, (y, output), scratch);
    }
    let Some(tiles) = weights.tiles() else {
        let factor = weights.factor()?;
        let slices = slices(device.features(), [n, k], factor.format);
        let computed = if slices > 1 {
            let scratch = scratch.ok_or(KernelError::NotLoaded { variant: NAME, what: "memory for sums of slices" })?;
            sliced(device, (factor, slices), (x, rows), bias, (y, output), scratch)
        } else {
            let y = &mut *y;
            let product = Product { x, rows, weights: factor, bias, y, y_format: output, columns: None, slices: None };
            device.product(product).map_err(KernelError::from)
        };
        return match computed {
            Err(KernelError::Device(DeviceError::Cuda(CudaError::NoAlgorithm(_)))) => {
                numbers(device, weights, (x, rows), bias, (y, output))
            }
            computed => computed,
        };
    };
    let mut scratch = scratch;
    if let Some(scratch) = scratch.as_mut().filter(|scratch| wide::takes(device, tiles, [n, k], rows, scratch)) {
        return wide::linear(device, (tiles, dtype), (x, rows), bias, (y, output), [n, k], scratch);
    }
    if let Some(scratch) = scratch.filter(|scratch| rows >= LEAST_ROWS && scratch.unpacks(weights, output)) {
        return unpacked::linear(device, (tiles, dtype), (x, rows), bias, (y, output), [n, k], scratch);
    }
    let size = Size::of(rows);
    for segment in tiles.segments() {
        for first in (0..rows).step_by(MOST_PARTS * size.rows) {
            let count_of_rows = (MOST_PARTS * size.rows).min(rows - first);
            let shape = LinearShape {
                rows: count(count_of_rows)?,
                y_stride: count(n)?,
                y_is_float: (output == Dtype::F32).into(),
                ..of_weights(Some(segment), [segment.n, k])?
            };
            let operands = Operands {
                x: Arg::pointer(x, first * k * dtype.bytes()),
                weights: Arg::pointer(&segment.panels, 0),
                table: table(segment),
                bias: bias.map_or(Arg::null(), |bias| Arg::pointer(bias, segment.first * output.bytes())),
                y: Arg::pointer(y, (first * n + segment.first) * output.bytes()),
                assignments: [Arg::null(); 2],
            };
            let form = form_name(Some(&segment.form), dtype);
            launch(device, (form, dtype), &size, count_of_rows.div_ceil(size.rows), &operands, &shape)?;
        }
    }
    Ok(())
}

/// Computes the products of slices of k, then their sums in order, as many rows at a time as the scratch memory holds.
fn sliced(
    device: &dyn Device,
    (weights, slices): (Factor<'_>, usize),
    (x, rows): (&Buffer, usize),
    bias: Option<&Buffer>,
    (y, output): (&mut Buffer, Dtype),
    scratch: &mut LinearScratch,
) -> Result<(), KernelError> {
    let FactorType::Numbers(dtype) = weights.format else {
        return Err(KernelError::Unsupported { variant: NAME, found: "slices of 8-bit factors".to_string() });
    };
    let Factor { n, .. } = weights;
    let most = scratch.sliced_rows(n, slices);
    at_least("rows whose slices are summed at a time", most, 1)?;
    for first_row in (0..rows).step_by(most) {
        let rows = most.min(rows - first_row);
        let of_k = Some(Slices { count: slices, first_row });
        sums(device, (weights, of_k), (x, rows), &mut scratch.wide)?;
        add_slices(device, scratch, (rows, n, slices), bias, (y, first_row, output), dtype)?;
    }
    Ok(())
}

/// Adds the sums of slices of k and the bias, for some rows of `y` from `first_row` on.
pub(super) fn add_slices(
    device: &dyn Device,
    scratch: &LinearScratch,
    (rows, n, slices): (usize, usize, usize),
    bias: Option<&Buffer>,
    (y, first_row, output): (&mut Buffer, usize, Dtype),
    dtype: Dtype,
) -> Result<(), KernelError> {
    let y_is_float = (output == Dtype::F32).into();
    let shape = SliceShape { rows: count(rows)?, n: count(n)?, slices: count(slices)?, y_is_float };
    let bias = bias.map_or(Arg::null(), |bias| Arg::pointer(bias, 0));
    let to = Arg::pointer(y, first_row * n * output.bytes());
    Ok(device.launch(&Launch {
        module: MODULE,
        kernel: &Name::new(format_args!("add_slices_{dtype}")),
        grid: [count((rows * n / 4).div_ceil(THREADS as usize).min(MOST_PARTS))?, 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: &[Arg::pointer(&scratch.wide, 0), bias, to, Arg::bytes(&shape)],
    })?)
}

/// Computes a layer whose weights are numbers with `linear.cu`.
fn numbers(
    device: &dyn Device,
    weights: &Matrix,
    (x, rows): (&Buffer, usize),
    bias: Option<&Buffer>,
    (y, output): (&mut Buffer, Dtype),
) -> Result<(), KernelError> {
    let (factor, dtype) = (weights.factor()?, weights.dtype());
    let (n, k, size) = (factor.n, factor.k, Size::of(rows));
    let most = if dtype == Dtype::F32 { rows.max(1) } else { MOST_PARTS * size.rows };
    for first in (0..rows).step_by(most) {
        let rows = most.min(rows - first);
        let shape = LinearShape {
            rows: count(rows)?,
            y_stride: count(n)?,
            y_is_float: (output == Dtype::F32).into(),
            top_k: 1,
            ..of_weights(None, [n, k])?
        };
        let operands = Operands {
            x: Arg::pointer(x, first * k * dtype.bytes()),
            weights: Arg::pointer(factor.elements, 0),
            table: Arg::null(),
            bias: bias.map_or(Arg::null(), |bias| Arg::pointer(bias, 0)),
            y: Arg::pointer(y, first * n * output.bytes()),
            assignments: [Arg::null(); 2],
        };
        match dtype {
            Dtype::F32 => launch_f32(device, 1, &operands, &shape)?,
            _ => launch(device, (form_name(None, dtype), dtype), &size, rows.div_ceil(size.rows), &operands, &shape)?,
        }
    }
    Ok(())
}

/// Enqueues the products of each expert's rows, `y[a] = x[a / top_k]·Wᵀ + bias` for the assignments a of each expert, whose weights are
/// W and bias. The result of an assignment does not depend on the others. Experts without assignments cost nothing.
///
/// Runs on `cuda` and `cuda-sim`. The kernels are those of `cuda.linear`, and with memory for ordered rows those of
/// `cuda.grouped_experts`, where they serve.
///
/// # Errors
/// A buffer is too small, the weights are not those of `experts` experts, or the launch fails.
pub fn expert_linear(device: &dyn Device, args: ExpertLinearArgs<'_>) -> Result<(), KernelError> {
    let ExpertLinearArgs { x, assignments, top_k, weights, bias, y, order, starts, experts, ordered } = args;
    let (k, dtype) = (weights.k(), weights.dtype());
    let n = weights.n() / experts.max(1);
    expect("rows of stacked experts", weights.n(), n * experts)?;
    holds("inputs of experts", x, assignments / top_k.max(1) * k, dtype)?;
    holds("outputs of experts", y, assignments * n, dtype)?;
    at_least("order of assignments", order.len_bytes() / size_of::<u32>(), assignments)?;
    at_least("starts of experts", starts.len_bytes() / size_of::<u32>(), experts + 1)?;
    if let Some(bias) = bias {
        holds("biases of experts", bias, experts * n, dtype)?;
    }
    let segment = match weights.tiles().map(|tiles| tiles.segments()) {
        None => None,
        Some([segment]) if n.is_multiple_of(PANEL) => Some(segment),
        Some(_) => {
            return Err(KernelError::Unsupported { variant: NAME, found: "experts of several forms".to_string() });
        }
    };
    let numbers = || weights.numbers().ok_or(DeviceError::NoMatrices(device.name()));
    let shape = LinearShape {
        rows: count(assignments)?,
        y_stride: count(n)?,
        experts: count(experts)?,
        top_k: count(top_k)?,
        y_is_float: (dtype == Dtype::F32).into(),
        ..of_weights(segment, [n, k])?
    };
    let operands = Operands {
        x: Arg::pointer(x, 0),
        weights: Arg::pointer(segment.map_or_else(numbers, |segment| Ok(&segment.panels))?, 0),
        table: segment.map_or(Arg::null(), table),
        bias: bias.map_or(Arg::null(), |bias| Arg::pointer(bias, 0)),
        y: Arg::pointer(y, 0),
        assignments: [order, starts].map(|buffer| Arg::pointer(buffer, 0)),
    };
    if assignments == 0 {
        return Ok(()); // a driver refuses an empty grid
    }
    if dtype == Dtype::F32 {
        return launch_f32(device, experts, &operands, &shape);
    }
    if let Some(ordered) = ordered.filter(|_| wide::takes_experts(device, segment, [n, k], (assignments, experts))) {
        return wide::experts(device, (segment, dtype), &operands, &shape, ordered);
    }
    let size = Size::of(assignments.div_ceil(experts));
    // Each expert with assignments has at most one part that is not full.
    let parts = (assignments / size.rows + experts).min(assignments);
    at_least("parts of the products of experts", MOST_PARTS, parts)?;
    launch(device, (form_name(segment.map(|segment| &segment.form), dtype), dtype), &size, parts, &operands, &shape)
}

/// Pointers of a launch, without its shape.
pub(super) struct Operands<'a> {
    pub x: Arg<'a>,
    pub weights: Arg<'a>,
    pub table: Arg<'a>,
    pub bias: Arg<'a>,
    pub y: Arg<'a>,
    /// Order and starts; null without experts.
    pub assignments: [Arg<'a>; 2],
}

fn launch(
    device: &dyn Device,
    (form, dtype): (&str, Dtype),
    size: &Size,
    parts: usize,
    operands: &Operands<'_>,
    shape: &LinearShape,
) -> Result<(), KernelError> {
    let Operands { x, weights, table, bias, y, assignments: [order, starts] } = *operands;
    Ok(device.launch(&Launch {
        module: MODULE,
        kernel: &Name::new(format_args!("linear_{form}_{dtype}_{}", size.name)),
        grid: [count((shape.n as usize).div_ceil(PANEL))?, count(parts)?, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: &[x, weights, table, bias, y, order, starts, Arg::bytes(shape)],
    })?)
}

/// As [`launch`], in float32.
fn launch_f32(
    device: &dyn Device,
    experts: usize,
    operands: &Operands<'_>,
    shape: &LinearShape,
) -> Result<(), KernelError> {
    let Operands { x, weights, bias, y, assignments: [order, starts], .. } = *operands;
    Ok(device.launch(&Launch {
        module: MODULE,
        kernel: "linear_f32",
        grid: [count((shape.n as usize).div_ceil(F32_OUTPUTS))?, count(experts)?, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: &[x, weights, bias, y, order, starts, Arg::bytes(shape)],
    })?)
}

fn holds(what: &'static str, buffer: &Buffer, elements: usize, dtype: Dtype) -> Result<(), KernelError> {
    at_least(what, buffer.len_bytes() / dtype.bytes(), elements)
}
