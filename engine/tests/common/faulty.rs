//! Copies of cache blocks and forward passes that fail when a test says so, on the thread that sets the countdowns.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::LocalKey;

use attention_kernels::{BlockCopyArgs, Capabilities, Kernel, KernelError, Operation, Variant, inventory, variants};
use device::{Device, DeviceError, Event, Graph, Launch, Product, Queue};

use super::hooked::{Hooked, Hooks, Transfer};

thread_local! {
    /// Number of copies of cache blocks that succeed before one fails; `None`: all succeed.
    pub static COPIES: Cell<Option<usize>> = const { Cell::new(None) };
    /// Number of forward passes that run before one writes nothing and fails when the host waits for it.
    pub static PASSES: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Counts down; `true` if the countdown ends with this call.
fn is_last(left: &'static LocalKey<Cell<Option<usize>>>) -> bool {
    let now = left.get();
    left.set(now.and_then(|left| left.checked_sub(1)));
    now == Some(0)
}

/// Runs `work` and returns how often the countdown was asked.
pub fn count(left: &'static LocalKey<Cell<Option<usize>>>, work: impl FnOnce()) -> usize {
    left.set(Some(usize::MAX));
    work();
    usize::MAX - left.take().unwrap()
}

fn copy_of_blocks() -> Result<(), DeviceError> {
    if is_last(&COPIES) { Err(DeviceError::NoGraphs("a fault that a test asked for")) } else { Ok(()) }
}

#[derive(Default)]
pub struct Faults {
    capturing: AtomicBool,
    /// A forward pass runs that is to write nothing.
    silent: AtomicBool,
    /// Recorded before the results of the silent pass were copied: a wait for it promises too little.
    early: Mutex<Option<Event>>,
}

impl Faults {
    /// Whether a call on the compute queue is dropped.
    fn drops(&self) -> bool {
        self.silent.load(Relaxed) && !self.capturing.load(Relaxed)
    }

    fn begin_pass(&self) {
        if !self.capturing.load(Relaxed) && is_last(&PASSES) {
            self.silent.store(true, Relaxed);
        }
    }
}

impl Hooks for Faults {
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        match launch.kernel {
            "copy_blocks" => copy_of_blocks()?,
            "rope_table" => self.begin_pass(),
            // A part of the upload of inputs, which a failed pass has received.
            "scatter_words" => return device.launch(launch),
            _ => {}
        }
        if self.drops() { Ok(()) } else { device.launch(launch) }
    }

    fn product(&self, device: &dyn Device, product: Product<'_>) -> Result<(), DeviceError> {
        if self.drops() { Ok(()) } else { device.product(product) }
    }

    fn capture(&self, device: &dyn Device, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        self.capturing.store(true, Relaxed);
        let graph = device.capture(work);
        self.capturing.store(false, Relaxed);
        graph
    }

    fn replay(&self, device: &dyn Device, graph: &Graph) -> Result<(), DeviceError> {
        self.begin_pass();
        if self.drops() { Ok(()) } else { device.replay(graph) }
    }

    fn before_transfer(&self, device: &dyn Device, transfer: &Transfer) -> Result<(), DeviceError> {
        if transfer.queue == Queue::Copy {
            return copy_of_blocks();
        }
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        if self.drops() && early.is_none() {
            *early = Some(device.record(transfer.queue)?);
        }
        Ok(())
    }

    /// The event after the results of a silent pass does not cover their copy, so reading them fails. A pass without
    /// results fails at once.
    fn record(&self, device: &dyn Device, queue: Queue) -> Result<Event, DeviceError> {
        if queue == Queue::Compute && self.silent.swap(false, Relaxed) {
            let early = self.early.lock().unwrap_or_else(PoisonError::into_inner).take();
            return early.ok_or(DeviceError::NoGraphs("a fault that a test asked for"));
        }
        device.record(queue)
    }
}

/// The device with the faults of [`COPIES`] and [`PASSES`].
pub fn faulty(device: Arc<dyn Device>) -> Arc<dyn Device> {
    Arc::new(Hooked { device, hooks: Faults::default() })
}

/// The block copy of a CPU with the faults of [`COPIES`].
fn block_copy(device: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
    copy_of_blocks()?;
    let sound = variants(Operation::BlockCopy).into_iter().find(|variant| variant.name == "cpu.reference").unwrap();
    let Kernel::BlockCopy(copy) = sound.kernel else { panic!("a kernel of its operation") };
    copy(device, args)
}

inventory::submit! { Variant {
    name: "test.faulty",
    operation: Operation::BlockCopy,
    capabilities: Capabilities::CPU,
    kernel: Kernel::BlockCopy(block_copy),
} }
