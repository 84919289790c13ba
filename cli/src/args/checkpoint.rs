//! Flags that say what a checkpoint has: its tokenizer, and how its weights are quantised. They are checked when the model is there.

use std::path::Path;

use engine::{EngineConfig, ModelSource};
use serde_json::Value;

use super::EngineArgs;
use crate::error::CliError;
use crate::log::note;
use crate::values::Weights;

/// Checks `--tokenizer` and the method of `--quantization`, and puts the tokenizer into the configuration.
pub fn check(args: &EngineArgs, config: &mut EngineConfig) -> Result<(), CliError> {
    let folder = match &config.model {
        ModelSource::Folder(path) => Some(path.as_path()),
        ModelSource::Demo => None,
    };
    if let Some(Weights::Stored(method)) = &args.quantization {
        let found = folder.and_then(stored);
        if found.as_deref() != Some(base(method)) {
            let found = found.map_or("weights that are not quantised".to_string(), |found| format!("{found} weights"));
            return Err(CliError::Usage(format!(
                "--quantization: found {method:?} and a checkpoint with {found}, expected the method of the checkpoint; \
                 omit the flag, or choose q8 or q4 to quantise while loading"
            )));
        }
    }
    let Some(tokenizer) = &args.tokenizer else { return Ok(()) };
    let is_gguf = folder.is_some_and(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    if Some(tokenizer) == args.model() || Some(tokenizer.as_path()) == folder {
        return Ok(());
    }
    if is_gguf {
        note("--tokenizer has no effect: a GGUF file has its own");
        return Ok(());
    }
    if !tokenizer.is_dir() {
        return Err(CliError::Usage(format!(
            "--tokenizer: found {}, expected a folder with tokenizer.json, or the model itself; omit the flag to use the \
             tokenizer of the checkpoint",
            tokenizer.display()
        )));
    }
    config.tokenizer = Some(tokenizer.clone());
    Ok(())
}

/// The name of a method without what says which kernels of vLLM compute it.
fn base(method: &str) -> &str {
    method.trim_end_matches("_marlin").trim_end_matches("_triton")
}

/// How the weights of a checkpoint are quantised; `None` if they are not. A file that cannot be read is reported where it is loaded.
fn stored(model: &Path) -> Option<String> {
    if model.extension().is_some_and(|extension| extension == "gguf") {
        return Some("gguf".to_string());
    }
    let text = std::fs::read_to_string(model.join("config.json")).ok()?;
    let config: Value = serde_json::from_str(&text).ok()?;
    let settings = ["quantization_config", "compression_config"].iter().find_map(|key| config[key].as_object())?;
    let method = settings.get("quant_method").and_then(Value::as_str);
    Some(base(method.unwrap_or("modelopt")).to_string())
}
