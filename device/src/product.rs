//! Products with row-major weights, for devices that launch kernels: the operands, their checks, and the host
//! implementation that `cuda-sim` runs.
//!
//! `x` is `[rows, k]`, `W` is `[n, k]`, `y` is `[rows, n]` or some columns of a wider matrix, all row-major. On `cuda`, cuBLASLt
//! computes the product with an order of summation that it chooses for each shape. On `cuda-sim` the order of every sum depends on
//! `k` only, so the bits of a row do not depend on the other rows.

use std::fmt;

use simd::small_float::e4m3_to_f32;

use crate::memory::inside;
use crate::{Buffer, DeviceError, Dtype};

/// Type of both factors of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FactorType {
    /// Numbers, summed in f32.
    Numbers(Dtype),
    /// Integers of 8 bits, summed exactly: `y` is i32, and what overflows wraps around.
    Int8,
    /// Floats of 8 bits (e4m3), summed in f32.
    E4m3,
}

impl FactorType {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            FactorType::Numbers(dtype) => dtype.bytes(),
            FactorType::Int8 | FactorType::E4m3 => 1,
        }
    }
}

impl fmt::Display for FactorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FactorType::Numbers(dtype) => dtype.fmt(f),
            FactorType::Int8 => f.write_str("int8"),
            FactorType::E4m3 => f.write_str("e4m3"),
        }
    }
}

/// Row-major weights `[n, k]`, from the start of a buffer.
#[derive(Clone, Copy)]
pub struct Factor<'a> {
    /// At least `n * k` elements.
    pub elements: &'a Buffer,
    /// Their type.
    pub format: FactorType,
    /// Number of outputs.
    pub n: usize,
    /// Number of inputs.
    pub k: usize,
}

/// Columns of a wider matrix `[rows, stride]`, from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// The first of the columns.
    pub first: usize,
    /// Columns of the whole matrix.
    pub stride: usize,
}

/// Equal parts of k whose products are not added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slices {
    /// Number of parts, at least 1. It divides k.
    pub count: usize,
    /// Rows of `x` before those that are computed.
    pub first_row: usize,
}

/// Operands of one product `y = x·Wᵀ + bias`, rounded once.
pub struct Product<'a> {
    /// Activations `[rows, k]` in the type of the weights.
    pub x: &'a Buffer,
    /// Number of rows to compute.
    pub rows: usize,
    /// Weights `[n, k]`.
    pub weights: Factor<'a>,
    /// Bias `[n]` in the type of `y`, or as wide as `columns.stride`. Factors of 8 bits have none.
    pub bias: Option<&'a Buffer>,
    /// Output `[rows, n]`, overwritten, or with `columns` a wider matrix of which only those are written.
    pub y: &'a mut Buffer,
    /// Type of `y`: the type of the weights, or f32. Factors of 8 bits: f32, whose bytes are integers for [`FactorType::Int8`].
    pub y_format: Dtype,
    /// Where `y` and `bias` begin in wider ones; `None`: they have `n` columns.
    pub columns: Option<Columns>,
    /// With slices, `y` is `[slices, rows, n]` in f32, without bias or columns. Only numbers have slices.
    pub slices: Option<Slices>,
}

/// Sizes and types of products with any number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductShape {
    /// Number of outputs.
    pub n: usize,
    /// Number of inputs.
    pub k: usize,
    /// Type of the weights and of `x`.
    pub format: FactorType,
    /// Type of `y`.
    pub y_format: Dtype,
    /// Whether a bias is added.
    pub bias: bool,
    /// Columns of the matrix that `y` is a part of; `n` if it is whole.
    pub stride: usize,
    /// Number of [`Slices`]; 1: none.
    pub slices: usize,
}

impl fmt::Display for ProductShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProductShape { n, k, format, y_format, bias, stride, slices } = self;
        write!(f, "n = {n}, k = {k}, {format} to {y_format} {} bias", if *bias { "with" } else { "without" })?;
        if stride != n {
            write!(f, ", of {stride} columns")?;
        }
        if *slices == 1 { Ok(()) } else { write!(f, ", in {slices} slices") }
    }
}

impl Product<'_> {
    /// Checks the size of every operand; returns the shape, and the first bytes of `x` and of `y` and the bias.
    pub(crate) fn check(&self) -> Result<(ProductShape, [usize; 2]), DeviceError> {
        let (Factor { format, n, k, .. }, y_bytes) = (self.weights, self.y_format.bytes());
        let Columns { first, stride } = self.columns.unwrap_or(Columns { first: 0, stride: n });
        let numbers = matches!(format, FactorType::Numbers(_));
        let Slices { count: slices, first_row } = self.slices.unwrap_or(Slices { count: 1, first_row: 0 });
        let is_plain = self.bias.is_none() && self.y_format == Dtype::F32;
        let may_have_slices = numbers && is_plain && self.columns.is_none() && slices > 0 && k.is_multiple_of(slices);
        let shape = ProductShape { n, k, format, y_format: self.y_format, bias: self.bias.is_some(), stride, slices };
        if first + n > stride || !numbers && !is_plain || self.slices.is_some() && !may_have_slices {
            return Err(DeviceError::BadProduct(shape));
        }
        let x_from = first_row * k * format.bytes();
        inside(0, n * k * format.bytes(), self.weights.elements.len_bytes())?;
        inside(x_from, self.rows * k * format.bytes(), self.x.len_bytes())?;
        inside(0, slices * self.rows * stride * y_bytes, self.y.len_bytes())?;
        if let Some(bias) = self.bias {
            inside(0, stride * y_bytes, bias.len_bytes())?;
        }
        Ok((shape, [x_from, first * y_bytes]))
    }
}

/// Number of partial sums of one output element; they are added in order at the end.
const LANES: usize = 16;

/// Computes `rows` rows over bytes, one row of weights at a time. `bias` and `y` begin at the first column.
pub(crate) fn on_host(shape: &ProductShape, rows: usize, weights: &[u8], x: &[u8], bias: Option<&[u8]>, y: &mut [u8]) {
    let ProductShape { n, k, format, y_format, stride, slices, .. } = *shape;
    let of_slice = (k / slices).max(1);
    let mut biases = vec![0.0; n];
    if let Some(bias) = bias {
        y_format.read_row(&bias[..n * y_format.bytes()], &mut biases);
    }
    let (mut wide, mut row) = (vec![0.0; rows * k], vec![0.0; k]);
    let read = |bytes: &[u8], out: &mut [f32]| match format {
        FactorType::Numbers(dtype) => dtype.read_row(bytes, out),
        FactorType::Int8 => out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = f32::from(*byte as i8)),
        FactorType::E4m3 => out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = e4m3_to_f32(*byte)),
    };
    read(x, &mut wide);
    for column in 0..n {
        read(&weights[column * k * format.bytes()..][..k * format.bytes()], &mut row);
        for (i, x) in wide.chunks(k).enumerate() {
            let at = |slice: usize| {
                let first = ((slice * rows + i) * stride + column) * y_format.bytes();
                first..first + y_format.bytes()
            };
            match format {
                FactorType::Int8 => {
                    let products = x.iter().zip(&row).map(|(x, weight)| *x as i32 * *weight as i32);
                    y[at(0)].copy_from_slice(&products.fold(0, i32::wrapping_add).to_ne_bytes());
                }
                FactorType::Numbers(_) | FactorType::E4m3 => {
                    for (slice, (x, row)) in x.chunks(of_slice).zip(row.chunks(of_slice)).enumerate() {
                        y_format.write_row(&[dot(x, row) + biases[column]], &mut y[at(slice)]);
                    }
                }
            }
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
