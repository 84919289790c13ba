//! A recording, read and computed again.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use sched::{SeqId, StepId};

use super::load::{Progress, Started, start};
use super::open::open;
use crate::api::EngineConfig;
use crate::error::EngineError;
use crate::worker::record::{Entry, MAGIC, MAX_ENTRY, Start};
use crate::worker::{Draw, StepError, StepInput, StepOutput, Worker};

/// Why a recording can not be replayed. Displays as one line.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// It can not be read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: String,
        /// Why.
        error: io::Error,
    },
    /// It is no recording, or damaged.
    #[error("{path}: found {found}, expected {expected}")]
    Damaged {
        /// The file.
        path: String,
        /// What was found, and where.
        found: String,
        /// What would be right, and what to do.
        expected: String,
    },
    /// The worker could not be started.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// A file that [`EngineConfig::record`] has made.
pub struct Recording {
    /// How the worker was made. The model's folder, the kernels' folder and the number of threads may be changed before
    /// [`Recording::replay`]; the device too, for one that computes the same.
    pub config: EngineConfig,
    fingerprint: u64,
    version: String,
    path: String,
    file: BufReader<File>,
    /// Bytes of it that were read.
    at: u64,
}

/// How a replay went.
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// Steps with work whose outputs are equal.
    pub steps: u64,
    /// Tokens that were drawn in them.
    pub tokens: u64,
    /// Where the replay is not equal, if it is not: it ended there.
    pub difference: Option<String>,
    /// Steps at the end whose outputs are not in the file, since the program ended in them, and what came of them here.
    pub unrecorded: Vec<(StepId, Result<(), StepError>)>,
}

impl Recording {
    /// Opens a recording and reads how it was made.
    ///
    /// # Errors
    /// The file can not be read, or is no recording of this version.
    pub fn open(path: &Path) -> Result<Recording, RecordingError> {
        let name = path.display().to_string();
        let io = |error| RecordingError::Io { path: name.clone(), error };
        let mut file = BufReader::new(File::open(path).map_err(io)?);
        let mut magic = Vec::new();
        file.by_ref().take(MAGIC.len() as u64).read_to_end(&mut magic).map_err(io)?;
        if magic != MAGIC {
            let (found, expected) =
                ("another beginning".to_string(), "a recording (serve --record FILE makes one)".to_string());
            return Err(RecordingError::Damaged { path: name, found, expected });
        }
        let at = MAGIC.len() as u64;
        let (config, fingerprint, version) = (EngineConfig::default(), 0, String::new());
        let mut recording = Recording { config, fingerprint, version, path: name, file, at };
        let Some(Entry::Start(start)) = recording.next()? else {
            return Err(recording.damaged("no configuration"));
        };
        let Start { version, config, fingerprint } = *start;
        Ok(Recording { config, fingerprint, version, ..recording })
    }

    /// Computes every step again by a worker alone, and compares. `watch` sees each step before it is computed.
    ///
    /// # Errors
    /// The file is damaged, the checkpoint is another, or the worker can not be started. A step that comes out otherwise is no
    /// error but [`Replayed::difference`].
    pub fn replay(
        mut self,
        progress: Progress<'_>,
        mut watch: impl FnMut(&StepInput),
    ) -> Result<Replayed, RecordingError> {
        let opened = open(&self.config)?;
        if opened.fingerprint() != self.fingerprint {
            let expected = "the checkpoint that was recorded; name its folder with --model".to_string();
            let found = format!("another checkpoint in {}", opened.files.name());
            return Err(RecordingError::Damaged { path: self.path, found, expected });
        }
        let Started { mut worker, info, plan, .. } = start(&self.config, &opened, progress)?;
        let bounds = Bounds {
            max_num_seqs: plan.max_num_seqs,
            max_model_len: plan.max_model_len,
            vocab_size: info.vocab_size,
            table: plan.max_model_len.div_ceil(plan.block_size),
            groups: plan.groups,
        };
        let mut replayed = Replayed { steps: 0, tokens: 0, difference: None, unrecorded: Vec::new() };
        let (mut output, mut in_flight) = (StepOutput::default(), VecDeque::new());
        while let Some(entry) = self.next()? {
            match entry {
                Entry::Start(_) => return Err(self.damaged("a second configuration")),
                Entry::Input(input) => {
                    if in_flight.len() >= info.max_in_flight {
                        let most = info.max_in_flight;
                        return Err(
                            self.damaged(&format!("more steps in flight than {most}, which is what this device takes"))
                        );
                    }
                    bounds.check(&input).map_err(|found| self.damaged(&format!("{}: {found}", input.plan.step)))?;
                    watch(&input);
                    in_flight.push_back((input.plan.step, !input.plan.spans.is_empty()));
                    worker.submit(Arc::new(input));
                }
                Entry::Output(recorded) => {
                    let Some((step, computes)) = in_flight.pop_front() else {
                        return Err(self.damaged("an output of no step"));
                    };
                    let found = worker.collect(&mut output);
                    let found = found.as_ref().map(|()| &output);
                    if let Some(difference) = difference(found, recorded.as_ref()) {
                        replayed.difference = Some(format!("{step}: {difference}"));
                        return Ok(replayed);
                    }
                    if found.is_err() {
                        in_flight.clear();
                    }
                    replayed.steps += u64::from(computes);
                    replayed.tokens += output.drawn.len() as u64;
                }
            }
        }
        for (step, _) in in_flight {
            let collected = worker.collect(&mut output);
            let failed = collected.is_err();
            replayed.unrecorded.push((step, collected));
            if failed {
                break;
            }
        }
        Ok(replayed)
    }

