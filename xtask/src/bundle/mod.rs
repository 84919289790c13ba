//! `cargo xtask gpu-bundle`: one folder that proves and times the CUDA kernels on a bare GPU machine.
//!
//! ```text
//! target/gpu-bundle/  run.sh         what to start there; it says how
//!                     bin/*.gz       quire, and the tests of kernels, forward pass, sampling and engine: release, stripped
//!                     kernels/       fat binaries, and the host libraries for `run.sh --device cuda-sim`
//!                     shapes/        checkpoints of 1 and 8 billion weights without the weights
//!                     *.py           makes the weights; measures PyTorch; prints the figures
//!                     */tests/reference/  the cases of the tree, where the tree has them
//!                     bundle.txt     what it was made of
//! ```
//!
//! It takes no toolchain and no network there: a driver, bash, gzip, coreutils, and a C library as new as the newest symbol that the
//! programs ask for, which is read from them ([`newest`]), written into `run.sh` and checked by it first. Rust's standard
//! library and `libcuda` need the shared C library, so the programs are not static; a bundle made on an older system runs
//! on older ones. Speed wants weights, which a Python with torch makes there; where there is none those parts do not run, and
//! the table says so.

mod glibc;
mod programs;

use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::kernels::{self, cuda, host, resources, toolkit};
use testkit::{model, workspace};

pub use glibc::{Version, newest};

/// Most bytes of a bundle: what is carried to a machine whose lease counts every minute, with the tree in 64 MiB.
pub const MOST_BYTES: u64 = 46 << 20;
const SCRIPT: &str = include_str!("run.sh");
const PYTHON: [(&str, &str); 3] = [
    ("weights.py", include_str!("weights.py")),
    ("peer.py", include_str!("peer.py")),
    ("table.py", include_str!("table.py")),
];
/// Folders of the tree that the tests read.
const CASES: [&str; 2] = ["attention-kernels/tests/reference", "models/tests/reference"];
const SHAPES: [&str; 3] = ["tiny", "1b", "8b"];

/// What to put into it.
#[derive(Clone, Debug)]
pub struct Options {
    /// As nvcc names architectures, without `sm_`; none: 90a alone, an H100 or H200.
    pub architectures: Vec<String>,
    /// Install the pinned compiler under `target/` where none is found.
    pub fetch: bool,
    /// Compilers that run at once.
    pub jobs: usize,
}

/// Makes the bundle anew and returns its folder.
///
/// # Errors
/// One line: what is missing, what did not compile, or that the bundle is too large.
pub fn run(root: &Path, options: &Options) -> Result<PathBuf, String> {
    let folder = kernels::target(root).join("gpu-bundle");
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(at(&folder, error)),
        _ => {}
    }
    let into = |name: &str| folder.join(name);
    std::fs::create_dir_all(into("kernels")).map_err(|error| at(&folder, error))?;

    let names: Vec<&str> = options.architectures.iter().map(String::as_str).collect();
    let architectures = if names.is_empty() { &["90a"][..] } else { &names };
    let toolkit = toolkit::find(root, options.fetch)?;
    let compiler = host::compiler()?;
    for manifest in &kernels::manifests(root)? {
        let built = cuda::build(root, manifest, &toolkit, architectures, options.jobs)?;
        resources::within_limits(&built.kernels)?;
        cuda::write(root, &into("kernels"), manifest, &built)?;
        let library = host::library(root, manifest, &compiler, host::Sanitizer::None, options.jobs)?;
        copy(&library, &into("kernels"))?;
    }

    let needed = programs::build(root, &into("bin"))?;
    for (name, text) in PYTHON {
        std::fs::write(into(name), text).map_err(|error| at(&into(name), error))?;
    }
    for name in SHAPES {
        let folder = into("shapes").join(name);
        model::write_head(&model::Shape::named(name)?, &folder)?;
        programs::press(&folder.join("tokenizer.json"))?;
    }
    for folder in CASES {
        copy_all(&root.join(folder), &into(folder))?;
    }
    script(&into("run.sh"), needed)?;
    let commit = Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(root).output();
    let commit = commit.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    let text = format!(
        "Quire, commit {commit}\narchitectures: {}\nnvcc: {}\nC library: glibc {needed} or newer\nstart ./run.sh\n",
        architectures.join(", "),
        toolkit.version.lines().last().unwrap_or_default()
    );
    std::fs::write(into("bundle.txt"), text).map_err(|error| at(&folder, error))?;

    let bytes = check_size(&folder, MOST_BYTES)?;
    println!("xtask: {}: {:.1} MiB, for glibc {needed} or newer", folder.display(), mib(bytes));
    Ok(folder)
}

/// Writes `run.sh` for programs that need that C library.
///
/// # Errors
/// The file could not be written.
pub fn script(file: &Path, needed: Version) -> Result<(), String> {
    std::fs::write(file, SCRIPT.replace("@GLIBC@", &needed.to_string())).map_err(|error| at(file, error))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let may_run = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(file, may_run).map_err(|error| at(file, error))?;
    }
    Ok(())
}

/// The bytes of all files of a folder.
///
/// # Errors
/// More than `most`, and which files are the largest.
pub fn check_size(folder: &Path, most: u64) -> Result<u64, String> {
    let mut files: Vec<(u64, PathBuf)> = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(|error| at(&folder, error))?.flatten() {
            match entry.metadata() {
                Ok(found) if found.is_dir() => folders.push(entry.path()),
                Ok(found) => files.push((found.len(), entry.path())),
                Err(error) => return Err(at(&entry.path(), error)),
            }
        }
    }
    files.sort();
    let bytes = files.iter().map(|(bytes, _)| bytes).sum();
    if bytes <= most {
        return Ok(bytes);
    }
    let largest = files.iter().rev().take(3);
    let largest: Vec<String> = largest.map(|(bytes, path)| format!("{} {:.1}", path.display(), mib(*bytes))).collect();
    Err(format!(
        "the bundle has {:.1} MiB, at most {:.1} are carried; the largest files: {}; name fewer --arch",
        mib(bytes),
        mib(most),
        largest.join(", ")
    ))
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn at(path: &Path, error: impl std::fmt::Display) -> String {
    format!("{}: {error}", path.display())
}

fn copy(file: &Path, folder: &Path) -> Result<(), String> {
    let name = file.file_name().unwrap_or_default();
    std::fs::copy(file, folder.join(name)).map(|_| ()).map_err(|error| at(file, error))
}

/// A folder with all that is in it.
fn copy_all(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::create_dir_all(to).map_err(|error| at(to, error))?;
    for entry in std::fs::read_dir(from).map_err(|error| at(from, error))?.flatten() {
        let path = entry.path();
        if path.is_dir() { copy_all(&path, &to.join(entry.file_name()))? } else { copy(&path, to)? }
    }
    Ok(())
}

/// For tests: the workspace's bundle with default options.
///
/// # Errors
/// Those of [`run`].
pub fn default(jobs: usize) -> Result<PathBuf, String> {
    run(&workspace::root(), &Options { architectures: Vec::new(), fetch: false, jobs })
}
