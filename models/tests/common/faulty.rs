//! Captures and replays that fail as often as a test wants.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::hooked::{Hooked, Hooks};
use device::{Device, DeviceError, Graph};

/// So many of the next captures and replays fail.
struct Faults(Arc<AtomicUsize>);

impl Faults {
    fn meet(&self) -> Result<(), DeviceError> {
        let left = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if left.is_ok() { Err(DeviceError::NoGraphs("a fault that a test asked for")) } else { Ok(()) }
    }
}

impl Hooks for Faults {
    fn capture(&self, device: &dyn Device, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        let graph = device.capture(work)?;
        self.meet()?;
        Ok(graph)
    }
    fn replay(&self, device: &dyn Device, graph: &Graph) -> Result<(), DeviceError> {
        self.meet()?;
        device.replay(graph)
    }
}

/// The device, and the number of faults that it is to meet.
pub fn faulty(device: Arc<dyn Device>) -> (Arc<dyn Device>, Arc<AtomicUsize>) {
    let faults = Arc::new(AtomicUsize::new(0));
    (Arc::new(Hooked { device, hooks: Faults(faults.clone()) }), faults)
}
