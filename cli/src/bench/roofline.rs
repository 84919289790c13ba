//! `quire bench roofline`: the peaks that figures are compared with.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use engine::kernels::Peaks;
use serde_json::{Value, json};

use crate::args::CommonArgs;
use crate::error::CliError;
use crate::values;
use ::bench::results::Results;

/// `quire bench roofline`.
#[derive(Debug, Args)]
pub struct RooflineArgs {
    /// Write everything to this file
    #[arg(long, value_name = "FILE", value_parser = values::file)]
    pub json: Option<PathBuf>,
    /// Where.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// Measures and prints.
pub fn run(args: RooflineArgs) -> Result<(), CliError> {
    let results = Results::open("--json", args.json.as_deref())?;
    let device = args.common.open()?;
    let peaks = Peaks::measure(&*device).map_err(CliError::bench)?;
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

/// As JSON; what was not measured is null.
pub fn record(peaks: &Peaks) -> Value {
    json!({
        "read_bytes_per_second": peaks.read,
        "copy_bytes_per_second": peaks.copy,
        "f32_operations_per_second": peaks.f32,
        "int8_operations_per_second": peaks.int8,
        "tensor_operations_per_second": peaks.tensor,
    })
}
