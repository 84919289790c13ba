//! Memory, streams, launches and graphs of CPUs and GPUs behind one interface, the trait [`Device`].
//!
//! This crate decides where bytes are stored. It contains [`Buffer`]s (aligned device memory), copies and events on two [`Queue`]s,
//! [`Launch`]es of CUDA kernels, [`Product`]s of plain matrices, [`Graph`]s and the [`Profile`]. No other crate calls the CUDA driver.
//!
//! Nothing here depends on models, attention or requests.
//!
//! | backend | memory | kernels |
//! |---|---|---|
//! | `cpu` | of this process; CPU code accesses it with [`Buffer::host`] | none: CPU kernels are functions |
//! | `cuda` | of a GPU | fat binaries, launched through the NVIDIA driver, which is loaded at run time and may be missing |
//! | `cuda-sim` | of this process, but not accessible with [`Buffer::host`], with guard bytes around every buffer | the same CUDA sources compiled as host code ([`sim`]) |
//!
//! Code that uses only [`Device`] works on every backend, and what one backend forbids, the others forbid too: so the CUDA path
//! of a program is tested on a machine without a GPU. On `cpu`, layers are host code, on the threads of [`Device::pool`]; on the other
//! two they are launches and [`Device::product`]s.
//!
//! ```
//! use device::Queue;
//! let device = device::open("cpu", Some(1))?;
//! let mut buffer = device.alloc(4 * size_of::<f32>())?;
//! buffer.host_mut::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
//! assert_eq!(buffer.host::<f32>()?[2], 3.0);
//!
//! // On every device: a copy that runs beside other work, and a wait for it.
//! let mut page_locked = device.pinned(buffer.len_bytes())?;
//! device.download_async(Queue::Copy, &buffer, 0, &mut page_locked, 0, buffer.len_bytes())?;
//! device.record(Queue::Copy)?.synchronize()?;
//! assert_eq!(page_locked.host::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
//! # Ok::<(), device::DeviceError>(())
//! ```
//!
//! A launch names its kernel and passes arguments in the layout of the CUDA driver. `cargo xtask build-kernels` (`--sim` for
//! `cuda-sim`) compiles the kernels; [`Options::kernels`] says where they are searched.
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

mod append;
mod buffer;
mod cuda;
mod driver;
mod dtype;
mod error;
mod files;
mod graph;
mod host;
mod launch;
mod launch_error;
mod memory;
mod pinned;
mod product;
pub mod profile;
mod queue;
mod resources;
pub mod sim;
mod stream;
mod tensor;
pub mod transfer;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use simd::Pool;

pub use buffer::{Buffer, bytes_of};
pub use cuda::Gpu;
pub use driver::{CudaError, Refusal};
pub use dtype::Dtype;
pub use error::DeviceError;
pub use graph::Graph;
pub use host::host_memory;
pub use launch::{Arg, Launch, Tile};
pub use launch_error::LaunchError;
pub use memory::Element;
pub use pinned::Pinned;
pub use product::{Columns, Factor, FactorType, Product, ProductShape, Slices};
pub use profile::Profile;
pub use queue::Event;
pub use resources::Resources;
pub use stream::Queue;
pub use tensor::Tensor;

/// Amount of memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// All memory.
    pub total: u64,
    /// Memory that a new allocation could use now.
    pub available: u64,
    /// Whether the device has this memory for itself. Otherwise it is that of the host, which other programs need.
    pub is_own: bool,
}

/// Capabilities of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Types that layers can be computed in. On a device that packs matrices, buffers are float32 with each of them, and bfloat16
    /// is the type to which products round.
    pub compute: &'static [Dtype],
    /// Whether weights are packed for host code. Otherwise they are codes for kernels, or numbers in the type that layers are
    /// computed in, for [`Device::product`].
    pub packs_matrices: bool,
    /// Whether layers and sampling are kernels ([`Device::launch`]), which a graph can replay. Otherwise they are host code.
    pub launches: bool,
    /// Whether [`Device::product`] multiplies factors of e4m3: GPUs from compute capability 8.9 on.
    pub multiplies_e4m3: bool,
    /// Whether results must not depend on the number of rows ([`Options::deterministic`]).
    pub deterministic: bool,
}

