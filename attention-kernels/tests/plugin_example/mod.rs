//! Builds the example plug-in outside the workspace, for every test program that loads it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the example with these features and returns the library.
pub fn build(features: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("plugin-{features}"));
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("plugin-example/Cargo.toml");
    let mut command = Command::new(env!("CARGO"));
    command.args(["build", "--quiet", "--offline", "--features", features, "--manifest-path"]).arg(manifest);
    // Not the flags of the surrounding build.
    command.env_remove("RUSTFLAGS").env("CARGO_TARGET_DIR", &folder);
    assert!(command.status().unwrap().success(), "the example plug-in does not build");
    folder.join("debug").join(libloading::library_filename("kernel_plugin_example"))
}
