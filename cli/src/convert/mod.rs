//! `quire convert`: quantises the weights of a checkpoint once.

mod calibrate;
mod checkpoint;
mod tests;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use engine::{EngineConfig, ModelSource};

use super::error::CliError;
use super::progress;
use super::values;
use checkpoint::{ConvertOptions, Converted, convert};

/// How weights are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Method {
    /// 8-bit integers
    Q8,
    /// 4-bit integers, each weight rounded to the nearest
    Q4,
    /// 4-bit integers by GPTQ, which keeps the outputs for a text close to those of the original
    Gptq4,
}

#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Checkpoint folder in Hugging Face layout
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// Folder to write, which must not exist
    #[arg(value_name = "DST")]
    destination: PathBuf,
    /// Form of the weights
    ///
    /// `q8` and `q4` are 8- or 4-bit integers, each weight rounded to the nearest; `gptq4` is 4-bit integers by GPTQ.
    #[arg(long)]
    quantization: Method,
    /// Weights of a row that share a scale: a multiple of 32 [default: 32, gptq4: 128]
    #[arg(long, value_parser = values::whole::<usize>)]
    group_size: Option<usize>,
    /// Text file for gptq4 [default: pages of Quire's documentation]
    ///
    /// At most 65536 tokens are read.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Number of threads [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
}

pub fn run(args: &ConvertArgs) -> Result<(), CliError> {
    let method = args.quantization;
    let group_size = args.group_size.unwrap_or(if method == Method::Gptq4 { 128 } else { 32 });
    if group_size == 0 || !group_size.is_multiple_of(32) {
        return Err(CliError::Usage(format!("--group-size: found {group_size}, expected a multiple of 32")));
    }
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path).map_err(|error| CliError::File {
            flag: "--calibration",
            path: path.clone(),
            message: error.to_string(),
        })
    };
    let calibration = args.calibration.as_ref().map(read).transpose()?;
    let config = EngineConfig {
        model: ModelSource::Folder(args.source.clone()),
        device: "cpu".to_string(),
        threads: args.threads,
        ..EngineConfig::default()
    };
    let bar = progress::progress_bar(0, "converting {bar:32} {binary_bytes}/{binary_total_bytes}");
    let report =
        convert(&config, &args.destination, &ConvertOptions { method, group_size, calibration }, &|done, total| {
            bar.set_length(total);
            bar.set_position(done);
        })?;
    bar.finish_and_clear();
    print(&report);
    Ok(())
}

/// Prints a line for each module.
fn print(report: &[Converted]) {
    let width = report.iter().map(|it| it.module.len()).max().unwrap_or(0);
    println!("{:width$}  {:>15}  {:>13}  {:>13}", "module", "shape", "weight error", "output error");
    for Converted { module, outputs, inputs, weight_error, output_error } in report {
        let percent = |error: Option<f64>| error.map_or("–".to_string(), |error| format!("{:.2} %", error * 100.0));
        let weights = weight_error.map_or("as it was".to_string(), |error| percent(Some(error)));
        let shape = format!("{outputs} x {inputs}");
        println!("{module:width$}  {shape:>15}  {weights:>13}  {:>13}", percent(*output_error));
    }
}
