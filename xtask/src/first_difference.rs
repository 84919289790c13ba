//! `cargo xtask first-difference`: where a wrong token comes from. Computes a request with the float64 oracle of models' tests, with
//! `cpu.reference`, and with chosen kernels, and names the first layer, position and element that differ.
//!
//! The oracle is test code, so a test of `models` does the work: `models/tests/naive/first_difference.rs`.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde_json::{Map, Value, json};

use crate::cargo;

/// What to compute.
#[derive(Args)]
pub struct Options {
    /// Folder of the checkpoint
    model: PathBuf,
    /// Token ids of the request: its prompt and what was answered before the wrong token; POST /tokenize gives those of a text
    #[arg(long, value_delimiter = ',', required = true)]
    ids: Vec<u32>,
    /// Device of the chosen kernels: cpu, cuda or cuda-sim
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Type in which the chosen kernels compute: float32, float16 or bfloat16; on cpu, how products round
    #[arg(long, default_value = "float32")]
    dtype: String,
    /// Variants of operations that are not chosen as usual, such as linear=cpu.avx2,decode=cpu.portable
    #[arg(long, value_delimiter = ',', value_name = "OPERATION=VARIANT")]
    kernels: Vec<String>,
    /// Greatest difference that counts as equal, as a share of a row's root mean square [default: 0.001, in 16 bits 0.1]
    #[arg(long)]
    tolerance: Option<f64>,
}

/// Builds the test program of `models` and prints the comparison.
///
/// # Errors
/// One line: an argument is wrong, or the program does not build or fails, after its messages.
pub fn run(root: &Path, options: &Options) -> Result<(), String> {
    let question = question(options)?;
    let programs = cargo::test_programs(root, &["--workspace"])?;
    let program = programs.iter().find(|program| program.package == "models" && program.target == "all");
    let program = program.ok_or("first-difference: models has no test program \"all\"")?;
    let test = ["the_first_difference_of_a_request_is_printed", "--ignored", "--nocapture", "--quiet"];
    let status = Command::new(&program.file).args(test).env("QUIRE_FIRST_DIFFERENCE", question.to_string()).status();
    match status.map_err(|error| format!("{}: {error}", program.file.display()))? {
        status if status.success() => Ok(()),
        status => Err(format!("first-difference: the comparison ended with {status}; its messages are above")),
    }
}

/// The question in the form that the test reads.
fn question(options: &Options) -> Result<Value, String> {
    let Options { model, ids, device, dtype, kernels, tolerance } = options;
    let folder = model.canonicalize().map_err(|error| format!("{}: {error}", model.display()))?;
    let (name, default) = match &dtype[..] {
        "float32" => ("F32", 1e-3),
        "float16" => ("F16", 0.1),
        "bfloat16" => ("Bf16", 0.1),
        other => return Err(format!("--dtype {other}: expected float32, float16 or bfloat16")),
    };
    let mut variants = Map::new();
    for choice in kernels {
        let (operation, variant) = choice
            .split_once('=')
            .ok_or_else(|| format!("--kernels {choice}: expected OPERATION=VARIANT, such as linear=cpu.avx2"))?;
        variants.insert(operation.replace('-', "_"), variant.into());
    }
    let tolerance = tolerance.unwrap_or(default);
    Ok(json!({
        "model": folder, "ids": ids, "device": device, "dtype": name, "kernels": variants, "tolerance": tolerance,
    }))
}
