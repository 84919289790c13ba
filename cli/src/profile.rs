//! `--profile FILE`: a table at the end, and a trace in the file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use engine::kernels::Peaks;
use engine::profile::{Best, table, trace};
use engine::{EngineConfig, Profile};

use super::args::CommonArgs;
use super::error::CliError;
use super::log::note;

#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct ProfileArgs {
    /// Time every operation and phase: print a table at the end, and write a trace for chrome://tracing or Perfetto to
    /// this file
    ///
    /// [How to read it](profile.md). Each step waits for the device and no CUDA graphs are used; the trace holds the last
    /// 262144 spans, the table, which is printed to standard error, covers all steps.
    #[arg(long, value_name = "FILE", env = "QUIRE_PROFILE")]
    pub profile: Option<PathBuf>,
}

pub struct Profiling {
    profile: Arc<Profile>,
    path: PathBuf,
    file: File,
    best: Best,
}

impl ProfileArgs {
    /// If the flag is given, opens the file, measures the device and enables recording in the engine.
    pub fn start(&self, common: &CommonArgs, config: &mut EngineConfig) -> Result<Option<Profiling>, CliError> {
        let Some(path) = self.profile.clone() else { return Ok(None) };
        let file = File::create(&path).map_err(|error| failed(&path, &error))?;
        // Measure before the engine takes the memory.
        let peaks = Peaks::measure(&*common.open()?).map_err(CliError::failed)?;
        let best = Best::of(&peaks, config.quantization.is_some());
        let profile = Arc::new(Profile::default());
        config.profile = Some(profile.clone());
        note("profile: every step waits for the device, and CUDA graphs are disabled");
        Ok(Some(Profiling { profile, path, file, best }))
    }
}

impl Profiling {
    /// Prints the table and writes the trace, if any step has run.
    pub fn finish(self) -> Result<(), CliError> {
        let recorded = self.profile.recorded();
        if recorded.steps == 0 {
            return Ok(());
        }
        note(table(&recorded, &self.best));
        let mut out = BufWriter::new(self.file);
        trace(&recorded, &mut out).and_then(|()| out.flush()).map_err(|error| failed(&self.path, &error))?;
        let (steps, kept) = (recorded.steps, recorded.kept_steps);
        let which = if kept < steps { format!("the last {kept} of {steps} steps") } else { format!("{steps} steps") };
        note(format_args!(
            "profile: {} contains {which}; open it in chrome://tracing or Perfetto",
            self.path.display()
        ));
        Ok(())
    }
}

fn failed(path: &Path, error: &io::Error) -> CliError {
    let message = format!("{error}; expected a file that can be written");
    CliError::File { flag: "--profile", path: path.to_owned(), message }
}
