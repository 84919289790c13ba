//! The backends with memory of this process: `cpu`, and `cuda-sim`, which runs kernels and denies CPU code access to its
//! memory.
//!
//! Every call is done when it returns, so both queues are in order. One lock also orders the calls of several threads:
//! a kernel of `cuda-sim` writes memory through raw pointers, and nothing else may access it meanwhile. What a GPU forbids is
//! forbidden here too: the CPU cannot access the memory of `cuda-sim`, and page-locked memory only after a wait
//! ([`crate::queue`]).

use std::ptr::copy_nonoverlapping;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Instant;

use simd::int8::DotIsa;
use simd::{Isa, Pool, lock};

use crate::buffer::{Buffer, Memory, SIM_ALLOCATED, SimMemory};
use crate::graph::{Graph, Recorded, Tape};
use crate::memory::HostMemory;
use crate::pinned::{Locked, Pinned};
use crate::queue::{Event, Mark, Progress};
use crate::sim::{Libraries, Library, Part, SimError, Work};
use crate::stream::Queue;
use crate::{Device, DeviceError, Features, Launch, LaunchError, MemoryInfo, Options, Product, Profile, Tile};

/// Returns the amount of memory of this machine, or of the container that this process runs in.
pub fn host_memory() -> MemoryInfo {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let (total, available) = (system.total_memory(), system.available_memory());
    // Inside of a container the limit of its control group counts.
    match system.cgroup_limits() {
        Some(limits) if limits.total_memory > 0 => {
            let (total, available) = (total.min(limits.total_memory), available.min(limits.free_memory));
            MemoryInfo { total, available, is_own: false }
        }
        _ => MemoryInfo { total, available, is_own: false },
    }
}

/// Memory of all devices `cuda-sim` of this process together, as of one GPU, in bytes; `None`: that of the host.
static SIM_MEMORY: LazyLock<Option<u64>> =
    LazyLock::new(|| std::env::var("QUIRE_SIM_MEMORY").ok().and_then(|bytes| bytes.parse().ok()));

pub(crate) struct Host {
    pool: Pool,
    /// Held while memory is copied or a kernel runs.
    order: Arc<Mutex<()>>,
    progress: Arc<Progress>,
    /// `cuda-sim`: total size of all buffers.
    allocated: Arc<AtomicU64>,
    /// `cuda-sim`: the libraries of kernels.
    kernels: Option<Libraries>,
    /// `cuda-sim`: the current capture.
    tape: Tape<Work>,
    deterministic: bool,
    profile: Option<Arc<Profile>>,
}

impl Host {
    pub fn cpu(options: &Options) -> Result<Host, DeviceError> {
        Host::new("cpu", options, None)
    }

    pub fn sim(options: &Options) -> Result<Host, DeviceError> {
        Host::new("cuda-sim", options, Some(Libraries::find(options)?))
    }

    fn new(name: &'static str, options: &Options, kernels: Option<Libraries>) -> Result<Host, DeviceError> {
        let pool = Pool::new(options.threads)?;
        let (order, progress, allocated) = (Arc::default(), Arc::new(Progress::new(name)), Arc::default());
        let (tape, deterministic, profile) = (Tape::new(name), options.deterministic, options.profile.clone());
        Ok(Host { pool, order, progress, allocated, kernels, tape, deterministic, profile })
    }

