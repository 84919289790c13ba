//! `cargo xtask build-kernels`: the `.cu` sources of the workspace become files that the engine opens at run time.
//!
//! Every crate with a `csrc/kernels.toml` ([`manifest`]) gets, under `target/kernels/`,
//!
//! - `<crate>.fatbin` and `<crate>.kernels.tsv` from nvcc ([`cuda`]), or
//! - `libquire_sim_<crate>.so` from the host's C++ compiler and the SIMT shim ([`host`]), with `--sim`.
//!
//! Compiled pieces are kept under `target/kernels/cache/` and compiled again only when something that they were made of
//! has changed ([`compile`]). Tests build the host library through this module too, so there is one way to build it.

pub mod compile;
pub mod cuda;
pub mod host;
pub mod manifest;
pub mod resources;
pub mod toolkit;

use std::fs::File;
use std::path::{Path, PathBuf};

use manifest::Manifest;

/// What to build.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Compile for one architecture only and write no fat binary.
    pub check: bool,
    /// Build the host library instead.
    pub sim: bool,
    /// Install the pinned compiler under `target/` where none is found.
    pub fetch: bool,
    /// Compilers that run at once.
    pub jobs: usize,
}

/// Builds the kernels of every crate of the workspace and prints what each needs.
///
/// # Errors
/// One line: what is missing, what did not compile, or which kernel is over a limit of its manifest.
pub fn run(root: &Path, options: Options) -> Result<(), String> {
    let manifests = manifests(root)?;
    if manifests.is_empty() {
        println!("xtask: no crate has a csrc/kernels.toml; nothing to build");
        return Ok(());
    }
    if options.sim {
        let compiler = host::compiler()?;
        for manifest in &manifests {
            let library = host::library(root, manifest, &compiler, host::Sanitizer::None, options.jobs)?;
            println!("xtask: {}", library.display());
        }
        return Ok(());
    }
    let toolkit = toolkit::find(root, options.fetch)?;
    let architectures = if options.check { cuda::CHECKED } else { cuda::ARCHITECTURES };
    for manifest in &manifests {
        let built = cuda::build(root, manifest, &toolkit, architectures, options.jobs)?;
        print!("{}", resources::table(&built.kernels));
        resources::within_limits(&built.kernels)?;
        if !options.check {
            let file = cuda::write(root, &folder(root), manifest, &built)?;
            println!("xtask: {}", file.display());
        }
    }
    Ok(())
}

/// As many jobs as this machine runs at once.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Manifests of the workspace, sorted by crate.
pub(crate) fn manifests(root: &Path) -> Result<Vec<Manifest>, String> {
    let entries = std::fs::read_dir(root).map_err(|error| format!("{}: {error}", root.display()))?;
    let mut folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    folders.sort();
    let files = folders.iter().map(|folder| (folder, folder.join("csrc/kernels.toml")));
    let found = files.filter(|(_, file)| file.is_file());
    found.map(|(folder, file)| Manifest::load(&file, &library_name(folder))).collect()
}

/// The name of a crate's folder as it stands in file names: `attention_kernels`.
fn library_name(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().replace('-', "_")
}

/// Where the files go: `target/kernels`, under `CARGO_TARGET_DIR` if that is set.
pub fn folder(root: &Path) -> PathBuf {
    target(root).join("kernels")
}

/// The folder of what cargo makes: `target`, or what `CARGO_TARGET_DIR` says.
pub fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |folder| root.join(folder))
}

/// Held while files under [`folder`] are made: tests of several programs may want the same library at once.
fn lock(root: &Path) -> Result<File, String> {
    let folder = folder(root);
    let file = folder.join("lock");
    let open = || {
        std::fs::create_dir_all(&folder)?;
        let opened = File::create(&file)?;
        opened.lock()?;
        Ok(opened)
    };
    open().map_err(|error: std::io::Error| format!("{}: {error}", file.display()))
}
