//! Parsers of flag values. The command line parser names the flag and what was found; the errors here say what was expected.

use std::path::PathBuf;

use engine::{Backend, Dtype, ItlTarget, Policy, PreemptionMode, Quantization, RoundActivations};
use serde_json::Value;

pub use ::bench::values::{key, whole};
pub use server::values::{bytes, filled, human, positive};

/// An adapter of `--lora-modules`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraModule {
    /// Name of the adapter in the API.
    pub name: String,
    /// Folder of its files.
    pub path: PathBuf,
}

/// `NAME=FOLDER`, or JSON with `name`, `path` and perhaps `base_model_name`, which is not used: there is only one base model.
pub fn lora_module(text: &str) -> Result<LoraModule, String> {
    let fields = match text.starts_with('{') {
        true => {
            let json: Value = serde_json::from_str(text).unwrap_or_default();
            let field = |name: &str| json.get(name).and_then(Value::as_str).map(str::to_string);
            field("name").zip(field("path"))
        }
        false => text.split_once('=').map(|(name, path)| (name.to_string(), path.to_string())),
    };
    let fields = fields.filter(|(name, path)| !name.is_empty() && !path.is_empty());
    let expected = r#"expected NAME=FOLDER, or JSON such as {"name": "sql", "path": "adapters/sql"}"#;
    fields.map(|(name, path)| LoraModule { name, path: path.into() }).ok_or_else(|| expected.to_string())
}

/// The number of cores that this process may use, if it is less than that of a text.
pub fn cores_below(text: &str) -> Option<usize> {
    text.parse().ok().filter(|count: &usize| *count > cores()).map(|_| cores())
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// `--threads`. More threads than cores would only wait for each other.
pub fn threads(text: &str) -> Result<usize, String> {
    let cores = cores();
    let count = text.parse().ok().filter(|count| (1..=cores).contains(count));
    count.ok_or_else(|| format!("expected a whole number from 1 to {cores}, the cores that this process may use"))
}

/// A file to write. `json = true` in a settings file belongs to another command.
pub fn file(text: &str) -> Result<PathBuf, String> {
    match text {
        "" | "true" | "false" => Err("expected the path of a file".to_string()),
        path => Ok(path.into()),
    }
}

/// A level, or levels by module. The names of Python's levels are those of vLLM and uvicorn.
pub fn log_filter(text: &str) -> Result<String, String> {
    let level = match text.to_lowercase().as_str() {
        "warning" => "warn".to_string(),
        "critical" | "fatal" => "error".to_string(),
        level @ ("error" | "warn" | "info" | "debug" | "trace") => level.to_string(),
        _ => text.to_string(),
    };
    let checked = tracing_subscriber::EnvFilter::try_new(&level);
    checked.map(|_| level).map_err(|error| format!("expected warn, info, debug, or engine=debug,warn: {error}"))
}

pub fn policy(text: &str) -> Result<Policy, String> {
    match text {
        "fcfs" => Ok(Policy::Fcfs),
        "priority" => Ok(Policy::Priority),
        _ => Err("expected fcfs or priority".to_string()),
    }
}

/// A value of `--quantization`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// A form into which weights are quantised while they are loaded.
    Quantised(Quantization),
    /// The method by which those of the checkpoint are quantised, under one of vLLM's names.
    Stored(String),
}

impl Weights {
    pub fn form(&self) -> Option<Quantization> {
        match self {
            Weights::Quantised(form) => Some(*form),
            Weights::Stored(_) => None,
        }
    }
}

/// Methods of checkpoints that this engine reads, as vLLM calls them.
const METHODS: [&str; 12] = [
    "awq",
    "awq_marlin",
    "gptq",
    "gptq_marlin",
    "compressed-tensors",
    "fp8",
    "fbgemm_fp8",
    "mxfp4",
    "bitsandbytes",
    "modelopt",
    "gguf",
    "awq_triton",
];

pub fn quantization(text: &str) -> Result<Weights, String> {
    match text.parse() {
        Ok(form) => Ok(Weights::Quantised(form)),
        Err(_) if METHODS.contains(&text) => Ok(Weights::Stored(text.to_string())),
        Err(expected) => Err(format!("{expected}; omit the flag to keep the checkpoint's type")),
    }
}

pub fn activations(text: &str) -> Result<RoundActivations, String> {
    match text {
        "auto" => Ok(RoundActivations::Auto),
        "float" => Ok(RoundActivations::Never),
        "int8" => Ok(RoundActivations::Int8),
        _ => Err("expected auto, float or int8".to_string()),
    }
}

/// A value of `--dtype`; `None` is `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DtypeChoice(pub Option<Dtype>);

pub fn dtype(text: &str) -> Result<DtypeChoice, String> {
    Ok(DtypeChoice(match text {
        "auto" => None,
        "float32" | "float" => Some(Dtype::F32),
        "float16" | "half" => Some(Dtype::F16),
        "bfloat16" => Some(Dtype::Bf16),
        _ => return Err("expected auto, float32, float16 or bfloat16".to_string()),
    }))
}

/// A number of tokens; `None` is `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens(pub Option<usize>);

/// As in vLLM, `32k` is 32000, `32K` is 32768, and `25.6k` is 25600.
pub fn tokens_or_auto(text: &str) -> Result<Tokens, String> {
    // A double represents whole numbers exactly up to 2^53.
    let counted = human(text).filter(|tokens| text.ends_with(char::is_alphabetic) && *tokens <= (1u64 << 53) as f64);
    match (text, counted) {
        ("auto", _) => Ok(Tokens(None)),
        (_, Some(tokens)) if tokens >= 0.0 => Ok(Tokens(Some(tokens as usize))),
        _ => whole(text)
            .map(|tokens| Tokens(Some(tokens)))
            .map_err(|expected| format!("{expected}, such as 32k, or auto")),
    }
}

/// `--max-model-len`, where -1 is vLLM's name of `auto`.
pub fn context(text: &str) -> Result<Tokens, String> {
    if text == "-1" { Ok(Tokens(None)) } else { tokens_or_auto(text) }
}

/// `--distributed-executor-backend`, with vLLM's names.
pub fn backend(text: &str) -> Result<Backend, String> {
    match text {
        "mp" | "uni" => Ok(Backend::Threads),
        "external_launcher" => Ok(Backend::Mpi),
        _ => text.parse().map_err(str::to_string),
    }
}

pub fn itl_target(text: &str) -> Result<ItlTarget, String> {
    text.parse().map_err(|expected| format!("expected {expected}"))
}

/// `--swap-space` and `--kv-offloading-size`: parses GiB, returns bytes.
pub fn gib(text: &str) -> Result<u64, String> {
    let gib = text.parse().ok().filter(|gib: &f64| (0.0..=1e6).contains(gib));
    let bytes = gib.map(|gib| (gib * f64::from(1 << 30)) as u64);
    bytes.ok_or_else(|| "expected a number of GiB, 0 or more, such as 4 or 0.5".to_string())
}

pub fn preemption_mode(text: &str) -> Result<PreemptionMode, String> {
    match text {
        "auto" => Ok(PreemptionMode::Auto),
        "recompute" => Ok(PreemptionMode::Recompute),
        "swap" => Ok(PreemptionMode::Swap),
        _ => Err("expected auto, recompute or swap".to_string()),
    }
}
