//! `quire bench roofline`: the peak rates with which figures are compared.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use engine::kernels::Peaks;
use serde_json::{Value, json};

use crate::args::CommonArgs;
use crate::error::CliError;
use crate::values;
use ::bench::results::Results;

#[derive(Debug, Args)]
pub struct RooflineArgs {
    /// Write all figures to this file as JSON
    #[arg(long, value_name = "FILE", value_parser = values::file)]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub common: CommonArgs,
}

pub fn run(args: RooflineArgs) -> Result<(), CliError> {
    let results = Results::open("--json", args.json.as_deref())?;
    let device = args.common.open()?;
    let peaks = Peaks::measure(&*device).map_err(CliError::failed)?;
    let memory = device.memory();
    let mut out = io::stdout().lock();
    writeln!(out, "device: {}, {}", device.name(), device.description())?;
    writeln!(out, "memory: {:.1} GiB, {:.1} free", gib(memory.total), gib(memory.available))?;
    writeln!(out, "host threads: {}", device.pool().threads())?;
    writeln!(out, "peaks: {peaks}")?;
    if let Some(mut results) = results {
        results.value(&json!({
            "quire": env!("CARGO_PKG_VERSION"),
            "device": device.name(),
            "description": device.description(),
            "memory_bytes": memory.total,
            "threads": device.pool().threads(),
            "peaks": record(&peaks),
        }))?;
    }
    Ok(())
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// The peaks as JSON; null for those that were not measured.
pub fn record(peaks: &Peaks) -> Value {
    json!({
        "read_bytes_per_second": peaks.read,
        "copy_bytes_per_second": peaks.copy,
        "f32_operations_per_second": peaks.f32,
        "int8_operations_per_second": peaks.int8,
        "bf16_operations_per_second": peaks.halves,
    })
}
