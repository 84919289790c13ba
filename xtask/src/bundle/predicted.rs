//! The predicted times in a bundle: what `quire bench kernels --counts` writes for the shapes that `run.sh` measures.

use std::path::Path;
use std::process::Command;

use testkit::kernels::{self, host};

use super::{at, programs};
use crate::cargo;

/// Cards that a machine for the bundle may have. The counts are the same; the times are not.
const CARDS: [&str; 2] = ["H200", "H100"];
/// Name, `--scale` and what is counted: one sequence, for the batches of `run.sh`. Sweeps need only the decode that `auto` chooses;
/// prefill has a short context, because 4096 tokens with every variant take the simulator minutes.
const RUNS: [(&str, &str, &str); 5] = [
    ("decode", "1", "--op decode --context 512,4096"),
    ("decode", "64", "--op decode --context 512,4096"),
    ("decode", "8", "--op decode --context 512,4096 --variant cuda.paged_gqa"),
    ("decode", "256", "--op decode --context 512,4096 --variant cuda.paged_gqa"),
    ("prefill", "16", PREFILL),
];
const PREFILL: &str = "--op prefill --context 1024 --query-len 128 --variant cuda.paged_prefill,cuda.prefill_sm90";
const SHAPE: &str = "--dtype bfloat16 --heads 32 --kv-heads 8 --head-size 128 --block-size 16 --batch 1";

/// Writes a file for each card and run. Without g++, which the counting libraries need, it writes none and says so.
///
/// # Errors
/// A library does not compile, or `quire` fails.
pub(super) fn write(root: &Path, compiler: &host::Compiler, jobs: usize, to: &Path) -> Result<(), String> {
    if compiler.is_clang() {
        println!("xtask: no predicted times: found clang++, expected g++; set CXX");
        return Ok(());
    }
    std::fs::create_dir_all(to).map_err(at(to))?;
    for manifest in &kernels::manifests(root)? {
        host::library(root, manifest, compiler, host::Instrument::Counts, jobs)?;
    }
    let quire = cargo::build_quire(root, "release")?;
    let libraries = kernels::folder(root).join(host::Instrument::Counts.name());
    for card in CARDS {
        for (name, scale, what) in RUNS {
            let mut command = Command::new(&quire);
            command.args(["bench", "kernels", "--device", "cuda-sim", "--counts", "--card", card, "--scale", scale]);
            command.args(what.split(' ')).args(SHAPE.split(' ')).arg("--kernels-dir").arg(&libraries);
            command
                .arg("--json")
                .arg(to.join(format!("{card}-{name}-{scale}.json")))
                .stdout(std::process::Stdio::null());
            programs::call(&mut command, "quire")?;
        }
    }
    Ok(())
}
