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

/// As many jobs as this machine runs at once.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Manifests of the workspace, sorted by crate.
///
/// # Errors
/// A manifest that cannot be read, with the line that is wrong.
pub fn manifests(root: &Path) -> Result<Vec<Manifest>, String> {
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
