//! The devices of this machine: `cpu` always, `cuda-sim` where there is a C++ compiler, `cuda` where one opens.

use std::path::PathBuf;
use std::sync::{Arc, Once, OnceLock};

use attention_kernels::{Operation, Variant, variants};
use device::{Device, Options};
use xtask::kernels::host::{self, Compiler, Sanitizer};
use xtask::kernels::manifest::Manifest;
use xtask::{kernels, workspace};

pub fn manifest() -> Manifest {
    let file = workspace::root().join("attention-kernels/csrc/kernels.toml");
    Manifest::load(&file, "attention_kernels").unwrap()
}

/// `None`, and the line that says so, without a compiler.
pub fn compiler() -> Option<&'static Compiler> {
    static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
    COMPILER.get_or_init(host::compiler).as_ref().map_err(|missing| println!("NOT RUN: cuda-sim: {missing}")).ok()
}

/// The folder of the host library, built from the sources as they are.
fn library() -> Option<PathBuf> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let compiler = compiler()?;
    let build = || host::library(&workspace::root(), &manifest(), compiler, Sanitizer::None, kernels::cores()).unwrap();
    Some(BUILT.get_or_init(build).parent().unwrap().to_owned())
}

/// The kernels on the host, threads and blocks in an order of that seed.
pub fn sim(seed: u64) -> Option<Arc<dyn Device>> {
    let options = Options { threads: Some(1), kernels: Some(library()?), seed };
    Some(device::open_with("cuda-sim", &options).unwrap())
}

/// Every device that there is; one line, once, for each that is not.
pub fn all() -> Vec<Arc<dyn Device>> {
    let mut found = vec![device::open("cpu", Some(2)).unwrap()];
    found.extend(sim(1));
    found.extend(cuda());
    found
}

/// A GPU, and the kernels compiled for it.
fn cuda() -> Option<Arc<dyn Device>> {
    static MISSING: Once = Once::new();
    let kernels = kernels::folder(&workspace::root());
    let options = Options { threads: Some(1), kernels: Some(kernels), ..Options::default() };
    let opened = device::open_with("cuda", &options).and_then(|device| {
        device.load("attention_kernels")?;
        Ok(device)
    });
    opened.map_err(|missing| MISSING.call_once(|| println!("NOT RUN: cuda: {missing}"))).ok()
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