    /// Checks a range of a buffer of this device and returns its memory.
    fn own<'a>(&self, buffer: &'a Buffer, at: usize, bytes: usize) -> Result<&'a HostMemory, DeviceError> {
        if self.kernels.is_some() {
            return Ok(&self.own_sim(buffer, at, bytes)?.memory);
        }
        buffer.checked(self.name(), at, bytes, |memory| match memory {
            Memory::Cpu(memory) => Some(memory),
            _ => None,
        })
    }

    /// As [`Host::own`] for `cuda-sim`; the result can be kept.
    fn own_sim<'a>(&self, buffer: &'a Buffer, at: usize, bytes: usize) -> Result<&'a Arc<SimMemory>, DeviceError> {
        buffer.checked(self.name(), at, bytes, |memory| match memory {
            Memory::Sim(memory) if Arc::ptr_eq(&memory.order, &self.order) => Some(memory),
            _ => None,
        })
    }

    /// As [`Host::own`] for page-locked memory.
    fn locked<'a>(&self, pinned: &'a Pinned, at: usize, bytes: usize) -> Result<&'a HostMemory, DeviceError> {
        pinned.checked(self.name(), at, bytes, |memory| match memory {
            Locked::Host(memory) if Arc::ptr_eq(&pinned.progress, &self.progress) => Some(memory),
            _ => None,
        })
    }

    /// Returns the libraries of kernels; an error on `cpu`.
    fn kernels_for(&self, wanted: &str) -> Result<&Libraries, DeviceError> {
        let none = || DeviceError::NoKernels { device: self.name(), wanted: wanted.to_owned() };
        self.kernels.as_ref().ok_or_else(none)
    }

    /// Returns the library of a module. A capture opens none.
    fn library(&self, kernels: &Libraries, module: &str) -> Result<Arc<Library>, DeviceError> {
        match kernels.opened(module) {
            Some(library) => Ok(library),
            None => {
                self.tape.refuse("loading kernels")?;
                kernels.library(module)
            }
        }
    }

    /// Runs work of `cuda-sim`, or records it during a capture.
    fn submit(&self, kernels: &Libraries, work: Work) -> Result<(), DeviceError> {
        let Some(work) = self.tape.record(work) else { return Ok(()) };
        let _order = lock(&self.order);
        // SAFETY: the memory of `cuda-sim` has no views, and the lock excludes copies and other work. The caller of
        // `Device::launch` promises that the kernel stays within its arguments.
        unsafe { work.run(kernels.seed(), kernels.tally()) }
    }

    /// # Safety
    /// `from` and `to` have `bytes` bytes and do not overlap, and there is no reference to the bytes at `to`.
    unsafe fn move_bytes(&self, from: *const u8, to: *mut u8, bytes: usize) {
        let _order = lock(&self.order);
        // SAFETY: as the caller promises; the lock excludes kernels.
        unsafe { copy_nonoverlapping(from, to, bytes) }
    }
}

/// [`Device::resident_blocks`] of `cuda-sim`: few, so that a block gets several items.
const RESIDENT_BLOCKS: u32 = 6;
/// The same if launches are counted: so many that each item has a block of its own.
const COUNTED_BLOCKS: u32 = 4096;

