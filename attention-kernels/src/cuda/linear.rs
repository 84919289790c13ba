//! Linear layers by the matrix product of the device.

use device::Device;
use device::gemm::Product;

use crate::args::LinearArgs;
use crate::error::KernelError;

pub(super) fn linear(device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let LinearArgs { x, rows, weights, bias, y, output: y_format } = args;
    let x = x.numbers("cuda.product")?;
    Ok(device.product(Product { x, rows, weights, bias, y, y_format })?)
}
