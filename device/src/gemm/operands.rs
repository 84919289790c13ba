//! Operands of a product.

use super::pack::PackedMatrix;
use super::rows::{RowBlock, Rows};

/// Operands of one product.
pub struct Gemm<'a> {
    /// Of `k` numbers each, as the weights have.
    pub x: Rows<'a>,
    /// Packed `[n, k]`.
    pub weights: &'a PackedMatrix,
    /// Added to every row, `[n]`.
    pub bias: Option<&'a [f32]>,
    /// `[rows, n]`, overwritten.
    pub y: &'a mut [f32],
}

impl Gemm<'_> {
    pub(super) fn rows(&self) -> usize {
        let (n, k) = (self.weights.n(), self.weights.k());
        let (len, width) = match self.x {
            Rows::Numbers(x) => (x.len(), k),
            Rows::Blocks(x) => (x.len(), k.div_ceil(RowBlock::LEN)),
        };
        assert_eq!(len % width, 0, "x holds whole rows of k = {k}");
        let rows = len / width;
        assert_eq!(self.y.len(), rows * n, "y is [rows, n] = [{rows}, {n}]");
        assert!(self.bias.is_none_or(|b| b.len() == n), "the bias has n = {n} elements");
        rows
    }
}
