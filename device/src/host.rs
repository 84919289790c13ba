//! The backends whose memory is this process's: `cpu`, and `cuda-sim`, which is the same with closed doors and kernels.
//!
//! Every call is done when it returns, so both queues are in order by themselves. One lock makes the calls of several
//! threads an order too: a kernel of `cuda-sim` writes what it was given through pointers, and nothing else may look at
//! that meanwhile. What a GPU would forbid is forbidden here: the CPU can not see the memory of `cuda-sim`, and
//! page-locked memory only after a wait ([`crate::queue`]).

use std::ptr::copy_nonoverlapping;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::buffer::{Buffer, Memory, SimMemory};
use crate::gemm::{PackedMatrix, Product, Quantization, Shape};
use crate::graph::{Graph, Recorded, Tape};
use crate::memory::HostMemory;
use crate::pinned::{Locked, Pinned};
use crate::queue::{Event, Mark, Progress};
use crate::sim::{Libraries, Part, SimError, Work};
use crate::stream::Queue;
use crate::{
    Device, DeviceError, Dtype, Features, Isa, Launch, LaunchError, Matrix, MemoryInfo, Options, Pool, Profile,
};

/// Memory of this machine now, or of the container that this process is in.
pub fn host_memory() -> MemoryInfo {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let (total, available) = (system.total_memory(), system.available_memory());
    // Inside a container the limit is the group's, not the machine's.
    match system.cgroup_limits() {
        Some(limits) if limits.total_memory > 0 => {
            MemoryInfo { total: total.min(limits.total_memory), available: available.min(limits.free_memory) }
        }
        _ => MemoryInfo { total, available },
    }
}

pub(crate) struct Host {
    pool: Pool,
    /// Held while memory is copied or a kernel runs.
    order: Arc<Mutex<()>>,
    progress: Arc<Progress>,
    /// `cuda-sim`: bytes of all buffers.
    allocated: Arc<AtomicU64>,
    /// `cuda-sim`: where kernels come from.
    kernels: Option<Libraries>,
    /// `cuda-sim`: the capture under way.
    tape: Tape<Work>,
    /// [`Options::profile`].
    profile: Option<Arc<Profile>>,
}

impl Host {
    pub fn cpu(options: &Options) -> Result<Host, DeviceError> {
        let pool = Pool::new(options.threads)?;
        let (order, progress, allocated) = (Arc::default(), Arc::default(), Arc::default());
        let (tape, profile) = (Tape::of("cuda-sim"), options.profile.clone());
        Ok(Host { pool, order, progress, allocated, kernels: None, tape, profile })
    }

    pub fn sim(options: &Options) -> Result<Host, DeviceError> {
        Ok(Host { kernels: Some(Libraries::find(options)?), ..Host::cpu(options)? })
    }

    /// The memory of a buffer of this device that has `bytes` bytes from `at` on.
    fn own<'a>(&self, buffer: &'a Buffer, at: usize, bytes: usize) -> Result<&'a HostMemory, DeviceError> {
        buffer.of(self.name(), at, bytes, |memory| match memory {
            Memory::Cpu(memory) if self.kernels.is_none() => Some(memory),
            Memory::Sim(memory) if Arc::ptr_eq(&memory.order, &self.order) => Some(&memory.memory),
            _ => None,
        })
    }

    /// The same of `cuda-sim` alone, to be kept.
    fn own_sim<'a>(&self, buffer: &'a Buffer, at: usize, bytes: usize) -> Result<&'a Arc<SimMemory>, DeviceError> {
        buffer.of(self.name(), at, bytes, |memory| match memory {
            Memory::Sim(memory) if Arc::ptr_eq(&memory.order, &self.order) => Some(memory),
            _ => None,
        })
    }

    /// Runs work, or takes it down.
    fn submit(&self, kernels: &Libraries, work: Work) -> Result<(), DeviceError> {
        let Some(work) = self.tape.take_down(work) else { return Ok(()) };
        let _order = self.in_order();
        // SAFETY: the memory of `cuda-sim` has no views, and the lock keeps copies and other work away from it. That a
        // kernel stays within what its arguments say is the promise of `Device::launch`.
        unsafe { work.run(kernels.seed()) }
    }

    /// The same of page-locked memory.
    fn locked<'a>(&self, pinned: &'a Pinned, at: usize, bytes: usize) -> Result<&'a HostMemory, DeviceError> {
        pinned.of(self.name(), at, bytes, |memory| match memory {
            Locked::Host(_, memory) if Arc::ptr_eq(&pinned.progress, &self.progress) => Some(memory),
            _ => None,
        })
    }

    fn in_order(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data of its own.
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Safety
    /// `from` and `to` hold `bytes` bytes, do not overlap, and no reference to the bytes at `to` is alive.
    unsafe fn move_bytes(&self, from: *const u8, to: *mut u8, bytes: usize) {
        let _order = self.in_order();
        // SAFETY: the caller's promise; kernels are kept out by the lock.
        unsafe { copy_nonoverlapping(from, to, bytes) }
    }
}

