//! Builds the example plug-in outside the workspace, for every test program that loads it.

use std::path::PathBuf;
use std::process::Command;

use testkit::{kernels, workspace};

/// Builds the example with these features and returns the library.
pub fn build(features: &str) -> PathBuf {
    let root = workspace::root();
    let folder = kernels::target(&root).join(format!("tmp/plugin-{features}"));
    let manifest = root.join("attention-kernels/plugin-example/Cargo.toml");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--quiet", "--offline", "--features", features, "--manifest-path"]).arg(manifest);
    // Not the flags of the surrounding build.
    command.env_remove("RUSTFLAGS").env("CARGO_TARGET_DIR", &folder);
    assert!(command.status().unwrap().success(), "the example plug-in does not build");
    folder.join("debug").join(libloading::library_filename("kernel_plugin_example"))
}
