//! `cargo xtask bench-cpu`: Quire and llama.cpp by turns on the same bits, as a table.
//!
//! A round is one run of each, in processes of their own, A-B-A-B; the table has the median of the rounds and their range.
//! Quire's figures come from `quire bench latency`, llama.cpp's from its Python package. Other tenants of the machine
//! move all figures: `quire bench` measures the floors in each run, and the table has those too.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use testkit::kernels;
use testkit::model::{self, Shape};

/// What to compare.
pub struct Options {
    /// Names of shapes.
    pub models: Vec<String>,
    /// Where models are, or are made: `FOLDER/NAME`.
    pub folder: PathBuf,
    /// The Python that has llama-cpp-python.
    pub python: PathBuf,
    /// Rounds.
    pub rounds: usize,
    /// Threads of both sides.
    pub threads: usize,
}

/// Sequences at once, prompt tokens and generated tokens of a run.
const SETTINGS: [(usize, usize, usize); 5] = [(1, 512, 129), (4, 256, 33), (8, 256, 33), (16, 256, 33), (32, 256, 33)];

/// `--quantization` here, and the GGUF file of the same bits.
const FORMATS: [(&str, &str); 2] = [("q8", "q8_0"), ("q4", "q4_0")];

/// Quire's caches: its default, exact, and the type that llama.cpp's has by default; bytes of a number.
const CACHES: [(&str, &str, usize); 2] = [("Quire", "auto", 4), ("Quire, float16 cache", "float16", 2)];

/// Tokens of a block of Quire's cache.
const BLOCK_SIZE: usize = 16;

const SCRIPT: &str = include_str!("llama.py");

/// Figures of the rounds.
#[derive(Default)]
struct Series {
    prefill: Vec<f64>,
    decode: Vec<f64>,
    prefill_share: Vec<f64>,
    decode_share: Vec<f64>,
}

/// Builds Quire, makes the models that are missing, measures, prints.
///
/// # Errors
/// One line: what is missing, or a command that failed.
pub fn compare(root: &Path, options: &Options) -> Result<(), String> {
    let shapes = options.models.iter().map(|name| Shape::named(name)).collect::<Result<Vec<_>, _>>()?;
    let python = || Command::new(&options.python);
    let has_llama = python().args(["-c", "import llama_cpp"]).output().is_ok_and(|output| output.status.success());
    if !has_llama {
        println!(
            "llama.cpp is left out: {} has no llama_cpp; `pip install llama-cpp-python`, or name another with --python",
            options.python.display()
        );
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo).args(["build", "--release", "--package", "cli"]).current_dir(root).status();
    if !built.is_ok_and(|status| status.success()) {
        return Err("quire was not built: cargo build --release --package server".into());
    }
    let quire = kernels::target(root).join("release/quire");
    println!("| model | form | sequences, context | | prefill | of the floor | decode | of the floor |");
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
                        // As large as the peer's: just what the sequences need, so that no run is the first to touch its pages.
                        let tokens = batch * (input + output).next_multiple_of(BLOCK_SIZE);
                        let bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim() * number_bytes * tokens;
                        let figures = run(Command::new(&quire).args(["bench", "latency"]).arg(&folder).args([
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
                        ]))?;
                        ours.prefill.push(number(&figures, "prefill_tokens_per_second")?);
                        ours.decode.push(number(&figures, "decode_tokens_per_second")?);
                        ours.prefill_share.push(number(&figures, "prefill_share_of_floor")?);
                        ours.decode_share.push(number(&figures, "decode_share_of_floor")?);
                    }
                    if has_llama {
                        let file = folder.join(format!("{}-{gguf}.gguf", shape.name));
                        let numbers = [options.threads, batch, input, output].map(|number| number.to_string());
                        let figures = run(python().args(["-c", SCRIPT]).arg(file).args(numbers))?;
                        theirs.prefill.push(number(&figures, "prefill")?);
                        theirs.decode.push(number(&figures, "decode")?);
                    }
                }
                let row = format!("| {} | {form} | {batch}, {input}", shape.name);
                if has_llama {
                    println!("{row} | llama.cpp {gguf} | {} | | {} | |", shown(&theirs.prefill), shown(&theirs.decode));
                }
                for ((name, _, _), ours) in CACHES.iter().zip(&ours) {
                    println!(
                        "{row} | {name} | {}{} | {:.0} % | {}{} | {:.0} % |",
                        shown(&ours.prefill),
                        times(&ours.prefill, &theirs.prefill),
                        100.0 * median(&ours.prefill_share),
                        shown(&ours.decode),
                        times(&ours.decode, &theirs.decode),
                        100.0 * median(&ours.decode_share)
                    );
                }
            }
        }
    }
    Ok(())
}

/// The last line of a program that prints JSON.
fn run(command: &mut Command) -> Result<Value, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name} did not start: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(last).map_err(|_| {
        let errors = String::from_utf8_lossy(&output.stderr);
        format!("{name} ended with {} and no figures: {}", output.status, errors.lines().last().unwrap_or("no message"))
    })
}

fn number(figures: &Value, key: &str) -> Result<f64, String> {
    figures[key].as_f64().ok_or_else(|| format!("no {key} in {figures}"))
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// How many times the peer's median ours is; nothing without a peer.
fn times(ours: &[f64], theirs: &[f64]) -> String {
    if theirs.is_empty() { String::new() } else { format!(", **{:.2} ×**", median(ours) / median(theirs)) }
}

/// The median, and the least and greatest.
fn shown(values: &[f64]) -> String {
    let (least, most) = values.iter().fold((f64::INFINITY, 0.0f64), |(l, m), v| (l.min(*v), m.max(*v)));
    format!("{:.0} ({least:.0}–{most:.0})", median(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_shown_by_median_and_range() {
        assert_eq!(shown(&[3.2, 1.0, 2.0, 9.0, 2.4]), "2 (1–9)");
        assert_eq!((times(&[3.0, 1.0, 2.0], &[0.5]), times(&[1.0], &[])), (", **4.00 ×**".into(), String::new()));
        let problem = run(Command::new("sh").args(["-c", "echo it is broken >&2; exit 3"])).err().unwrap_or_default();
        assert!(problem.contains("it is broken") && problem.contains('3'), "{problem}");
    }
}
