//! Products of factors of 8 bits: rows are rounded by a kernel, multiplied by [`Device::product`], and scaled by a kernel.

use device::{Arg, Buffer, Device, Launch};
use linear::{ByteMatrix, RowRounding};

use super::names::{MODULE, Name};
use super::parameters::{RoundShape, ScaleShape, count, kv_format};
use super::sums::sums;
use crate::error::{KernelError, at_least};
use crate::format::{CacheFormat, Dtype, KvDtype};
use crate::scratch::LinearScratch;

const NAME: &str = "cuda.linear";
/// Threads of a block.
const THREADS: u32 = 256;
/// Most thread blocks of a launch of `scale_rows`. More outputs are covered by a loop in each thread.
const MOST_BLOCKS: usize = 1 << 14;

/// As many rows at a time as the scratch memory holds.
pub(super) fn linear(
    device: &dyn Device,
    matrix: &ByteMatrix,
    (x, rows, dtype): (&Buffer, usize, Dtype),
    bias: Option<&Buffer>,
    (y, output): (&mut Buffer, Dtype),
    scratch: &mut LinearScratch,
) -> Result<(), KernelError> {
    let weights = matrix.factor();
    let ([n, k], most) = ([weights.n, weights.k], scratch.rounded_rows([weights.n, weights.k]));
    at_least("rows that are rounded at a time", most, 1)?;
    let (kv_dtype, scale) = match matrix.rounding() {
        RowRounding::Int8 => (KvDtype::Int8, 0.0),
        RowRounding::E4m3 => (KvDtype::Fp8E4m3, 0.0),
        RowRounding::Static(scale) => (KvDtype::Fp8E4m3, scale),
    };
    let format = kv_format(NAME, CacheFormat { kv_dtype, ..CacheFormat::default() })?;
    let launch = |kernel: &str, blocks: usize, args: &[Arg<'_>]| {
        let kernel = &Name::new(format_args!("{kernel}_rows_{dtype}"));
        let (grid, block) = ([count(blocks)?, 1, 1], [THREADS, 1, 1]);
        Ok::<_, KernelError>(device.launch(&Launch { module: MODULE, kernel, grid, block, shared_bytes: 0, args })?)
    };
    for first in (0..rows).step_by(most) {
        let rows = most.min(rows - first);
        let (codes, scales) = (Arg::pointer(&scratch.rows, 0), Arg::pointer(&scratch.rows, rows * k));
        let shape = RoundShape { k: count(k)?, format, scale, reserved: 0 };
        let from = Arg::pointer(x, first * k * dtype.bytes());
        launch("round", rows, &[from, codes, scales, Arg::bytes(&shape)])?;
        sums(device, (weights, None), (&scratch.rows, rows), &mut scratch.wide)?;
        let (rows_of_sums, y_is_float) = (count(rows)?, (output == Dtype::F32).into());
        let shape = ScaleShape { rows: rows_of_sums, n: count(n)?, format, y_is_float };
        let to = Arg::pointer(y, first * n * output.bytes());
        let bias = bias.map_or(Arg::null(), |bias| Arg::pointer(bias, 0));
        let of_outputs = Arg::pointer(matrix.scales(), 0);
        let blocks = (rows * n / 4).div_ceil(THREADS as usize).min(MOST_BLOCKS);
        launch("scale", blocks, &[Arg::pointer(&scratch.wide, 0), scales, of_outputs, bias, to, Arg::bytes(&shape)])?;
    }
    Ok(())
}
