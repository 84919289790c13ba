//! `cargo xtask gpu-bundle`: one folder that tests and measures the CUDA kernels on a bare GPU machine.
//!
//! ```text
//! target/gpu-bundle/  run.sh         the program to start there; its first lines say how
//!                     bin/*.xz       quire, and the tests of kernels, forward pass, sampling and engine: release, stripped
//!                     kernels/       fat binaries, and the host libraries for `run.sh --device cuda-sim`
//!                     shapes/        checkpoints of 1 and 8 billion weights without the weights
//!                     predicted/     times that `quire bench kernels --counts` predicts for the shapes that run.sh measures
//!                     peers/*.xz     kernels of other engines, if `cargo xtask gpu-peers` made them
//!                     *.py           makes the weights; measures PyTorch; prints the figures
//!                     cases.tar.xz   reference cases, at the paths that they have in the tree
//!                     bundle.txt     commit, architectures, versions
//! ```
//!
//! That machine needs no toolchain and no network, only a driver, bash, tar, coreutils, xz or Python 3, and a C library as new as the newest symbol
//! that the programs name. [`newest`] reads it from the programs, and `run.sh` checks it first. The programs are not static, because
//! Rust's standard library and `libcuda` need the shared C library; a bundle made on an older system runs on older ones. Measuring
//! speed needs weights, which a Python with torch makes there. Without it those parts do not run, and the table says so.

mod glibc;
pub mod peers;
mod predicted;
mod programs;

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::kernels::{self, cuda, host, resources, toolkit};
use testkit::model;

pub use glibc::{Version, newest};

/// Greatest size of a bundle in bytes: it is copied to a machine that is rented by the minute, with the tree in 64 MiB. The tree takes
/// 11 MiB without its reference data.
pub const MOST_BYTES: u64 = 52 << 20;
const SCRIPT: &str = include_str!("run.sh");
const PYTHON: [(&str, &str); 4] = [
    ("weights.py", include_str!("weights.py")),
    ("peer.py", include_str!("peer.py")),
    ("peers.py", include_str!("peers/peers.py")),
    ("table.py", include_str!("table.py")),
];
/// Folders of the tree that the tests read.
const CASES: [&str; 2] = ["attention-kernels/tests/reference", "models/tests/reference"];
const SHAPES: [&str; 3] = ["tiny", "1b", "8b"];

/// What to build.
#[derive(Clone, Debug)]
pub struct Options {
    /// Architectures as nvcc names them, without `sm_`; empty: 90a only, an H100 or H200.
    pub architectures: Vec<String>,
    /// Install the pinned compiler under `target/` if none is found.
    pub fetch: bool,
    /// Compilers that run at once.
    pub jobs: usize,
}

/// Makes the bundle anew and returns its folder.
///
/// # Errors
/// One line: what is missing, what does not compile, or that the bundle is too large.
pub fn run(root: &Path, options: &Options) -> Result<PathBuf, String> {
    let folder = kernels::target(root).join("gpu-bundle");
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&folder)(error)),
        _ => {}
    }
    let into = |name: &str| folder.join(name);
    std::fs::create_dir_all(into("kernels")).map_err(at(&folder))?;

    let names: Vec<&str> = options.architectures.iter().map(String::as_str).collect();
    let architectures = if names.is_empty() { &["90a"][..] } else { &names };
    let toolkit = toolkit::find(root, options.fetch)?;
    let compiler = host::compiler()?;
    for manifest in &kernels::manifests(root)? {
        let built = cuda::build(root, manifest, &toolkit, architectures, options.jobs)?;
        resources::within_limits(&built.kernels)?;
        cuda::write(root, &into("kernels"), manifest, &built)?;
        let library = host::library(root, manifest, &compiler, host::Instrument::None, options.jobs)?;
        copy(&library, &into("kernels"))?;
    }

    let needed = programs::build(root, &into("bin"))?;
    predicted::write(root, &compiler, options.jobs, &into("predicted"))?;
    peers::pack(root, &into("peers"))?;
    for (name, text) in PYTHON {
        std::fs::write(into(name), text).map_err(at(&into(name)))?;
    }
    for name in SHAPES {
        let folder = into("shapes").join(name);
        model::write_head(&model::Shape::named(name)?, &folder)?;
        programs::compress(&folder.join("tokenizer.json"))?;
    }
    for folder in CASES {
        copy_all(&root.join(folder), &into(folder))?;
    }
    programs::pack_cases(&folder, &CASES)?;
    script(&into("run.sh"), needed)?;
    let commit = Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(root).output();
    let commit = commit.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    let text = format!(
        "Quire, commit {commit}\narchitectures: {}\nnvcc: {}\nC library: glibc {needed} or newer\nstart ./run.sh\n",
        architectures.join(", "),
        toolkit.version.lines().last().unwrap_or_default()
    );
    std::fs::write(into("bundle.txt"), text).map_err(at(&folder))?;

    let bytes = check_size(&folder, MOST_BYTES)?;
    println!("xtask: {}: {:.1} MiB, for glibc {needed} or newer", folder.display(), mib(bytes));
    Ok(folder)
}

/// Writes `run.sh` for programs that need this C library.
///
/// # Errors
/// The file cannot be written.
pub fn script(file: &Path, needed: Version) -> Result<(), String> {
    std::fs::write(file, SCRIPT.replace("@GLIBC@", &needed.to_string())).map_err(at(file))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755)).map_err(at(file))?;
    }
    Ok(())
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
