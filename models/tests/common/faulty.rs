//! A device whose captures and replays fail as often as a test wants.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use device::gemm::Product;
use device::{Buffer, Device, DeviceError, Event, Graph, Launch, Matrix, MemoryInfo, Pinned, Pool, Queue};

pub struct Faulty {
    pub device: Arc<dyn Device>,
    /// So many of the next captures and replays fail.
    pub faults: Arc<AtomicUsize>,
}

impl Faulty {
    fn meet(&self) -> Result<(), DeviceError> {
        let left = self.faults.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if left.is_ok() { Err(DeviceError::NoGraphs("a fault that a test asked for")) } else { Ok(()) }
    }
}

impl Device for Faulty {
    fn capture(&self, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        let graph = self.device.capture(work)?;
        self.meet()?;
        Ok(graph)
    }
    fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        self.meet()?;
        self.device.replay(graph)
    }
    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.device.launch(launch)
    }

    fn name(&self) -> &'static str {
        self.device.name()
    }
    fn description(&self) -> String {
        self.device.description()
    }
    fn memory(&self) -> MemoryInfo {
        self.device.memory()
    }
    fn allocated(&self) -> Option<u64> {
        self.device.allocated()
    }
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.device.alloc(bytes)
    }
    fn matrix(&self, k: usize, parts: &[(device::gemm::WeightFormat, &[u8])]) -> Result<Matrix, DeviceError> {
        self.device.matrix(k, parts)
    }
    fn load_products(&self) -> Result<(), DeviceError> {
        self.device.load_products()
    }
    fn product_bytes(&self) -> u64 {
        self.device.product_bytes()
    }
    fn product(&self, product: Product<'_>) -> Result<(), DeviceError> {
        self.device.product(product)
    }
    fn pool(&self) -> &Pool {
        self.device.pool()
    }
    fn upload(&self, to: &mut Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.device.upload(to, at, bytes)
    }
    fn download(&self, from: &Buffer, at: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.device.download(from, at, bytes)
    }
    fn copy(&self, from: &Buffer, at: usize, to: &mut Buffer, to_at: usize, bytes: usize) -> Result<(), DeviceError> {
        self.device.copy(from, at, to, to_at, bytes)
    }
    fn fill(&self, buffer: &mut Buffer, at: usize, bytes: usize, byte: u8) -> Result<(), DeviceError> {
        self.device.fill(buffer, at, bytes, byte)
    }
    fn synchronize(&self) -> Result<(), DeviceError> {
        self.device.synchronize()
    }
    fn pinned(&self, bytes: usize) -> Result<Pinned, DeviceError> {
        self.device.pinned(bytes)
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
        self.device.upload_async(queue, from, from_at, to, at, bytes)
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
        self.device.download_async(queue, from, at, to, to_at, bytes)
    }
    fn record(&self, queue: Queue) -> Result<Event, DeviceError> {
        self.device.record(queue)
    }
    fn wait(&self, queue: Queue, event: &Event) -> Result<(), DeviceError> {
        self.device.wait(queue, event)
    }
    fn load(&self, module: &str) -> Result<(), DeviceError> {
        self.device.load(module)
    }
}
