//! Page-locked host memory, for copies that run while the CPU continues.

use std::sync::{Arc, Mutex};

use simd::lock;

use crate::DeviceError;
use crate::driver::PinnedMemory;
use crate::memory::{Element, HostMemory, inside};
use crate::queue::{Clock, Progress};

/// Page-locked host memory, 64-byte aligned and initially zero; made by [`Device::pinned`](crate::Device::pinned).
///
/// It is inaccessible while an asynchronous copy may still read or write it: [`Pinned::host`] fails with
/// [`DeviceError::InFlight`] until the host has waited for an event that was recorded after the copy, whether or not
/// the copy is already done. Dropping it waits for the copy.
pub struct Pinned {
    pub(crate) memory: Locked,
    pub(crate) progress: Arc<Progress>,
    /// The copies that must be done before the CPU may access the memory.
    last: Mutex<Clock>,
}

/// Page-locked memory of a backend.
pub(crate) enum Locked {
    /// Ordinary memory, for devices whose copies are done when the call returns.
    Host(HostMemory),
    /// Memory that the CUDA driver has locked.
    Cuda(PinnedMemory),
}

impl Pinned {
    pub(crate) fn new(memory: Locked, progress: Arc<Progress>) -> Pinned {
        Pinned { memory, progress, last: Mutex::default() }
    }

    /// Size in bytes.
    pub fn len_bytes(&self) -> usize {
        match &self.memory {
            Locked::Host(memory) => memory.len(),
            Locked::Cuda(memory) => memory.len(),
        }
    }

    /// Returns the memory as elements of `T`.
    ///
    /// # Errors
    /// [`DeviceError::InFlight`] while a copy may use it; [`DeviceError::BadView`] if the size is not a multiple of the size of
    /// `T`.
    pub fn host<T: Element>(&self) -> Result<&[T], DeviceError> {
        self.check_idle()?;
        match &self.memory {
            Locked::Host(memory) => memory.view(),
            Locked::Cuda(memory) => memory.view(),
        }
    }

    /// As [`Pinned::host`], for writing.
    ///
    /// # Errors
    /// As [`Pinned::host`].
    pub fn host_mut<T: Element>(&mut self) -> Result<&mut [T], DeviceError> {
        self.check_idle()?;
        match &mut self.memory {
            Locked::Host(memory) => memory.view_mut(),
            Locked::Cuda(memory) => memory.view_mut(),
        }
    }

    /// Checks a range and the owner, as `Buffer::checked` does.
    pub(crate) fn checked<'a, T>(
        &'a self,
        device: &'static str,
        at: usize,
        bytes: usize,
        own: impl FnOnce(&'a Locked) -> Option<T>,
    ) -> Result<T, DeviceError> {
        inside(at, bytes, self.len_bytes())?;
        own(&self.memory).ok_or(DeviceError::WrongDevice { expected: device, found: self.progress.device })
    }

    /// Notes that a copy from or to this memory was enqueued.
    pub(crate) fn note_copy(&self, clock: Clock) {
        lock(&self.last).join(clock);
    }

    fn check_idle(&self) -> Result<(), DeviceError> {
        let last = *lock(&self.last);
        if self.progress.is_waited_for(last) { Ok(()) } else { Err(DeviceError::InFlight) }
    }
}