impl Device for Host {
    fn name(&self) -> &'static str {
        if self.kernels.is_some() { "cuda-sim" } else { "cpu" }
    }

    fn description(&self) -> String {
        let host = format!("{} threads, vector unit {}", self.pool.threads(), Isa::best());
        match &self.kernels {
            None => host,
            Some(kernels) => format!("CUDA kernels as host code from {}; {host}", kernels.folder().display()),
        }
    }

    fn memory(&self) -> MemoryInfo {
        host_memory()
    }

    fn allocated(&self) -> Option<u64> {
        self.kernels.as_ref().map(|_| self.allocated.load(Ordering::Relaxed))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.tape.refuse("an allocation")?;
        let memory = match self.kernels {
            None => HostMemory::zeroed(bytes).map(Memory::Cpu),
            Some(_) => HostMemory::guarded(bytes).map(|memory| {
                self.allocated.fetch_add(bytes as u64, Ordering::Relaxed);
                let (order, allocated) = (Arc::clone(&self.order), Arc::clone(&self.allocated));
                Memory::Sim(Arc::new(SimMemory { memory, order, allocated }))
            }),
        };
        memory.map(Buffer).ok_or(DeviceError::OutOfMemory { device: self.name(), wanted: bytes })
    }

    fn packed_matrix(
        &self,
        quantization: Option<Quantization>,
        k: usize,
        parts: &[(Dtype, &[u8])],
    ) -> Result<Matrix, DeviceError> {
        let packed = match (&self.kernels, quantization) {
            (Some(_), _) => return Err(DeviceError::NoMatrices(self.name())),
            (None, None) => PackedMatrix::pack(&self.pool, k, parts),
            (None, Some(quantization)) => PackedMatrix::quantize(&self.pool, quantization, k, parts),
        };
        packed.map(Matrix::packed)
    }

    fn profile(&self) -> Option<&Arc<Profile>> {
        self.profile.as_ref()
    }

    fn features(&self) -> Features {
        if self.kernels.is_none() { Features::HOST } else { Features::LAUNCHING }
    }

    fn product(&self, product: Product<'_>) -> Result<(), DeviceError> {
        let Some(kernels) = &self.kernels else { return Err(DeviceError::NoMatrices(self.name())) };
        let dense = product.check(self.name())?;
        let (y_format, shape) =
            (product.y_format, Shape { rows: product.rows, n: dense.n, k: dense.k, format: dense.format });
        let part = |buffer: &Buffer| self.own_sim(buffer, 0, 0).map(|memory| Part::new(memory, 0, buffer.len_bytes()));
        let (x, weights, y) = (part(product.x)?, part(&dense.numbers)?, part(product.y)?);
        let bias = product.bias.map(part).transpose()?;
        self.submit(kernels, Work::Product { shape, y_format, x, weights, bias, y })
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn upload(&self, to: &mut Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.tape.refuse("an upload")?;
        let to = self.own(to, at, bytes.len())?;
        // SAFETY: inside of `to`, which is borrowed for writing, so `bytes` is other memory.
        unsafe { self.move_bytes(bytes.as_ptr(), to.start().add(at), bytes.len()) };
        Ok(())
    }

    fn download(&self, from: &Buffer, at: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.tape.refuse("a download")?;
        let from = self.own(from, at, bytes.len())?;
        // SAFETY: inside of `from`; `bytes` is borrowed for writing, so it is other memory.
        unsafe { self.move_bytes(from.start().add(at), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn copy(&self, from: &Buffer, at: usize, to: &mut Buffer, to_at: usize, bytes: usize) -> Result<(), DeviceError> {
        if let Some(kernels) = &self.kernels {
            let (from, to) = (self.own_sim(from, at, bytes)?, self.own_sim(to, to_at, bytes)?);
            return self
                .submit(kernels, Work::Copy { from: Part::new(from, at, bytes), to: Part::new(to, to_at, bytes) });
        }
        let (from, to) = (self.own(from, at, bytes)?, self.own(to, to_at, bytes)?);
        // SAFETY: inside of both; `to` is borrowed for writing, so they are two.
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
        self.progress.seen(self.progress.all());
        Ok(())
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned, DeviceError> {
        self.tape.refuse("an allocation")?;
        let memory =
            HostMemory::zeroed(bytes).ok_or(DeviceError::OutOfMemory { device: self.name(), wanted: bytes })?;
        Ok(Pinned::new(Locked::Host(self.name(), memory), Arc::clone(&self.progress)))
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
        // SAFETY: inside of both, which are of two kinds; `to` is borrowed for writing.
        unsafe { self.move_bytes(locked.start().add(from_at), to.start().add(at), bytes) };
        from.used_until(self.progress.copied(queue));
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
        // SAFETY: inside of both, which are of two kinds; `to` is borrowed for writing.
        unsafe { self.move_bytes(from.start().add(at), locked.start().add(to_at), bytes) };
        to.used_until(self.progress.copied(queue));
        Ok(())
    }

    fn record(&self, queue: Queue) -> Result<Event, DeviceError> {
        self.tape.refuse("an event")?;
        let clock = self.progress.of(queue);
        Ok(Event { progress: Arc::clone(&self.progress), clock, mark: Mark::Host(self.name(), Instant::now()) })
    }

    fn wait(&self, queue: Queue, event: &Event) -> Result<(), DeviceError> {
        self.tape.refuse("a wait")?;
        if !Arc::ptr_eq(&event.progress, &self.progress) {
            return Err(DeviceError::WrongDevice { expected: self.name(), found: event.mark.device() });
        }
        self.progress.waits(queue, event.clock);
        Ok(())
    }

    fn load(&self, module: &str) -> Result<(), DeviceError> {
        match &self.kernels {
            None => Err(DeviceError::NoKernels { device: self.name(), wanted: module.to_owned() }),
            Some(kernels) => {
                self.tape.refuse("opening kernels")?;
                kernels.library(module).map(|_| ())
            }
        }
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let Some(kernels) = &self.kernels else {
            return Err(DeviceError::NoKernels { device: self.name(), wanted: launch.kernel.to_owned() });
        };
        let library = match kernels.opened(launch.module) {
            Some(library) => library,
            None => {
                self.tape.refuse("opening kernels")?;
                kernels.library(launch.module)?
            }
        };
        let mut memory = Vec::new();
        for (index, buffer) in launch.buffers() {
            let own = self.own_sim(buffer, 0, 0);
            let foreign = |_| LaunchError::wrong_device(launch.kernel, index, buffer.device(), self.name());
            memory.push((index, Arc::clone(own.map_err(foreign)?)));
        }
        let call = library.prepare(launch).map_err(SimError::from)?;
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
        let _order = self.in_order();
        // SAFETY: as in `give`; the graph keeps its memory.
        list.iter().try_for_each(|work| unsafe { work.run(kernels.seed()) })
    }
}
