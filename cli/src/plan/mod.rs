//! `quire plan`: the memory that a model needs and how much fits, or the layers of its checkpoint. `quire kernels`: the table of kernels.

pub mod speed;

use std::io::{self, Write};

use engine::EngineConfig;
use serde_json::json;

use super::command::{KernelsArgs, PlanArgs};
use super::error::CliError;
use super::model::{Folders, outline};
use speed::Speed;

pub fn run(args: &PlanArgs, mut config: EngineConfig) -> Result<(), CliError> {
    let (mut folders, mut is_outline) = (Folders::default(), false);
    args.engine.fetch_by(&mut config, &mut |model, hub| {
        let path = outline(model, hub, &mut folders)?;
        is_outline |= path != model;
        Ok(path)
    })?;
    let mut out = io::stdout();
    if args.decoder {
        let declared = engine::declare(&config)?;
        match args.json {
            true => writeln!(out, "{}", json!(declared))?,
            false => {
                writeln!(out, "{}: {}", declared.architecture, declared.decoder)?;
                if let Some(predictor) = declared.predictor {
                    writeln!(out, "predictor of a further token: {predictor}")?;
                }
            }
        }
        return Ok(());
    }
    let on = args.card.map(|card| Ok::<_, CliError>((card, card.plan(&config)?))).transpose()?;
    let (plan, on) = match on {
        Some((card, (plan, roofline))) => (plan, Some((card, roofline))),
        None => (engine::plan(&config)?, None),
    };
    let wanted = args.speed || is_outline || on.is_some();
    let speed = wanted.then(|| Speed::of(&config, &plan, on.as_ref())).transpose()?;
    if !args.json {
        writeln!(out, "{plan}")?;
        return Ok(speed.map_or(Ok(()), |speed| write!(out, "{speed}"))?);
    }
    let mut plan = json!({
        "model": plan.model,
        "weight_bytes": plan.weight_bytes,
        "draft_weight_bytes": plan.draft.map(|(weights, _)| weights),
        "adapter_bytes": plan.adapter_bytes,
        "quantization": plan.quantization.map(|it| it.to_string()),
        "stored": plan.stored,
        "dtype": plan.dtype.map(|it| it.to_string()),
        "kv_scale_bytes": plan.kv_scale_bytes,
        "step_bytes": plan.step_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_cache_dtype": plan.kv_cache_dtype.to_string(),
        "block_size": plan.block_size,
        "state_bytes": plan.state_bytes,
        "groups": plan.groups,
        "num_blocks": plan.num_blocks,
        "host_blocks": plan.host_blocks,
        "max_model_len": plan.max_model_len,
        "limited_by_pool": plan.limited_by_pool,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.step_limits.max_rows,
        "reason": plan.reason,
    });
    if let Some(speed) = speed {
        plan["speed"] = speed.to_json();
    }
    Ok(writeln!(out, "{plan}")?)
}

pub fn kernels(args: &KernelsArgs, mut config: EngineConfig) -> Result<(), CliError> {
    args.engine.fetch(&mut config)?;
    let table = engine::describe_kernels(&config)?;
    let text = match (args.json, args.verbose) {
        (true, _) => json!(table).to_string(),
        (false, true) => table.verbose(),
        (false, false) => table.to_string(),
    };
    Ok(writeln!(io::stdout(), "{text}")?)
}
