//! Products with row-major weights, for devices that launch kernels: the operands, their checks, and the host
//! implementation that `cuda-sim` runs.
//!
//! `x` is `[rows, k]`, `W` is `[n, k]`, `y` is `[rows, n]`, all row-major. On `cuda`, cuBLASLt computes the product with an
//! order of summation that it chooses for each shape. On `cuda-sim` the order of every sum depends on `k` only, so the bits
//! of a row do not depend on the other rows.

use crate::memory::inside;
use crate::{Buffer, DeviceError, Dtype, Matrix};

/// Operands of one product `y = x·Wᵀ + bias`, summed in f32 and rounded once.
pub struct Product<'a> {
    /// Activations `[rows, k]` in the type of the weights.
    pub x: &'a Buffer,
    /// Number of rows to compute.
    pub rows: usize,
    /// Weights `[n, k]`, made by [`Matrix::dense`].
    pub weights: &'a Matrix,
    /// Bias `[n]` in the type of `y`.
    pub bias: Option<&'a Buffer>,
    /// Output `[rows, n]`; overwritten.
    pub y: &'a mut Buffer,
    /// Type of `y`: the type of the weights, or f32.
    pub y_format: Dtype,
}

impl<'a> Product<'a> {
    /// Checks the size of every operand and returns the weights with the shape.
    pub(crate) fn check(&self, device: &'static str) -> Result<(&'a Dense, Shape), DeviceError> {
        let dense = self.weights.stored_dense().ok_or(DeviceError::NoMatrices(device))?;
        let Dense { format, n, k, .. } = *dense;
        inside(0, self.rows * k * format.bytes(), self.x.len_bytes())?;
        inside(0, self.rows * n * self.y_format.bytes(), self.y.len_bytes())?;
        if let Some(bias) = self.bias {
            inside(0, n * self.y_format.bytes(), bias.len_bytes())?;
        }
        Ok((dense, Shape { rows: self.rows, n, k, format }))
    }
}

/// Row-major weights of one type.
pub(crate) struct Dense {
    pub numbers: Buffer,
    pub format: Dtype,
    pub n: usize,
    pub k: usize,
}

/// Sizes of a product and the type of its weights.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    pub format: Dtype,
}

/// Number of partial sums of one output element; they are added in order at the end.
const LANES: usize = 16;

/// Computes the product over bytes, widening one row of weights at a time.
pub(crate) fn on_host(
    Shape { rows, n, k, format }: Shape,
    weights: &[u8],
    x: &[u8],
    bias: Option<&[u8]>,
    (y, y_format): (&mut [u8], Dtype),
) {
    let (mut wide, mut row) = (vec![0.0; rows * k], vec![0.0; k]);
    let (mut biases, mut out) = (vec![0.0; n], vec![0.0; rows * n]);
    format.read_row(x, &mut wide);
    if let Some(bias) = bias {
        y_format.read_row(bias, &mut biases);
    }
    for column in 0..n {
        format.read_row(&weights[column * k * format.bytes()..], &mut row);
        for (i, x) in wide.chunks(k).enumerate() {
            out[i * n + column] = dot(x, &row) + biases[column];
        }
    }
    y_format.write_row(&out, y);
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    lanes.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}
