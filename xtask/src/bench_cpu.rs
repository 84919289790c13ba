//! `cargo xtask bench-cpu`: measures Quire and llama.cpp alternately on the same weights, and prints a table.
//!
//! A round runs each program once, in a process of its own, A-B-A-B. The table has the median of the rounds and their range. Quire's
//! figures come from `quire bench latency`, llama.cpp's from its Python package. Other processes of the machine change all figures, so
//! `quire bench` also measures the limits of the hardware in each run, and the table has the share of them.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use testkit::model::{self, Shape};

use crate::cargo;

/// What to measure.
pub struct Options {
    /// Names of shapes.
    pub models: Vec<String>,
    /// Folder with the models, each as `FOLDER/NAME`; missing ones are made.
    pub folder: PathBuf,
    /// Python interpreter with llama-cpp-python.
    pub python: PathBuf,
    /// Number of rounds.
    pub rounds: usize,
    /// Threads of each program.
    pub threads: usize,
}

/// Sequences at once, prompt tokens and generated tokens of a run.
const SETTINGS: [(usize, usize, usize); 5] = [(1, 512, 129), (4, 256, 33), (8, 256, 33), (16, 256, 33), (32, 256, 33)];

/// `--quantization` of Quire, and the GGUF format with the same bits.
const FORMATS: [(&str, &str); 2] = [("q8", "q8_0"), ("q4", "q4_0")];

/// Quire's caches: its default, which is exact, and the default type of llama.cpp; with bytes per number.
const CACHES: [(&str, &str, usize); 2] = [("Quire", "auto", 4), ("Quire, float16 cache", "float16", 2)];

/// Tokens per block of Quire's cache.
const BLOCK_SIZE: usize = 16;

const SCRIPT: &str = include_str!("llama.py");

/// Figures of all rounds: tokens per second of prefill and decode, and their shares of the hardware's limit.
pub type Series = [Vec<f64>; 4];

/// Fields of the output of `quire bench latency`, in the order of [`Series`].
const FIELDS: [&str; 4] =
    ["prefill_tokens_per_second", "decode_tokens_per_second", "prefill_share_of_roofline", "decode_share_of_roofline"];

/// Builds Quire, makes missing models, measures, and prints the table.
///
/// # Errors
/// One line: something is missing, or a command failed.
pub fn run(root: &Path, options: &Options) -> Result<(), String> {
    let shapes = options.models.iter().map(|name| Shape::named(name)).collect::<Result<Vec<_>, _>>()?;
    let python = || Command::new(&options.python);
    let has_llama = python().args(["-c", "import llama_cpp"]).output().is_ok_and(|output| output.status.success());
    if !has_llama {
        println!(
            "llama.cpp is not measured: {} has no module llama_cpp; install llama-cpp-python with pip, or name another Python with --python",
            options.python.display()
        );
    }
    let quire = cargo::build_quire(root, "release")?;
    println!("| model | form | sequences, context | | prefill | of the limit | decode | of the limit |");
    println!("|---|---|---|---|---|---|---|---|");
    for shape in &shapes {
        let folder = options.folder.join(shape.name);
        if !folder.join("model.safetensors").exists() {
            model::write(shape, &folder, 0)?;
        }
        for (form, gguf) in FORMATS {
            for (batch, input, output) in SETTINGS {
                let (mut ours, mut theirs) = (CACHES.map(|_| Series::default()), Series::default());
                for _ in 0..options.rounds {
                    for ((_, cache, number_bytes), ours) in CACHES.iter().zip(&mut ours) {
                        // As large as the sequences need, like that of llama.cpp, so that no run touches new pages.
                        let tokens = batch * (input + output).next_multiple_of(BLOCK_SIZE);
                        let bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim() * number_bytes * tokens;
                        let mut command = Command::new(&quire);
                        command.args(["bench", "latency"]).arg(&folder).args([
                            "--quantization",
                            form,
                            &format!("--kv-cache-dtype={cache}"),
                            &format!("--kv-cache-memory-bytes={bytes}"),
                            &format!("--block-size={BLOCK_SIZE}"),
                            &format!("--threads={}", options.threads),
                            &format!("--batch-size={batch}"),
                            &format!("--input-len={input}"),
                            &format!("--output-len={output}"),
                            "--num-iters=1",
                            "--num-iters-warmup=1",
                            "--output-json=-",
                        ]);
                        measure(&mut command, &FIELDS, ours)?;
                    }
                    if has_llama {
                        let file = folder.join(format!("{}-{gguf}.gguf", shape.name));
                        let numbers = [options.threads, batch, input, output].map(|number| number.to_string());
                        measure(
                            python().args(["-c", SCRIPT]).arg(file).args(numbers),
                            &["prefill", "decode"],
                            &mut theirs,
                        )?;
                    }
                }
                let row = format!("| {} | {form} | {batch}, {input}", shape.name);
                let [their_prefill, their_decode, ..] = &theirs;
                if has_llama {
                    println!("{row} | llama.cpp {gguf} | {} | | {} | |", shown(their_prefill), shown(their_decode));
                }
                for ((name, _, _), [prefill, decode, prefill_share, decode_share]) in CACHES.iter().zip(&ours) {
                    println!(
                        "{row} | {name} | {}{} | {:.0} % | {}{} | {:.0} % |",
                        shown(prefill),
                        times(prefill, their_prefill),
                        100.0 * median(prefill_share),
                        shown(decode),
                        times(decode, their_decode),
                        100.0 * median(decode_share)
                    );
                }
            }
        }
    }
    Ok(())
}

/// Runs a program and adds these fields of the JSON in its last line to the series.
pub fn measure(command: &mut Command, fields: &[&str], series: &mut Series) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name} did not start: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let figures: Value = serde_json::from_str(text.lines().last().unwrap_or_default()).map_err(|_| {
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().last().unwrap_or("no message");
        format!("{name} ended with {} and printed no figures: {last}", output.status)
    })?;
    for (field, series) in fields.iter().zip(series) {
        series.push(figures[field].as_f64().ok_or_else(|| format!("{name}: found no {field} in {figures}"))?);
    }
    Ok(())
}

/// Returns the middle value, the upper one of two.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns our median as a multiple of theirs, or nothing if they were not measured.
pub fn times(ours: &[f64], theirs: &[f64]) -> String {
    if theirs.is_empty() { String::new() } else { format!(", **{:.2} ×**", median(ours) / median(theirs)) }
}

/// Returns the median and the range.
pub fn shown(values: &[f64]) -> String {
    let (least, most) = values.iter().fold((f64::INFINITY, 0.0f64), |(l, m), v| (l.min(*v), m.max(*v)));
    format!("{:.0} ({least:.0}–{most:.0})", median(values))
}
