//! `--record FILE`, and `quire replay FILE`, which repeats the steps of a recorded run with a worker alone.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use engine::{ModelSource, Recording};

use super::args::CommonArgs;
use super::error::CliError;
use super::log::LogArgs;
use super::model::{self, HubArgs};

#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct RecordArgs {
    /// Record every step in this file for `quire replay`; it contains all prompts and answers
    ///
    /// The file must not exist yet, and only its owner can read it. It has the input and output of the worker in every
    /// step: [`quire replay`](#quire-replay) computes the steps again. It grows by about 40 bytes per sampled token and 10
    /// bytes per prompt token. If writing fails, the error is logged and serving continues.
    #[arg(long, value_name = "FILE", env = "QUIRE_RECORD")]
    pub record: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// File written by --record
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Print every step and its outcome without computing it
    #[arg(long)]
    pub print: bool,
    /// Model, if it is not at the recorded place: a folder, a .gguf file or a hub id
    #[arg(long, value_name = "MODEL", env = "QUIRE_MODEL")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub hub: HubArgs,
    /// Flags that are not given are as recorded.
    #[command(flatten)]
    pub common: CommonArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

pub fn run(args: &ReplayArgs) -> Result<(), CliError> {
    let mut recording = Recording::open(&args.file).map_err(CliError::failed)?;
    let mut out = io::stdout().lock();
    if args.print {
        let mut written = Ok(());
        recording
            .read(|entry| written = std::mem::replace(&mut written, Ok(())).and_then(|()| writeln!(out, "{entry}")))
            .map_err(CliError::failed)?;
        return Ok(written?);
    }
    let config = &mut recording.config;
    if let Some(model) = &args.model {
        config.model = ModelSource::Folder(model::locate(model, &args.hub)?);
    }
    if let Some(device) = &args.common.device {
        config.device.clone_from(device);
    }
    config.kernels_dir = args.common.kernels_dir.clone().or(config.kernels_dir.take());
    config.threads = args.common.threads.or(config.threads);
    let replayed = recording.replay(&|_, _| {}, |_| {}).map_err(CliError::failed)?;
    let equal = format!("{} steps, {} tokens drawn", replayed.steps, replayed.tokens);
    if let Some(difference) = replayed.difference {
        let path = args.file.display();
        return Err(CliError::Failed(format!("{path}: {difference}; equal up to there: {equal}")));
    }
    writeln!(out, "{equal}: every output is equal to the recording, bit for bit")?;
    for (step, collected) in replayed.unrecorded {
        let outcome = collected.map_or_else(|error| format!("failed: {error}"), |()| "was computed".to_string());
        writeln!(out, "{step}, which the recorded program did not finish, {outcome}")?;
    }
    Ok(())
}
