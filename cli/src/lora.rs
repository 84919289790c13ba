//! LoRA adapters that `quire serve` loads at its start.

use engine::AsyncEngine;

use super::command::ServeArgs;
use super::error::CliError;
use super::note;
use super::values::LoraModule;

/// Loads the adapters of `--lora-modules`.
pub async fn load(engine: &AsyncEngine, args: &ServeArgs) -> Result<(), CliError> {
    let base = match args.options.served_model_names.as_slice() {
        [] => std::slice::from_ref(&engine.info().name),
        names => names,
    };
    for LoraModule { name, path } in &args.lora_modules {
        let failed = |problem: String| CliError::Failed(format!("--lora-modules {name}: {problem}"));
        if base.contains(name) {
            return Err(failed("found the name of the base model; expected another".to_string()));
        }
        engine.load_adapter(name, path.clone(), false).await.map_err(|error| failed(error.to_string()))?;
    }
    for adapter in engine.adapters() {
        note(format_args!(
            "  adapter {}: rank {}, {} KiB",
            adapter.name,
            adapter.rank,
            adapter.bytes.div_ceil(1 << 10)
        ));
    }
    Ok(())
}
