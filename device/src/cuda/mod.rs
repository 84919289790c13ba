//! The `cuda` backend: one NVIDIA GPU through its driver, which is loaded at run time.
//!
//! The same program runs with and without a driver: [`Cuda::open`] checks for it first, and reports what is missing in one
//! line. Nothing else of CUDA is needed to build or to run.
//!
//! Each [`Queue`] is a stream that does not synchronise with the default stream. Calls return when the driver has the work,
//! except [`Device::upload`], [`Device::download`] and [`Device::alloc`], which wait until it is done, and drops of memory,
//! which wait for the GPU: allocate before a step, not in it. Every wait has a time limit ([`crate::driver`]).

mod blas;
mod buckets;
mod gpu;
mod index;
mod modules;
mod tensor;

use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use cudarc::driver::result;
use cudarc::driver::sys;
use simd::{Pool, lock};

use crate::buffer::{Buffer, Memory};
use crate::driver::{
    self, Batch, Capture, Context, CudaError, DeviceMemory, PinnedMemory, Point, Refusal, refused, wait,
};
use crate::graph::{Graph, Recorded, Tape};
use crate::pinned::{Locked, Pinned};
use crate::queue::{Event, Mark, Progress};
use crate::stream::Queue;
use crate::transfer::{self, CopyRange};
use crate::{
    Device, DeviceError, Features, Launch, LaunchError, MemoryInfo, Options, Product, ProductShape, Profile, Tile,
};
use blas::Blas;
pub use gpu::Gpu;
use modules::Modules;

const NAME: &str = "cuda";
/// What a capture refuses.
const CHOICE: &str = "choosing the algorithm of a product";
/// The first compute capability whose tensor cores take e4m3 (Ada).
const E4M3_CAPABILITY: (u32, u32) = (8, 9);

pub(crate) struct Cuda {
    pool: Pool,
    modules: Modules,
    progress: Arc<Progress>,
    /// Loaded at its first use: a program without products does not need it.
    blas: Mutex<Option<Blas>>,
    /// Memory that the current capture uses.
    tape: Tape<Arc<DeviceMemory>>,
    deterministic: bool,
    profile: Option<Arc<Profile>>,
    context: Arc<Context>,
}

impl Cuda {
    pub fn open(options: &Options) -> Result<Cuda, DeviceError> {
        let context = driver::open(options.wait_limit.unwrap_or(wait::LIMIT))?;
        let modules = Modules::find(&context, options)?;
        Ok(Cuda {
            pool: Pool::new(options.threads)?,
            modules,
            progress: Arc::new(Progress::new(NAME)),
            blas: Mutex::default(),
            tape: Tape::new(NAME),
            deterministic: options.deterministic,
            profile: options.profile.clone(),
            context,
        })
    }

    /// Checks a range of a buffer of this GPU and returns its address.
    fn own(&self, buffer: &Buffer, at: usize, bytes: usize) -> Result<sys::CUdeviceptr, DeviceError> {
        buffer.checked(NAME, at, bytes, |memory| match memory {
            Memory::Cuda(memory) if Arc::ptr_eq(&memory.context, &self.context) => Some(memory.address + at as u64),
            _ => None,
        })
    }

    /// As [`Cuda::own`], for work that may be part of a graph, which then keeps the memory.
    fn work_on(&self, buffer: &Buffer, at: usize, bytes: usize) -> Result<sys::CUdeviceptr, DeviceError> {
        let address = self.own(buffer, at, bytes)?;
        if self.tape.is_running()
            && let Memory::Cuda(memory) = &buffer.0
        {
            self.tape.record(Arc::clone(memory));
        }
        Ok(address)
    }

    /// As [`Cuda::own`] for page-locked memory.
    fn locked(&self, pinned: &Pinned, at: usize, bytes: usize) -> Result<*mut c_void, DeviceError> {
        pinned.checked(NAME, at, bytes, |memory| match memory {
            Locked::Cuda(memory) if Arc::ptr_eq(&pinned.progress, &self.progress) => Some(memory.address(at)),
            _ => None,
        })
    }

