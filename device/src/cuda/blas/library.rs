//! The opened library, its workspace, and the operands of a product.

use std::fmt;
use std::sync::Arc;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::sys::CUdeviceptr;

use crate::driver::{Context, CudaError, DeviceMemory};

/// Size of the workspace in bytes, as NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// Addresses of the operands on the GPU.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub weights: CUdeviceptr,
    pub x: CUdeviceptr,
    pub bias: Option<CUdeviceptr>,
    pub y: CUdeviceptr,
}

/// What every call of the library needs.
pub(super) struct Library {
    pub handle: sys::cublasLtHandle_t,
    pub workspace: DeviceMemory,
    pub context: Arc<Context>,
}

/// Makes an error of the operation `what`, for `map_err`.
pub(super) fn refused(what: impl fmt::Display) -> impl Fn(CublasError) -> CudaError {
    move |error| CudaError::Blas { what: what.to_string(), status: error.to_string() }
}
