//! Work that is recorded once and given again by one call: what CUDA calls a graph.
//!
//! [`Device::capture`](crate::Device::capture) takes down what it is given instead of running it;
//! [`Device::replay`](crate::Device::replay) gives all of that to the compute queue. Launches keep their grids and the bytes
//! of their arguments, so a number that the host has read meanwhile is frozen. What changes from replay to replay must lie
//! in buffers.
//!
//! A graph keeps the memory that it works on: it may outlive the [`Buffer`]s, and a replay never meets freed memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::DeviceError;
use crate::buffer::Buffer;
use crate::cuda::{CudaGraph, DeviceMemory};
use crate::sim::Work;

/// See the module; made by [`Device::capture`](crate::Device::capture).
pub struct Graph(pub(crate) Recorded);

/// How a backend keeps what was captured.
pub(crate) enum Recorded {
    /// The list, and the lock of the `cuda-sim` device whose it is.
    Sim(Vec<Work>, Arc<Mutex<()>>),
    /// The driver's, and all memory that it works on, by address.
    Cuda(CudaGraph, BTreeMap<u64, Arc<DeviceMemory>>),
}

impl Graph {
    /// Bytes of device memory that the graph itself takes; `None` where it takes none or nobody counts them.
    pub fn device_bytes(&self) -> Option<u64> {
        match &self.0 {
            Recorded::Sim(..) => None,
            Recorded::Cuda(graph, _) => Some(graph.bytes),
        }
    }

    /// Whether the buffer is among those that the graph works on.
    pub fn uses(&self, buffer: &Buffer) -> bool {
        match &self.0 {
            Recorded::Sim(list, _) => list.iter().any(|work| work.uses(buffer.address())),
            Recorded::Cuda(_, memory) => memory.contains_key(&buffer.address()),
        }
    }

    /// Backend name.
    pub(crate) fn device(&self) -> &'static str {
        match &self.0 {
            Recorded::Sim(..) => "cuda-sim",
            Recorded::Cuda(..) => "cuda",
        }
    }
}

/// What a device has taken down of a capture that is under way.
pub(crate) struct Tape<T>(&'static str, Mutex<Option<Vec<T>>>);

impl<T> Tape<T> {
    pub fn of(device: &'static str) -> Tape<T> {
        Tape(device, Mutex::new(None))
    }

    /// From here on everything is taken down, until what is returned goes.
    pub fn start(&self) -> Result<Running<'_, T>, DeviceError> {
        self.refuse("a capture")?;
        *self.lock() = Some(Vec::new());
        Ok(Running(self))
    }

    pub fn runs(&self) -> bool {
        self.lock().is_some()
    }

    /// Takes it down; gives it back if nothing is captured.
    pub fn take_down(&self, item: T) -> Option<T> {
        match &mut *self.lock() {
            Some(list) => {
                list.push(item);
                None
            }
            None => Some(item),
        }
    }

    /// Refuses what can not be part of a graph.
    pub fn refuse(&self, what: &'static str) -> Result<(), DeviceError> {
        if self.runs() { Err(DeviceError::Capturing { device: self.0, what }) } else { Ok(()) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Vec<T>>> {
        // A list is whole between two of its items.
        self.1.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A capture under way. It ends when this goes, whatever happens to the one who captures.
pub(crate) struct Running<'a, T>(&'a Tape<T>);

impl<T> Running<'_, T> {
    /// What was taken down.
    pub fn stop(self) -> Vec<T> {
        self.0.lock().take().unwrap_or_default()
    }
}

impl<T> Drop for Running<'_, T> {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}
