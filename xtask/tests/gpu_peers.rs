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
PEER int fake_prepare(const Call *call) { return call->batch == 14 ? 0 : 1; }
PEER int fake_run(const Call *call) {
    auto *out = static_cast<double *>(call->out);
    const void *pointers[] = {call->queries, call->keys, call->values, call->tables, call->starts, call->rows,
                              call->last, call->floats, call->ints, call->pinned, call->stream};
    for (const void *pointer : pointers) *out++ = (double)(unsigned long)pointer;
    const double numbers[] = {(double)call->float_bytes, (double)call->int_bytes, (double)call->batch, (double)call->heads,
                              (double)call->kv_heads, (double)call->context, (double)call->query_len, call->scale};
    for (double number : numbers) *out++ = number;
    return multiples(call->batch, 3).back() - 42;
}
"#;

const CALLS: &str = r#"
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import peers
prepare, run = peers.functions(".", "fake", "fake")
out = (ctypes.c_double * 19)()
call = peers.Call(ctypes.addressof(out), *range(1, 12), 1 << 40, 1 << 41, *range(14, 19), 0.5)
prepare(call), run(call)
print([int(number) for number in out[:18]], out[18])
call.batch = 8
for function in prepare, run:
    try: function(call)
    except RuntimeError as error: print(error)
print(peers.version(sys.argv[1]))
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
        "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1099511627776, 2199023255552, 14, 15, 16, 17, 18] 0.5",
        "fake_prepare: CUDA error 1",
        "fake_run: CUDA error -18",
        "0.6.18",
        "found a structure of 136 bytes, expected 4",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), want);
}

/// A module in place of PyTorch: the first three processes that open the GPU fail, abort and wait for ever; the others measure.
const TORCH: &str = r#"
import os, pathlib, time
class cuda:
    set_stream = staticmethod(lambda stream: None)
    def Stream():
        opened = pathlib.Path("opened")
        with opened.open("a") as file: print(file=file)
        number = opened.read_text().count("\n")
        if number == 1: raise RuntimeError("no driver\nsecond line")
        if number == 2: os.abort()
        if number == 3: time.sleep(60)
"#;

/// Runs `peers.py` with two families that write a line and nothing else, beside those that fail when they open the GPU.
const FAMILIES: &str = r#"
import sys
sys.path[:0] = [".", sys.argv[1]]
import peers
measure = lambda card, folder: card.say(kernel="theirs", seconds=1)
peers.FAMILIES, peers.LIMIT = dict.fromkeys(["fails", "aborts", "waits", "measures", "other"], measure), 2
sys.argv[1:] = [".", "out.jsonl", "--only", "fails,aborts,waits,measures"]
print(peers.main())
sys.argv[3:] = ["--only", "measures", "--limit", "0"]
print(peers.main())
"#;

#[test]
fn a_family_of_peers_that_fails_aborts_or_waits_gets_a_line_and_stops_no_other() {
    let folder = tempfile::tempdir().unwrap();
    file(folder.path(), "torch.py", TORCH);
    let peers = source("peers");
    let Some(output) = python(&["-B", "-c", FAMILIES, peers.to_str().unwrap()], folder.path()) else { return };
    assert_eq!(text(&output).lines().collect::<Vec<_>>(), ["1", "1"]);
    let lines = std::fs::read_to_string(folder.path().join("out.jsonl")).unwrap();
    let want = [
        "{\"kind\": \"peer\", \"kernel\": \"fails\", \"error\": \"no driver\"}",
        "{\"kind\": \"peer\", \"kernel\": \"aborts\", \"error\": \"its process ended with code -6\"}",
        "{\"kind\": \"peer\", \"kernel\": \"waits\", \"error\": \"it took more than 2 s\"}",
        "{\"kind\": \"peer\", \"kernel\": \"theirs\", \"seconds\": 1}",
        "{\"kind\": \"peer\", \"kernel\": \"measures\", \"error\": \"not measured: the limit of 0 s was reached\"}",
    ];
    assert_eq!(lines.lines().collect::<Vec<_>>(), want);
}
