//! The devices of this machine: `cpu` always, `cuda-sim` where there is a C++ compiler, `cuda` where one opens.
//!
//! In a bundle for a GPU machine (`cargo xtask gpu-bundle`) there are no sources and nothing is built: `QUIRE_BUNDLE` names its
//! folder, which has the compiled kernels and the reference cases. `QUIRE_TEST_DEVICE` names the one device to test; it
//! must open then.

use std::path::PathBuf;
use std::sync::{Arc, Once, OnceLock};

use attention_kernels::{Operation, Variant, trial, variants};
use device::{Buffer, Device, Options};
use xtask::kernels::host::{self, Compiler, Sanitizer};
use xtask::kernels::manifest::Manifest;
use xtask::{kernels, workspace};

/// The folder of the bundle that these tests run in, if they do.
pub fn bundle() -> Option<PathBuf> {
    std::env::var_os("QUIRE_BUNDLE").map(PathBuf::from)
}

/// Whether a device is to be tested.
fn wanted(name: &str) -> bool {
    std::env::var("QUIRE_TEST_DEVICE").map_or(true, |wanted| wanted == name)
}

pub fn manifest() -> Manifest {
    let file = workspace::root().join("attention-kernels/csrc/kernels.toml");
    Manifest::load(&file, "attention_kernels").unwrap()
}

/// `None`, and the line that says so, without a compiler.
pub fn compiler() -> Option<&'static Compiler> {
    static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
    if bundle().is_some() {
        return None;
    }
    COMPILER.get_or_init(host::compiler).as_ref().map_err(|missing| println!("NOT RUN: cuda-sim: {missing}")).ok()
}

/// The folder of the host library, built from the sources as they are.
fn library() -> Option<PathBuf> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if let Some(bundle) = bundle() {
        return Some(bundle.join("kernels"));
    }
    let compiler = compiler()?;
    let build = || host::library(&workspace::root(), &manifest(), compiler, Sanitizer::None, kernels::cores()).unwrap();
    Some(BUILT.get_or_init(build).parent().unwrap().to_owned())
}

/// The kernels on the host, threads and blocks in an order of that seed.
pub fn sim(seed: u64) -> Option<Arc<dyn Device>> {
    if !wanted("cuda-sim") {
        return None;
    }
    let options = Options { threads: Some(1), kernels: Some(library()?), seed };
    Some(device::open_with("cuda-sim", &options).unwrap())
}

/// Every device that there is; one line, once, for each that is not.
pub fn all() -> Vec<Arc<dyn Device>> {
    let mut found = Vec::new();
    if wanted("cpu") {
        found.push(device::open("cpu", Some(2)).unwrap());
    }
    found.extend(gpus(1));
    assert!(!found.is_empty(), "QUIRE_TEST_DEVICE: expected cpu, cuda-sim or cuda");
    found
}

/// Those that run CUDA kernels.
pub fn gpus(seed: u64) -> Vec<Arc<dyn Device>> {
    sim(seed).into_iter().chain(cuda()).collect()
}

/// The GPU, and the kernels compiled for it: opened once, and lent to all tests.
fn cuda() -> Option<Arc<dyn Device>> {
    static OPENED: OnceLock<Result<Arc<dyn Device>, String>> = OnceLock::new();
    if !wanted("cuda") {
        return None;
    }
    let open = || {
        let kernels = bundle().map_or_else(|| kernels::folder(&workspace::root()), |bundle| bundle.join("kernels"));
        let options = Options { threads: Some(1), kernels: Some(kernels), ..Options::default() };
        let device = device::open_with("cuda", &options).map_err(|missing| missing.to_string())?;
        device.load("attention_kernels").map_err(|missing| missing.to_string())?;
        println!("cuda: {}", device.description());
        Ok(device)
    };
    match OPENED.get_or_init(open) {
        Ok(device) => Some(device.clone()),
        Err(missing) if std::env::var_os("QUIRE_TEST_DEVICE").is_some() => panic!("{missing}"),
        Err(missing) => {
            static MISSING: Once = Once::new();
            MISSING.call_once(|| println!("NOT RUN: cuda: {missing}"));
            None
        }
    }
}

/// A buffer with that contents.
pub fn buffer(device: &dyn Device, bytes: &[u8]) -> Buffer {
    trial::buffer(device, bytes).unwrap()
}

/// The contents of a buffer.
pub fn bytes(device: &dyn Device, buffer: &Buffer) -> Vec<u8> {
    trial::bytes(device, buffer).unwrap()
}

/// The variants of some operations that a device runs.
pub fn variants_on(device: &dyn Device, operations: &[Operation]) -> Vec<&'static Variant> {
    let all = operations.iter().flat_map(|&operation| variants(operation));
    all.filter(|variant| variant.capabilities.runs_on(device.name())).collect()
}

/// Everything, not the subset of an ordinary run.
pub fn everything() -> bool {
    std::env::var_os("QUIRE_TEST_ALL").is_some_and(|value| value == "1")
}
