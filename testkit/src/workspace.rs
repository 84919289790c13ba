//! The folder of the workspace.

use std::path::{Path, PathBuf};

/// Returns the root folder of the workspace, which is the parent of a crate's folder. In a bundle for a GPU machine (`cargo xtask
/// gpu-bundle`), returns the folder of the bundle: the files that tests read have the same paths there.
pub fn root() -> PathBuf {
    if let Some(bundle) = bundle() {
        return bundle;
    }
    // Cargo sets the variable at run time too, so a checkout that was moved is found at its new place.
    let here =
        std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.parent().map_or_else(|| here.clone(), Path::to_path_buf)
}

/// Returns the folder of the bundle that this process runs in, if it does.
pub fn bundle() -> Option<PathBuf> {
    std::env::var_os("QUIRE_BUNDLE").map(PathBuf::from)
}
