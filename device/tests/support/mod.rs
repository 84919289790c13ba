//! Shared support for tests of kernels in every crate: the devices of this machine, and sanitizers.
//!
//! The tests of a crate include this folder with `#[path = "…/device/tests/support/mod.rs"] mod support;` and define one
//! [`Kernels`]. Everything that cannot run on this machine is reported.
//!
//! Nothing is built where `QUIRE_KERNELS_DIR` names compiled kernels, or `QUIRE_BUNDLE` a bundle for a GPU machine (`cargo xtask
//! gpu-bundle`), which has them. `QUIRE_TEST_DEVICE` names the only device to test; then it is an error if that device cannot be opened.
#![allow(dead_code)] // Each crate uses a part of it.

pub mod hooked;
pub mod opened;
mod recorder;

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use device::{Device, Launch, Options};
use testkit::capability::Capability;
use testkit::kernels::host::{self, Compiler, Instrument};
use testkit::kernels::manifest::Manifest;
use testkit::{everything, kernels, not_run, workspace};

use hooked::Hooked;
use recorder::Recorder;

/// The kernels of one crate.
pub struct Kernels {
    /// Folder of the crate.
    folder: &'static str,
    /// Path of the host library once it is built.
    library: OnceLock<PathBuf>,
    /// The GPU, opened once for all tests.
    gpu: OnceLock<Result<Arc<dyn Device>, String>>,
}

impl Kernels {
    pub const fn of(folder: &'static str) -> Kernels {
        Kernels { folder, library: OnceLock::new(), gpu: OnceLock::new() }
    }

    fn module(&self) -> String {
        self.folder.replace('-', "_")
    }

    pub fn manifest(&self) -> Manifest {
        let file = workspace::root().join(self.folder).join("csrc/kernels.toml");
        Manifest::load(&file, &self.module()).unwrap()
    }

    /// Opens the simulator with a seed for the order of threads and blocks.
    pub fn sim(&self, seed: u64) -> Option<Arc<dyn Device>> {
        if !wanted("cuda-sim") {
            return None;
        }
        let options = Options { threads: Some(1), kernels: Some(self.host_library()?), seed, ..Options::default() };
        Some(device::open_with("cuda-sim", &options).unwrap())
    }

    /// Returns the folder of the host library, built from the current sources.
    fn host_library(&self) -> Option<PathBuf> {
        if let Some(compiled) = kernels::compiled() {
            return Some(compiled);
        }
        let compiler = host::sources_for_tests()?;
        let build = || {
            host::library(&workspace::root(), &self.manifest(), compiler, Instrument::None, kernels::cores()).unwrap()
        };
        Some(self.library.get_or_init(build).parent().unwrap().to_owned())
    }

    /// Opens a GPU with the kernels compiled for it.
    pub fn cuda(&self) -> Option<Arc<dyn Device>> {
        if !wanted("cuda") {
            return None;
        }
        let open = || {
            let options = Options { threads: Some(1), kernels: Some(fat_binaries()), ..Options::default() };
            let device = device::open_with("cuda", &options).map_err(|missing| missing.to_string())?;
            device.load(&self.module()).map_err(|missing| missing.to_string())?;
            println!("cuda: {}", device.description());
            Ok(device)
        };
        match self.gpu.get_or_init(open) {
            Ok(device) => Some(device.clone()),
            Err(missing) if std::env::var_os("QUIRE_TEST_DEVICE").is_some() => panic!("{missing}"),
            Err(missing) => {
                not_run::report(Capability::Cuda, missing);
                None
            }
        }
    }

    /// Opens one device for what does not depend on it: the GPU if it is the only device to test, else the simulator with a seed.
    pub fn one(&self, seed: u64) -> Option<Arc<dyn Device>> {
        if host::device_for_tests() == "cuda" { self.cuda() } else { self.sim(seed) }
    }

    /// Opens every device of this machine that runs the kernels, the simulator with a seed.
    pub fn devices(&self, seed: u64) -> Vec<Arc<dyn Device>> {
        self.sim(seed).into_iter().chain(self.cuda()).collect()
    }

