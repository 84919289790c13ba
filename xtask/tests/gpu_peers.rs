//! What a bundle prints beside its measurements: predicted times, and the kernels of other engines.

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

/// Figures of a card with 4 TB/s and 1 PFLOP/s: decode of `scale` sequences takes `micros` µs.
fn predicted(card: &str, operation: &str, scale: u32, micros: u32, query_len: u32) -> String {
    let (bytes, operations) = if operation == "decode" { (4_000_000, 1) } else { (1, 1_000_000_000) };
    format!(
        "{{\"counting\":{{\"card\":\"{card}\",\"scale\":{scale},\"graph_launch_seconds\":1e-6}},\"rows\":[{{\
         \"operation\":\"{operation}\",\"variant\":\"cuda.paged_gqa\",\"kv_dtype\":\"same\",\"heads\":32,\"kv_heads\":8,\
         \"head_size\":128,\"batch\":1,\"context\":4096,\"query_len\":{query_len},\"bytes\":{bytes},\
         \"operations\":{operations},\"least_seconds\":{scale}e-6,\"predicted_seconds\":{micros}e-6}}]}}"
    )
}

fn measured(operation: &str, batch: u32, query_len: u32, micros: u32) -> String {
    format!(
        "{{\"rows\":[{{\"operation\":\"{operation}\",\"variant\":\"cuda.paged_gqa\",\"kv_dtype\":\"same\",\"heads\":32,\
         \"kv_heads\":8,\"head_size\":128,\"batch\":{batch},\"context\":4096,\"query_len\":{query_len},\
         \"bytes_per_second\":1e12,\"operations\":1000000,\"median_seconds\":{micros}e-6}}]}}"
    )
}

/// Prints the table of made-up figures on a card.
fn table(card: &str) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| file(folder.path(), name, text);
    put("predicted/H200-decode-64.json", &predicted("H200", "decode", 64, 200, 0));
    put("predicted/H200-prefill-16.json", &predicted("H200", "prefill", 16, 500, 128));
    put("predicted/H100-decode-64.json", &predicted("H100", "decode", 64, 400, 0));
    put("attention.json", &measured("decode", 64, 128, 300));
    put("prefill.json", &measured("prefill", 16, 128, 1000));
    put("kernels.json", &measured("prefill", 1, 2048, 7));
    put(
        "peers.jsonl",
        "{\"kind\":\"peer decode\",\"kernel\":\"vllm 1 v1\",\"batch\":64,\"tokens\":4096,\"seconds\":600e-6,\
         \"bytes_per_second\":2e12}\n{\"kind\":\"peer decode\",\"kernel\":\"flashinfer 2\",\"error\":\"CUDA error 700\"}\n",
    );
    put("sweep-8b.planned", "--batch-size 64,256 --context 4096 --prefill 0");
    put(
        "sweep-8b.jsonl",
        "{\"kind\":\"decode\",\"batch\":64,\"tokens\":4096,\"steps\":2,\"seconds\":0.03,\"tokens_per_second\":1,\
         \"bytes\":1,\"operations\":2000000000000,\"roofline\":{\"weight_bytes\":16000000000}}\n",
    );
    put(
        "8b/config.json",
        "{\"num_hidden_layers\":32,\"num_attention_heads\":32,\"num_key_value_heads\":8,\"hidden_size\":4096}",
    );
    put("start.jsonl", "{\"seconds\":2.5}\n");
    put("bundle.txt", "Quire, commit 1\n");
    let script = source("table.py");
    let output = python(&[script.to_str().unwrap(), ".", ".", "cuda", card, "bundle.txt"], folder.path())?;
    Some(text(&output))
}

#[test]
fn predicted_times_of_the_measured_card_stand_beside_the_measured_ones() {
    let Some(said) = table("NVIDIA H200, 580.1") else { return };
    // 16 GB at 4 TB/s are 4 ms, 32 layers take 32 * 0.2 ms, and 8 * 32 + 5 launches 0.261 ms.
    for row in [
        "- predicted times: of an H200\n",
        "| decode | cuda.paged_gqa | same | 64 | 4096 | 1 | 300.0 | 200.0 | 1.50 × |",
        "| prefill | cuda.paged_gqa | same | 16 | 4096 | 128 | 1,000.0 | 500.0 | 2.00 × |",
        "| prefill | cuda.paged_gqa | same | 1 | 4096 | 2048 | 7.0 | – | – |",
        "| step, batch 64 × 4096 | 15.00 ms | 10.66 ms | 1.41 × | ≤ 15 ms |",
        "| step, batch 256 × 4096 | not run: the time limit of its part |",
        "| start to the first token | 2.50 s | – | – | ≤ 3 s |",
    ] {
        assert!(said.contains(row), "{row:?} is not in {said}");
    }
    assert!(
        said.find("## 8B at a glance") > said.find("## Decode attention of other engines"),
        "the last table: {said}"
    );
    let other = table("NVIDIA H100 80GB HBM3, 580.1").unwrap();
    assert!(other.contains("| 64 | 4096 | 1 | 300.0 | 400.0 | 0.75 × |"), "{other}");
}

#[test]
fn a_card_without_predicted_times_is_named() {
    let Some(said) = table("NVIDIA L4") else { return };
    assert!(
        said.contains("- no predicted times: they were made for H100, H200, and the card is another one"),
        "{said}"
    );
    assert!(said.contains("| 64 | 4096 | 1 | 300.0 | – | – |"), "{said}");
}

#[test]
fn kernels_of_other_engines_stand_beside_ours_and_an_error_is_a_row() {
    let Some(said) = table("NVIDIA H200") else { return };
    for row in [
        "| vllm 1 v1 | 64 | 4096 | 600.0 | 2,000.0 | cuda.paged_gqa | 300.0 | 2.00 × |",
        "| flashinfer 2 | – | – | not measured: CUDA error 700 |",
    ] {
        assert!(said.contains(row), "{row:?} is not in {said}");
    }
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
