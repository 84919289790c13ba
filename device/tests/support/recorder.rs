//! A device that keeps what it is asked to launch, so that what is replayed is what a program launches.

use std::sync::{Arc, Mutex};

use device::gemm::Product;
use device::{Buffer, Device, DeviceError, Event, Graph, Launch, Matrix, MemoryInfo, Pinned, Pool, Queue};

/// `cuda-sim` that writes each launch to a file before it runs it.
pub struct Recorder {
    device: Arc<dyn Device>,
    seeds: Vec<u64>,
    file: Mutex<tempfile::NamedTempFile>,
    launches: Mutex<Vec<String>>,
}

impl Recorder {
    pub fn new(device: Arc<dyn Device>, seeds: &[u64]) -> Recorder {
        let file = Mutex::new(tempfile::NamedTempFile::new().unwrap());
        Recorder { device, seeds: seeds.to_vec(), file, launches: Mutex::default() }
    }

    /// The file, and the names of the kernels in it.
    pub fn into_parts(self) -> (tempfile::NamedTempFile, Vec<String>) {
        (self.file.into_inner().unwrap(), self.launches.into_inner().unwrap())
    }
}

impl Device for Recorder {
    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        launch.record(&self.seeds, &mut *self.file.lock().unwrap()).unwrap();
        self.launches.lock().unwrap().push(launch.kernel.to_owned());
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
    fn capture(&self, work: &mut dyn FnMut()) -> Result<Graph, DeviceError> {
        self.device.capture(work)
    }
    fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        self.device.replay(graph)
    }
}