    /// Opens the same devices with results that do not depend on the number of rows.
    pub fn deterministic(&self) -> Vec<Arc<dyn Device>> {
        let open = |device: Arc<dyn Device>| {
            let kernels = if device.name() == "cuda" { Some(fat_binaries()) } else { self.host_library() };
            let options = Options { threads: Some(1), kernels, deterministic: true, ..Options::default() };
            device::open_with(device.name(), &options).unwrap()
        };
        self.devices(1).into_iter().map(open).collect()
    }

    /// Records the launches of `work` and replays them in a process under a sanitizer, each once for every seed. Returns the
    /// names of the kernels; panics with the output of the sanitizer if it reports an error.
    pub fn under(
        &self,
        sanitizer: Instrument,
        seeds: &[u64],
        work: impl FnOnce(Arc<dyn Device>),
    ) -> Option<Vec<String>> {
        let compiler = host::compiler_for_tests("kernels under a sanitizer")?;
        let program = self.program(sanitizer, compiler)?;
        let recorder = Arc::new(Hooked { device: self.sim(0)?, hooks: Recorder::new(seeds) });
        work(recorder.clone());
        let (file, launches) = Arc::into_inner(recorder).unwrap().hooks.into_parts();
        let mut command = Command::new(program);
        // One race is enough to report.
        command.env("TSAN_OPTIONS", "halt_on_error=1").arg(file.path());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{} sanitizer, {} launches:\n{said}", sanitizer.name(), launches.len());
        Some(launches)
    }

    /// Runs `work` as [`Self::under`] does. It launches `kernels` and no others: a name begins with one of them.
    pub fn are_clean(
        &self,
        sanitizer: Instrument,
        seeds: &[u64],
        kernels: &[&str],
        work: impl FnOnce(Arc<dyn Device>),
    ) {
        let Some(launches) = self.under(sanitizer, seeds, work) else { return };
        for kernel in kernels {
            assert!(launches.iter().any(|launch| launch.starts_with(kernel)), "{kernel} was not launched");
        }
        for launch in &launches {
            assert!(kernels.iter().any(|kernel| launch.starts_with(kernel)), "{launch} is not in {kernels:?}; add it");
        }
    }

    /// What a sanitizer says of a launch with a deliberate error. It runs only in the sanitizer's process.
    pub fn finds(&self, sanitizer: Instrument, launch: &Launch<'_>) -> Option<String> {
        let program = self.program(sanitizer, host::compiler_for_tests("kernels under a sanitizer")?)?;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        launch.record(&[1], &mut file).unwrap();
        let output = Command::new(program).arg(file.path()).output().unwrap();
        assert!(!output.status.success(), "the {} sanitizer found nothing in {}", sanitizer.name(), launch.kernel);
        Some(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// An ordinary run leaves out the bf16 shards, which use the same templates as those for f16, and half of the head sizes: three
    /// quarters of the compilation.
    fn program(&self, sanitizer: Instrument, compiler: &Compiler) -> Option<PathBuf> {
        let mut manifest = self.manifest();
        if !everything() {
            manifest.units.retain(|unit| !unit.macros.iter().any(|name| name.contains("_BF16")));
            manifest.units.iter_mut().for_each(|unit| unit.macros.push(host::SOME_HEAD_SIZES.to_owned()));
        }
        host::replay_for_tests(&manifest, compiler, sanitizer)
    }
}

/// Returns the folder of the kernels that are compiled for GPUs.
fn fat_binaries() -> PathBuf {
    kernels::compiled().unwrap_or_else(|| kernels::folder(&workspace::root()))
}

/// Returns whether a device should be tested; reports if `QUIRE_TEST_DEVICE` names another one.
pub fn wanted(name: &str) -> bool {
    let wanted = std::env::var("QUIRE_TEST_DEVICE").map_or(true, |wanted| wanted == name);
    if !wanted {
        not_run::report(Capability::AnyDevice, &format!("QUIRE_TEST_DEVICE names another device than {name}"));
    }
    wanted
}
