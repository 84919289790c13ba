//! The kernels of other engines that a bundle measures beside ours.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use testkit::capability::Capability;
use testkit::{not_run, workspace};

fn file(folder: &Path, name: &str, text: &str) {
    let file = folder.join(name);
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, text).unwrap();
}

fn source(name: &str) -> PathBuf {
    workspace::root().join("xtask/src/bundle").join(name)
}

/// Runs Python, or reports that there is none.
fn python(args: &[&str], folder: &Path) -> Option<Output> {
    let started = Command::new("python3").args(args).current_dir(folder).output();
    started.map_err(|missing| not_run::report(Capability::Python3, &format!("python3: {missing}"))).ok()
}

fn text(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    said
}

/// A library that writes the fields of a call into the array that `out` points to.
const FAKE: &str = r#"#include "call.h"
PEER int fake_prepare(const Call *call) { return call->batch == 7 ? 0 : 1; }
PEER int fake_run(const Call *call) {
    auto *out = static_cast<double *>(call->out);
    const void *pointers[] = {call->queries, call->keys, call->values, call->tables, call->lengths, call->stream};
    for (int i = 0; i < 6; i++) out[i] = (double)(unsigned long)pointers[i];
    const double numbers[] = {(double)call->batch, (double)call->heads, (double)call->kv_heads, (double)call->context, call->scale};
    for (int i = 0; i < 5; i++) out[6 + i] = numbers[i];
    return 0;
}
"#;

const CALLS: &str = r#"
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import peers
prepare, run = peers.functions(".", "fake", "fake")
out = (ctypes.c_double * 11)()
call = peers.Call(ctypes.addressof(out), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0.5)
prepare(call), run(call)
print(list(out))
call.batch = 8
try: prepare(call)
except RuntimeError as error: print(error)
print(peers.version(sys.argv[1], "vllm"), peers.version(sys.argv[1], "flashinfer"))
print(peers.tables_of(100, 3, 10), peers.tables_of(10, 3, 10))
peers.Call = type("Short", (ctypes.Structure,), {"_fields_": [("batch", ctypes.c_int)]})
try: peers.functions(".", "fake", "fake")
except ValueError as error: print(error)
"#;

#[test]
fn arguments_reach_a_library_of_a_peer_as_its_header_declares_them() {
    let folder = tempfile::tempdir().unwrap();
    file(folder.path(), "fake.cpp", FAKE);
    let compiled = Command::new("g++")
        .args(["-shared", "-fPIC", "-fvisibility=hidden", "fake.cpp", "-o", "libfake.so", "-I"])
        .arg(source("peers"))
        .current_dir(folder.path())
        .status();
    match compiled {
        Ok(status) => assert!(status.success(), "{status}"),
        Err(missing) => return not_run::report(Capability::Gxx, &format!("g++: {missing}")),
    }
    let peers = source("peers");
    let Some(output) = python(&["-B", "-c", CALLS, peers.to_str().unwrap()], folder.path()) else { return };
    let said = text(&output);
    let want = [
        "[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 0.5]",
        "fake_prepare: CUDA error 1",
        "0.9.2 0.2.6.post1",
        "3 1",
        "found a structure of 80 bytes, expected 4",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), want);
}

#[test]
fn pip_learns_the_published_name_of_a_package_without_its_build_backend() {
    let folder = tempfile::tempdir().unwrap();
    for (name, version, published) in [("flashinfer", "0.2.6.post1", "flashinfer-python"), ("vllm", "0.9.2", "vllm")] {
        let info = format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: of the description\n");
        file(folder.path(), "PKG-INFO", &info);
        let ask = "import sys; sys.path.insert(0, sys.argv[1]); import build_meta; \
                   print(build_meta.prepare_metadata_for_build_wheel('.'))";
        let peers = source("peers");
        let Some(output) = python(&["-B", "-c", ask, peers.to_str().unwrap()], folder.path()) else { return };
        let made = folder.path().join(text(&output).trim()).join("METADATA");
        let metadata = std::fs::read_to_string(&made).unwrap();
        assert!(metadata.contains(&format!("Name: {published}\nVersion: {version}\n")), "{metadata}");
    }
}
