//! A device that passes every call on to another, except for the calls that a test observes or makes fail.

use std::sync::Arc;

use device::transfer::{Download, Upload};
use device::{
    Buffer, Device, DeviceError, Event, Features, Graph, Launch, MemoryInfo, Pinned, Product, ProductShape, Profile,
    Queue, Tile,
};
use simd::Pool;

/// Calls that a test may replace. Each passes the call on unless it is implemented.
pub trait Hooks: Send + Sync {
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        device.launch(launch)
    }
    fn product(&self, device: &dyn Device, product: Product<'_>) -> Result<(), DeviceError> {
        device.product(product)
    }
    /// Before a product is planned, with the arguments of [`Device::plan_product`].
    fn before_plan(&self, _shape: &ProductShape, _max_rows: usize) {}
    fn capture(&self, device: &dyn Device, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        device.capture(work)
    }
    fn replay(&self, device: &dyn Device, graph: &Graph) -> Result<(), DeviceError> {
        device.replay(graph)
    }
    /// Before copies that one call enqueues; the number of ranges. After [`Hooks::before_transfer`] for each of them.
    fn before_batch(&self, _ranges: usize) {}
    /// Before an asynchronous copy.
    fn before_transfer(&self, _: &dyn Device, _: &Transfer) -> Result<(), DeviceError> {
        Ok(())
    }
    fn record(&self, device: &dyn Device, queue: Queue) -> Result<Event, DeviceError> {
        device.record(queue)
    }
    fn wait(&self, device: &dyn Device, queue: Queue, event: &Event) -> Result<(), DeviceError> {
        device.wait(queue, event)
    }
}

/// An asynchronous copy between device and host memory.
pub struct Transfer {
    pub queue: Queue,
    /// To the device.
    pub upload: bool,
    /// First byte in the device's buffer.
    pub at: usize,
    pub bytes: usize,
}

pub struct Hooked<H> {
    pub device: Arc<dyn Device>,
    pub hooks: H,
}

impl<H: Hooks> Device for Hooked<H> {
    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.hooks.launch(&*self.device, launch)
    }
    fn product(&self, product: Product<'_>) -> Result<(), DeviceError> {
        self.hooks.product(&*self.device, product)
    }
    fn capture(&self, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        self.hooks.capture(&*self.device, work)
    }
    fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        self.hooks.replay(&*self.device, graph)
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
        self.hooks.before_transfer(&*self.device, &Transfer { queue, upload: true, at, bytes })?;
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
        self.hooks.before_transfer(&*self.device, &Transfer { queue, upload: false, at, bytes })?;
        self.device.download_async(queue, from, at, to, to_at, bytes)
    }
    fn download_ranges(&self, queue: Queue, copies: &mut [Download<'_>]) -> Result<(), DeviceError> {
        for range in copies.iter().flat_map(|copy| copy.ranges) {
            let transfer = Transfer { queue, upload: false, at: range.from, bytes: range.bytes };
            self.hooks.before_transfer(&*self.device, &transfer)?;
        }
        self.hooks.before_batch(copies.iter().map(|copy| copy.ranges.len()).sum());
        self.device.download_ranges(queue, copies)
    }
    fn upload_ranges(&self, queue: Queue, copies: &mut [Upload<'_>]) -> Result<(), DeviceError> {
        for range in copies.iter().flat_map(|copy| copy.ranges) {
            let transfer = Transfer { queue, upload: true, at: range.to, bytes: range.bytes };
            self.hooks.before_transfer(&*self.device, &transfer)?;
        }
        self.hooks.before_batch(copies.iter().map(|copy| copy.ranges.len()).sum());
        self.device.upload_ranges(queue, copies)
    }
    fn record(&self, queue: Queue) -> Result<Event, DeviceError> {
        self.hooks.record(&*self.device, queue)
    }
    fn wait(&self, queue: Queue, event: &Event) -> Result<(), DeviceError> {
        self.hooks.wait(&*self.device, queue, event)
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
    fn features(&self) -> Features {
        self.device.features()
    }
    fn load_products(&self) -> Result<(), DeviceError> {
        self.device.load_products()
    }
    fn product_bytes(&self) -> u64 {
        self.device.product_bytes()
    }
    fn plan_product(&self, shape: ProductShape, weights: &Buffer, max_rows: usize) -> Result<(), DeviceError> {
        self.hooks.before_plan(&shape, max_rows);
        self.device.plan_product(shape, weights, max_rows)
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
    fn load(&self, module: &str) -> Result<(), DeviceError> {
        self.device.load(module)
    }
    fn tile(&self, module: &str, kernel: &str) -> Result<Tile, DeviceError> {
        self.device.tile(module, kernel)
    }
    fn compute_capability(&self) -> Option<(u32, u32)> {
        self.device.compute_capability()
    }
    fn profile(&self) -> Option<&Arc<Profile>> {
        self.device.profile()
    }
}
