//! What can go wrong on a device, each in one line.

use std::path::PathBuf;

use crate::cuda::CudaError;
use crate::launch_error::LaunchError;
use crate::sim::SimError;

/// What went wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No backend of that name.
    #[error("--device: found {0:?}, expected \"auto\", \"cpu\", \"cuda\" or \"cuda-sim\"")]
    UnknownDevice(String),
    /// The memory could not be had.
    #[error(
        "{device}: {wanted} bytes of memory could not be allocated; lower --kv-cache-memory-bytes or --max-num-batched-tokens"
    )]
    OutOfMemory {
        /// Backend name.
        device: &'static str,
        /// Size of the failed allocation.
        wanted: usize,
    },
    /// A view of a buffer does not match its size.
    #[error("a buffer of {bytes} bytes can not be seen as elements of {element} bytes")]
    BadView {
        /// Size of the buffer.
        bytes: usize,
        /// Size of one element.
        element: usize,
    },
    /// A view of memory that belongs to a device.
    #[error("{0}: the CPU can not reach this memory; copy it with Device::download or Device::upload")]
    NotOnHost(&'static str),
    /// A buffer, page-locked memory or an event of another device.
    #[error(
        "{expected}: found memory or an event of another device ({found}); one device can not use what another made"
    )]
    WrongDevice {
        /// Backend name of the device that was called.
        expected: &'static str,
        /// Backend name of the other one.
        found: &'static str,
    },
    /// A copy that would leave its buffer.
    #[error("{bytes} bytes from byte {at} on do not lie in a buffer of {len} bytes")]
    Outside {
        /// First byte.
        at: usize,
        /// Bytes to copy.
        bytes: usize,
        /// Size of the buffer.
        len: usize,
    },
    /// A view of page-locked memory that a copy may still read or write.
    #[error(
        "page-locked memory is still being copied; wait for an event recorded after the copy, or Device::synchronize"
    )]
    InFlight,
    /// No weight rows, or none that are whole.
    #[error("a weight matrix with {0} columns was given no rows, or rows of another length")]
    BadMatrix(usize),
    /// A device without matrix products.
    #[error("{0}: there are no matrix products on this device yet; use --device cpu to run a model")]
    NoMatrices(&'static str),
    /// A device that runs no CUDA kernels.
    #[error("{device}: launches no CUDA kernels, and was asked for {wanted}; use --device cuda or cuda-sim")]
    NoKernels {
        /// Backend name.
        device: &'static str,
        /// The kernel, or the module of kernels.
        wanted: String,
    },
    /// A kernel of `cuda-sim` wrote next to a buffer.
    #[error(
        "cuda-sim: kernel {kernel} wrote beside the buffer of its argument {index}; the address sanitizer names the line"
    )]
    Trespass {
        /// The kernel.
        kernel: String,
        /// Which argument, from 0.
        index: usize,
    },
    /// Something that can not be part of a graph, asked for while one is captured.
    #[error("{device}: {what} can not be part of a graph; do it before Device::capture, or after it")]
    Capturing {
        /// Backend name.
        device: &'static str,
        /// What was asked for.
        what: &'static str,
    },
    /// A device that can not keep work to give it again.
    #[error("{0}: launches no CUDA kernels, so it has no graphs of them; use --device cuda or cuda-sim")]
    NoGraphs(&'static str),
    /// Compiled kernels that are in none of the folders.
    #[error("{device}: found no {file} in {}; `{command}` builds it, --kernels-dir names a folder that has it", list(.searched))]
    NoKernelFiles {
        /// Backend name.
        device: &'static str,
        /// The file, or a pattern of files.
        file: String,
        /// The folders, in the order of the search.
        searched: Vec<PathBuf>,
        /// What builds the file.
        command: &'static str,
    },
    /// The launch does not fit its kernel.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The host library of kernels is no good, or a kernel of it went wrong.
    #[error("cuda-sim: {0}")]
    Sim(#[from] SimError),
    /// The GPU or its driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A weight that the quantised form can not hold.
    #[error(
        "a weight matrix holds numbers that {0} can not store (not finite, or too large); load it without --quantization"
    )]
    BadWeights(crate::gemm::Quantization),
    /// This backend multiplies with no such weights.
    #[error("--quantization: device {device} has no {quantization} weights; leave it out, or use --device cpu")]
    NoQuantization {
        /// Backend name.
        device: &'static str,
        /// What was asked for.
        quantization: crate::gemm::Quantization,
    },
    /// The thread pool could not be started.
    #[error("--threads: {0} worker threads could not be started: {1}")]
    Threads(usize, String),
}

fn list(folders: &[PathBuf]) -> String {
    let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    folders.join(", ")
}
