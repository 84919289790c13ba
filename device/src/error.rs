//! Errors of a device; each is one line.

use std::path::PathBuf;

use simd::ThreadsError;

use crate::driver::CudaError;
use crate::launch_error::LaunchError;
use crate::product::ProductShape;
use crate::sim::SimError;

/// An error of a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No backend has this name.
    #[error("--device: found {0:?}, expected \"auto\", \"cpu\", \"cuda\" or \"cuda-sim\"")]
    UnknownDevice(String),
    /// The memory could not be allocated.
    #[error(
        "{device}: could not allocate {wanted} bytes of memory; lower --kv-cache-memory-bytes or --max-num-batched-tokens"
    )]
    OutOfMemory {
        /// Backend name.
        device: &'static str,
        /// Size of the failed allocation.
        wanted: usize,
    },
    /// The size of a buffer is not a multiple of the element size.
    #[error("found a buffer of {bytes} bytes, expected a multiple of {element} bytes, the size of an element")]
    BadView {
        /// Size of the buffer.
        bytes: usize,
        /// Size of one element.
        element: usize,
    },
    /// A buffer cannot be cut or joined at this byte.
    #[error(
        "found byte {at} of {bytes}, expected a multiple of 64 inside of a buffer, or the buffer that was cut off there"
    )]
    BadPart {
        /// The byte.
        at: usize,
        /// Size of the buffer.
        bytes: usize,
    },
    /// CPU code tried to access the memory of a device.
    #[error("{0}: the CPU cannot access this memory; copy it with Device::download or Device::upload")]
    NotOnHost(&'static str),
    /// Memory, an event or a graph belongs to another device.
    #[error(
        "{expected}: found memory, an event or a graph of another device ({found}); make it with the device that uses it"
    )]
    WrongDevice {
        /// Backend name of the device that was called.
        expected: &'static str,
        /// Backend name of the owner.
        found: &'static str,
    },
    /// A range does not lie inside of its buffer.
    #[error("found {bytes} bytes at offset {at}, expected a range inside of a buffer of {len} bytes")]
    Outside {
        /// First byte.
        at: usize,
        /// Length of the range.
        bytes: usize,
        /// Size of the buffer.
        len: usize,
    },
    /// Page-locked memory that a copy may still read or write was accessed.
    #[error(
        "page-locked memory may still be in use by a copy; wait for an event recorded after the copy, or call Device::synchronize"
    )]
    InFlight,
    /// Operands of a product that do not fit each other.
    #[error(
        "a product ({0}): found columns outside of y, slices that do not divide k, or a bias or a result that slices or factors of 8 bits do not have; expected none of these"
    )]
    BadProduct(ProductShape),
    /// The device does not multiply with weights of this form.
    #[error("{0}: this device does not multiply with weights of this form; make them with Uploader::matrix")]
    NoMatrices(&'static str),
    /// The device does not run CUDA kernels.
    #[error("{device}: this device runs no CUDA kernels, and cannot run {wanted}; use --device cuda or cuda-sim")]
    NoKernels {
        /// Backend name.
        device: &'static str,
        /// The kernel, or the module of kernels.
        wanted: String,
    },
    /// A kernel of `cuda-sim` wrote next to a buffer.
    #[error(
        "cuda-sim: kernel {kernel} wrote outside of the buffer of argument {index}; run it under the address sanitizer to find the line"
    )]
    Trespass {
        /// Name of the kernel.
        kernel: String,
        /// Index of the argument, from 0.
        index: usize,
    },
    /// A call during a capture that cannot be part of a graph.
    #[error("{device}: {what} cannot be part of a graph; do it before or after Device::capture")]
    Capturing {
        /// Backend name.
        device: &'static str,
        /// What was called.
        what: &'static str,
    },
    /// The device has no graphs.
    #[error("{0}: this device runs no CUDA kernels, so it has no graphs; use --device cuda or cuda-sim")]
    NoGraphs(&'static str),
    /// Compiled kernels were not found.
    #[error("{device}: found no {file} in {}; `{command}` builds it, --kernels-dir names another folder", list(.searched))]
    NoKernelFiles {
        /// Backend name.
        device: &'static str,
        /// The file, or a pattern of file names.
        file: String,
        /// The folders, in the order of the search.
        searched: Vec<PathBuf>,
        /// Command that builds the file.
        command: &'static str,
    },
    /// A launch does not fit its kernel.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The host library of kernels cannot be used, or a kernel in it failed.
    #[error("cuda-sim: {0}")]
    Sim(#[from] SimError),
    /// An error of the GPU or its driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The thread pool could not be started.
    #[error(transparent)]
    Threads(#[from] ThreadsError),
}

fn list(folders: &[PathBuf]) -> String {
    let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    folders.join(", ")
}
