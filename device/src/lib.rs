//! Memory, threads and matrix products behind one small interface.
//!
//! What it is: the only place that knows where bytes live and who computes. It owns [`Buffer`]s (aligned device
//! memory), the [`Pool`] of worker threads, the [`simd`] lanes that CPU kernels are written in, [`gemm`], the
//! matrix product that every linear layer is made of, [`Launch`]es of CUDA kernels, and [`roofline`], what the machine
//! could do at best. Nothing else names the driver.
//!
//! What it is not: it knows nothing of models, attention or requests.
//!
//! | backend | memory | kernels |
//! |---|---|---|
//! | `cpu` | this process's; [`Buffer::host`] is the door for code that runs on the CPU | none: CPU kernels are functions |
//! | `cuda` | a GPU's | fat binaries, through the NVIDIA driver, which is opened at run time and need not be there |
//! | `cuda-sim` | this process's, with the door shut and guards around every buffer | the same sources as host code ([`sim`]) |
//!
//! A caller that stays within [`Device`] does not learn which one it has, and what one forbids the others forbid: that
//! is how the CUDA path of a program is tested on a machine without a GPU. Layers are host code over packed
//! weights on `cpu` ([`Uploader::matrix`]), and launches with [`Device::product`]s between them on the other two.
//!
//! ```
//! use device::Queue;
//! let device = device::open("cpu", Some(1))?;
//! let mut buffer = device.alloc(4 * size_of::<f32>())?;
//! buffer.host_mut::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
//! assert_eq!(buffer.host::<f32>()?[2], 3.0);
//!
//! // The same on every device: copies beside the work, seen when they are over.
//! let mut page_locked = device.pinned(buffer.len_bytes())?;
//! device.download_async(Queue::Copy, &buffer, 0, &mut page_locked, 0, buffer.len_bytes())?;
//! device.record(Queue::Copy)?.synchronize()?;
//! assert_eq!(page_locked.host::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
//! # Ok::<(), device::DeviceError>(())
//! ```
//!
//! A launch names its kernel and has its arguments as the driver takes them. `cargo xtask build-kernels` (`--sim` for
//! `cuda-sim`) makes the files; [`open`] says where they are found.
//!
//! ```no_run
//! use device::{Arg, Launch};
//! let device = device::open("cuda", None)?;
//! let values = device.alloc(4096)?;
//! let args = [Arg::pointer(&values, 0), 1024.into(), 0.5f32.into()];
//! let (grid, block) = ([4, 1, 1], [256, 1, 1]);
//! device.launch(&Launch { module: "demo", kernel: "scale", grid, block, shared_bytes: 0, args: &args })?;
//! # Ok::<(), device::DeviceError>(())
//! ```

pub mod allocator;
mod buffer;
mod cuda;
mod dtype;
mod error;
mod files;
pub mod gemm;
mod graph;
mod host;
mod launch;
mod launch_error;
mod memory;
mod mirror;
mod pinned;
mod pool;
pub mod profile;
mod queue;
pub mod roofline;
pub mod sim;
pub mod simd;
mod stream;
mod tensor;
mod upload;

use std::path::PathBuf;
use std::sync::Arc;

pub use buffer::{Buffer, bytes_of};
pub use cuda::{CudaError, Refusal};
pub use dtype::Dtype;
pub use error::DeviceError;
pub use graph::Graph;
pub use host::host_memory;
pub use launch::{Arg, Launch};
pub use launch_error::LaunchError;
pub use memory::Element;
pub use mirror::Mirror;
pub use pinned::Pinned;
pub use pool::Pool;
pub use profile::Profile;
pub use queue::Event;
pub use simd::Isa;
pub use stream::Queue;
pub use tensor::Tensor;
pub use upload::Uploader;

/// Bytes of memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// All of it.
    pub total: u64,
    /// What a new allocation could use now.
    pub available: u64,
}

