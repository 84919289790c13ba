//! `cargo xtask gpu-bundle`: one folder that tests and measures the CUDA kernels on a bare GPU machine.
//!
//! ```text
//! target/gpu-bundle/  run.py         the program to start there; `run.py --help` says how
//!                     steps.py …     its modules: plan.py has all steps, tests and limits, page.py makes the tables
//!                     weights.py     makes weights; peers.py measures other engines
//!                     bin.tar.xz     quire, and the tests of kernels, devices, forward pass, sampling and engine, stripped
//!                     kernels.tar.xz fat binaries
//!                     shapes/        checkpoints of 8 billion weights, and of few, without the weights
//!                     peers/*.xz     kernels of other engines, if `cargo xtask gpu-peers` made them
//!                     bundle.txt     commit, architectures, versions
//! ```
//!
//! The tests read their reference cases from a checkout, which travels with the bundle. That machine needs no toolchain and no network,
//! only a driver, Python 3.9, and a C library as new as the newest symbol that the programs name. [`newest`] reads it from the programs,
//! and `run.py` checks it first. The programs are not static, because Rust's standard library and `libcuda` need the shared C library; a
//! bundle made on an older system runs on older ones. Speed of whole models needs weights, which a Python with torch makes there.

mod glibc;
pub mod peers;
mod programs;
pub mod rehearse;

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::kernels::{self, cuda, resources, toolkit};
use testkit::model;

use crate::workspace;

pub use glibc::{Version, newest};
pub use programs::{archive_of, script};

/// Greatest size of the tracked tree and a bundle together, in bytes: both are copied to a machine that is rented by the minute.
pub const MOST_BYTES: u64 = 56 << 20;
const PYTHON: [(&str, &str); 7] = [
    ("run.py", include_str!("run.py")),
    ("steps.py", include_str!("steps.py")),
    ("plan.py", include_str!("plan.py")),
    ("process.py", include_str!("process.py")),
    ("environment.py", include_str!("environment.py")),
    ("page.py", include_str!("page.py")),
    ("weights.py", include_str!("weights.py")),
];
const PEERS: &str = include_str!("peers/peers.py");
const SHAPES: [&str; 2] = ["tiny", "8b"];

/// What to build.
#[derive(Clone, Debug)]
pub struct Options {
    /// Architectures as nvcc names them, without `sm_`, with `+ptx` for PTX too; empty: 90a only, an H100 or H200.
    pub architectures: Vec<String>,
    /// Install the pinned compiler under `target/` if none is found.
    pub fetch: bool,
    /// Compilers that run at once.
    pub jobs: usize,
}

/// Makes the bundle anew and returns its folder.
///
/// # Errors
/// One line: what is missing, what does not compile, or that the bundle is too large; that one is removed.
pub fn run(root: &Path, options: &Options) -> Result<PathBuf, String> {
    let folder = folder(root);
    fresh(&folder)?;
    let into = |name: &str| folder.join(name);
    std::fs::create_dir_all(into("kernels")).map_err(at(&folder))?;

    let names: Vec<&str> = options.architectures.iter().map(String::as_str).collect();
    let architectures = if names.is_empty() { &["90a"][..] } else { &names };
    let toolkit = toolkit::find(root, options.fetch)?;
    let mut manifests = kernels::manifests(root)?;
    manifests.push(kernels::of_devices(root, true)?);
    let target = cuda::Target { architectures, is_compressed: false };
    for manifest in &manifests {
        let built = cuda::build(root, manifest, &toolkit, target, options.jobs)?;
        resources::within_limits(&built.kernels)?;
        cuda::write(root, &into("kernels"), manifest, &built)?;
    }

    programs::archive(&into("kernels"), &into("kernels.tar"))?;
    let needed = programs::build(root, &into("bin.tar"))?;
    peers::pack(root, &into("peers"))?;
    scripts(&folder)?;
    for name in SHAPES {
        let folder = into("shapes").join(name);
        model::write_head(&model::Shape::named(name)?, &folder)?;
        programs::compress(&folder.join("tokenizer.json"))?;
    }
    let commit = Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(root).output();
    let commit = commit.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    let text = format!(
        "Quire, commit {commit}\narchitectures: {}\nnvcc: {}\nC library: glibc {needed} or newer\nstart python3 run.py one\n",
        architectures.join(", "),
        toolkit.version.lines().last().unwrap_or_default()
    );
    std::fs::write(into("bundle.txt"), text).map_err(at(&folder))?;

    let most = MOST_BYTES.saturating_sub(tree_bytes(root));
    let bytes = check_size(&folder, most).inspect_err(|_| drop(std::fs::remove_dir_all(&folder)))?;
    println!("xtask: {}: {:.1} MiB, for glibc {needed} or newer", folder.display(), mib(bytes));
    Ok(folder)
}

