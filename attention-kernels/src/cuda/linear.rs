//! Linear layers by the device's own matrix product.

use device::Device;
use device::gemm::{Product, WeightFormat};

use crate::args::LinearArgs;
use crate::error::KernelError;
use crate::format::Dtype;

pub(super) fn linear(device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let y_format = match args.output {
        Dtype::F32 => WeightFormat::F32,
        Dtype::F16 => WeightFormat::F16,
        Dtype::Bf16 => WeightFormat::Bf16,
    };
    let LinearArgs { x, rows, weights, bias, y, .. } = args;
    let x = x.numbers("cuda.product")?;
    Ok(device.product(Product { x, rows, weights, bias, y, y_format })?)
}
