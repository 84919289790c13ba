//! Times of operations, where the device keeps a profile.

use attention_kernels::Dtype;
use device::profile::{self, Cost, Running};
use device::{Device, Queue};

/// The time of an operation that moves so many numbers, where the device keeps a profile.
pub(super) fn clock<'a>(
    device: &'a dyn Device,
    operation: &'static str,
    variant: Option<&'static str>,
    numbers: usize,
    dtype: Dtype,
) -> Option<Running<'a>> {
    // By the registry's rule for names: `device.kind`.
    let variant = variant.unwrap_or(if device.features().launches { "cuda.layer" } else { "cpu.layer" });
    let cost = || Cost { bytes: (numbers * dtype.bytes()) as u64, operations: 0 };
    profile::start(device, Queue::Compute, operation, variant, cost)
}
