//! What another library needs to exchange memory of GPUs: the compute stream, addresses, and copies of columns.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUDA_MEMCPY2D, CUmemorytype};

use super::NAME;
use crate::buffer::{Buffer, Memory};
use crate::driver::Context;
use crate::driver::refused;
use crate::{DeviceError, Queue};

/// A GPU, for work that another library enqueues on its compute stream.
pub struct Gpu(Arc<Context>);

impl Gpu {
    /// Returns the GPU that owns a buffer; `None` for memory of another backend.
    pub fn of(buffer: &Buffer) -> Option<Gpu> {
        match &buffer.0 {
            Memory::Cuda(memory) => Some(Gpu(Arc::clone(&memory.context))),
            _ => None,
        }
    }

    /// Makes the GPU current for this thread, as every call that uses it needs.
    ///
    /// # Errors
    /// The GPU has failed.
    pub fn enter(&self) -> Result<(), DeviceError> {
        Ok(self.0.enter()?)
    }

    /// The compute stream, a `CUstream`.
    pub fn stream(&self) -> *mut c_void {
        self.0.stream(Queue::Compute).cast()
    }

    /// Returns the address of a range of a buffer.
    ///
    /// # Errors
    /// The range is not inside of the buffer, or the buffer is not of this GPU.
    pub fn address(&self, buffer: &Buffer, at: usize, bytes: usize) -> Result<u64, DeviceError> {
        buffer.checked(NAME, at, bytes, |memory| match memory {
            Memory::Cuda(memory) if Arc::ptr_eq(&memory.context, &self.0) => Some(memory.address + at as u64),
            _ => None,
        })
    }

    /// Enqueues a copy of rows of `part` bytes to columns of a matrix with rows of `width` bytes.
    ///
    /// # Errors
    /// The driver refuses it.
    ///
    /// # Safety
    /// Both ranges are inside of buffers of this GPU, which exist until the copy is done, and do not overlap.
    pub unsafe fn copy_columns(
        &self,
        from: u64,
        part: usize,
        to: u64,
        width: usize,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let copy = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: from,
            srcArray: std::ptr::null_mut(),
            srcPitch: part,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: to,
            dstArray: std::ptr::null_mut(),
            dstPitch: width,
            WidthInBytes: part,
            Height: rows,
        };
        // SAFETY: as the caller promises.
        let outcome = unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.0.stream(Queue::Compute)) };
        Ok(outcome.result().map_err(refused("copying on the GPU"))?)
    }
}
