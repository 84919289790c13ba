//! Recordings of a worker's inputs and outputs, which a worker alone can replay: a complete report of a bug.
//!
//! A [`Recording`](crate::Recording) starts with the configuration, followed by the worker's inputs and outputs in the order of
//! the calls. It contains every prompt and every token. An input is written before it is computed, so the last input in the
//! file of a crashed process is the step that it crashed in. Scheduling, grammars and clients take no part in a replay: equal
//! inputs must give equal outputs, to the bit.
//!
//! ```text
//! "quire recording 4\n" | length, Start | length, Input | length, Input | length, Output | length, Input | …
//! ```
//!
//! A length is 4 bytes, little-endian; an entry is in [postcard](https://postcard.jamesmunns.com)'s format.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::profile::Step;
use models::lora::AdapterRef;
use serde::{Deserialize, Serialize};

use super::{StepError, StepInput, StepOutput, Worker};
use crate::api::EngineConfig;
use crate::error::EngineError;
use crate::speculate::ProposeError;

pub(crate) const MAGIC: &[u8] = b"quire recording 4\n";
/// Greatest size of an entry in bytes: about ten million new tokens in one step.
pub(crate) const MAX_ENTRY: usize = 64 << 20;

/// An entry of a recording, with references when it is written.
#[derive(Deserialize, Serialize)]
pub(crate) enum Entry<Begin = Box<Start>, Input = StepInput, Output = Result<StepOutput, StepError>> {
    Start(Begin),
    Input(Input),
    Output(Output),
}

type EntryRef<'a> = Entry<&'a Start, &'a StepInput, Result<&'a StepOutput, &'a StepError>>;

/// How the worker was started.
#[derive(Serialize, Deserialize)]
pub(crate) struct Start {
    /// Version of the program that wrote the recording.
    pub version: String,
    pub config: EngineConfig,
    /// Fingerprint of the checkpoint.
    pub fingerprint: u64,
}

/// A worker that records the inputs and outputs of another.
pub(crate) struct Recorder {
    worker: Box<dyn Worker>,
    path: PathBuf,
    /// `None` after a failed write.
    file: Option<File>,
    buffer: Vec<u8>,
}

impl Recorder {
    /// Creates the file. `config` is the worker's configuration with all automatic choices resolved.
    ///
    /// # Errors
    /// The file exists already, or cannot be written.
    pub fn new(
        worker: Box<dyn Worker>,
        path: &Path,
        config: &EngineConfig,
        fingerprint: u64,
    ) -> Result<Recorder, EngineError> {
        let refused = |error: io::Error| EngineError::Config {
            flag: "--record",
            found: format!("{} ({error})", path.display()),
            expected: "a file that does not exist yet, in a folder that can be written".to_string(),
        };
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(path).map_err(refused)?;
        file.write_all(MAGIC).map_err(refused)?;
        let mut recorder = Recorder { worker, path: path.to_path_buf(), file: Some(file), buffer: Vec::new() };
        let start = Start { version: env!("CARGO_PKG_VERSION").to_string(), config: config.clone(), fingerprint };
        recorder.try_write(&EntryRef::Start(&start)).map_err(refused)?;
        Ok(recorder)
    }

    /// Writes an entry. If that fails, the recording ends and serving continues.
    fn write(&mut self, entry: &EntryRef<'_>) {
        if let Err(error) = self.try_write(entry) {
            tracing::error!("--record {}: {error}; the recording ends here, serving continues", self.path.display());
            self.file = None;
        }
    }

    fn try_write(&mut self, entry: &EntryRef<'_>) -> io::Result<()> {
        let Recorder { file: Some(file), buffer, .. } = self else { return Ok(()) };
        buffer.clear();
        buffer.extend([0; 4]);
        *buffer = postcard::to_extend(entry, std::mem::take(buffer)).map_err(io::Error::other)?;
        let length = buffer.len() - 4;
        if length > MAX_ENTRY {
            return Err(io::Error::other(format!("a step of {length} bytes, expected at most {MAX_ENTRY}")));
        }
        buffer[..4].copy_from_slice(&(length as u32).to_le_bytes());
        // Written with one call and without a buffer, so that the entry survives a crash of the process.
        file.write_all(buffer)
    }
}

impl Worker for Recorder {
    /// Not recorded: the input has the drafts.
    fn draft(&mut self, input: &StepInput) -> Result<Vec<u32>, ProposeError> {
        self.worker.draft(input)
    }

    fn submit(&mut self, input: Arc<StepInput>) {
        self.write(&EntryRef::Input(&input));
        self.worker.submit(input);
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        let collected = self.worker.collect(output);
        self.write(&EntryRef::Output(collected.as_ref().map(|()| &*output)));
        collected
    }

    /// Not recorded: a replay reads an adapter when a step needs it.
    fn share_adapter(&mut self, adapter: &AdapterRef, kept: &[String]) -> Result<(), String> {
        self.worker.share_adapter(adapter, kept)
    }

    fn num_sequences(&self) -> usize {
        self.worker.num_sequences()
    }

    fn probe(&mut self) {
        self.worker.probe();
    }

    fn is_lost(&self) -> bool {
        self.worker.is_lost()
    }

    fn profile_step(&self) -> Option<Step> {
        self.worker.profile_step()
    }
}

/// Writes the token of each sequence and the numbers of other results.
impl fmt::Display for StepOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "drew")?;
        self.drawn.iter().try_for_each(|(seq, sampled)| write!(f, " {seq}: {};", sampled.token))?;
        let others = [
            (self.likeliest.len(), "beams"),
            (self.prompt_logprobs.len(), "scored prompts"),
            (self.embeddings.len(), "embeddings"),
        ];
        others.iter().filter(|(count, _)| *count > 0).try_for_each(|(count, what)| write!(f, " {count} {what};"))
    }
}
