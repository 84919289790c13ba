//! Page-locked host memory: the device copies from and to it while the CPU goes on.

use std::sync::{Arc, Mutex, PoisonError};

use crate::DeviceError;
use crate::cuda::PinnedMemory;
use crate::memory::{Element, HostMemory, inside};
use crate::queue::{Clock, Progress};

/// Page-locked host memory, zeroed at birth, 64-byte aligned; made by [`Device::pinned`](crate::Device::pinned).
///
/// While an asynchronous copy may still read or write it, it can not be seen: [`Pinned::host`] is
/// [`DeviceError::InFlight`] until the host has waited for an event that was recorded after the copy, whether or not
/// the copy happens to be over. Dropping it waits.
pub struct Pinned {
    pub(crate) memory: Locked,
    pub(crate) progress: Arc<Progress>,
    /// What must be over before the CPU may look.
    last: Mutex<Clock>,
}

/// Whose the memory is.
pub(crate) enum Locked {
    /// Of this process alone: nobody copies beside it.
    Host(&'static str, HostMemory),
    /// Of the driver.
    Cuda(PinnedMemory),
}

impl Locked {
    /// Backend name.
    pub fn device(&self) -> &'static str {
        match self {
            Locked::Host(device, _) => device,
            Locked::Cuda(_) => "cuda",
        }
    }
}

impl Pinned {
    pub(crate) fn new(memory: Locked, progress: Arc<Progress>) -> Pinned {
        Pinned { memory, progress, last: Mutex::default() }
    }

    /// Size in bytes.
    pub fn len_bytes(&self) -> usize {
        match &self.memory {
            Locked::Host(_, memory) => memory.len(),
            Locked::Cuda(memory) => memory.len(),
        }
    }

    /// The memory as elements of `T`.
    ///
    /// # Errors
    /// [`DeviceError::InFlight`], and [`DeviceError::BadView`] if the size is no multiple of `T`'s.
    pub fn host<T: Element>(&self) -> Result<&[T], DeviceError> {
        self.landed()?;
        match &self.memory {
            Locked::Host(_, memory) => memory.view(),
            Locked::Cuda(memory) => memory.view(),
        }
    }

    /// As [`Pinned::host`], for writing.
    ///
    /// # Errors
    /// As [`Pinned::host`].
    pub fn host_mut<T: Element>(&mut self) -> Result<&mut [T], DeviceError> {
        self.landed()?;
        match &mut self.memory {
            Locked::Host(_, memory) => memory.view_mut(),
            Locked::Cuda(memory) => memory.view_mut(),
        }
    }

    /// As [`Buffer::of`](crate::Buffer).
    pub(crate) fn of<'a, T>(
        &'a self,
        device: &'static str,
        at: usize,
        bytes: usize,
        own: impl FnOnce(&'a Locked) -> Option<T>,
    ) -> Result<T, DeviceError> {
        inside(at, bytes, self.len_bytes())?;
        own(&self.memory).ok_or(DeviceError::WrongDevice { expected: device, found: self.memory.device() })
    }

    /// A copy from or to this memory was given to a queue.
    pub(crate) fn used_until(&self, clock: Clock) {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).join(clock);
    }

    fn landed(&self) -> Result<(), DeviceError> {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if self.progress.over(last) { Ok(()) } else { Err(DeviceError::InFlight) }
    }
}
