//! Launches of the attention kernels under the sanitizers, each in a process of its own. A [`Recorder`] stands in for the
//! device, so what is replayed is what the wrappers launch.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use attention_kernels::trial::{Look, Problem, multiply_and_sum, read_and_fold};
use attention_kernels::{CacheWriteArgs, Kernel, KvCache, Operation, PARTITION, variants};
use device::{Buffer, Device, DeviceError, Event, Launch, Matrix, MemoryInfo, Pinned, Pool, Queue};
use xtask::kernels::host::{self, Sanitizer};
use xtask::{kernels, workspace};

use crate::caches::{copy_all, loaded, write_workspace};
use crate::devices::{self, buffer, compiler, manifest};
use crate::looks;
use crate::transfers::convert_all;

/// `cuda-sim` that writes each launch to a file before it runs it.
struct Recorder {
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
    fn load(&self, module: &str) -> Result<(), DeviceError> {
        self.device.load(module)
    }
}

/// `None`, and the line that says so, where the program can not be built.
fn program(sanitizer: Sanitizer) -> Option<PathBuf> {
    match host::replay(&workspace::root(), &manifest(), compiler()?, sanitizer, kernels::cores()) {
        Ok(program) => Some(program),
        // A compiler without the library of its sanitizer compiles, and fails to link.
        Err(problem) if problem.contains("did not link") => {
            println!("NOT RUN: no {} sanitizer: {}", sanitizer.name(), problem.lines().nth(1).unwrap_or(&problem));
            None
        }
        Err(problem) => panic!("{problem}"),
    }
}

/// Small batches for a look: two partitions of which a window leaves some tokens each, one row or a chunk of them, and some
/// tiles of one partition. What a barrier orders is there in them as in great ones.
fn small(look: Look, i: usize) -> Look {
    let (window, lens) = match i % 3 {
        0 => (Some(33), vec![(1, PARTITION + 9), (1, 0)]),
        1 => (Some(33), vec![(3, PARTITION + 4)]),
        _ => (None, vec![(18, 150), (1, 40)]),
    };
    Look { heads: [(2, 1), (3, 3), (18, 1)][i / 3 % 3], lens, window, ..look }
}

/// Every so many of the looks of each variant that a GPU runs, recorded.
fn recorded(step: usize, seeds: &[u64]) -> Option<Recorder> {
    let device = devices::sim(0)?;
    let file = Mutex::new(tempfile::NamedTempFile::new().unwrap());
    let recorder = Arc::new(Recorder { device, seeds: seeds.to_vec(), file, launches: Mutex::default() });
    let device: Arc<dyn Device> = recorder.clone();
    for variant in devices::variants_on(&*device, &[Operation::Decode, Operation::Prefill]) {
        for (i, look) in looks::of(variant, 2).into_iter().step_by(step).enumerate() {
            let problem = Problem::new(i as u64, &small(look, i));
            problem.on(&device).unwrap().run(variant, 0..problem.batch.num_seqs(), true).unwrap();
        }
    }
    for variant in variants(Operation::CacheWrite).into_iter().filter(|v| v.capabilities.runs_on("cuda-sim")) {
        let Kernel::CacheWrite(kernel) = variant.kernel else { panic!("{}", variant.name) };
        for look in looks::of(variant, 2).into_iter().step_by(step) {
            let problem = Problem::new(1, &Look { lens: vec![(1, 9)], ..look });
            let (shape, width) = (problem.shape, problem.shape.num_kv_heads * problem.shape.head_dim);
            let mut cache: KvCache = problem.on(&device).unwrap().cache;
            let slots = [2, -1, (shape.num_blocks * shape.block_size) as i64 - 1];
            let workspace = loaded(write_workspace(&*device, &shape, 3), &*device, &slots);
            let args = CacheWriteArgs {
                source: &buffer(&*device, &vec![0x33; 6 * width * problem.format.dtype.bytes()]),
                key_offset: 0,
                value_offset: 3 * width,
                stride: width,
                slot_mapping: &slots,
                cache: &mut cache,
                workspace: Some(&workspace),
            };
            kernel(&*device, args).unwrap();
        }
    }
    copy_all(&*device);
    convert_all(&*device);
    read_and_fold(&*device, 12 << 10, 2).unwrap();
    multiply_and_sum(&*device, [1.0, 1.0], 2).unwrap();
    drop(device);
    Arc::into_inner(recorder)
}

/// Replays every `step`-th look under a sanitizer; with `QUIRE_TEST_ALL=1`, all of them, under three seeds.
fn is_content(sanitizer: Sanitizer, step: usize) {
    let Some(program) = program(sanitizer) else { return };
    let (step, seeds) = if devices::everything() { (1, &[0, 1, 77][..]) } else { (step, &[1][..]) };
    let Some(recorder) = recorded(step, seeds) else { return };
    let mut command = Command::new(program);
    // The first race tells enough.
    command.env("TSAN_OPTIONS", "halt_on_error=1").arg(recorder.file.lock().unwrap().path());
    let output = command.output().unwrap();
    let launches = recorder.launches.into_inner().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} sanitizer, {} launches:\n{said}", sanitizer.name(), launches.len());
    println!("{} sanitizer: {} launches, {} seeds", sanitizer.name(), launches.len(), seeds.len());
}

#[test]
fn the_address_sanitizer_finds_nothing_in_the_kernels() {
    is_content(Sanitizer::Address, 5);
}

#[test]
fn the_alignment_sanitizer_finds_nothing_in_the_kernels() {
    is_content(Sanitizer::Alignment, 5);
}

#[test]
fn the_thread_sanitizer_finds_nothing_in_the_kernels() {
    is_content(Sanitizer::Thread, 8);
}
