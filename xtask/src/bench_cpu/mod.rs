//! `cargo xtask bench-cpu`: measures Quire, llama.cpp and vLLM alternately on the same weights, and prints two tables.
//!
//! A round runs each engine once, A-B-A-B. The tables have the median of the rounds and their range. Other processes of the machine
//! change all figures, so `quire bench` also measures the limits of the hardware in each run, and the first table has the share of
//! them.
//!
//! - `steps`: prefill and decode of a batch. Quire's figures come from `quire bench latency`, those of the others from a script
//!   in Python that stays in memory and is idle while another engine runs.
//! - `serving`: two workloads over HTTP, by `quire bench serve`.

mod resident;
mod serving;
mod steps;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use testkit::model::{self, Shape};

use crate::cargo;

/// What to measure.
pub struct Options {
    /// Names of shapes.
    pub models: Vec<String>,
    /// Names of forms of the weights.
    pub forms: Vec<String>,
    /// Folder with the models, each as `FOLDER/NAME`; missing ones are made.
    pub folder: PathBuf,
    /// Python interpreter with llama-cpp-python.
    pub llama: PathBuf,
    /// Python interpreter with vLLM.
    pub vllm: PathBuf,
    /// Number of rounds.
    pub rounds: usize,
    /// Threads of each engine.
    pub threads: usize,
    /// Whether to measure prefill and decode.
    pub steps: bool,
    /// Whether to measure servers.
    pub serving: bool,
}

/// A form of the weights.
struct Form {
    name: &'static str,
    /// `--quantization` of Quire.
    quantization: Option<&'static str>,
    /// The GGUF format with as many bits.
    gguf: &'static str,
    /// `--dtype` of vLLM, if it computes in this form.
    vllm: Option<&'static str>,
}

impl Form {
    /// Adds Quire's flag for it.
    fn add_to(&self, command: &mut Command) {
        command.args(self.quantization.map(|form| format!("--quantization={form}")));
    }
}

const FORMS: [Form; 3] = [
    Form { name: "bf16", quantization: None, gguf: "bf16", vllm: Some("bfloat16") },
    Form { name: "q8", quantization: Some("q8"), gguf: "q8_0", vllm: None },
    Form { name: "q4", quantization: Some("q4"), gguf: "q4_0", vllm: None },
];

/// `--dtype` of Quire, which is also the type of its cache, with the bytes of a number.
const DTYPES: [(&str, usize); 2] = [("bfloat16", 2), ("float32", 4)];

/// Settings of vLLM: a cache of 2 GiB, all cores, and no network.
const VLLM: [(&str, &str); 3] =
    [("VLLM_CPU_KVCACHE_SPACE", "2"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("HF_HUB_OFFLINE", "1")];

/// Figures of all rounds: tokens per second of prefill and decode, and their shares of the hardware's limit.
pub type Series = [Vec<f64>; 4];

/// Builds Quire, makes missing models, measures, and prints the tables.
///
/// # Errors
/// One line: something is missing, or a command failed.
pub fn run(root: &Path, options: &Options) -> Result<(), String> {
    let shapes = options.models.iter().map(|name| Shape::named(name)).collect::<Result<Vec<_>, _>>()?;
    let form = |name: &String| FORMS.iter().find(|form| form.name == name);
    let forms = options.forms.iter().map(|name| form(name).ok_or(name)).collect::<Result<Vec<_>, _>>();
    let forms = forms.map_err(|name| format!("--forms: found {name}; expected some of bf16, q8 and q4"))?;
    let quire = cargo::build_quire(root, "release")?;
    let subjects: Vec<_> = shapes.iter().map(|shape| (shape, options.folder.join(shape.name))).collect();
    for (shape, folder) in &subjects {
        if !folder.join("model.safetensors").exists() {
            model::write(shape, folder, 0)?;
        }
    }
    if options.steps {
        steps::run(&quire, options, &subjects, &forms)?;
    }
    if options.serving {
        serving::run(root, &quire, options, &subjects, &forms)?;
    }
    Ok(())
}

/// Returns whether a Python interpreter has a module, and says if it has not.
fn has_module(python: &Path, module: &str, flag: &str) -> bool {
    let found = Command::new(python)
        .args(["-c", &format!("import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)")])
        .output()
        .is_ok_and(|output| output.status.success());
    if !found {
        println!("{module} is not measured: {} does not have it; name another Python with {flag}", python.display());
    }
    found
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
    add(&name, &figures, fields, series)
}

/// Adds fields of what a program printed to the series.
fn add(name: &str, figures: &Value, fields: &[&str], series: &mut Series) -> Result<(), String> {
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

/// Returns our median as a multiple of each peer's that was measured.
pub fn times(ours: &[f64], peers: &[(&str, &[f64])]) -> String {
    let measured = peers.iter().filter(|(_, theirs)| !theirs.is_empty());
    measured.map(|(name, theirs)| format!(", **{:.2} ×** {name}", median(ours) / median(theirs))).collect()
}

/// Returns the median and the range.
pub fn shown(values: &[f64]) -> String {
    let (least, most) = values.iter().fold((f64::INFINITY, 0.0f64), |(l, m), v| (l.min(*v), m.max(*v)));
    format!("{:.0} ({least:.0}–{most:.0})", median(values))
}
