//! The products of [`Device::product`] that a kernel finishes.

use device::{Buffer, Device, Factor, Product, Slices};

use crate::error::KernelError;
use crate::format::Dtype;

/// Computes sums of a product, or of slices of its k, as f32 and without a bias, for a kernel that finishes them.
pub(super) fn sums(
    device: &dyn Device,
    (weights, slices): (Factor<'_>, Option<Slices>),
    (x, rows): (&Buffer, usize),
    y: &mut Buffer,
) -> Result<(), KernelError> {
    let product = Product { x, rows, weights, bias: None, y, y_format: Dtype::F32, columns: None, slices };
    Ok(device.product(product)?)
}
