//! `quire bench lora`: prompts and decode steps of a batch whose sequences have LoRA adapters, beside the same batch without.
//!
//! The adapters have random numbers in bfloat16 for every module that adapters may target. Three batches are timed: of an engine without
//! `--enable-lora`, and of one with it, without and with adapters.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use engine::{EngineConfig, LoraConfig};
use serde_json::{Value, json};

use super::batch::{Batch, Bench};
use super::write_figures;
use crate::args::EngineArgs;
use crate::error::CliError;
use crate::values;
use ::bench::random::Random;
use ::bench::results::Results;

#[derive(Debug, Args)]
pub struct LoraArgs {
    /// Number of sequences
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = values::positive)]
    pub batch_size: usize,
    /// Number of different adapters, which the sequences take in turn
    ///
    /// They have random numbers in bfloat16 for every module.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = values::positive)]
    pub num_adapters: usize,
    /// Rank of each adapter
    #[arg(long, value_name = "RANK", default_value_t = 16, value_parser = values::positive)]
    pub rank: usize,
    /// Tokens per prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = values::positive)]
    pub input_len: usize,
    /// Number of steps to time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = values::positive)]
    pub steps: usize,
    /// Write the figures to this file as JSON; - writes only them, to standard output
    #[arg(long, value_name = "FILE")]
    pub output_json: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// A module of the model: name, inputs, outputs.
type Module = (String, usize, usize);

pub fn run(args: LoraArgs, mut config: EngineConfig) -> Result<(), CliError> {
    let results = Results::open("--output-json", args.output_json.as_deref())?;
    // No step mixes prompts and decodes, because they are timed separately.
    config.itl_target = None;
    args.engine.fetch(&mut config)?;
    let prompts = Batch { prompts: args.batch_size, input_len: args.input_len, output_len: 1 };
    let time = |bench: &mut Bench| -> Result<[f64; 2], CliError> {
        let prompts = bench.run(&prompts)?.all;
        let steps = bench.decode(args.batch_size, args.input_len, args.steps)?;
        Ok([prompts.seconds, steps.seconds / steps.work.steps.max(1) as f64])
    };
    let disabled = time(&mut Bench::start(&EngineConfig { lora: None, ..config.clone() })?)?;
    let lora = LoraConfig { max_loras: args.num_adapters, max_lora_rank: args.rank, max_cpu_loras: None };
    let mut bench = Bench::start(&EngineConfig { lora: Some(lora), ..config.clone() })?;
    let none = time(&mut bench)?;
    let folder = Folder::new()?;
    let modules = modules(&config)?;
    for number in 0..args.num_adapters {
        let (name, path) = (number.to_string(), folder.0.join(number.to_string()));
        write(&path, &modules, args.rank, number as u64)?;
        let loaded = bench.engine.load_adapter(&name, &path, false);
        loaded.map_err(|error| CliError::Failed(error.to_string()))?;
        bench.adapters.push(name);
    }
    let bytes: usize = bench.engine.adapters().iter().map(|adapter| adapter.bytes).sum();
    let with = time(&mut bench)?;
    // Every adapter multiplies each number of its factors with each of its rows.
    let numbers: usize = modules.iter().map(|(_, inputs, outputs)| args.rank * (inputs + outputs)).sum();
    let operations = 2 * numbers * args.batch_size;
    let of_phase = |phase: usize| {
        let [disabled, none, with] = [disabled, none, with].map(|seconds| seconds[phase]);
        json!({ "disabled": disabled, "none": none, "adapters": with, "slower": with / disabled - 1.0 })
    };
    let figures = json!({
        "batch_size": args.batch_size, "num_adapters": args.num_adapters, "rank": args.rank,
        "seconds_of_prompts": of_phase(0), "seconds_per_step": of_phase(1),
        "adapter_bytes": bytes, "adapter_operations_per_step": operations,
    });
    if write_figures(results, &figures)? {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    let with_adapters = format!("{} adapters of rank {}", args.num_adapters, args.rank);
    let lines = [("without --enable-lora", disabled), ("no sequence has an adapter", none), (&*with_adapters, with)];
    for (what, [prompts, step]) in lines {
        let slower = [prompts / disabled[0], step / disabled[1]].map(|times| 100.0 * (times - 1.0));
        writeln!(
            out,
            "{what:<28}{:10.3} ms for the prompts ({:+.1} %){:10.3} ms per step ({:+.1} %)",
            prompts * 1e3,
            slower[0],
            step * 1e3,
            slower[1]
        )?;
    }
    let (bytes, operations) = (bytes as f64 / 1e6, operations as f64 / 1e6);
    Ok(writeln!(
        out,
        "a step reads {bytes:.1} MB of adapters and computes {operations:.1} million operations with them"
    )?)
}

/// The modules that adapters may target.
fn modules(config: &EngineConfig) -> Result<Vec<Module>, CliError> {
    let decoder = engine::declare(config)?.decoder;
    let mut modules: Vec<Module> = Vec::new();
    for linear in decoder.linears().filter(|linear| linear.adapters) {
        for part in &linear.parts {
            let inputs = part.pick.inputs.map_or(linear.inputs, |(_, all)| all);
            let module = (part.name.clone(), inputs, part.pick.total);
            if part.pick.matrix.is_none() && !modules.contains(&module) {
                modules.push(module);
            }
        }
    }
    Ok(modules)
}

/// Writes an adapter of random numbers in bfloat16.
fn write(folder: &Path, modules: &[Module], rank: usize, seed: u64) -> Result<(), CliError> {
    let (mut random, mut header, mut data) = (Random::new(seed), serde_json::Map::new(), Vec::new());
    for (name, inputs, outputs) in modules {
        for (factor, shape) in [("lora_A", [rank, *inputs]), ("lora_B", [*outputs, rank])] {
            let start = data.len();
            // From ±2^-7 to ±2^-6: small against the results of the model.
            let number = |bits: u64| 0x3c00 | (bits & 0x807f) as u16;
            data.extend((0..shape[0] * shape[1]).flat_map(|_| number(random.next()).to_le_bytes()));
            let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, data.len()]});
            header.insert(format!("base_model.model.{name}.{factor}.weight"), entry);
        }
    }
    let names: Vec<&String> = modules.iter().map(|(name, ..)| name).collect();
    let config = json!({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names});
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::create_dir_all(folder)?;
    fs::write(folder.join("adapter_config.json"), config.to_string())?;
    Ok(fs::write(folder.join("adapter_model.safetensors"), file)?)
}

/// A temporary folder, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Folder, CliError> {
        let folder = std::env::temp_dir().join(format!("quire-bench-lora-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        Ok(Folder(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left over is small, and the system cleans its temporary folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}