/// Returns the folder of the bundle.
pub fn folder(root: &Path) -> PathBuf {
    kernels::target(root).join("gpu-bundle")
}

/// Returns the size of the files of the tree that git tracks, or does not ignore.
pub fn tree_bytes(root: &Path) -> u64 {
    let sizes = workspace::files(root).into_iter().filter_map(|file| root.join(file).metadata().ok());
    sizes.map(|found| found.len()).sum()
}

/// Removes a folder, and makes it anew.
fn fresh(folder: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(folder)(error)),
        _ => std::fs::create_dir_all(folder).map_err(at(folder)),
    }
}

/// Writes the Python files of a bundle.
///
/// # Errors
/// A file cannot be written.
pub fn scripts(folder: &Path) -> Result<(), String> {
    let files = PYTHON.into_iter().chain([("peers.py", PEERS)]);
    files
        .map(|(name, text)| (folder.join(name), text))
        .try_for_each(|(file, text)| std::fs::write(&file, text).map_err(at(&file)))
}

/// Returns the size of all files of a folder in bytes.
///
/// # Errors
/// There are more than `most` bytes; names the largest files.
pub fn check_size(folder: &Path, most: u64) -> Result<u64, String> {
    let mut files = Vec::new();
    list(folder, &mut files)?;
    files.sort();
    let bytes = files.iter().map(|(bytes, _)| bytes).sum();
    if bytes <= most {
        return Ok(bytes);
    }
    let largest = files.iter().rev().take(3);
    let largest: Vec<String> = largest.map(|(bytes, path)| format!("{} {:.1}", path.display(), mib(*bytes))).collect();
    Err(format!(
        "found a bundle of {:.1} MiB, expected at most {:.1}; the largest files: {}; name fewer --arch",
        mib(bytes),
        mib(most),
        largest.join(", ")
    ))
}

/// Lists the files of a folder and of its folders, with their sizes.
fn list(folder: &Path, files: &mut Vec<(u64, PathBuf)>) -> Result<(), String> {
    for entry in std::fs::read_dir(folder).map_err(at(folder))?.flatten() {
        let found = entry.metadata().map_err(at(&entry.path()))?;
        if found.is_dir() {
            list(&entry.path(), files)?;
        } else {
            files.push((found.len(), entry.path()));
        }
    }
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Returns a function that puts a path before an error.
fn at(path: &Path) -> impl Fn(io::Error) -> String {
    move |error| format!("{}: {error}", path.display())
}

fn copy(file: &Path, folder: &Path) -> Result<(), String> {
    std::fs::copy(file, folder.join(file.file_name().unwrap_or_default())).map(drop).map_err(at(file))
}

fn copy_all(from: &Path, to: &Path) -> Result<(), String> {
    let mut files = Vec::new();
    list(from, &mut files)?;
    for (_, file) in files {
        let folder = to.join(file.strip_prefix(from).ok().and_then(Path::parent).unwrap_or(Path::new("")));
        std::fs::create_dir_all(&folder).map_err(at(&folder))?;
        copy(&file, &folder)?;
    }
    Ok(())
}
