//! `cargo xtask gpu-peers`: compiles the decode attention of vLLM and FlashInfer, which a bundle measures beside ours.
//!
//! ```text
//! peers/requirements.txt       their packages, pinned by hash; pip downloads and checks them
//!       vllm.cu flashinfer.cu  instantiate their templates behind the functions of call.h
//!       peers.py               calls these on the GPU machine, checks the results and times them
//! target/peers/                libvllm.so, libflashinfer.so, requirements.txt, licences; gpu-bundle copies it to peers/
//! target/peers-build/          the downloaded packages
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
const BACKEND: &str = include_str!("build_meta.py");
/// Headers of PyTorch that vLLM's kernels include and do not use.
const EMPTY: [&str; 3] = ["torch/all.h", "ATen/cuda/CUDAContext.h", "c10/cuda/CUDAGuard.h"];

/// A library of a peer.
struct Library {
    /// Name of the package and of our source; the library is `lib<name>.so`.
    name: &'static str,
    /// Folder of the headers in the package.
    include: &'static str,
    source: &'static str,
}

const LIBRARIES: [Library; 2] = [
    Library { name: "vllm", include: "csrc", source: include_str!("vllm.cu") },
    Library { name: "flashinfer", include: "include", source: include_str!("flashinfer.cu") },
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

/// Downloads the packages, compiles the libraries and returns their folder.
///
/// # Errors
/// One line: what is missing; or the messages of pip, tar or nvcc.
pub fn run(root: &Path, options: &Options) -> Result<PathBuf, String> {
    let toolkit = toolkit::find(root, options.fetch)?;
    let work = kernels::target(root).join("peers-build");
    write(&work.join("requirements.txt"), REQUIREMENTS)?;
    write(&work.join("backend/setuptools/__init__.py"), "")?;
    write(&work.join("backend/setuptools/build_meta.py"), BACKEND)?;
    for header in EMPTY {
        write(&work.join("empty").join(header), "")?;
    }
    write(&work.join("call.h"), include_str!("call.h"))?;
    download(&work)?;

    let folder = folder(root);
    write(&folder.join("requirements.txt"), REQUIREMENTS)?;
    for library in &LIBRARIES {
        let package = unpack(&work, library.name)?;
        let licence = package.join("LICENSE");
        std::fs::copy(&licence, folder.join(format!("LICENSE.{}", library.name))).map_err(at(&licence))?;
        let made = compile(&toolkit.nvcc, library, &work, &package, &options.architectures, &folder)?;
        println!("xtask: {}", made.display());
    }
    Ok(folder)
}

/// Has pip download the source packages, without what they depend on.
fn download(work: &Path) -> Result<(), String> {
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps"]);
    command.args(["--no-binary", ":all:", "--no-build-isolation", "--dest"]).arg(work);
    command.arg("-r").arg(work.join("requirements.txt")).env("PYTHONPATH", work.join("backend"));
    programs::call(&mut command, "python3 and its pip")
}

/// Unpacks a downloaded package and returns its folder.
fn unpack(work: &Path, name: &str) -> Result<PathBuf, String> {
    let pin = REQUIREMENTS.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    let pin = pin.split_whitespace().next().unwrap_or_default();
    let package = pin.replace('-', "_").replace("==", "-");
    programs::call(
        Command::new("tar").arg("-xzf").arg(work.join(format!("{package}.tar.gz"))).arg("-C").arg(work),
        "tar and gzip",
    )?;
    Ok(work.join(package))
}

fn compile(
    nvcc: &Path,
    library: &Library,
    work: &Path,
    package: &Path,
    architectures: &[String],
    folder: &Path,
) -> Result<PathBuf, String> {
    let source = work.join(format!("{}.cu", library.name));
    write(&source, library.source)?;
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-shared", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]);
    let default = ["90a".to_owned()];
    for name in if architectures.is_empty() { &default[..] } else { architectures } {
        command.arg(format!("-gencode=arch=compute_{name},code=sm_{name}"));
    }
    for include in [work.to_owned(), work.join("empty"), package.join(library.include)] {
        command.arg("-I").arg(include);
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
