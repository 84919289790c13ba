//! Times of layer operations in a device's profile.

use attention_kernels::Dtype;
use device::profile::{self, Cost, Running};
use device::{Device, Queue};

/// Times an operation that moves this many numbers until the guard is dropped; `None` without a profile.
pub(super) fn clock<'a>(
    device: &'a dyn Device,
    operation: &'static str,
    variant: Option<&'static str>,
    numbers: usize,
    dtype: Dtype,
) -> Option<Running<'a>> {
    // The registry's naming rule: `device.kind`.
    let variant = variant.unwrap_or(if device.features().launches { "cuda.layer" } else { "cpu.layer" });
    let cost = || Cost { bytes: (numbers * dtype.bytes()) as u64, operations: 0 };
    profile::start(device, Queue::Compute, operation, variant, cost)
}
