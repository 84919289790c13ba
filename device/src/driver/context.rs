//! The driver, checked before anything depends on it, and one GPU with two streams.
//!
//! cudarc loads `libcuda` at the first call, and panics if it is missing or lacks a function. So [`open`] first looks for the
//! library, then for a version that has every function that this crate calls, and then for these functions.
//!
//! Waits have a limit ([`wait`]). When the GPU exceeds it, the context has failed: every later call returns
//! [`CudaError::NotFinished`] at once, and what is dropped is leaked, because releasing it would wait for the GPU.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::result::{self, DriverError, stream::StreamKind};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::error::{CudaError, Refusal, refused};
use super::{symbols, wait};
use crate::Queue;

/// Minimum version, CUDA 13.0, as `cuDriverGetVersion` reports it.
const MIN_VERSION: c_int = 13_000;

/// Minimum compute capability that `cargo xtask build-kernels` compiles for.
const MIN_CAPABILITY: (u32, u32) = (8, 0);

/// An open GPU. All memory, events and graphs of the GPU hold a reference.
pub(crate) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    streams: [sys::CUstream; 2],
    pub driver_version: c_int,
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    /// Maximum shared memory of a block, in bytes.
    pub shared_bytes: u32,
    pub name: String,
    /// Bytes of all memory of the GPU that this crate has allocated and not released.
    pub allocated: AtomicU64,
    wait_limit: Duration,
    /// Whether a wait has exceeded the limit.
    has_stalled: AtomicBool,
}

// SAFETY: any thread may use handles of the driver after it has made the context current, which `Context::enter` does.
unsafe impl Send for Context {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for Context {}

/// Opens the first GPU that the driver reports; `CUDA_VISIBLE_DEVICES` selects which GPUs it reports.
pub(crate) fn open(wait_limit: Duration) -> Result<Arc<Context>, CudaError> {
    symbols::find_driver()?;
    let mut version = 0;
    // SAFETY: the pointer has the right type. The function may be called before `init`.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(no_start)?;
    if version < MIN_VERSION {
        return Err(CudaError::OldDriver(version));
    }
    symbols::check_driver()?;
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Err(CudaError::NoGpu),
        outcome => outcome.map_err(no_start)?,
    }
    if result::device::get_count().map_err(no_start)? < 1 {
        return Err(CudaError::NoGpu);
    }
    let device = result::device::get(0).map_err(no_start)?;
    let attribute = |attribute| {
        // SAFETY: the driver returned the device.
        let value = unsafe { result::device::get_attribute(device, attribute) }.map_err(no_start)?;
        Ok(value.unsigned_abs())
    };
    let capability = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let shared_bytes = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let name = result::device::get_name(device).map_err(no_start)?;
    if capability < MIN_CAPABILITY {
        return Err(CudaError::OldGpu { name, capability });
    }
    // SAFETY: the driver returned the device.
    let bytes = unsafe { result::device::total_mem(device) }.map_err(no_start)? as u64;
    let occupied = |error: DriverError| match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY | sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            CudaError::InUse { name: name.clone(), bytes, refusal: Refusal(error) }
        }
        _ => no_start(error),
    };
    // SAFETY: the driver returned the device; dropping `Context` releases the reference.
    let context = unsafe { result::primary_ctx::retain(device) }.map_err(occupied)?;
    let mut opened = Context {
        device,
        context,
        streams: [result::stream::null(); 2],
        driver_version: version,
        capability,
        multiprocessors,
        shared_bytes,
        name: name.clone(),
        allocated: AtomicU64::new(0),
        wait_limit,
        has_stalled: AtomicBool::new(false),
    };
    opened.enter()?;
    for stream in &mut opened.streams {
        *stream = result::stream::create(StreamKind::NonBlocking).map_err(occupied)?;
    }
    Ok(Arc::new(opened))
}

fn no_start(error: DriverError) -> CudaError {
    CudaError::NoStart(Refusal(error))
}

impl Context {
    /// Makes the context current for this thread, as every call of the driver needs. Takes about 50 ns. Returns an error if the
    /// context has failed.
    pub fn enter(&self) -> Result<(), CudaError> {
        self.check()?;
        // SAFETY: the context is held until `drop`.
        unsafe { result::ctx::set_current(self.context) }.map_err(refused("selecting the GPU"))
    }

    /// Returns an error if a wait has exceeded the limit.
    fn check(&self) -> Result<(), CudaError> {
        let limit = self.wait_limit;
        if self.has_stalled.load(Ordering::Acquire) { Err(CudaError::NotFinished(limit)) } else { Ok(()) }
    }

    /// Waits until `query`, a call of the driver, no longer answers that something is not ready.
    pub fn wait_until(&self, what: &'static str, query: impl Fn() -> sys::CUresult) -> Result<(), CudaError> {
        self.enter()?;
        let is_done = wait::until(self.wait_limit, || match query() {
            // Another wait may have exceeded the limit.
            sys::CUresult::CUDA_ERROR_NOT_READY => self.check().map(|()| false),
            outcome => outcome.result().map(|()| true).map_err(refused(what)),
        })?;
        if !is_done {
            self.has_stalled.store(true, Ordering::Release);
        }
        self.check()
    }

    pub fn stream(&self, queue: Queue) -> sys::CUstream {
        self.streams[queue as usize]
    }

    /// Waits for one stream.
    pub fn finish(&self, queue: Queue) -> Result<(), CudaError> {
        // SAFETY: the stream exists as long as `self`.
        self.wait_until("waiting for the GPU", || unsafe { sys::cuStreamQuery(self.stream(queue)) })
    }

    /// Waits for both streams.
    pub fn finish_all(&self) -> Result<(), CudaError> {
        self.finish(Queue::Compute)?;
        self.finish(Queue::Copy)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // The driver would wait for the GPU.
        if self.check().is_err() {
            return;
        }
        // Calls fail here only if the driver has failed, and then there is nothing to release.
        if self.enter().is_ok() {
            for stream in self.streams.into_iter().filter(|stream| !stream.is_null()) {
                // SAFETY: created in `open`, and no longer in use: everything on the GPU holds the context.
                let _ = unsafe { result::stream::destroy(stream) };
            }
        }
        // SAFETY: retained in `open`, once.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}
