//! Reads a recording and computes it again.

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
use crate::parallel::Rank;
use crate::step::MOST_SEQUENCES;
use crate::worker::record::{Entry, MAGIC, MAX_ENTRY, Start};
use crate::worker::{Draw, StepError, StepInput, StepOutput, Worker};

/// Why a recording cannot be replayed. Displays as one line.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The file cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: String,
        /// The cause.
        error: io::Error,
    },
    /// The file is not a recording, or is damaged.
    #[error("{path}: found {found}, expected {expected}")]
    Damaged {
        /// The file.
        path: String,
        /// What was found, and where.
        found: String,
        /// What was expected, and what to do.
        expected: String,
    },
    /// The worker could not be started.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// A file written by [`EngineConfig::record`].
pub struct Recording {
    /// Configuration of the worker. Before [`Recording::replay`], the folders of the model and of the kernels and the number of
    /// threads may be changed; the device too, to one that computes the same bits.
    pub config: EngineConfig,
    fingerprint: u64,
    version: String,
    path: String,
    file: BufReader<File>,
    /// Number of bytes read.
    at: u64,
}

/// The result of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// Number of steps with work whose outputs were equal.
    pub steps: u64,
    /// Number of tokens drawn in them.
    pub tokens: u64,
    /// The first difference, at which the replay ended.
    pub difference: Option<String>,
    /// Steps at the end without outputs in the file, because the recorded process ended in them, and their results here.
    pub unrecorded: Vec<(StepId, Result<(), StepError>)>,
}

impl Recording {
    /// Opens a recording and reads its configuration.
    ///
    /// # Errors
    /// The file cannot be read, or is not a recording of this version.
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

    /// Computes every step again with a worker alone, and compares the outputs. `observe` is called with each step before it is
    /// computed.
    ///
    /// # Errors
    /// The file is damaged, the checkpoint is a different one, or the worker cannot be started. A different output is not an
    /// error; it is returned as [`Replayed::difference`].
    pub fn replay(
        mut self,
        progress: Progress<'_>,
        mut observe: impl FnMut(&StepInput),
    ) -> Result<Replayed, RecordingError> {
        let opened = open(&self.config)?;
        if opened.fingerprint() != self.fingerprint {
            let expected = "the checkpoint that was recorded; name its folder with --model".to_string();
            let found = format!("another checkpoint in {}", opened.files.name());
            return Err(RecordingError::Damaged { path: self.path, found, expected });
        }
        let report = |done, total| {
            progress(done, total);
            Ok(())
        };
        let Started { mut worker, info, plan, .. } = start(&self.config, &opened, &Rank::alone(), &report)?;
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
                    let most = info.max_in_flight;
                    if in_flight.len() >= most {
                        return Err(
                            self.damaged(&format!("more than {most} steps in flight, the limit of this device"))
                        );
                    }
                    bounds.check(&input).map_err(|found| self.damaged(&format!("{}: {found}", input.plan.step)))?;
                    observe(&input);
                    in_flight.push_back((input.plan.step, !input.plan.spans.is_empty()));
                    worker.submit(Arc::new(input));
                }
                Entry::Output(recorded) => {
                    let Some((step, computes)) = in_flight.pop_front() else {
                        return Err(self.damaged("an output without a step"));
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

    /// Reads every step without computing it. `observe` is called with the plan and the recorded output of each.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn read(mut self, mut observe: impl FnMut(&dyn fmt::Display)) -> Result<(), RecordingError> {
        while let Some(entry) = self.next()? {
            match entry {
                Entry::Start(_) => return Err(self.damaged("a second configuration")),
                Entry::Input(input) => observe(&input.plan),
                Entry::Output(Ok(output)) => observe(&output),
                Entry::Output(Err(error)) => observe(&format_args!("failed: {error}")),
            }
        }
        Ok(())
    }

    /// Reads the next entry; `None` at the end. A truncated last entry counts as the end: the process ended while writing it.
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
            postcard::from_bytes(&bytes).map_err(|error| self.damaged(&format!("an invalid entry ({error})")))?;
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

/// Limits for steps from a file, so that they cost no more than a scheduler's. Blocks, slots and token ids are checked by the kernels.
struct Bounds {
    max_num_seqs: usize,
    max_model_len: usize,
    vocab_size: usize,
    /// Greatest length of a block table.
    table: usize,
    groups: usize,
}

impl Bounds {
    /// Returns what exceeds a limit, if anything does.
    fn check(&self, input: &StepInput) -> Result<(), String> {
        let at_most = |what: &str, found: usize, most: usize| match found <= most {
            true => Ok(()),
            false => Err(format!("{found} {what}, where at most {most} are allowed")),
        };
        at_most("spans", input.plan.spans.len(), self.max_num_seqs)?;
        at_most("draws", input.draws.len(), input.plan.spans.len())?;
        for request in &input.requests {
            at_most("sequences of a request", request.sequences as usize, self.max_num_seqs)?;
            at_most("sequences before one", request.first_sequence as usize, MOST_SEQUENCES)?;
            at_most("tokens of a prompt", request.prompt.len(), self.max_model_len)?;
            at_most("alternatives of a prompt's token", request.prompt_logprobs.unwrap_or(0), self.vocab_size)?;
            request.sampling.validate().map_err(|error| error.message)?;
        }
        for span in &input.plan.spans {
            let tokens = span.tokens.len();
            at_most("tokens of a sequence", span.start.saturating_add(tokens), self.max_model_len)?;
            let shapes = span.groups.iter().map(|group| group.slots.len());
            if tokens == 0 || !shapes.eq(std::iter::repeat_n(tokens, self.groups)) {
                return Err(format!(
                    "a span of {tokens} tokens whose {} groups do not have as many slots",
                    span.groups.len()
                ));
            }
            at_most("drafts of a span", span.drafts, tokens - 1)?;
            for group in &span.groups {
                at_most("entries of a block table", group.table.holes.max(group.table.append.len()), self.table)?;
            }
        }
        let counts = input.draws.iter().map(|draw| if let Draw::Likeliest { count, .. } = draw { *count } else { 0 });
        at_most("likeliest tokens", counts.max().unwrap_or(0), self.vocab_size)
    }
}

/// Returns the first difference between an output and the recorded one.
fn difference(found: Result<&StepOutput, &StepError>, recorded: Result<&StepOutput, &StepError>) -> Option<String> {
    let (found, recorded) = match (found, recorded) {
        (Ok(found), Ok(recorded)) => (found, recorded),
        (Err(found), Err(recorded)) => {
            return (found != recorded).then(|| format!("it failed with {found:?}; recorded is {recorded:?}"));
        }
        (Err(found), Ok(_)) => return Some(format!("it failed: {found}; recorded is a result")),
        (Ok(_), Err(recorded)) => return Some(format!("it has a result; recorded is a failure: {recorded}")),
    };
    // Compared as bits: a NaN equals itself, and 0 differs from −0.
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
        Some(((seq, _), _)) => what(seq, "a different log-probability"),
        None if found.drawn.len() != recorded.drawn.len() => {
            format!("{} tokens; recorded are {}", found.drawn.len(), recorded.drawn.len())
        }
        None if found.likeliest != recorded.likeliest => match found.likeliest.first() {
            Some((seq, _)) => what(seq, "different candidates of beams, including those"),
            None => "no candidates of beams".to_string(),
        },
        None if found.embeddings != recorded.embeddings => "a different embedding".to_string(),
        None => "different log-probabilities of a prompt".to_string(),
    })
}
