//! Builds the host libraries that replace the driver and cuBLASLt; the tests of the engine use this file too.

use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::workspace;

/// Replaces a library atomically, because another run of the same tests may have it open.
pub fn copy(library: &Path, to: &Path) {
    let unfinished = to.with_extension(std::process::id().to_string());
    std::fs::copy(library, &unfinished).and_then(|_| std::fs::rename(&unfinished, to)).unwrap();
}

/// Compiles a file of this folder into a library that is linked with the library `over`.
pub fn compile(source: &str, over: &Path, output: &Path) {
    let named = std::env::var_os("CXX").filter(|name| !name.is_empty()).map(PathBuf::from);
    let compilers = named.into_iter().chain(["g++", "c++", "clang++"].map(PathBuf::from));
    let root = workspace::root();
    let outputs = compilers.filter_map(|compiler| {
        let mut command = Command::new(compiler);
        command.args(["-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-rpath,$ORIGIN"]);
        command.arg("-I").arg(root.join("device/simt/include")).arg(root.join("device/tests/backends").join(source));
        command.arg(over).arg("-o").arg(output).output().ok()
    });
    let output = outputs.into_iter().next().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
