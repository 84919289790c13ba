//! The devices of this machine: `cpu` always, `cuda-sim` where there is a C++ compiler, `cuda` where one opens.

use std::sync::Arc;

use attention_kernels::{Operation, Variant, variants};
use device::Device;

use crate::support::Kernels;
pub use crate::support::everything;

pub static KERNELS: Kernels = Kernels::of("attention-kernels");

/// The kernels on the host, threads and blocks in an order of that seed.
pub fn sim(seed: u64) -> Option<Arc<dyn Device>> {
    KERNELS.sim(seed)
}

/// Every device that there is; one line for each that is not.
pub fn all() -> Vec<Arc<dyn Device>> {
    let mut found = vec![device::open("cpu", Some(2)).unwrap()];
    found.extend(KERNELS.devices());
    found
}

/// The variants of some operations that a device runs.
pub fn variants_on(device: &dyn Device, operations: &[Operation]) -> Vec<&'static Variant> {
    let all = operations.iter().flat_map(|&operation| variants(operation));
    all.filter(|variant| variant.capabilities.runs_on(device.name())).collect()
}
