//! Checks that the libraries of the driver and of cuBLASLt have the functions that this crate calls.
//!
//! cudarc panics at the first call of a function that its library lacks, such as an empty library of the same name that the loader
//! finds first. A test compares the lists with the calls of the libraries that replace both in tests
//! (`tests/backends/driver.cpp`, `blas.cpp`).

use cudarc::cublaslt::sys as blas;
use cudarc::driver::sys as driver;

use super::error::CudaError;

/// Functions that every driver has, which tell its version.
const VERSION: &[&str] = &["cuDriverGetVersion", "cuGetErrorString"];

/// The other functions of the driver; the oldest supported version has them.
#[rustfmt::skip]
const DRIVER: &[&str] = &[
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuFuncGetAttribute",
    "cuFuncGetParamInfo",
    "cuFuncSetAttribute",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyBatchAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleGetGlobal_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

#[rustfmt::skip]
const BLAS: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoCheck",
    "cublasLtMatmulAlgoConfigGetAttribute",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
];

/// Looks for the driver's library and the functions that tell its version.
pub(crate) fn find_driver() -> Result<(), CudaError> {
    // SAFETY: loading the library of the driver runs its initialisers, which are trusted.
    if !unsafe { driver::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    has_driver(VERSION)
}

/// Checks the other functions of the driver.
pub(crate) fn check_driver() -> Result<(), CudaError> {
    has_driver(DRIVER)
}

fn has_driver(names: &[&'static str]) -> Result<(), CudaError> {
    // SAFETY: the library exists, so it is loaded, as at the first call of any of its functions.
    let library = unsafe { driver::culib() };
    // SAFETY: the address is not used.
    let has = |name: &str| unsafe { library.get::<*const ()>(name.as_bytes()) }.is_ok();
    check(names, has, ("libcuda.so", "the NVIDIA driver"))
}

/// Looks for cuBLASLt and its functions.
pub(crate) fn check_blas() -> Result<(), CudaError> {
    // SAFETY: loading the library runs its initialisers, which are trusted.
    if !unsafe { blas::is_culib_present() } {
        return Err(CudaError::NoBlas);
    }
    // SAFETY: as in `has_driver`.
    let library = unsafe { blas::culib() };
    // SAFETY: as in `has_driver`.
    let has = |name: &str| unsafe { library.get::<*const ()>(name.as_bytes()) }.is_ok();
    check(BLAS, has, ("libcublasLt.so", "CUDA 13"))
}

fn check(
    names: &[&'static str],
    has: impl Fn(&str) -> bool,
    (library, owner): (&'static str, &'static str),
) -> Result<(), CudaError> {
    match names.iter().copied().find(|name| !has(name)) {
        Some(missing) => Err(CudaError::NoFunction { library, owner, missing }),
        None => Ok(()),
    }
}
