//! Errors of a GPU and its driver; each is one line.

use std::path::PathBuf;
use std::time::Duration;

use cudarc::driver::result::DriverError;

/// An error of a GPU or its driver.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The library of the driver was not found.
    #[error(
        "--device cuda: found no NVIDIA driver (libcuda.so.1), expected version 580 or newer; install it, or use --device cpu"
    )]
    NoDriver,
    /// A library lacks a function: it is a stub, or another file of that name.
    #[error(
        "--device cuda: found {library} without the function {missing}, expected the one of {owner}; remove the file from the loader's path (LD_LIBRARY_PATH), or use --device cpu"
    )]
    NoFunction {
        /// Name of the library.
        library: &'static str,
        /// What the library should belong to.
        owner: &'static str,
        /// The first function that it lacks.
        missing: &'static str,
    },
    /// The driver is too old for the compiled kernels.
    #[error(
        "--device cuda: found a driver for CUDA {}.{}, expected 13.0 or newer; update the NVIDIA driver to 580 or newer, or use --device cpu",
        .0 / 1000, .0 % 1000 / 10
    )]
    OldDriver(i32),
    /// The driver does not start.
    #[error("--device cuda: the NVIDIA driver does not start ({0}); check nvidia-smi, or use --device cpu")]
    NoStart(Refusal),
    /// The driver reports no GPU.
    #[error(
        "--device cuda: the NVIDIA driver finds no GPU; check CUDA_VISIBLE_DEVICES and nvidia-smi, or use --device cpu"
    )]
    NoGpu,
    /// The GPU is too old for the compiled kernels.
    #[error(
        "--device cuda: found {name} of compute capability {}.{}, expected 8.0 or newer; select another GPU with CUDA_VISIBLE_DEVICES, or use --device cpu",
        .capability.0, .capability.1
    )]
    OldGpu {
        /// Name of the GPU.
        name: String,
        /// Its compute capability.
        capability: (u32, u32),
    },
    /// Other programs use all memory of the GPU, or have exclusive access to it.
    #[error(
        "--device cuda: {name}, {:.1} GiB, is in use and cannot be opened ({refusal}); end the programs that nvidia-smi lists, select another GPU with CUDA_VISIBLE_DEVICES, or use --device cpu",
        *.bytes as f64 / (1u64 << 30) as f64
    )]
    InUse {
        /// Name of the GPU.
        name: String,
        /// Total memory of the GPU.
        bytes: u64,
        /// Error of the driver.
        refusal: Refusal,
    },
    /// The library of matrix products was not found.
    #[error(
        "--device cuda: found no cuBLASLt (libcublasLt.so.13), which matrix products need; install cuBLAS of CUDA 13, or add its folder to LD_LIBRARY_PATH"
    )]
    NoBlas,
    /// The library of matrix products is too old.
    #[error(
        "--device cuda: found cuBLASLt {}.{}.{}, expected 13.0 or newer; install cuBLAS of CUDA 13, or put its folder first in LD_LIBRARY_PATH",
        .0 / 10_000, .0 % 10_000 / 100, .0 % 100
    )]
    OldBlas(usize),
    /// A call of the library of matrix products failed.
    #[error("cuda: cuBLASLt failed at {what}: {status}; check that it belongs to CUDA 13")]
    Blas {
        /// The operation.
        what: String,
        /// Status that the library returned.
        status: String,
    },
    /// The library of matrix products has no algorithm for a product, or none whose bits do not depend on the number of rows.
    #[error("cuda: found no algorithm of cuBLASLt for a product with {0}, expected one; update cuBLAS of CUDA 13")]
    NoAlgorithm(String),
    /// A fat binary has no code for this GPU.
    #[error("{file}: found no code for compute capability {}.{}; rebuild it with `cargo xtask build-kernels`, or use --device cpu", .capability.0, .capability.1)]
    NoCode {
        /// The fat binary.
        file: PathBuf,
        /// Compute capability of the GPU.
        capability: (u32, u32),
    },
    /// A file is not as `cargo xtask build-kernels` writes it.
    #[error("{file}: found {problem}; rebuild it with `cargo xtask build-kernels`")]
    Damaged {
        /// The fat binary, or the list of its kernels.
        file: PathBuf,
        /// What was found.
        problem: String,
    },
    /// The driver rejected a launch.
    #[error("cuda: kernel {kernel}, grid {grid:?}, block {block:?}, {shared_bytes} bytes of shared memory: {refusal}")]
    Launch {
        /// Name of the kernel.
        kernel: String,
        /// Number of blocks in x, y and z.
        grid: [u32; 3],
        /// Number of threads of a block in x, y and z.
        block: [u32; 3],
        /// Dynamic shared memory of a block, in bytes.
        shared_bytes: u32,
        /// Error of the driver.
        refusal: Refusal,
    },
    /// The GPU has not finished what the host waits for. Every later call returns this error.
    #[error(
        "cuda: the GPU has not finished within {} s: a kernel hangs, or other programs keep the GPU busy; check nvidia-smi, and restart the program", .0.as_secs_f64()
    )]
    NotFinished(Duration),
    /// Another call of the driver failed. After an error of a kernel, every call fails.
    #[error("cuda: {what}: {refusal}")]
    Refused {
        /// The operation.
        what: &'static str,
        /// Error of the driver.
        refusal: Refusal,
    },
}

/// Error code of a failed call of the driver, shown with its name and text.
#[derive(Debug)]
pub struct Refusal(pub(crate) DriverError);

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The name comes from cudarc, the text from the driver, which is loaded if a call has failed.
        let text = self.0.error_string().map(|text| text.to_string_lossy()).unwrap_or_default();
        write!(f, "{:?}, {text}", self.0.0)
    }
}

/// Makes an error of the operation `what`, for `map_err`.
pub(crate) fn refused(what: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Refused { what, refusal: Refusal(error) }
}
