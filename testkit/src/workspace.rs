//! Where the workspace is.

use std::path::{Path, PathBuf};

/// The root folder of the workspace: the parent of this crate's folder. In a bundle for a GPU machine (`cargo xtask gpu-bundle`)
/// the bundle's: what its tests read lies at the same places there.
pub fn root() -> PathBuf {
    if let Some(bundle) = bundle() {
        return bundle;
    }
    // Cargo sets the variable at run time too, so a checkout that has moved is found where it is now.
    let here =
        std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.parent().map_or_else(|| here.clone(), Path::to_path_buf)
}

/// The folder of the bundle that this process runs in, if it does.
pub fn bundle() -> Option<PathBuf> {
    std::env::var_os("QUIRE_BUNDLE").map(PathBuf::from)
}
