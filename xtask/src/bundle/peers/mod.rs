//! `cargo xtask gpu-peers`: compiles FlashInfer's attention, which a bundle measures beside ours.
//!
//! ```text
//! peers/requirements.txt                    its package, pinned by hash; pip downloads and checks it
//!       flashinfer.cu flashinfer_sm90.cu    instantiate its templates behind the functions of call.h
//!       peers.py                            calls these on the GPU machine, checks the results, times them and PyTorch
//! target/peers/         libflashinfer.so, libflashinfer_sm90.so, requirements.txt, licence; gpu-bundle copies it to peers/
//! target/peers-build/   the package: a wheel that contains headers, also those of CUTLASS and CCCL that it needs
//! ```
//!
//! Nothing of theirs is in the tree. A library has the launches too, so the compiler checks every argument, and FlashInfer's own plan
//! chooses its partitions. It contains the static CUDA runtime, needs only a driver, and shares PyTorch's context.

use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::kernels::{self, toolkit};

use super::at;
use super::programs;

const REQUIREMENTS: &str = include_str!("requirements.txt");
/// Folders of headers under `flashinfer/data` in the package.
const INCLUDES: [&str; 5] = ["cccl/cub", "cccl/libcudacxx/include", "cccl/thrust", "include", "cutlass/include"];

/// A library of a peer.
struct Library {
    /// Name of our source; the library is `lib<name>.so`.
    name: &'static str,
    source: &'static str,
    /// Whether its kernels exist for 90a alone.
    hopper: bool,
}

const LIBRARIES: [Library; 2] = [
    Library { name: "flashinfer", source: include_str!("flashinfer.cu"), hopper: false },
    Library { name: "flashinfer_sm90", source: include_str!("flashinfer_sm90.cu"), hopper: true },
];

/// What to build.
#[derive(Clone, Debug)]
pub struct Options {
    /// Architectures as nvcc names them, without `sm_`; empty: 90a only.
    pub architectures: Vec<String>,
    /// Install the pinned compiler under `target/` if none is found.
    pub fetch: bool,
}

fn folder(root: &Path) -> PathBuf {
    kernels::target(root).join("peers")
}

/// Puts what [`run`] has made into a bundle, with the libraries compressed; nothing if it has not run.
pub(super) fn pack(root: &Path, to: &Path) -> Result<(), String> {
    let from = folder(root);
    if !from.is_dir() {
        println!("xtask: no peers, because cargo xtask gpu-peers has not run");
        return Ok(());
    }
    super::copy_all(&from, to)?;
    for Library { name, .. } in &LIBRARIES {
        let library = format!("lib{name}.so");
        programs::pack(&from.join(&library), &to.join(&library))?;
    }
    Ok(())
}

/// Downloads the package, compiles the libraries and returns their folder.
///
/// # Errors
/// One line: what is missing; or the messages of pip, zipfile or nvcc.
pub fn run(root: &Path, options: &Options) -> Result<PathBuf, String> {
    let toolkit = toolkit::find(root, options.fetch)?;
    let work = kernels::target(root).join("peers-build");
    write(&work.join("requirements.txt"), REQUIREMENTS)?;
    write(&work.join("call.h"), include_str!("call.h"))?;
    let package = download(&work)?;

    let folder = folder(root);
    super::fresh(&folder)?;
    write(&folder.join("requirements.txt"), REQUIREMENTS)?;
    let licence = work.join(format!("{package}.dist-info/licenses/LICENSE"));
    std::fs::copy(&licence, folder.join("LICENSE.flashinfer")).map_err(at(&licence))?;
    for library in &LIBRARIES {
        let made = compile(&toolkit.nvcc, library, &work, &options.architectures, &folder)?;
        println!("xtask: {}", made.display());
    }
    Ok(folder)
}

/// Downloads the wheel, without what it depends on, unpacks it, and returns its name and version as in file names.
///
/// A source package is not used: pip runs its build backend to learn its name, and that installs packages.
fn download(work: &Path) -> Result<String, String> {
    let python = || Command::new("python3");
    let mut pip = python();
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps"]);
    // The version of the Python that runs pip does not matter, because only headers are used.
    pip.args(["--only-binary", ":all:", "--python-version", "3.12", "--dest"]).arg(work);
    programs::call(pip.arg("-r").arg(work.join("requirements.txt")), "python3 and its pip")?;
    let pin = REQUIREMENTS.lines().find(|line| !line.starts_with('#')).unwrap_or_default();
    let pin = pin.split_whitespace().next().unwrap_or_default();
    let package = pin.replace('-', "_").replace("==", "-");
    let wheel = work.join(format!("{package}-py3-none-any.whl"));
    programs::call(python().args(["-m", "zipfile", "-e"]).arg(&wheel).arg(work), "python3")?;
    Ok(package)
}

fn compile(
    nvcc: &Path,
    library: &Library,
    work: &Path,
    architectures: &[String],
    folder: &Path,
) -> Result<PathBuf, String> {
    let source = work.join(format!("{}.cu", library.name));
    write(&source, library.source)?;
    let mut command = Command::new(nvcc);
    // Rates of its kernels are those of its own flags.
    command.args(["-std=c++17", "-O3", "-use_fast_math", "-DNDEBUG", "--expt-relaxed-constexpr", "-w", "-shared"]);
    command.arg("-Xcompiler=-fPIC,-fvisibility=hidden");
    let default = ["90a".to_owned()];
    for name in if library.hopper || architectures.is_empty() { &default[..] } else { architectures } {
        command.arg(format!("-gencode=arch=compute_{name},code=sm_{name}"));
    }
    command.arg("-I").arg(work);
    for include in INCLUDES {
        command.arg("-I").arg(work.join("flashinfer/data").join(include));
    }
    // The wheels of the compiler have their libraries in a folder that it does not search.
    if let Some(home) = nvcc.parent().and_then(Path::parent) {
        command.arg("-L").arg(home.join("lib"));
    }
    let made = folder.join(format!("lib{}.so", library.name));
    programs::call(command.arg("-o").arg(&made).arg(&source), "a C++ compiler that nvcc knows")?;
    Ok(made)
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).map_err(at(folder))?;
    }
    std::fs::write(file, text).map_err(at(file))
}
