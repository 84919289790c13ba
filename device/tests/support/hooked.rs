//! A device that forwards every call to another device, with hooks for launches, graphs and asynchronous uploads.

use std::sync::Arc;

use device::gemm::{Product, Quantization};
use device::{
    Buffer, Device, DeviceError, Dtype, Event, Features, Graph, Launch, Matrix, MemoryInfo, Pinned, Pool, Profile,
    Queue,
};

/// Hooks of a test; the default implementations forward the call.
pub trait Hooks: Send + Sync {
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        device.launch(launch)
    }
    fn capture(&self, device: &dyn Device, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        device.capture(work)
    }
    fn replay(&self, device: &dyn Device, graph: &Graph) -> Result<(), DeviceError> {
        device.replay(graph)
    }
    /// Called with the size of each asynchronous upload.
    fn upload_async(&self, _bytes: usize) {}
}

pub struct Hooked<H> {
    pub device: Arc<dyn Device>,
    pub hooks: H,
}

impl<H: Hooks> Device for Hooked<H> {
    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.hooks.launch(&*self.device, launch)
    }
    fn capture(&self, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        self.hooks.capture(&*self.device, work)
    }
    fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        self.hooks.replay(&*self.device, graph)
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
    fn packed_matrix(
        &self,
        quantization: Option<Quantization>,
        k: usize,
        parts: &[(Dtype, &[u8])],
    ) -> Result<Matrix, DeviceError> {
        self.device.packed_matrix(quantization, k, parts)
    }
    fn features(&self) -> Features {
        self.device.features()
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
        self.hooks.upload_async(bytes);
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
    fn compute_capability(&self) -> Option<(u32, u32)> {
        self.device.compute_capability()
    }
    fn profile(&self) -> Option<&Arc<Profile>> {
        self.device.profile()
    }
}