impl Features {
    /// Capabilities of `cpu`.
    pub const HOST: Features = Features {
        compute: &[Dtype::F32, Dtype::Bf16],
        packs_matrices: true,
        launches: false,
        multiplies_e4m3: false,
        deterministic: true,
    };
    /// Capabilities of `cuda` and `cuda-sim` without [`Options::deterministic`], on a GPU that has all of them.
    pub const LAUNCHING: Features = Features {
        compute: &Dtype::ALL,
        packs_matrices: false,
        launches: true,
        multiplies_e4m3: true,
        deterministic: false,
    };
}

/// A backend: something that holds memory and computes.
///
/// The engine opens one device with [`open_with`] and shares it as `Arc<dyn Device>`; weights are loaded by the crate `linear`,
/// and each step calls the methods below. This is the contract for callers, and for the implementation of a new backend.
///
/// **Queues.** A device has two [`Queue`]s, which work like CUDA streams. Work on one queue runs in the order in which it was
/// enqueued. Work on different queues is ordered only by events: [`Device::record`] on one queue, then [`Device::wait`] on the
/// other. A method without a queue parameter uses [`Queue::Compute`].
///
/// | methods | queue | return when |
/// |---|---|---|
/// | [`alloc`](Device::alloc), [`pinned`](Device::pinned) | – | the memory is allocated and zeroed; either queue may use it |
/// | [`upload`](Device::upload), [`download`](Device::download) | Compute | the copy is done, and with it all earlier work on the queue |
/// | [`copy`](Device::copy), [`fill`](Device::fill), [`product`](Device::product), [`launch`](Device::launch), [`replay`](Device::replay) | Compute | the work is enqueued |
/// | [`upload_async`](Device::upload_async), [`download_async`](Device::download_async), [`upload_ranges`](Device::upload_ranges), [`download_ranges`](Device::download_ranges) | as named | the copies are enqueued |
/// | [`record`](Device::record), [`wait`](Device::wait) | as named | the event or the wait is enqueued |
/// | [`synchronize`](Device::synchronize) | both | both queues are empty |
///
/// A backend may finish enqueued work before it returns, as `cpu` and `cuda-sim` do. It must still refuse what a GPU forbids:
/// page-locked memory stays inaccessible until the host has waited for an event behind its copy ([`DeviceError::InFlight`]), so
/// that a missing wait shows on every backend.
///
/// **Threads.** All methods may be called from several threads at once; each call takes its place in the order of its queue.
///
/// **Memory.** Dropping a [`Buffer`], a [`Pinned`] or a [`Graph`] waits for work that may use it, so drop them outside of
/// steps.
///
/// **Errors.** Before anything is enqueued, every range of every buffer is checked ([`DeviceError::Outside`]), and that
/// buffers, page-locked memory, events and graphs belong to this device ([`DeviceError::WrongDevice`]; for both, a launch
/// returns [`DeviceError::Launch`]). After such an error nothing has changed. An error of work that was already enqueued is
/// returned by any later call, at the latest by one that waits. After an error of a kernel on `cuda`, every later call fails.
pub trait Device: Send + Sync {
    /// Returns the name of the backend: `"cpu"`, `"cuda"` or `"cuda-sim"`.
    fn name(&self) -> &'static str;
    /// Describes the hardware in one line, for the start-up log.
    fn description(&self) -> String;
    /// Returns the amount of memory now; zeros if the driver has failed.
    fn memory(&self) -> MemoryInfo;
    /// Returns the total size of all existing buffers, if the device counts it, so that tests can compare a memory plan with what
    /// was allocated. `cuda-sim` does, and `cuda`, which counts the workspace of [`Device::load_products`] too.
    fn allocated(&self) -> Option<u64> {
        None
    }
    /// Allocates zeroed memory, aligned to 64 bytes. On a CPU, pages that are never touched cost nothing.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::Capturing`] during a capture.
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError>;
    /// Returns the capabilities of the backend.
    fn features(&self) -> Features {
        Features::LAUNCHING
    }
    /// Loads what [`Device::product`] needs now, instead of at the first product: on `cuda`, cuBLASLt and its workspace.
    ///
    /// # Errors
    /// [`CudaError::NoBlas`] if the library is missing; [`DeviceError::OutOfMemory`].
    fn load_products(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Returns the bytes of device memory that [`Device::load_products`] allocates.
    fn product_bytes(&self) -> u64 {
        0
    }
    /// Chooses now how products of 1 to `max_rows` rows of this shape are computed, instead of at the first product of each
    /// size. Algorithms are tried with `weights`, a matrix of the shape. A shape that cannot be computed is not an error before its
    /// product. The default implementation does nothing: the other backends have no choice.
    ///
    /// # Errors
    /// [`DeviceError::Outside`] if `weights` is too small; [`DeviceError::Capturing`] during a capture.
    fn plan_product(&self, _shape: ProductShape, _weights: &Buffer, _max_rows: usize) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Enqueues a matrix product on [`Queue::Compute`].
    ///
    /// # Errors
    /// [`DeviceError::Outside`] if an operand is too small; [`DeviceError::BadProduct`] for columns outside of `y`, slices that do not
    /// divide k, and for a bias or a result that factors of 8 bits or slices do not have; [`CudaError::NoAlgorithm`] if the library of
    /// `cuda` cannot compute the shape, with any number of rows if results must not depend on it; [`DeviceError::NoMatrices`] on
    /// `cpu`.
    fn product(&self, _product: Product<'_>) -> Result<(), DeviceError> {
        Err(DeviceError::NoMatrices(self.name()))
    }
    /// Returns the host threads that prepare work for the device; on `cpu`, the threads that compute.
    fn pool(&self) -> &Pool;

    /// Copies `bytes` to offset `at` of a buffer and waits until that is done.
    fn upload(&self, to: &mut Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError>;
    /// Fills `bytes` from offset `at` of a buffer and waits until that is done.
    fn download(&self, from: &Buffer, at: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;
    /// Enqueues a copy of `bytes` bytes between two buffers.
    fn copy(&self, from: &Buffer, at: usize, to: &mut Buffer, to_at: usize, bytes: usize) -> Result<(), DeviceError>;
    /// Enqueues setting `bytes` bytes of a buffer to `byte`. The default implementation is an upload.
    fn fill(&self, buffer: &mut Buffer, at: usize, bytes: usize, byte: u8) -> Result<(), DeviceError> {
        self.upload(buffer, at, &vec![byte; bytes])
    }
    /// Waits until both queues are empty.
    ///
    /// # Errors
    /// Any error of the work that it waits for.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// Allocates zeroed page-locked host memory, for copies that the CPU does not wait for.
    ///
    /// # Errors
    /// As [`Device::alloc`].
    fn pinned(&self, bytes: usize) -> Result<Pinned, DeviceError>;
    /// Enqueues a copy of `bytes` bytes to the device. `from` is inaccessible until the host has waited for an event that was
    /// recorded after this call.
    fn upload_async(
        &self,
        queue: Queue,
        from: &Pinned,
        from_at: usize,
        to: &mut Buffer,
        at: usize,
        bytes: usize,
    ) -> Result<(), DeviceError>;
    /// Enqueues a copy of `bytes` bytes from the device. `to` is inaccessible until the host has waited for an event that was
    /// recorded after this call.
    fn download_async(
        &self,
        queue: Queue,
        from: &Buffer,
        at: usize,
        to: &mut Pinned,
        to_at: usize,
        bytes: usize,
    ) -> Result<(), DeviceError>;
    /// Enqueues many copies as [`Device::download_async`] does each, on `cuda` with one call of the driver. Their order is not
    /// defined, so no two may write the same byte.
    fn download_ranges(&self, queue: Queue, copies: &mut [transfer::Download<'_>]) -> Result<(), DeviceError> {
        for copy in copies.iter() {
            transfer::check(copy.ranges, copy.from.len_bytes(), copy.to.len_bytes())?;
        }
        copies.iter_mut().try_for_each(|copy| {
            let (from, to, mut ranges) = (copy.from, &mut *copy.to, copy.ranges.iter());
            ranges.try_for_each(|range| self.download_async(queue, from, range.from, to, range.to, range.bytes))
        })
    }
    /// As [`Device::download_ranges`], to the device.
    fn upload_ranges(&self, queue: Queue, copies: &mut [transfer::Upload<'_>]) -> Result<(), DeviceError> {
        for copy in copies.iter() {
            transfer::check(copy.ranges, copy.from.len_bytes(), copy.to.len_bytes())?;
        }
        copies.iter_mut().try_for_each(|copy| {
            let (from, to, mut ranges) = (copy.from, &mut *copy.to, copy.ranges.iter());
            ranges.try_for_each(|range| self.upload_async(queue, from, range.from, to, range.to, range.bytes))
        })
    }
    /// Records an event behind all work that has been enqueued on `queue` so far.
    fn record(&self, queue: Queue) -> Result<Event, DeviceError>;
    /// Makes all work that is enqueued on `queue` from now on wait for `event`. The host does not wait.
    fn wait(&self, queue: Queue, event: &Event) -> Result<(), DeviceError>;

    /// Loads a module of kernels now, instead of at its first launch.
    ///
    /// # Errors
    /// [`DeviceError::NoKernelFiles`] if its file is not found; [`DeviceError::Cuda`] or [`DeviceError::Sim`] if the file
    /// cannot be used; [`DeviceError::NoKernels`] on `cpu`.
    fn load(&self, module: &str) -> Result<(), DeviceError>;
    /// Enqueues a kernel on [`Queue::Compute`].
    ///
    /// Before the launch the device checks the number and sizes of the arguments, that pointers start inside of their buffers,
    /// and that the buffers belong to this device. It cannot check what a kernel does with its arguments: lengths, strides and
    /// tables are trusted, and each `.cu` file states what they must satisfy. `cuda-sim` runs kernels in this process, so use
    /// it for tests only; it detects writes next to a buffer ([`DeviceError::Trespass`]).
    ///
    /// # Errors
    /// [`DeviceError::Launch`] if the launch does not fit the kernel (nothing has run); [`DeviceError::Sim`] with the source
    /// line where a kernel of `cuda-sim` failed; [`DeviceError::NoKernels`] on `cpu`; those of [`Device::load`].
    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError>;
    /// Returns how many thread blocks of a launch the device runs at once, at least 1: its multiprocessors, times the blocks
    /// that fit one of them. The grid and the arguments of the launch are not used. A kernel whose blocks share a list of work
    /// is launched with this number. `cuda-sim` returns a constant.
    ///
    /// # Errors
    /// As for [`Device::launch`].
    fn resident_blocks(&self, _launch: &Launch<'_>) -> Result<u32, DeviceError> {
        Ok(1)
    }
    /// Returns the threads of a kernel's blocks and the rows that a block computes, as the kernel's source says
    /// (`QUIRE_EXPORT_TILED` of `quire/export.cuh`); zeros if it does not say. The default implementation is for a device
    /// without kernels.
    ///
    /// # Errors
    /// As for [`Device::launch`].
    fn tile(&self, _module: &str, _kernel: &str) -> Result<Tile, DeviceError> {
        Ok(Tile { threads: 1, rows: 1 })
    }
    /// Records the launches, products, buffer copies and fills that `work` enqueues on [`Queue::Compute`], without running
    /// them. [`Device::replay`] runs them, any number of times.
    ///
    /// Everything else that `work` calls fails with [`DeviceError::Capturing`]: allocation, copies from and to the host, waits,
    /// events, and kernels and products that have not run before. So run `work` once without a capture; after that everything
    /// it needs is loaded. `work` keeps its own results and errors: if it fails half-way, drop the graph. During the call no
    /// other thread may use the device: work that it enqueues on the compute queue would become part of the graph, and no
    /// memory of the device may be dropped.
    ///
    /// # Errors
    /// [`DeviceError::NoGraphs`] on `cpu`; [`DeviceError::Capturing`] inside of another capture; errors of the driver.
    fn capture(&self, _work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        Err(DeviceError::NoGraphs(self.name()))
    }
    /// Enqueues the work of a graph on [`Queue::Compute`].
    ///
    /// # Errors
    /// [`DeviceError::WrongDevice`] for a graph of another device; errors of the work, as for [`Device::launch`].
    fn replay(&self, _graph: &Graph) -> Result<(), DeviceError> {
        Err(DeviceError::NoGraphs(self.name()))
    }
    /// Returns the major and minor compute capability of a GPU. `None` on `cpu`, and on `cuda-sim`, whose kernels are host
    /// code: it supports every instruction that `quire/ptx.cuh` models, whatever capability that needs.
    fn compute_capability(&self) -> Option<(u32, u32)> {
        None
    }
    /// Returns the profile that step times are recorded in, if profiling is on.
    fn profile(&self) -> Option<&Arc<Profile>> {
        None
    }
}

/// Options for opening a device. [`Options::default`] is the configuration without any flags.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Number of host threads; `None`: one per core.
    pub threads: Option<usize>,
    /// Folder of compiled kernels, the only one that is searched. `None`: first the folder of the executable, then `kernels/`
    /// of the cargo target folder that contains the executable.
    pub kernels: Option<PathBuf>,
    /// `cuda`: every element of a [`Device::product`] is summed in the same order for any number of rows. The other backends
    /// always do that.
    pub deterministic: bool,
    /// Profile to record step times in.
    pub profile: Option<Arc<Profile>>,
    /// `cuda`: how long the host waits for the GPU before it gives up, after which every call fails; `None`: 60 s.
    pub wait_limit: Option<Duration>,
    /// `cuda-sim`: seed of the order in which the threads and blocks of a launch run; 0 is the natural order.
    pub seed: u64,
    /// `cuda-sim`: what gets the counts of all launches. The libraries of kernels must have been built to count. If no folder is
    /// given, they are searched in the subfolder `counts` of the others.
    pub counts: Option<Arc<sim::Tally>>,
}

/// Opens a backend by name with `threads` host threads (`None`: one per core). Kernels are searched in `QUIRE_KERNELS_DIR` if
/// that is set, otherwise as described at [`Options::kernels`]. See [`open_with`].
pub fn open(name: &str, threads: Option<usize>) -> Result<Arc<dyn Device>, DeviceError> {
    let kernels = std::env::var_os("QUIRE_KERNELS_DIR").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    open_with(name, &Options { threads, kernels, ..Options::default() })
}

/// Opens a backend by name. `"auto"` opens `cpu`: whether a GPU serves depends on the model, which the engine knows.
///
/// # Errors
/// [`DeviceError::UnknownDevice`], or what the backend is missing on this machine; each error is one line.
pub fn open_with(name: &str, options: &Options) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(match name {
        "auto" | "cpu" => Arc::new(host::Host::cpu(options)?),
        "cuda" => Arc::new(cuda::Cuda::open(options)?),
        "cuda-sim" => Arc::new(host::Host::sim(options)?),
        other => return Err(DeviceError::UnknownDevice(other.to_string())),
    })
}
