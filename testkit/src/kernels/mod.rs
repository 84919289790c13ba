//! Compiles the `.cu` sources of the workspace into files that the engine opens at run time.
//!
//! Every crate with a `csrc/kernels.toml` ([`manifest`]) gets, under `target/kernels/`,
//!
//! - `<crate>.fatbin`, `<crate>.kernels.tsv` and `<crate>.resources.tsv` from nvcc ([`cuda`]), or
//! - `libquire_sim_<crate>.so` from the C++ compiler of the host and the SIMT shim ([`host`]).
//!
//! Compiled pieces are kept under `target/kernels/cache/`, and compiled again only if something that they were made from has changed
//! ([`compile`]). `cargo xtask build-kernels` and the tests both build through this module.

pub mod compile;
pub mod cuda;
pub mod host;
pub mod manifest;
pub mod resources;
pub mod toolkit;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::at;
use manifest::Manifest;

/// Returns the number of jobs that this machine runs at once.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the manifests of the workspace, sorted by crate.
///
/// # Errors
/// A manifest that cannot be read, with the line that is wrong.
pub fn manifests(root: &Path) -> Result<Vec<Manifest>, String> {
    let entries = std::fs::read_dir(root).map_err(at(root))?;
    let mut folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    folders.sort();
    let files = folders.iter().map(|folder| (folder, folder.join("csrc/kernels.toml")));
    let load = |(folder, file): (&PathBuf, PathBuf)| {
        // As in file names: `attention_kernels`.
        let name = folder.file_name().unwrap_or_default().to_string_lossy().replace('-', "_");
        Manifest::load(&file, &name)
    };
    files.filter(|(_, file)| file.is_file()).map(load).collect()
}

/// Returns the folder of compiled kernels: `target/kernels`, or under `CARGO_TARGET_DIR` if that is set.
pub fn folder(root: &Path) -> PathBuf {
    target(root).join("kernels")
}

/// Name of the files of [`of_devices`].
pub const OF_DEVICES: &str = "simt_tests";

/// Loads the manifest of the kernels that test devices. On a GPU there are none with mistakes in their pipelines, which nvcc refuses.
///
/// # Errors
/// The manifest is invalid.
pub fn of_devices(root: &Path, for_gpu: bool) -> Result<Manifest, String> {
    let mut manifest = Manifest::load(&root.join("device/simt/tests/kernels.toml"), OF_DEVICES)?;
    manifest.units.retain(|unit| !for_gpu || unit.name != "hopper_mistakes");
    Ok(manifest)
}

/// Returns the folder of kernels that were compiled for these tests elsewhere, of which nothing is built: `QUIRE_KERNELS_DIR`, or
/// `kernels` in the bundle.
pub fn compiled() -> Option<PathBuf> {
    let named = std::env::var_os("QUIRE_KERNELS_DIR").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    named.or_else(|| crate::workspace::bundle().map(|bundle| bundle.join("kernels")))
}

/// Returns cargo's target folder: `target`, or `CARGO_TARGET_DIR`.
pub fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |folder| root.join(folder))
}

/// Locks [`folder`] for writing: tests of several programs may build the same library at once.
fn lock(root: &Path) -> Result<File, String> {
    let folder = folder(root);
    let open = || -> io::Result<File> {
        std::fs::create_dir_all(&folder)?;
        let opened = File::create(folder.join("lock"))?;
        opened.lock()?;
        Ok(opened)
    };
    open().map_err(at(&folder))
}