    /// Reads every step, and computes none. `watch` sees each with what was recorded of it.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn read(mut self, mut watch: impl FnMut(&dyn fmt::Display)) -> Result<(), RecordingError> {
        while let Some(entry) = self.next()? {
            match entry {
                Entry::Start(_) => return Err(self.damaged("a second configuration")),
                Entry::Input(input) => watch(&input.plan),
                Entry::Output(Ok(output)) => watch(&output),
                Entry::Output(Err(error)) => watch(&format_args!("failed: {error}")),
            }
        }
        Ok(())
    }

    /// The next entry; `None` at the end. The last may be cut: the program ended while it was written.
    fn next(&mut self) -> Result<Option<Entry>, RecordingError> {
        let io = |error| RecordingError::Io { path: self.path.clone(), error };
        let mut bytes = Vec::new();
        self.file.by_ref().take(4).read_to_end(&mut bytes).map_err(io)?;
        let Ok(length) = <[u8; 4]>::try_from(&bytes[..]) else { return Ok(None) };
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_ENTRY {
            return Err(self.damaged(&format!("an entry of {length} bytes")));
        }
        bytes.clear();
        self.file.by_ref().take(length as u64).read_to_end(&mut bytes).map_err(io)?;
        if bytes.len() < length {
            return Ok(None);
        }
        let entry =
            postcard::from_bytes(&bytes).map_err(|error| self.damaged(&format!("an entry that is none ({error})")))?;
        self.at += 4 + length as u64;
        Ok(Some(entry))
    }

    fn damaged(&self, found: &str) -> RecordingError {
        let version = match self.version.as_str() {
            "" => String::new(),
            version => format!(" of version {version}"),
        };
        let expected = format!("a recording{version} as it was written");
        RecordingError::Damaged { path: self.path.clone(), found: format!("{found} at byte {}", self.at), expected }
    }
}

/// What a step from a file is held to, so that it costs what a scheduler's steps cost. Blocks, slots and token ids are checked by the
/// kernels.
struct Bounds {
    max_num_seqs: usize,
    max_model_len: usize,
    vocab_size: usize,
    /// Entries of a block table.
    table: usize,
    groups: usize,
}

impl Bounds {
    /// What is out of bounds, if anything is.
    fn check(&self, input: &StepInput) -> Result<(), String> {
        let at_most = |what: &str, found: usize, most: usize| match found <= most {
            true => Ok(()),
            false => Err(format!("{found} {what}, where {most} may be")),
        };
        at_most("spans", input.plan.spans.len(), self.max_num_seqs)?;
        at_most("draws", input.draws.len(), input.plan.spans.len())?;
        for request in &input.requests {
            at_most("sequences of a request", request.sequences as usize, self.max_num_seqs)?;
            at_most("tokens of a prompt", request.prompt.len(), self.max_model_len)?;
            at_most("alternatives of a prompt's token", request.prompt_logprobs.unwrap_or(0), self.vocab_size)?;
            request.sampling.validate().map_err(|error| error.message)?;
        }
        for span in &input.plan.spans {
            let tokens = span.tokens.len();
            at_most("tokens of a sequence", span.start.saturating_add(tokens), self.max_model_len)?;
            let shapes = span.groups.iter().map(|group| group.slots.len());
            if tokens == 0 || !shapes.eq(std::iter::repeat_n(tokens, self.groups)) {
                return Err(format!("a span of {tokens} tokens in {} groups with other slots", span.groups.len()));
            }
            for group in &span.groups {
                at_most("entries of a block table", group.table.holes.max(group.table.append.len()), self.table)?;
            }
        }
        let counts = input.draws.iter().map(|draw| if let Draw::Likeliest { count, .. } = draw { *count } else { 0 });
        at_most("likeliest tokens", counts.max().unwrap_or(0), self.vocab_size)
    }
}

/// The first thing in which a step came out otherwise than recorded.
fn difference(found: Result<&StepOutput, &StepError>, recorded: Result<&StepOutput, &StepError>) -> Option<String> {
    let (found, recorded) = match (found, recorded) {
        (Ok(found), Ok(recorded)) => (found, recorded),
        (Err(found), Err(recorded)) => {
            return (found != recorded).then(|| format!("it failed with {found:?}, recorded is {recorded:?}"));
        }
        (Err(found), Ok(_)) => return Some(format!("it failed: {found}; recorded is a result")),
        (Ok(_), Err(recorded)) => return Some(format!("it has a result; recorded is a failure: {recorded}")),
    };
    // As bits: a NaN equals itself, and 0 is not −0.
    let bytes = |output: &StepOutput| postcard::to_stdvec(output).unwrap_or_default();
    if bytes(found) == bytes(recorded) {
        return None;
    }
    let what = |seq: &SeqId, what: &str| format!("{what} of {seq}");
    let tokens = found.drawn.iter().zip(&recorded.drawn).find(|(found, recorded)| found != recorded);
    Some(match tokens {
        Some(((a, found), (b, recorded))) if a != b || found.token != recorded.token => {
            format!("token {} for {a}; recorded is token {} for {b}", found.token, recorded.token)
        }
        Some(((seq, _), _)) => what(seq, "another log-probability"),
        None if found.drawn.len() != recorded.drawn.len() => {
            format!("{} tokens; recorded are {}", found.drawn.len(), recorded.drawn.len())
        }
        None if found.likeliest != recorded.likeliest => match found.likeliest.first() {
            Some((seq, _)) => what(seq, "other candidates of beams, among them those"),
            None => "no candidates of beams".to_string(),
        },
        None if found.embeddings != recorded.embeddings => "another embedding".to_string(),
        None => "other log-probabilities of a prompt".to_string(),
    })
}
