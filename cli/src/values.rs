//! Parsers of flag values. The command line parser names the flag and what was found; the errors here say what was expected.

use std::path::PathBuf;

use engine::{Dtype, ItlTarget, Policy, PreemptionMode, Quantization, RoundActivations};
use serde_json::Value;

pub use ::bench::values::{key, whole};
pub use server::values::{bytes, filled, positive};

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

/// `--threads`. More threads than cores would only wait for each other.
pub fn threads(text: &str) -> Result<usize, String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
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

pub fn log_filter(text: &str) -> Result<String, String> {
    let checked = tracing_subscriber::EnvFilter::try_new(text);
    checked
        .map(|_| text.to_string())
        .map_err(|error| format!("expected warn, info, debug, or engine=debug,warn: {error}"))
}

pub fn policy(text: &str) -> Result<Policy, String> {
    match text {
        "fcfs" => Ok(Policy::Fcfs),
        "priority" => Ok(Policy::Priority),
        _ => Err("expected fcfs or priority".to_string()),
    }
}

pub fn quantization(text: &str) -> Result<Quantization, String> {
    text.parse().map_err(|expected| format!("{expected}; omit the flag to keep the checkpoint's type"))
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
    let units = [('k', 1e3), ('m', 1e6), ('g', 1e9), ('K', 1024.0), ('M', 1048576.0), ('G', 1073741824.0)];
    let counted =
        units.into_iter().find_map(|(letter, unit)| Some(text.strip_suffix(letter)?.parse::<f64>().ok()? * unit));
    match (text, counted) {
        ("auto", _) => Ok(Tokens(None)),
        // A double represents whole numbers exactly up to 2^53.
        (_, Some(tokens)) if (0.0..=(1u64 << 53) as f64).contains(&tokens) => Ok(Tokens(Some(tokens as usize))),
        _ => whole(text)
            .map(|tokens| Tokens(Some(tokens)))
            .map_err(|expected| format!("{expected}, such as 32k, or auto")),
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
