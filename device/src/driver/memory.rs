//! Memory of a GPU, page-locked memory of the host, and events; each is released when it is dropped. Batches of copies.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{
    self, CUevent_flags, CUevent_wait_flags, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpyFlags,
    CUmemcpySrcAccessOrder, CUresult,
};

use super::context::Context;
use super::error::{CudaError, refused};
use crate::memory::{Element, elements};
use crate::{DeviceError, Queue};

/// Memory of a GPU, initially zero.
pub(crate) struct DeviceMemory {
    pub context: Arc<Context>,
    /// 0 for an empty buffer; the driver aligns to 256 bytes.
    pub address: sys::CUdeviceptr,
    pub bytes: usize,
}

impl DeviceMemory {
    pub fn zeroed(context: &Arc<Context>, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        let mut memory = DeviceMemory { context: Arc::clone(context), address: 0, bytes };
        if bytes > 0 {
            context.enter()?;
            // SAFETY: the memory is set before anything reads it.
            memory.address = unsafe { result::malloc_sync(bytes) }.map_err(|error| no_memory(error, bytes))?;
            context.allocated.fetch_add(bytes as u64, Ordering::Relaxed);
            // SAFETY: the memory is `bytes` long, and the stream belongs to the context.
            unsafe { result::memset_d8_async(memory.address, 0, bytes, context.stream(Queue::Compute)) }
                .map_err(refused("zeroing memory"))?;
            // The other queue may use the memory first.
            context.finish(Queue::Compute)?;
        }
        Ok(memory)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Either stream may still use it. If the wait fails, the memory is leaked; a driver that has failed has released it.
        if self.address != 0 && self.context.finish_all().is_ok() {
            // SAFETY: allocated in `zeroed`, and nothing uses it any more.
            let _ = unsafe { result::free_sync(self.address) };
            self.context.allocated.fetch_sub(self.bytes as u64, Ordering::Relaxed);
        }
    }
}

/// Page-locked memory, initially zero.
pub(crate) struct PinnedMemory {
    context: Arc<Context>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it has one owner, and views follow the rules of references; `Pinned` denies views during copies.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    pub fn zeroed(context: &Arc<Context>, bytes: usize) -> Result<PinnedMemory, DeviceError> {
        context.enter()?;
        // The driver refuses to allocate 0 bytes.
        // SAFETY: the memory is set below, before anything reads it.
        let start = unsafe { result::malloc_host(bytes.max(1), 0) }.map_err(|error| no_memory(error, bytes))?;
        let no_memory = DeviceError::OutOfMemory { device: "cuda", wanted: bytes };
        let start = NonNull::new(start.cast::<u8>()).ok_or(no_memory)?;
        // SAFETY: just allocated with this size.
        unsafe { start.write_bytes(0, bytes) };
        Ok(PinnedMemory { context: Arc::clone(context), start, bytes })
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Address of byte `at`, which is at most the size.
    pub fn address(&self, at: usize) -> *mut c_void {
        self.start.as_ptr().wrapping_add(at).cast()
    }

    pub fn view<T: Element>(&self) -> Result<&[T], DeviceError> {
        let len = elements::<T>(self.bytes)?;
        // SAFETY: initialised (zeroed when allocated), aligned to a page, `len` elements long, and `T` allows any bits.
        Ok(unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), len) })
    }

    pub fn view_mut<T: Element>(&mut self) -> Result<&mut [T], DeviceError> {
        let len = elements::<T>(self.bytes)?;
        // SAFETY: as in `view`, and `&mut self` makes this the only view.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), len) })
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // A copy may still be running. If the wait fails, the memory is leaked.
        if self.context.finish_all().is_ok() {
            // SAFETY: allocated in `zeroed`, and no copy uses it any more.
            let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
        }
    }
}

/// Copies that the driver makes in one call, in any order.
#[derive(Default)]
pub(crate) struct Batch {
    sources: Vec<sys::CUdeviceptr>,
    targets: Vec<sys::CUdeviceptr>,
    sizes: Vec<usize>,
}

impl Batch {
    pub fn add(&mut self, from: u64, to: u64, bytes: usize) {
        // The driver refuses copies of nothing.
        if bytes > 0 {
            self.sources.push(from);
            self.targets.push(to);
            self.sizes.push(bytes);
        }
    }

    /// Number of bytes of all copies.
    pub fn bytes(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// # Safety
    /// There is a copy; all addresses are those of a GPU's or page-locked memory, which stays allocated until the stream has
    /// copied it, and no two targets overlap.
    pub unsafe fn enqueue(&mut self, stream: sys::CUstream) -> CUresult {
        let anywhere = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = CUmemcpyAttributes {
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: anywhere,
            dstLocHint: anywhere,
            flags: CUmemcpyFlags::CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE as u32,
        };
        let Batch { sources, targets, sizes } = self;
        let (to, from, bytes, count) = (targets.as_mut_ptr(), sources.as_mut_ptr(), sizes.as_mut_ptr(), sizes.len());
        // SAFETY: the lists are equally long, and the one set of attributes counts from copy 0 on. The call copies all of them;
        // the rest is the caller's promise.
        unsafe { sys::cuMemcpyBatchAsync_v2(to, from, bytes, count, &mut attributes, &mut 0, 1, stream) }
    }
}

fn no_memory(error: DriverError, wanted: usize) -> DeviceError {
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfMemory { device: "cuda", wanted },
        _ => refused("allocating memory")(error).into(),
    }
}

/// An event in a stream, with its time.
pub(crate) struct Point {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: any thread that has made the context current may use this handle of the driver.
unsafe impl Send for Point {}
// SAFETY: as above.
unsafe impl Sync for Point {}

impl Point {
    pub fn record(context: &Arc<Context>, queue: Queue) -> Result<Point, CudaError> {
        context.enter()?;
        let event = result::event::create(CUevent_flags::CU_EVENT_DEFAULT).map_err(refused("creating an event"))?;
        let point = Point { context: Arc::clone(context), event };
        // SAFETY: the event and the stream exist and belong to this context.
        unsafe { result::event::record(point.event, context.stream(queue)) }.map_err(refused("recording an event"))?;
        Ok(point)
    }

    /// Makes a stream wait for the event.
    pub fn make_wait(&self, queue: Queue) -> Result<(), CudaError> {
        self.context.enter()?;
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event and the stream exist and belong to this context; the driver keeps what it needs of the event.
        unsafe { result::stream::wait_event(self.context.stream(queue), self.event, flags) }
            .map_err(refused("waiting for an event"))
    }

    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event exists.
        self.context.wait_until("waiting for an event", || unsafe { sys::cuEventQuery(self.event) })
    }

    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.context.enter()?;
        // SAFETY: the event exists.
        match unsafe { result::event::query(self.event) } {
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            outcome => outcome.map(|()| true).map_err(refused("querying an event")),
        }
    }

    /// Returns the time between two events that are done.
    pub fn since(&self, earlier: &Point) -> Result<Duration, CudaError> {
        self.context.enter()?;
        // SAFETY: both events exist, belong to one context, and record their time.
        let milliseconds =
            unsafe { result::event::elapsed(earlier.event, self.event) }.map_err(refused("reading an event's time"))?;
        // Negative if the later event was recorded on the other stream and was done first.
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1000.0))
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `record`, destroyed once; the driver waits if it must.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}
