//! The devices of this machine: `cpu` always, `cuda-sim` where there is a C++ compiler, `cuda` where one opens.

use std::sync::Arc;

use attention_kernels::{Capabilities, Operation, Variant, variants};
use device::{Buffer, Device};

use testkit::capability::Capability;
use testkit::not_run;

use crate::support::{Kernels, wanted};

pub static KERNELS: Kernels = Kernels::of("attention-kernels");

/// Returns `cuda-sim` with threads and blocks in the order of a seed.
pub fn sim(seed: u64) -> Option<Arc<dyn Device>> {
    KERNELS.sim(seed)
}

/// Returns one device for what does not depend on it.
pub fn one(seed: u64) -> Option<Arc<dyn Device>> {
    KERNELS.one(seed)
}

/// Returns every available device and reports those that are missing.
pub fn all() -> Vec<Arc<dyn Device>> {
    let mut found = Vec::new();
    if wanted("cpu") {
        found.push(device::open("cpu", Some(2)).unwrap());
    }
    found.extend(gpus(1));
    assert!(!found.is_empty(), "QUIRE_TEST_DEVICE: expected cpu, cuda-sim or cuda");
    found
}

/// Returns the devices that run CUDA kernels.
pub fn gpus(seed: u64) -> Vec<Arc<dyn Device>> {
    KERNELS.devices(seed)
}

/// Returns the same devices with results that do not depend on the number of rows.
pub fn deterministic() -> Vec<Arc<dyn Device>> {
    KERNELS.deterministic()
}

/// Returns a buffer with these contents.
pub fn buffer(device: &dyn Device, bytes: &[u8]) -> Buffer {
    trial::buffer(device, bytes).unwrap()
}

/// Returns the contents of a buffer.
pub fn bytes(device: &dyn Device, buffer: &Buffer) -> Vec<u8> {
    trial::bytes(device, buffer).unwrap()
}

/// Whether a device runs a variant; reports it if only a better CPU or GPU does.
fn runs(can: &Capabilities, device: &dyn Device) -> bool {
    if !can.devices.contains(&device.name()) {
        return false;
    }
    if !can.isa.is_available() {
        let capability = Capability::named(&can.isa.to_string()).unwrap();
        not_run::report(capability, &format!("this CPU has no {}", can.isa));
        return false;
    }
    let is_gpu_of_it = can.runs_on_gpu(device.compute_capability());
    if !is_gpu_of_it {
        let (major, minor) = can.compute_capability;
        not_run::report(Capability::Cuda, &format!("this GPU is not of compute capability {major}.{minor}"));
    }
    is_gpu_of_it
}

/// Returns the variants of some operations that a device runs.
pub fn variants_on(device: &dyn Device, operations: &[Operation]) -> Vec<&'static Variant> {
    let all = operations.iter().flat_map(|&operation| variants(operation));
    all.filter(|variant| runs(&variant.capabilities, device)).collect()
}
