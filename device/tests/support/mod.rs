//! What the tests of kernels share, in whichever crate the kernels are: the devices of this machine, and sanitizers.
//!
//! A crate's tests take this folder in by its path, `#[path = "…/device/tests/support/mod.rs"] mod support;`, and make one
//! [`Kernels`]. What cannot run here is reported, never skipped in silence.
//!
//! In a bundle for a GPU machine (`cargo xtask gpu-bundle`) there are no sources and nothing is built: `QUIRE_BUNDLE` names its
//! folder, which has the compiled kernels and the reference cases. `QUIRE_TEST_DEVICE` names the one device to test; it
//! must open then.
#![allow(dead_code)] // Each crate uses its part.

pub mod hooked;
mod recorder;

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use device::{Device, Options};
use testkit::capability::Capability;
use testkit::kernels::host::{self, Compiler, Sanitizer};
use testkit::kernels::manifest::Manifest;
use testkit::{everything, kernels, not_run, workspace};

use hooked::Hooked;
use recorder::Recorder;

/// The kernels of one crate.
pub struct Kernels {
    /// The crate's folder.
    folder: &'static str,
    /// Of the host library, once it is built.
    library: OnceLock<PathBuf>,
    /// Opened once, and lent to all tests.
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

    /// The kernels on the host, threads and blocks in an order of that seed.
    pub fn sim(&self, seed: u64) -> Option<Arc<dyn Device>> {
        if !wanted("cuda-sim") {
            return None;
        }
        let options = Options { threads: Some(1), kernels: Some(self.host_library()?), seed, ..Options::default() };
        Some(device::open_with("cuda-sim", &options).unwrap())
    }

    /// The folder of the host library, built from the sources as they are.
    fn host_library(&self) -> Option<PathBuf> {
        if let Some(bundle) = bundle() {
            return Some(bundle.join("kernels"));
        }
        let compiler = compiler()?;
        let build = || {
            host::library(&workspace::root(), &self.manifest(), compiler, Sanitizer::None, kernels::cores()).unwrap()
        };
        Some(self.library.get_or_init(build).parent().unwrap().to_owned())
    }

    /// A GPU, and the kernels compiled for it.
    pub fn cuda(&self) -> Option<Arc<dyn Device>> {
        if !wanted("cuda") {
            return None;
        }
        let open = || {
            let kernels = bundle().map_or_else(|| kernels::folder(&workspace::root()), |bundle| bundle.join("kernels"));
            let options = Options { threads: Some(1), kernels: Some(kernels), ..Options::default() };
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

    /// Every device that runs the kernels here, the simulator with that seed.
    pub fn devices(&self, seed: u64) -> Vec<Arc<dyn Device>> {
        self.sim(seed).into_iter().chain(self.cuda()).collect()
    }

    /// Replays what `work` launches in a process under a sanitizer, each launch once for every seed, and gives the names of
    /// the kernels; fails with what the sanitizer said.
    pub fn under(
        &self,
        sanitizer: Sanitizer,
        seeds: &[u64],
        work: impl FnOnce(Arc<dyn Device>),
    ) -> Option<Vec<String>> {
        let program = self.program(sanitizer)?;
        let recorder = Arc::new(Hooked { device: self.sim(0)?, hooks: Recorder::new(seeds) });
        work(recorder.clone());
        let (file, launches) = Arc::into_inner(recorder).unwrap().hooks.into_parts();
        let mut command = Command::new(program);
        // The first race tells enough.
        command.env("TSAN_OPTIONS", "halt_on_error=1").arg(file.path());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{} sanitizer, {} launches:\n{said}", sanitizer.name(), launches.len());
        Some(launches)
    }

    /// An ordinary run leaves out the shards for bf16, which are the templates of those for f16: half of the compilation.
    fn program(&self, sanitizer: Sanitizer) -> Option<PathBuf> {
        let mut manifest = self.manifest();
        manifest.units.retain(|unit| everything() || !unit.macros.iter().any(|name| name.contains("_BF16")));
        host::replay_for_tests(&manifest, compiler()?, sanitizer)
    }
}

/// The folder of the bundle that these tests run in, if they do.
pub fn bundle() -> Option<PathBuf> {
    std::env::var_os("QUIRE_BUNDLE").map(PathBuf::from)
}

/// Whether a device is to be tested; a report, where `QUIRE_TEST_DEVICE` names another one.
pub fn wanted(name: &str) -> bool {
    let wanted = std::env::var("QUIRE_TEST_DEVICE").map_or(true, |wanted| wanted == name);
    if !wanted {
        not_run::report(Capability::AnyDevice, &format!("QUIRE_TEST_DEVICE names another device than {name}"));
    }
    wanted
}

/// `None`, and the line that says so, without a compiler.
fn compiler() -> Option<&'static Compiler> {
    static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
    if bundle().is_some() {
        not_run::report(Capability::Checkout, "a bundle has no sources to compile");
        return None;
    }
    let found = COMPILER.get_or_init(host::compiler).as_ref();
    found.map_err(|missing| not_run::report(Capability::Cxx, missing)).ok()
}
