//! Launches under the sanitizers, each in a process of its own. A [`Recorder`] stands in for the device, so what is
//! replayed is what the wrappers launch. The tests of `models` have this file too.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use device::gemm::Product;
use device::{Buffer, Device, DeviceError, Event, Launch, Matrix, MemoryInfo, Pinned, Pool, Queue};
use xtask::kernels::host::{self, Sanitizer};
use xtask::kernels::manifest::Manifest;
use xtask::{kernels, workspace};

/// `cuda-sim` that writes each launch to a file before it runs it.
pub struct Recorder {
    device: Arc<dyn Device>,
    seeds: Vec<u64>,
    file: Mutex<tempfile::NamedTempFile>,
    launches: Mutex<Vec<String>>,
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
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.device.alloc(bytes)
    }
    fn matrix(&self, k: usize, parts: &[(device::gemm::WeightFormat, &[u8])]) -> Result<Matrix, DeviceError> {
        self.device.matrix(k, parts)
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
    fn product(&self, product: Product<'_>) -> Result<(), DeviceError> {
        self.device.product(product)
    }
    fn load(&self, module: &str) -> Result<(), DeviceError> {
        self.device.load(module)
    }
}

impl Recorder {
    /// On a device that runs kernels on the host; each launch is to be replayed under each of the seeds.
    pub fn new(device: Arc<dyn Device>, seeds: &[u64]) -> Arc<Recorder> {
        let file = Mutex::new(tempfile::NamedTempFile::new().unwrap());
        Arc::new(Recorder { device, seeds: seeds.to_vec(), file, launches: Mutex::default() })
    }

    /// Replays what was recorded.
    pub fn is_content(self: Arc<Recorder>, sanitizer: Sanitizer, program: PathBuf) {
        let mut command = Command::new(program);
        // The first race tells enough.
        command.env("TSAN_OPTIONS", "halt_on_error=1").arg(self.file.lock().unwrap().path());
        let output = command.output().unwrap();
        let launches = self.launches.lock().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{} sanitizer, {} launches:\n{said}", sanitizer.name(), launches.len());
        println!("{} sanitizer: {} launches, {} seeds", sanitizer.name(), launches.len(), self.seeds.len());
    }
}

/// The program that replays launches of a crate's kernels. `None`, and the line that says so, where it can not be built.
pub fn program(manifest: &Manifest, sanitizer: Sanitizer) -> Option<PathBuf> {
    let compiler = host::compiler().map_err(|missing| xtask::not_run::report(&format!("cuda-sim: {missing}"))).ok()?;
    match host::replay(&workspace::root(), manifest, &compiler, sanitizer, kernels::cores()) {
        Ok(program) => Some(program),
        // A compiler without the library of its sanitizer compiles, and fails to link.
        Err(problem) if problem.contains("did not link") => {
            let why = problem.lines().nth(1).unwrap_or(&problem).to_owned();
            xtask::not_run::report(&format!("no {} sanitizer: {why}", sanitizer.name()));
            None
        }
        Err(problem) => panic!("{problem}"),
    }
}
