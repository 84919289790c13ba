//! Builds the host libraries that replace the driver and cuBLASLt; the tests of the engine use this file too.

use std::ffi::OsStr;
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
    let source = workspace::root().join("device/tests/backends").join(source);
    compile_with(&["-fvisibility=hidden".as_ref(), source.as_ref(), over.as_ref()], output);
}

/// Compiles a text into a library whose functions can all be called.
#[allow(dead_code)] // each test program uses its part
pub fn compile_text(text: &str, output: &Path) {
    let source = output.with_extension("cpp");
    std::fs::write(&source, text).unwrap();
    compile_with(&[source.as_ref()], output);
}

fn compile_with(args: &[&OsStr], output: &Path) {
    let named = std::env::var_os("CXX").filter(|name| !name.is_empty()).map(PathBuf::from);
    let compilers = named.into_iter().chain(["g++", "c++", "clang++"].map(PathBuf::from));
    let root = workspace::root();
    let outputs = compilers.filter_map(|compiler| {
        let mut command = Command::new(compiler);
        command.args(["-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", "-Wl,-rpath,$ORIGIN"]);
        command.arg("-I").arg(root.join("device/simt/include")).args(args).arg("-o").arg(output).output().ok()
    });
    let output = outputs.into_iter().next().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