    /// Enqueues an operation on `bytes` bytes of memory, unless there are none.
    fn enqueue(
        &self,
        queue: Queue,
        bytes: usize,
        what: &'static str,
        operation: impl FnOnce(sys::CUstream) -> sys::CUresult,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        operation(self.context.stream(queue)).result().map_err(refused(what))
    }

    fn with_blas<R>(&self, f: impl FnOnce(&mut Blas) -> Result<R, DeviceError>) -> Result<R, DeviceError> {
        let mut blas = lock(&self.blas);
        match &mut *blas {
            Some(blas) => f(blas),
            None => {
                self.tape.refuse("loading cuBLASLt")?;
                f(blas.insert(Blas::open(&self.context, self.deterministic)?))
            }
        }
    }
}

impl Device for Cuda {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> String {
        let Context { name, capability: (major, minor), multiprocessors, driver_version, .. } = &*self.context;
        format!(
            "{name}, compute capability {major}.{minor}, {multiprocessors} multiprocessors, driver for CUDA {}.{}",
            driver_version / 1000,
            driver_version % 1000 / 10
        )
    }

    fn memory(&self) -> MemoryInfo {
        // A driver that has failed offers no memory.
        let (available, total) =
            self.context.enter().ok().and_then(|()| result::mem_get_info().ok()).unwrap_or_default();
        MemoryInfo { total: total as u64, available: available as u64, is_own: true }
    }

    fn allocated(&self) -> Option<u64> {
        Some(self.context.allocated.load(Ordering::Relaxed))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.tape.refuse("an allocation")?;
        DeviceMemory::zeroed(&self.context, bytes).map(|memory| Buffer(Memory::Cuda(Arc::new(memory))))
    }

    fn features(&self) -> Features {
        let multiplies_e4m3 = self.context.capability >= E4M3_CAPABILITY;
        Features { multiplies_e4m3, deterministic: self.deterministic, ..Features::LAUNCHING }
    }

    fn load_products(&self) -> Result<(), DeviceError> {
        self.with_blas(|_| Ok(()))
    }

    fn product_bytes(&self) -> u64 {
        Blas::bytes(self.deterministic) as u64
    }

    fn plan_product(&self, shape: ProductShape, weights: &Buffer, max_rows: usize) -> Result<(), DeviceError> {
        self.tape.refuse(CHOICE)?;
        let weights = self.own(weights, 0, shape.n * shape.k * shape.format.bytes())?;
        self.with_blas(|blas| blas.plan(shape, weights, max_rows))
    }

    fn product(&self, product: Product<'_>) -> Result<(), DeviceError> {
        let ((shape, [x_from, first]), rows) = (product.check()?, product.rows);
        if rows == 0 {
            return Ok(());
        }
        let operands = blas::Operands {
            weights: self.work_on(product.weights.elements, 0, 0)?,
            x: self.work_on(product.x, x_from, 0)?,
            bias: product.bias.map(|bias| self.work_on(bias, first, 0)).transpose()?,
            y: self.work_on(product.y, first, 0)?,
        };
        self.with_blas(|blas| {
            if !blas.has_plan(&shape, rows) {
                self.tape.refuse(CHOICE)?;
            }
            blas.product(shape, rows, operands)
        })
    }

