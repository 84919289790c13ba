//! Operands of a product on the CPU.

use super::pack::PackedMatrix;
use super::rows::{RowBlock, Rows};

/// Operands of one product.
pub struct Gemm<'a> {
    /// Activations; each row has the `k` numbers of the weights.
    pub x: Rows<'a>,
    /// Packed weights `[n, k]`.
    pub weights: &'a PackedMatrix,
    /// Bias `[n]`, added to every row.
    pub bias: Option<&'a [f32]>,
    /// Output `[rows, n]`; overwritten.
    pub y: &'a mut [f32],
}

impl Gemm<'_> {
    /// Checks the shapes and returns the number of rows; each has `columns` outputs.
    pub(super) fn rows(&self, columns: usize) -> usize {
        let (n, k) = (self.weights.n(), self.weights.k());
        let (len, width) = match self.x {
            Rows::Numbers(x) => (x.len(), k),
            Rows::Blocks(x) => (x.len(), k.div_ceil(RowBlock::LEN)),
        };
        assert_eq!(len % width, 0, "x must hold whole rows of k = {k}");
        let rows = len / width;
        assert_eq!(self.y.len(), rows * columns, "y must be [rows, n] = [{rows}, {columns}]");
        assert!(self.bias.is_none_or(|b| b.len() == n), "the bias must have n = {n} elements");
        rows
    }
}
