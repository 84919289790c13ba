//! An engine whose steps take some milliseconds, so that a test can act while a request runs, long before the request ends,
//! on a fast machine as on a busy one. The tests of the server use this file too.

use std::time::Duration;

use attention_kernels::{
    CacheWriteArgs, Capabilities, Kernel, KernelChoice, KernelError, Operation, Variant, inventory, variants,
};
use device::Device;
use engine::EngineConfig;

/// Pause of each layer in each step. The demo model has five layers: 900 tokens take 18 s.
const PAUSE: Duration = Duration::from_millis(4);

/// This configuration with slow steps.
pub fn slow(config: EngineConfig) -> EngineConfig {
    let kernels = KernelChoice { cache_write: "test.slow".to_string(), ..config.kernels };
    EngineConfig { kernels, ..config }
}

/// The cache write of [`slow`].
pub fn cache_write(device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    std::thread::sleep(PAUSE);
    let sound = variants(Operation::CacheWrite).into_iter().find(|variant| variant.name == "cpu.reference").unwrap();
    let Kernel::CacheWrite(write) = sound.kernel else { panic!("a kernel of its operation") };
    write(device, args)
}

inventory::submit! { Variant {
    name: "test.slow",
    operation: Operation::CacheWrite,
    capabilities: Capabilities::CPU,
    kernel: Kernel::CacheWrite(cache_write),
} }
