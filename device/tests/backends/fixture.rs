//! The devices of this machine with the kernels of `simt/tests/`, and this program over a driver in host code: `driver.cpp`, `blas.cpp`
//! and `nccl.cpp`. The tests of other crates use this file too.
#![allow(dead_code)] // Each crate uses a part of it.

#[path = "fake.rs"]
pub mod fake;

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, OnceLock};

use device::sim::Library;
use device::{Device, DeviceError};
use testkit::capability::Capability;
use testkit::kernels::manifest::Manifest;
use testkit::kernels::{self, cuda, host, toolkit};
use testkit::{not_run, workspace};

use crate::support::wanted;
use fake::{compile, copy};

/// Environment variable that tells the started program that its driver is a fake.
const MARK: &str = "BACKENDS_OVER_FAKE_DRIVER";
/// Name of the files of test kernels.
pub const MODULE: &str = kernels::OF_DEVICES;

fn manifest(for_gpu: bool) -> Manifest {
    kernels::of_devices(&workspace::root(), for_gpu).unwrap()
}

/// Builds the host library; the error says why there is no compiler.
pub fn host_library() -> Result<std::path::PathBuf, String> {
    let compiler = host::compiler()?;
    // A compilation error fails the test.
    Ok(host::library(&workspace::root(), &manifest(false), &compiler, host::Instrument::None, kernels::cores())
        .unwrap())
}

/// Builds the fat binary; the error says why there is no compiler.
fn fat_binary() -> Result<(), String> {
    let (root, manifest) = (workspace::root(), manifest(true));
    let toolkit = toolkit::find(&root, false)?;
    let built = cuda::build(&root, &manifest, &toolkit, cuda::CHECK, kernels::cores()).unwrap();
    cuda::write(&root, &kernels::folder(&root), &manifest, &built).unwrap();
    Ok(())
}

/// Opens all devices of this machine, or the only one to test.
pub fn devices() -> Vec<Arc<dyn Device>> {
    let mut devices = Vec::new();
    if wanted("cpu") {
        devices.push(device::open("cpu", Some(1)).unwrap());
    }
    if wanted("cuda-sim") {
        match host_library() {
            Ok(_) => devices.push(device::open("cuda-sim", Some(1)).unwrap()),
            Err(reason) => not_run::report(Capability::Cxx, &reason),
        }
    }
    if wanted("cuda") {
        match gpu() {
            Ok(device) => devices.push(device),
            Err((Capability::Cuda, reason)) if std::env::var_os("QUIRE_TEST_DEVICE").is_some() => panic!("{reason}"),
            Err((capability, reason)) => not_run::report(capability, &reason),
        }
    }
    assert!(devices.len() == 3 || !is_fake());
    devices
}

/// Opens the GPU, with kernels that are compiled now if none are found and there is a driver.
fn gpu() -> Result<Arc<dyn Device>, (Capability, String)> {
    let open = || device::open("cuda", Some(1)).map_err(|reason| (Capability::Cuda, reason.to_string()));
    let compiled = || fat_binary().map_err(|reason| (Capability::Nvcc, reason)).and_then(|()| open());
    match device::open("cuda", Some(1)) {
        Err(DeviceError::NoKernelFiles { .. }) => compiled(),
        Ok(device) if device.load(MODULE).is_err() => compiled(),
        outcome => outcome.map_err(|reason| (Capability::Cuda, reason.to_string())),
    }
}

/// Opens the devices that run kernels.
pub fn launching() -> impl Iterator<Item = Arc<dyn Device>> {
    devices().into_iter().filter(|device| device.name() != "cpu")
}

pub fn is_fake() -> bool {
    std::env::var_os(MARK).is_some()
}

/// A folder with the fake driver and the kernels.
pub struct Fake {
    pub folder: PathBuf,
}

impl Fake {
    /// Builds the fake; without a C++ compiler, or where another device is tested, reports that and returns `None`.
    pub fn get() -> Option<&'static Fake> {
        static FAKE: OnceLock<Fake> = OnceLock::new();
        host::compiler_for_tests("a driver in host code")?;
        Some(FAKE.get_or_init(Fake::build))
    }

    fn build() -> Fake {
        let library = host_library().unwrap();
        let folder = kernels::target(&workspace::root()).join("tmp/driver");
        std::fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name);
        copy(&library, &path(library.file_name().unwrap().to_str().unwrap()));
        compile("driver.cpp", &library, &path("libcuda.so.1"));
        compile("nccl.cpp", &path("libcuda.so.1"), &path("libnccl.so.2"));
        compile("blas.cpp", &path("libcuda.so.1"), &path("libcublasLt.so.13"));
        // Two fat binaries in one file, as two source files give.
        let part = entry(90);
        std::fs::write(path(&format!("{MODULE}.fatbin")), [part.clone(), part.clone()].concat()).unwrap();
        let place = |index: usize| format!("{}\t{}", index % 2 * part.len(), part.len());
        let kernels = Library::open(&library).unwrap();
        let lines = kernels.kernels().iter().enumerate().map(|(i, kernel)| format!("{}\t{}\n", kernel.name, place(i)));
        let lines = lines.chain([format!("in_the_index_alone\t{}\n", place(0)), "no_code\t8\t88\n".into()]);
        std::fs::write(path(&format!("{MODULE}.kernels.tsv")), lines.collect::<String>()).unwrap();
        Fake { folder }
    }

    /// Runs this program with the fake.
    pub fn run(&self, test: &str, more: &[&str], variables: &[(&str, &str)]) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--test-threads=1", "--nocapture", "--include-ignored"]).args(more);
        command.env("LD_LIBRARY_PATH", &self.folder).env("QUIRE_KERNELS_DIR", &self.folder).env(MARK, "1");
        // It has every device.
        command.env_remove("QUIRE_TEST_DEVICE");
        command.envs(variables.iter().copied()).output().unwrap()
    }
}

/// Returns a fat binary with one empty entry.
pub fn entry(architecture: u32) -> Vec<u8> {
    let mut bytes = [0; 16 + 72];
    for (at, word) in [(0, 0xba55_ed50), (4, 16 << 16 | 1), (8, 72), (16, 2), (20, 64), (24, 8), (44, architecture)] {
        bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(word));
    }
    bytes.to_vec()
}