impl Device for Host {
    fn name(&self) -> &'static str {
        self.progress.device
    }

    fn description(&self) -> String {
        let (threads, isa) = (self.pool.threads(), Isa::best());
        let mut host = format!("{threads} threads, vector unit {isa}, 8-bit products {}", DotIsa::best_for(isa));
        if let Some(missing) = Isa::left_out().and_then(Isa::missing) {
            host += &format!(" ({missing})");
        }
        match &self.kernels {
            None => host,
            Some(kernels) => format!("CUDA kernels as host code from {}; {host}", kernels.folder().display()),
        }
    }

    fn memory(&self) -> MemoryInfo {
        let limit = self.kernels.as_ref().and_then(|_| *SIM_MEMORY);
        limit.map_or_else(host_memory, |total| MemoryInfo {
            total,
            available: total.saturating_sub(SIM_ALLOCATED.load(Ordering::Relaxed)),
            is_own: true,
        })
    }

    fn allocated(&self) -> Option<u64> {
        self.kernels.as_ref().map(|_| self.allocated.load(Ordering::Relaxed))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.tape.refuse("an allocation")?;
        let memory = match self.kernels {
            None => HostMemory::zeroed(bytes).map(Memory::Cpu),
            Some(_) if SIM_MEMORY.is_some() && bytes as u64 > self.memory().available => None,
            Some(_) => HostMemory::guarded(bytes).map(|memory| {
                self.allocated.fetch_add(bytes as u64, Ordering::Relaxed);
                SIM_ALLOCATED.fetch_add(bytes as u64, Ordering::Relaxed);
                let (order, allocated) = (Arc::clone(&self.order), Arc::clone(&self.allocated));
                Memory::Sim(Arc::new(SimMemory { memory, order, allocated }))
            }),
        };
        memory.map(Buffer).ok_or(DeviceError::OutOfMemory { device: self.name(), wanted: bytes })
    }

    fn profile(&self) -> Option<&Arc<Profile>> {
        self.profile.as_ref()
    }

    fn features(&self) -> Features {
        match self.kernels {
            None => Features::HOST,
            Some(_) => Features { deterministic: self.deterministic, ..Features::LAUNCHING },
        }
    }

    fn product(&self, product: Product<'_>) -> Result<(), DeviceError> {
        let Some(kernels) = &self.kernels else { return Err(DeviceError::NoMatrices(self.name())) };
        let (shape, [x_from, first]) = product.check()?;
        let part = |buffer: &Buffer, at| {
            self.own_sim(buffer, at, 0).map(|memory| Part::new(memory, at, buffer.len_bytes() - at))
        };
        let (x, weights, y) = (part(product.x, x_from)?, part(product.weights.elements, 0)?, part(product.y, first)?);
        let bias = product.bias.map(|bias| part(bias, first)).transpose()?;
        self.submit(kernels, Work::Product { shape, rows: product.rows, x, weights, bias, y })
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn upload(&self, to: &mut Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.tape.refuse("an upload")?;
        let to = self.own(to, at, bytes.len())?;
        // SAFETY: inside of `to`, which is borrowed mutably, so `bytes` is other memory.
        unsafe { self.move_bytes(bytes.as_ptr(), to.start().add(at), bytes.len()) };
        Ok(())
    }

    fn download(&self, from: &Buffer, at: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.tape.refuse("a download")?;
        let from = self.own(from, at, bytes.len())?;
        // SAFETY: inside of `from`; `bytes` is borrowed mutably, so it is other memory.
        unsafe { self.move_bytes(from.start().add(at), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn copy(&self, from: &Buffer, at: usize, to: &mut Buffer, to_at: usize, bytes: usize) -> Result<(), DeviceError> {
        if let Some(kernels) = &self.kernels {
            let (from, to) = (self.own_sim(from, at, bytes)?, self.own_sim(to, to_at, bytes)?);
            let (from, to) = (Part::new(from, at, bytes), Part::new(to, to_at, bytes));
            return self.submit(kernels, Work::Copy { from, to });
        }
        let (from, to) = (self.own(from, at, bytes)?, self.own(to, to_at, bytes)?);
        // SAFETY: inside of both; `to` is borrowed mutably, so they are different buffers.
        unsafe { self.move_bytes(from.start().add(at), to.start().add(to_at), bytes) };
        Ok(())
    }

    fn fill(&self, buffer: &mut Buffer, at: usize, bytes: usize, byte: u8) -> Result<(), DeviceError> {
        let Some(kernels) = &self.kernels else { return self.upload(buffer, at, &vec![byte; bytes]) };
        let to = Part::new(self.own_sim(buffer, at, bytes)?, at, bytes);
        self.submit(kernels, Work::Fill { to, byte })
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.tape.refuse("a wait")?;
        self.progress.note_wait(self.progress.promise_all());
        Ok(())
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned, DeviceError> {
        self.tape.refuse("an allocation")?;
        let memory =
            HostMemory::zeroed(bytes).ok_or(DeviceError::OutOfMemory { device: self.name(), wanted: bytes })?;
        Ok(Pinned::new(Locked::Host(memory), Arc::clone(&self.progress)))
    }

    fn upload_async(
        &self,
        queue: Queue,
        from: &Pinned,
        from_at: usize,
        to: &mut Buffer,
        at: usize,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.tape.refuse("an upload")?;
        let (locked, to) = (self.locked(from, from_at, bytes)?, self.own(to, at, bytes)?);
        // SAFETY: inside of both, which are different kinds of memory; `to` is borrowed mutably.
        unsafe { self.move_bytes(locked.start().add(from_at), to.start().add(at), bytes) };
        from.note_copy(self.progress.count_copy(queue));
        Ok(())
    }

    fn download_async(
        &self,
        queue: Queue,
        from: &Buffer,
        at: usize,
        to: &mut Pinned,
        to_at: usize,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.tape.refuse("a download")?;
        let (from, locked) = (self.own(from, at, bytes)?, self.locked(to, to_at, bytes)?);
        // SAFETY: inside of both, which are different kinds of memory; `to` is borrowed mutably.
        unsafe { self.move_bytes(from.start().add(at), locked.start().add(to_at), bytes) };
        to.note_copy(self.progress.count_copy(queue));
        Ok(())
    }

    fn record(&self, queue: Queue) -> Result<Event, DeviceError> {
        self.tape.refuse("an event")?;
        let clock = self.progress.promise(queue);
        Ok(Event { progress: Arc::clone(&self.progress), clock, mark: Mark::Host(Instant::now()) })
    }

    fn wait(&self, queue: Queue, event: &Event) -> Result<(), DeviceError> {
        self.tape.refuse("a wait")?;
        if !Arc::ptr_eq(&event.progress, &self.progress) {
            return Err(DeviceError::WrongDevice { expected: self.name(), found: event.progress.device });
        }
        self.progress.note_queue_wait(queue, event.clock);
        Ok(())
    }

    fn load(&self, module: &str) -> Result<(), DeviceError> {
        let kernels = self.kernels_for(module)?;
        self.tape.refuse("loading kernels")?;
        kernels.library(module).map(drop)
    }

    fn resident_blocks(&self, launch: &Launch<'_>) -> Result<u32, DeviceError> {
        let counts = self.kernels_for(launch.kernel)?.tally().is_some();
        Ok(if counts { COUNTED_BLOCKS } else { RESIDENT_BLOCKS })
    }

    fn tile(&self, module: &str, kernel: &str) -> Result<Tile, DeviceError> {
        let library = self.library(self.kernels_for(kernel)?, module)?;
        Ok(library.kernel(kernel)?.tile)
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let kernels = self.kernels_for(launch.kernel)?;
        let library = self.library(kernels, launch.module)?;
        let mut memory = Vec::new();
        for (index, buffer) in launch.buffers() {
            let own = self.own_sim(buffer, 0, 0);
            let foreign = |_| LaunchError::wrong_device(launch.kernel, index, buffer.device(), self.name());
            memory.push((index, Arc::clone(own.map_err(foreign)?)));
        }
        let call = Box::new(library.prepare(launch).map_err(SimError::from)?);
        self.submit(kernels, Work::Launch { library, call, memory })
    }

    fn capture(&self, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        if self.kernels.is_none() {
            return Err(DeviceError::NoGraphs(self.name()));
        }
        let running = self.tape.start()?;
        work();
        Ok(Graph(Recorded::Sim(running.stop(), Arc::clone(&self.order))))
    }

    fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        let Some(kernels) = &self.kernels else { return Err(DeviceError::NoGraphs(self.name())) };
        self.tape.refuse("a replay")?;
        let list = match &graph.0 {
            Recorded::Sim(list, order) if Arc::ptr_eq(order, &self.order) => list,
            _ => return Err(DeviceError::WrongDevice { expected: self.name(), found: graph.device() }),
        };
        let _order = lock(&self.order);
        // SAFETY: as in `submit`; the graph keeps its memory.
        list.iter().try_for_each(|work| unsafe { work.run(kernels.seed(), kernels.tally()) })
    }
}
