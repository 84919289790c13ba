//! Low-rank additions on the CPU, by [`linear::low_rank`].

use device::Device;
use linear::LowRankProduct;
use simd::Isa;

use crate::error::KernelError;
use crate::low_rank::{LowRankArgs, LowRankFactors};

pub(super) fn low_rank(isa: Isa, device: &dyn Device, args: LowRankArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    let LowRankArgs { x, y, rows, factors, t, .. } = args;
    let LowRankFactors::Host { inputs, outputs, of: adapters, width } = factors else {
        return Err(KernelError::Unsupported { variant: "cpu", found: "factors on another device".to_string() });
    };
    let (x, y, t) = (x.host()?, y.host_mut()?, t.host_mut()?);
    let product = LowRankProduct { x, inputs, y, outputs, rows: rows.by_slot(), adapters, t, width };
    linear::low_rank(isa, device.pool(), product);
    Ok(())
}
