//! The folder of the workspace.

use std::path::{Path, PathBuf};

/// Returns the root folder of the workspace, which is the parent of a crate's folder. Cargo names that folder in `CARGO_MANIFEST_DIR`
/// also at run time, and so may a program that runs tests in a checkout elsewhere. Without the variable, in a bundle for a GPU machine
/// (`cargo xtask gpu-bundle`), returns the folder of the bundle: the files that tests read have the same paths there.
pub fn root() -> PathBuf {
    let named = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let here = match (named, bundle()) {
        (Some(here), _) => here,
        (None, Some(bundle)) => return bundle,
        (None, None) => PathBuf::from(env!("CARGO_MANIFEST_DIR")),
    };
    here.parent().map_or_else(|| here.clone(), Path::to_path_buf)
}

/// Returns the folder of the bundle that this process runs in, if it does.
pub fn bundle() -> Option<PathBuf> {
    std::env::var_os("QUIRE_BUNDLE").map(PathBuf::from)
}
