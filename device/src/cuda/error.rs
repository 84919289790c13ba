//! What can go wrong with a GPU and its driver, each in one line.

use std::path::PathBuf;

use cudarc::driver::result::DriverError;

/// Why a GPU can not be used, or what the driver refused.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The library of the driver is not there.
    #[error(
        "--device cuda: found no NVIDIA driver (libcuda.so.1), expected version 580 or newer; install it, or use --device cpu"
    )]
    NoDriver,
    /// The driver is older than what the kernels are compiled for.
    #[error(
        "--device cuda: found a driver for CUDA {}.{}, expected 13.0 or newer; update the NVIDIA driver to 580 or newer, or use --device cpu",
        .0 / 1000, .0 % 1000 / 10
    )]
    OldDriver(i32),
    /// The driver is there and does not start.
    #[error("--device cuda: the NVIDIA driver does not start ({0}); see what nvidia-smi says, or use --device cpu")]
    NoStart(Refusal),
    /// The driver sees no GPU.
    #[error(
        "--device cuda: the NVIDIA driver finds no GPU; see CUDA_VISIBLE_DEVICES and nvidia-smi, or use --device cpu"
    )]
    NoGpu,
    /// A GPU that the kernels are not compiled for.
    #[error(
        "--device cuda: found {name} of compute capability {}.{}, expected 8.0 or newer; name another GPU in CUDA_VISIBLE_DEVICES, or use --device cpu",
        .capability.0, .capability.1
    )]
    OldGpu {
        /// The GPU.
        name: String,
        /// What it has.
        capability: (u32, u32),
    },
    /// Other programs leave no room on the GPU to open it, or have it for themselves.
    #[error(
        "--device cuda: {name}, {:.1} GiB, is in use and can not be opened ({refusal}); nvidia-smi shows by whom: end that, name another GPU in CUDA_VISIBLE_DEVICES, or use --device cpu",
        *.bytes as f64 / (1u64 << 30) as f64
    )]
    InUse {
        /// The GPU.
        name: String,
        /// All of its memory.
        bytes: u64,
        /// The driver's word.
        refusal: Refusal,
    },
    /// The library of matrix products is not there.
    #[error(
        "--device cuda: found no cuBLASLt (libcublasLt.so.13), which matrix products need; install cuBLAS of CUDA 13, or put its folder into LD_LIBRARY_PATH"
    )]
    NoBlas,
    /// The library of matrix products refused something.
    #[error("cuda: cuBLASLt, {what}: {status}; see that it is of CUDA 13")]
    Blas {
        /// What was asked of it.
        what: String,
        /// Its word.
        status: String,
    },
    /// Kernels without code for this GPU.
    #[error("{file}: found code for {found}, expected some for compute capability {}.{}; `cargo xtask build-kernels` compiles for 8.0 and newer, for an older GPU use --device cpu", .capability.0, .capability.1)]
    NoCode {
        /// The fat binary.
        file: PathBuf,
        /// What it has.
        found: String,
        /// Of the GPU.
        capability: (u32, u32),
    },
    /// A file that `cargo xtask build-kernels` did not write so.
    #[error("{file}: found {problem}; `cargo xtask build-kernels` writes it anew")]
    Damaged {
        /// The fat binary, or the list of its kernels.
        file: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The driver refused a launch.
    #[error("cuda: kernel {kernel}, grid {grid:?}, block {block:?}, {shared_bytes} bytes of shared memory: {refusal}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// Blocks.
        grid: [u32; 3],
        /// Threads of a block.
        block: [u32; 3],
        /// Dynamic shared memory of a block.
        shared_bytes: u32,
        /// Why.
        refusal: Refusal,
    },
    /// The driver refused something else. After a mistake of a kernel it refuses everything.
    #[error("cuda: {what}: {refusal}")]
    Refused {
        /// What was asked of it.
        what: &'static str,
        /// Why.
        refusal: Refusal,
    },
}

/// The driver's word on a call that failed.
#[derive(Debug)]
pub struct Refusal(pub(super) DriverError);

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The name is cudarc's; the text is the driver's, which is loaded or there would be no refusal.
        let text = self.0.error_string().map(|text| text.to_string_lossy()).unwrap_or_default();
        write!(f, "{:?}, {text}", self.0.0)
    }
}

/// For `map_err`: what was asked.
pub(super) fn refused(what: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Refused { what, refusal: Refusal(error) }
}
