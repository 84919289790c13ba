//! Memory, threads and matrix products behind one small interface.
//!
//! What it is: the only place that knows where bytes live and who computes. It owns [`Buffer`]s (aligned device
//! memory), the [`Pool`] of worker threads, the [`simd`] lanes that CPU kernels are written in, [`gemm`], the matrix
//! product that every linear layer is made of, and [`roofline`], what the machine could do at best.
//!
//! What it is not: it knows nothing of models, attention or requests.
//!
//! Today there is one backend, `cpu`; a [`Device`] is what the others will be too, and a caller that stays within
//! [`Device`] and [`Buffer`] does not learn which one it has. [`Buffer::host`] is the door for code that runs on the
//! CPU itself: it is an error, not a copy, for memory that the CPU can not reach.
//!
//! ```
//! let device = device::open("cpu", Some(1))?;
//! let mut buffer = device.alloc(4 * size_of::<f32>())?;
//! buffer.host_mut::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
//! assert_eq!(buffer.host::<f32>()?[2], 3.0);
//! # Ok::<(), device::DeviceError>(())
//! ```

mod buffer;
mod cpu;
pub mod gemm;
mod pool;
pub mod roofline;
pub mod simd;

use std::sync::Arc;

pub use buffer::{Buffer, Element};
pub use pool::Pool;
pub use simd::Isa;

/// What went wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No backend of that name.
    #[error("--device: found {0:?}, expected \"auto\" or \"cpu\" (this build has no other backend)")]
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
    /// Weight rows that are no whole rows.
    #[error("a weight matrix with {0} columns was given rows of another length")]
    BadMatrix(usize),
    /// A weight that the quantised form can not hold.
    #[error(
        "a weight matrix holds numbers that {0} can not store (not finite, or too large); load it without --quantization"
    )]
    BadWeights(gemm::Quantization),
    /// This backend multiplies with no such weights.
    #[error("--quantization: device {device} has no {quantization} weights; leave it out, or use --device cpu")]
    NoQuantization {
        /// Backend name.
        device: &'static str,
        /// What was asked for.
        quantization: gemm::Quantization,
    },
    /// The thread pool could not be started.
    #[error("--threads: {0} worker threads could not be started: {1}")]
    Threads(usize, String),
}

/// Bytes of memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// All of it.
    pub total: u64,
    /// What a new allocation could use now.
    pub available: u64,
}

/// Something that holds memory and computes.
pub trait Device: Send + Sync {
    /// Backend name, the prefix of its kernels' names: `"cpu"`.
    fn name(&self) -> &'static str;
    /// The hardware in words, for the start-up log.
    fn description(&self) -> String;
    /// Memory now.
    fn memory(&self) -> MemoryInfo;
    /// Zeroed memory, 64-byte aligned. Untouched pages cost nothing on a CPU.
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError>;
    /// A weight matrix `[n, k]`, given as the rows of one or more checkpoint tensors one below the other, in the form
    /// that this device multiplies with.
    fn matrix(&self, k: usize, parts: &[(gemm::WeightFormat, &[u8])]) -> Result<Matrix, DeviceError>;
    /// The same, quantised on the way; an error where the backend has no product for such weights.
    fn quantized_matrix(
        &self,
        quantization: gemm::Quantization,
        _k: usize,
        _parts: &[(gemm::WeightFormat, &[u8])],
    ) -> Result<Matrix, DeviceError> {
        Err(DeviceError::NoQuantization { device: self.name(), quantization })
    }
    /// The host threads that feed the device; on a CPU, the ones that compute.
    fn pool(&self) -> &Pool;
}

/// A weight matrix on a device; made by [`Device::matrix`].
pub struct Matrix(gemm::PackedMatrix);

impl Matrix {
    /// Outputs.
    pub fn n(&self) -> usize {
        self.0.n()
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.0.k()
    }

    /// The packed weights, for code that runs on the CPU (an error for memory that it can not reach).
    pub fn host(&self) -> Result<&gemm::PackedMatrix, DeviceError> {
        Ok(&self.0)
    }
}

/// Opens a backend by name (`"auto"` takes the best there is) with that many host threads (`None`: every core).
pub fn open(name: &str, threads: Option<usize>) -> Result<Arc<dyn Device>, DeviceError> {
    match name {
        "auto" | "cpu" => Ok(Arc::new(cpu::Cpu::new(threads)?)),
        other => Err(DeviceError::UnknownDevice(other.to_string())),
    }
}
