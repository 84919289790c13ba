//! Products with weights as they lie in a checkpoint, for the devices that launch kernels: what they are given, and how
//! `cuda-sim` computes them.
//!
//! `x` is `[rows, k]`, `W` is `[n, k]`, `y` is `[rows, n]`, all row-major. On `cuda` cuBLASLt computes them, in an order of
//! its own choice for each shape. On `cuda-sim` a row's bits do not depend on the other rows: the order of each sum is
//! that of k alone.

use half::{bf16, f16};

use crate::Dtype;
use crate::memory::inside;
use crate::{Buffer, DeviceError, Matrix};

/// One product `y = x·Wᵀ + bias`, summed in float32 and rounded once.
pub struct Product<'a> {
    /// `[rows, k]`, of the weights' type.
    pub x: &'a Buffer,
    /// Rows to compute.
    pub rows: usize,
    /// `[n, k]`, made by [`Matrix::dense`].
    pub weights: &'a Matrix,
    /// `[n]`, of the type of `y`.
    pub bias: Option<&'a Buffer>,
    /// `[rows, n]`, overwritten.
    pub y: &'a mut Buffer,
    /// Type of `y`: that of the weights, or float32.
    pub y_format: Dtype,
}

impl<'a> Product<'a> {
    /// The weights, after a look at the size of every operand.
    pub(crate) fn check(&self, device: &'static str) -> Result<&'a Dense, DeviceError> {
        let dense = self.weights.stored_dense().ok_or(DeviceError::NoMatrices(device))?;
        inside(0, self.rows * dense.k * dense.format.bytes(), self.x.len_bytes())?;
        inside(0, self.rows * dense.n * self.y_format.bytes(), self.y.len_bytes())?;
        if let Some(bias) = self.bias {
            inside(0, dense.n * self.y_format.bytes(), bias.len_bytes())?;
        }
        Ok(dense)
    }
}

/// Row-major weights of one type.
pub(crate) struct Dense {
    pub numbers: Buffer,
    pub format: Dtype,
    pub n: usize,
    pub k: usize,
}

/// How large the operands of a product are, and what its weights are.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    pub format: Dtype,
}

/// Sums of one product run in so many lanes, folded in order.
const LANES: usize = 16;

/// The product over bytes. Weights are widened a row at a time.
pub(crate) fn on_host(
    Shape { rows, n, k, format }: Shape,
    weights: &[u8],
    x: &[u8],
    bias: Option<&[u8]>,
    (y, y_format): (&mut [u8], Dtype),
) {
    let mut wide = vec![0.0; rows * k];
    format.read_row(&x[..rows * k * format.bytes()], &mut wide);
    let mut row = vec![0.0; k];
    for column in 0..n {
        format.read_row(&weights[column * k * format.bytes()..][..k * format.bytes()], &mut row);
        let bias = bias.map_or(0.0, |bias| y_format.read(bias, column));
        for (i, x) in wide.chunks(k).enumerate() {
            y_format.write(y, i * n + column, dot(x, &row) + bias);
        }
    }
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

impl Dtype {
    /// The number at an index becomes the nearest of this type.
    fn write(self, data: &mut [u8], index: usize, value: f32) {
        let at = index * self.bytes();
        match self {
            Dtype::F32 => data[at..at + 4].copy_from_slice(&value.to_le_bytes()),
            Dtype::Bf16 => data[at..at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            Dtype::F16 => data[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        }
    }

    /// Numbers of another type in this one, rounded to nearest even; `to` has as many.
    pub(crate) fn convert(self, from: Dtype, data: &[u8], to: &mut [u8]) {
        if self == from {
            return to.copy_from_slice(data);
        }
        for index in 0..to.len() / self.bytes() {
            self.write(to, index, from.read(data, index));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn numbers_keep_their_value_where_the_other_type_has_it() {
        let formats = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        for (from, to) in formats.into_iter().flat_map(|a| formats.map(|b| (a, b))) {
            let values = [0.0f32, -1.5, 0.25, 448.0];
            let (mut source, mut target) = (vec![0; 4 * from.bytes()], vec![0; 4 * to.bytes()]);
            values.iter().enumerate().for_each(|(i, v)| from.write(&mut source, i, *v));
            to.convert(from, &source, &mut target);
            assert_eq!(values, std::array::from_fn(|i| to.read(&target, i)), "{from:?} {to:?}");
        }
    }
}
