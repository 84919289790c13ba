//! Graphs: work that is captured once and replayed with one call, as in CUDA.
//!
//! [`Device::capture`](crate::Device::capture) records work instead of running it;
//! [`Device::replay`](crate::Device::replay) enqueues all of it on the compute queue. Launches keep their grids and the bytes
//! of their arguments, so a number that the host computed is frozen in the graph. What changes from replay to replay must be
//! stored in buffers.
//!
//! A graph keeps the memory that it uses: it may outlive the [`Buffer`]s, and a replay never accesses freed memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use simd::lock;

use crate::DeviceError;
use crate::buffer::Buffer;
use crate::driver::{CudaGraph, DeviceMemory};
use crate::sim::Work;

/// Captured work, made by [`Device::capture`](crate::Device::capture) and run by [`Device::replay`](crate::Device::replay).
pub struct Graph(pub(crate) Recorded);

/// Captured work of a backend.
pub(crate) enum Recorded {
    /// The list of work, and the lock that identifies the `cuda-sim` device.
    Sim(Vec<Work>, Arc<Mutex<()>>),
    /// The graph of the driver, and all memory that it uses, by address.
    Cuda(CudaGraph, BTreeMap<u64, Arc<DeviceMemory>>),
}

impl Graph {
    /// Returns the bytes of device memory that the graph itself takes; `None` on `cuda-sim`, where it takes none.
    pub fn device_bytes(&self) -> Option<u64> {
        match &self.0 {
            Recorded::Sim(..) => None,
            Recorded::Cuda(graph, _) => Some(graph.bytes),
        }
    }

    /// Returns whether the graph uses the buffer.
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

/// The recorded items of the current capture of a device, if there is one. While there is none, no call takes a lock.
pub(crate) struct Tape<T> {
    device: &'static str,
    /// Whether there is a capture. No other thread uses the device during one, so it needs no order with the list.
    running: AtomicBool,
    list: Mutex<Vec<T>>,
}

impl<T> Tape<T> {
    pub fn new(device: &'static str) -> Tape<T> {
        Tape { device, running: AtomicBool::new(false), list: Mutex::default() }
    }

    /// Starts a capture, which ends when the result is dropped.
    pub fn start(&self) -> Result<Running<'_, T>, DeviceError> {
        if self.running.swap(true, Ordering::AcqRel) {
            return Err(DeviceError::Capturing { device: self.device, what: "a capture" });
        }
        lock(&self.list).clear();
        Ok(Running(self))
    }

    /// Whether there is a capture.
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    /// Records an item; returns it if there is no capture.
    pub fn record(&self, item: T) -> Option<T> {
        if !self.is_running() {
            return Some(item);
        }
        lock(&self.list).push(item);
        None
    }

    /// Fails during a capture, for calls that cannot be part of a graph.
    pub fn refuse(&self, what: &'static str) -> Result<(), DeviceError> {
        if self.is_running() { Err(DeviceError::Capturing { device: self.device, what }) } else { Ok(()) }
    }
}

/// The current capture; dropping it ends the capture, also after a panic.
pub(crate) struct Running<'a, T>(&'a Tape<T>);

impl<T> Running<'_, T> {
    /// Ends the capture and returns the recorded items.
    pub fn stop(self) -> Vec<T> {
        std::mem::take(&mut *lock(&self.0.list))
    }
}

impl<T> Drop for Running<'_, T> {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::Release);
        lock(&self.0.list).clear();
    }
}
