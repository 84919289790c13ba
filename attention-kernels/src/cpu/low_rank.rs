//! Low-rank additions on the CPU, by [`linear::low_rank`].

use device::Device;
use linear::LowRankProduct;
use simd::Isa;

use crate::error::KernelError;
use crate::low_rank::{LowRankArgs, LowRankFactors};

pub(super) fn low_rank(isa: Isa, device: &dyn Device, args: LowRankArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    let LowRankArgs { x, y, num_rows, rows, factors } = args;
    let LowRankFactors::Host { inputs, outputs, of: adapters, first } = factors else {
        return Err(KernelError::Unsupported { variant: "cpu", found: "factors on another device".to_string() });
    };
    let (x, y) = (&x.host()?[..num_rows * inputs], &mut y.host_mut()?[..num_rows * outputs]);
    let product = LowRankProduct { x, inputs, y, outputs, rows: rows.by_slot(), first, adapters };
    linear::low_rank(isa, device.pool(), product);
    Ok(())
}