/// What a backend can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The types that it computes layers in.
    pub compute: &'static [Dtype],
    /// It packs matrices for its products ([`Device::packed_matrix`]) and can quantise them. Else they are
    /// [`Matrix::dense`], in the type that is computed in, and their products [`Device::product`].
    pub packs_matrices: bool,
    /// It runs kernels ([`Device::launch`]): layers and sampling are such kernels, and a graph can replay a step. Else they are
    /// code of the host.
    pub launches: bool,
}

impl Features {
    /// Of `cpu`.
    pub const HOST: Features = Features { compute: &[Dtype::F32], packs_matrices: true, launches: false };
    /// Of `cuda` and `cuda-sim`.
    pub const LAUNCHING: Features = Features { compute: &Dtype::ALL, packs_matrices: false, launches: true };
}

/// Something that holds memory and computes.
///
/// A device has two [`Queue`]s. Calls that name none are ordered on [`Queue::Compute`]. Memory, events and launches of
/// two devices do not mix: [`DeviceError::WrongDevice`].
pub trait Device: Send + Sync {
    /// Backend name: `"cpu"`, `"cuda"` or `"cuda-sim"`.
    fn name(&self) -> &'static str;
    /// The hardware in words, for the start-up log.
    fn description(&self) -> String;
    /// Memory now.
    fn memory(&self) -> MemoryInfo;
    /// Bytes of all buffers that are alive, where the device counts them: `cuda-sim` does, so that a plan of memory can be
    /// held to it.
    fn allocated(&self) -> Option<u64> {
        None
    }
    /// Zeroed memory, 64-byte aligned. Untouched pages cost nothing on a CPU.
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError>;
    /// A weight matrix `[n, k]`, given as the rows of one or more checkpoint tensors one below the other, packed for the
    /// products of this device and quantised where that is asked for. [`Uploader::matrix`] makes one on any device.
    ///
    /// # Errors
    /// The backend packs no matrices ([`Features::packs_matrices`]), or the parts are not whole rows.
    fn packed_matrix(
        &self,
        _quantization: Option<gemm::Quantization>,
        _k: usize,
        _parts: &[(Dtype, &[u8])],
    ) -> Result<Matrix, DeviceError> {
        Err(DeviceError::NoMatrices(self.name()))
    }
    /// What the backend can do.
    fn features(&self) -> Features {
        Features::LAUNCHING
    }
    /// Opens what products need now rather than at the first one. On `cuda` that is cuBLASLt and its workspace.
    ///
    /// # Errors
    /// It is not there.
    fn load_products(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Bytes of device memory that [`Device::load_products`] takes.
    fn product_bytes(&self) -> u64 {
        0
    }
    /// Gives a matrix product to [`Queue::Compute`].
    ///
    /// # Errors
    /// Operands of another size or device; [`DeviceError::NoMatrices`] where there are none.
    fn product(&self, _product: gemm::Product<'_>) -> Result<(), DeviceError> {
        Err(DeviceError::NoMatrices(self.name()))
    }
    /// The host threads that feed the device; on a CPU, the ones that compute.
    fn pool(&self) -> &Pool;

    /// Copies `bytes` to byte `at` of a buffer, and returns when that is done.
    fn upload(&self, to: &mut Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError>;
    /// Fills `bytes` from byte `at` of a buffer on, and returns when that is done.
    fn download(&self, from: &Buffer, at: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;
    /// Copies `bytes` bytes between two buffers, in order with the launches.
    fn copy(&self, from: &Buffer, at: usize, to: &mut Buffer, to_at: usize, bytes: usize) -> Result<(), DeviceError>;
    /// Sets bytes of a buffer, in order with the launches.
    fn fill(&self, buffer: &mut Buffer, at: usize, bytes: usize, byte: u8) -> Result<(), DeviceError> {
        self.upload(buffer, at, &vec![byte; bytes])
    }
    /// Waits for both queues.
    ///
    /// # Errors
    /// Of the work that was waited for: on `cuda` a kernel's mistake comes to light here or at any later call.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// Page-locked host memory, zeroed, for copies that the CPU does not wait for.
    fn pinned(&self, bytes: usize) -> Result<Pinned, DeviceError>;
    /// Orders a copy of `bytes` bytes to the device. `from` can not be seen until an event recorded after it was waited
    /// for.
    fn upload_async(
        &self,
        queue: Queue,
        from: &Pinned,
        from_at: usize,
        to: &mut Buffer,
        at: usize,
        bytes: usize,
    ) -> Result<(), DeviceError>;
    /// Orders a copy of `bytes` bytes from the device. `to` can not be seen until an event recorded after it was waited
    /// for.
    fn download_async(
        &self,
        queue: Queue,
        from: &Buffer,
        at: usize,
        to: &mut Pinned,
        to_at: usize,
        bytes: usize,
    ) -> Result<(), DeviceError>;
    /// Marks the point of a queue behind all that it was given so far.
    fn record(&self, queue: Queue) -> Result<Event, DeviceError>;
    /// Work that the queue is given from now on begins after the event.
    fn wait(&self, queue: Queue, event: &Event) -> Result<(), DeviceError>;

    /// Opens a module of kernels now rather than at its first launch.
    ///
    /// # Errors
    /// [`DeviceError::NoKernelFiles`], a file that is no good here, or [`DeviceError::NoKernels`] on a CPU.
    fn load(&self, module: &str) -> Result<(), DeviceError>;
    /// Gives a kernel to [`Queue::Compute`].
    ///
    /// What can be checked is: the number and the sizes of the arguments, that pointers begin within their buffers, and
    /// that these are of this device. What a kernel does with its arguments is the kernel's: its lengths, strides and
    /// tables are trusted as they would be on a GPU, and each `.cu` says what they must satisfy. `cuda-sim` runs
    /// kernels within this process, so it is for tests; it finds writes just beside a buffer
    /// ([`DeviceError::Trespass`]).
    ///
    /// # Errors
    /// [`DeviceError::Launch`] if it does not fit the kernel (nothing has run); [`DeviceError::Sim`] with the line
    /// where a kernel of `cuda-sim` went wrong; [`DeviceError::NoKernels`] on a CPU; those of [`Device::load`].
    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError>;
    /// Takes down what `work` gives to the compute queue, and runs none of it: launches, products, copies between buffers
    /// and fills. [`Device::replay`] runs it, any number of times.
    ///
    /// Whatever else `work` asks of the device (memory, copies from and to the host, waits, events, kernels and products
    /// that have not run before) is refused with [`DeviceError::Capturing`]: run the same once without a capture, then it
    /// has all of that. `work` keeps what it learns, errors too; a graph of half the work is dropped by the caller. Until
    /// the call returns the device is this thread's: what others give to the compute queue would become part of the graph,
    /// and no memory of the device may be dropped.
    ///
    /// # Errors
    /// [`DeviceError::NoGraphs`] on a CPU; a capture within a capture; those of the driver.
    fn capture(&self, _work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        Err(DeviceError::NoGraphs(self.name()))
    }
    /// Gives what was captured to [`Queue::Compute`].
    ///
    /// # Errors
    /// A graph of another device, and those of the work, which come to light as those of a [`Device::launch`] do.
    fn replay(&self, _graph: &Graph) -> Result<(), DeviceError> {
        Err(DeviceError::NoGraphs(self.name()))
    }
    /// Major and minor number of what a GPU can do. `None` on a CPU and for `cuda-sim`, whose kernels are host code: a
    /// kernel that asks for a capability finds all of it there that `quire/ptx.cuh` models.
    fn compute_capability(&self) -> Option<(u32, u32)> {
        None
    }
    /// Where the times of steps are recorded, if they are.
    fn profile(&self) -> Option<&Arc<Profile>> {
        None
    }
}

/// A weight matrix on a device; made by [`Uploader::matrix`] or [`Matrix::dense`].
pub struct Matrix(Stored);

enum Stored {
    Packed(gemm::PackedMatrix),
    Dense(gemm::Dense),
}

impl Matrix {
    /// Outputs.
    pub fn n(&self) -> usize {
        match &self.0 {
            Stored::Packed(packed) => packed.n(),
            Stored::Dense(dense) => dense.n,
        }
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        match &self.0 {
            Stored::Packed(packed) => packed.k(),
            Stored::Dense(dense) => dense.k,
        }
    }

    /// Bytes of the weights as they lie in memory, scales included.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Stored::Packed(packed) => packed.bytes(),
            Stored::Dense(dense) => dense.numbers.len_bytes(),
        }
    }

    /// The packed weights, for code that runs on the CPU (an error for memory that it can not reach).
    pub fn host(&self) -> Result<&gemm::PackedMatrix, DeviceError> {
        match &self.0 {
            Stored::Packed(packed) => Ok(packed),
            Stored::Dense(dense) => Err(DeviceError::NotOnHost(dense.numbers.device())),
        }
    }

    /// Row-major weights `[n, k]` of one type, for [`Device::product`].
    ///
    /// # Errors
    /// The buffer holds another number of them.
    pub fn dense(format: Dtype, n: usize, k: usize, numbers: Buffer) -> Result<Matrix, DeviceError> {
        if numbers.len_bytes() != n * k * format.bytes() {
            return Err(DeviceError::BadMatrix(k));
        }
        Ok(Matrix(Stored::Dense(gemm::Dense { numbers, format, n, k })))
    }

    /// The buffer of [`Matrix::dense`], for kernels that read rows of it; `None` for packed weights.
    pub fn numbers(&self) -> Option<&Buffer> {
        self.stored_dense().map(|dense| &dense.numbers)
    }

    pub(crate) fn packed(packed: gemm::PackedMatrix) -> Matrix {
        Matrix(Stored::Packed(packed))
    }

    pub(crate) fn stored_dense(&self) -> Option<&gemm::Dense> {
        match &self.0 {
            Stored::Packed(_) => None,
            Stored::Dense(dense) => Some(dense),
        }
    }
}

/// How to open a device; [`Options::default`] is what a user gets who says nothing.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Host threads; `None`: one per core.
    pub threads: Option<usize>,
    /// The folder of compiled kernels; `None`: beside the executable, else `kernels/` of the cargo target folder that
    /// it stands in.
    pub kernels: Option<PathBuf>,
    /// `cuda`: every element of a product ([`Device::product`]) has one order of summation, whatever the number of rows. The
    /// other backends have no other way.
    pub deterministic: bool,
    /// Where the times of steps are to be recorded.
    pub profile: Option<Arc<Profile>>,
    /// `cuda-sim`: of the order in which threads and blocks of a launch run; 0 is the natural one.
    pub seed: u64,
}

/// Opens a backend by name with that many host threads (`None`: every core). Kernels are searched in
/// `QUIRE_KERNELS_DIR` if that is set. See [`open_with`].
pub fn open(name: &str, threads: Option<usize>) -> Result<Arc<dyn Device>, DeviceError> {
    let kernels = std::env::var_os("QUIRE_KERNELS_DIR").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    open_with(name, &Options { threads, kernels, ..Options::default() })
}

/// Opens a backend by name. `"auto"` takes `cpu`: what has run on no GPU yet is taken by its name alone.
///
/// # Errors
/// One line: no such backend, or what it lacks here.
pub fn open_with(name: &str, options: &Options) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(match name {
        "auto" | "cpu" => Arc::new(host::Host::cpu(options)?),
        "cuda" => Arc::new(cuda::Cuda::open(options)?),
        "cuda-sim" => Arc::new(host::Host::sim(options)?),
        other => return Err(DeviceError::UnknownDevice(other.to_string())),
    })
}