    fn fill(&self, buffer: &mut Buffer, at: usize, bytes: usize, byte: u8) -> Result<(), DeviceError> {
        let to = self.work_on(buffer, at, bytes)?;
        // SAFETY: inside of the buffer, whose drop waits for the stream.
        let fill = |stream| unsafe { sys::cuMemsetD8Async(to, byte, bytes, stream) };
        Ok(self.enqueue(Queue::Compute, bytes, "filling memory", fill)?)
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn upload(&self, to: &mut Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.tape.refuse("an upload")?;
        let to = self.own(to, at, bytes.len())?;
        // SAFETY: inside of the buffer, and `bytes` is borrowed until the copy is done.
        let copy = |stream| unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), stream) };
        self.enqueue(Queue::Compute, bytes.len(), "copying to the GPU", copy)?;
        Ok(self.context.finish(Queue::Compute)?)
    }

    fn download(&self, from: &Buffer, at: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.tape.refuse("a download")?;
        let len = bytes.len();
        let from = self.own(from, at, len)?;
        // SAFETY: inside of the buffer, and `bytes` is borrowed until the copy is done.
        let copy = |stream| unsafe { sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, len, stream) };
        self.enqueue(Queue::Compute, len, "copying from the GPU", copy)?;
        Ok(self.context.finish(Queue::Compute)?)
    }

    fn copy(&self, from: &Buffer, at: usize, to: &mut Buffer, to_at: usize, bytes: usize) -> Result<(), DeviceError> {
        let (from, to) = (self.work_on(from, at, bytes)?, self.work_on(to, to_at, bytes)?);
        // SAFETY: inside of both, whose drops wait for the stream.
        let copy = |stream| unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream) };
        Ok(self.enqueue(Queue::Compute, bytes, "copying on the GPU", copy)?)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.tape.refuse("a wait")?;
        let clock = self.progress.promise_all();
        self.context.finish_all()?;
        self.progress.note_wait(clock);
        Ok(())
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned, DeviceError> {
        self.tape.refuse("an allocation")?;
        let memory = Locked::Cuda(PinnedMemory::zeroed(&self.context, bytes)?);
        Ok(Pinned::new(memory, Arc::clone(&self.progress)))
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
        // SAFETY: inside of both, whose drops wait for the stream; `note_copy` denies access to the source until then.
        let copy = |stream| unsafe { sys::cuMemcpyHtoDAsync_v2(to, locked, bytes, stream) };
        self.enqueue(queue, bytes, "copying to the GPU", copy)?;
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
        // SAFETY: inside of both, whose drops wait for the stream; `note_copy` denies access to the target until then.
        let copy = |stream| unsafe { sys::cuMemcpyDtoHAsync_v2(locked, from, bytes, stream) };
        self.enqueue(queue, bytes, "copying from the GPU", copy)?;
        to.note_copy(self.progress.count_copy(queue));
        Ok(())
    }

    fn download_ranges(&self, queue: Queue, copies: &mut [transfer::Download<'_>]) -> Result<(), DeviceError> {
        self.tape.refuse("a download")?;
        let mut batch = Batch::default();
        for transfer::Download { from, to, ranges } in copies.iter() {
            for CopyRange { from: at, to: to_at, bytes } in ranges.iter().copied() {
                batch.add(self.own(from, at, bytes)?, self.locked(to, to_at, bytes)?.addr() as u64, bytes);
            }
        }
        // SAFETY: each copy is inside of both, whose drops wait for the stream; `note_copy` denies access to the targets until
        // then.
        self.enqueue(queue, batch.bytes(), "copying from the GPU", |stream| unsafe { batch.enqueue(stream) })?;
        let clock = self.progress.count_copy(queue);
        copies.iter().for_each(|copy| copy.to.note_copy(clock));
        Ok(())
    }

    fn upload_ranges(&self, queue: Queue, copies: &mut [transfer::Upload<'_>]) -> Result<(), DeviceError> {
        self.tape.refuse("an upload")?;
        let mut batch = Batch::default();
        for transfer::Upload { from, to, ranges } in copies.iter() {
            for CopyRange { from: at, to: to_at, bytes } in ranges.iter().copied() {
                batch.add(self.locked(from, at, bytes)?.addr() as u64, self.own(to, to_at, bytes)?, bytes);
            }
        }
        // SAFETY: as in `download_ranges`, with the sources.
        self.enqueue(queue, batch.bytes(), "copying to the GPU", |stream| unsafe { batch.enqueue(stream) })?;
        let clock = self.progress.count_copy(queue);
        copies.iter().for_each(|copy| copy.from.note_copy(clock));
        Ok(())
    }

    fn record(&self, queue: Queue) -> Result<Event, DeviceError> {
        self.tape.refuse("an event")?;
        let clock = self.progress.promise(queue);
        let mark = Mark::Cuda(Point::record(&self.context, queue)?);
        Ok(Event { progress: Arc::clone(&self.progress), clock, mark })
    }

    fn wait(&self, queue: Queue, event: &Event) -> Result<(), DeviceError> {
        self.tape.refuse("a wait")?;
        match &event.mark {
            Mark::Cuda(point) if Arc::ptr_eq(&event.progress, &self.progress) => point.make_wait(queue)?,
            _ => return Err(DeviceError::WrongDevice { expected: NAME, found: event.progress.device }),
        }
        self.progress.note_queue_wait(queue, event.clock);
        Ok(())
    }

    fn load(&self, module: &str) -> Result<(), DeviceError> {
        self.tape.refuse("loading kernels")?;
        self.modules.load(module)
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let function = self.modules.function(launch.module, launch.kernel, launch.shared_bytes, &self.tape)?;
        let arguments = launch.pack(&function.parameter_bytes, tensor::map)?;
        for (index, buffer) in launch.buffers() {
            if self.work_on(buffer, 0, 0).is_err() {
                return Err(LaunchError::wrong_device(launch.kernel, index, buffer.device(), NAME).into());
            }
        }
        let Launch { grid, block, shared_bytes, .. } = *launch;
        let shared_bytes = shared_bytes.max(function.shared_bytes);
        let stream = self.context.stream(Queue::Compute);
        // SAFETY: the arguments have the sizes of the parameters, point into buffers of this GPU, whose drops wait for the
        // stream, and are copied by the call. The caller of `Device::launch` promises that the kernel stays within them.
        unsafe { function.launch(grid, block, shared_bytes, stream, &mut arguments.pointers()) }.map_err(|error| {
            let kernel = launch.kernel.to_owned();
            CudaError::Launch { kernel, grid, block, shared_bytes, refusal: Refusal(error) }.into()
        })
    }

    fn resident_blocks(&self, launch: &Launch<'_>) -> Result<u32, DeviceError> {
        let function = self.modules.function(launch.module, launch.kernel, launch.shared_bytes, &self.tape)?;
        let threads = launch.block.iter().product::<u32>().min(i32::MAX as u32) as i32;
        let shared_bytes = launch.shared_bytes.max(function.shared_bytes) as usize;
        // SAFETY: the handle is that of a loaded function.
        let fit =
            unsafe { result::occupancy::max_active_block_per_multiprocessor(function.handle, threads, shared_bytes) };
        let fit = fit.map_err(refused("asking how many blocks of a kernel fit"))?;
        Ok((self.context.multiprocessors * fit.unsigned_abs()).max(1))
    }

    fn tile(&self, module: &str, kernel: &str) -> Result<Tile, DeviceError> {
        self.modules.function(module, kernel, 0, &self.tape).map(|function| function.tile)
    }

    fn capture(&self, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        let running = self.tape.start()?;
        let capture = Capture::begin(&self.context)?;
        work();
        let memory = running.stop();
        let graph = capture.end()?;
        let memory = memory.into_iter().map(|memory| (memory.address, memory)).collect();
        Ok(Graph(Recorded::Cuda(graph, memory)))
    }

    fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        self.tape.refuse("a replay")?;
        match &graph.0 {
            Recorded::Cuda(graph, _) if Arc::ptr_eq(&graph.context, &self.context) => Ok(graph.launch()?),
            _ => Err(DeviceError::WrongDevice { expected: NAME, found: graph.device() }),
        }
    }

    fn profile(&self) -> Option<&Arc<Profile>> {
        self.profile.as_ref()
    }

    fn compute_capability(&self) -> Option<(u32, u32)> {
        Some(self.context.capability)
    }
}
