//! The interface to what computes the steps that the engine plans, with plain values on both sides.
//!
//! ```text
//! engine ── submit(StepInput) ──▶ Worker ── collect() ──▶ StepOutput
//! ```
//!
//! A worker owns a device, or a shard of a model on a device: weights, cache, block tables, CUDA graphs, and the sampler with
//! its state of each sequence. It makes no decisions: equal inputs in equal order give equal outputs, to the bit. So inputs can
//! be recorded and replayed by a worker alone, and broadcast to every rank of a group.
//!
//! The engine may submit a step before it has collected the previous one, up to [`WorkerInfo::max_in_flight`] steps. When a step
//! fails, the steps that were submitted behind it are dropped too, because they read what it should have written.

mod adapters;
mod draft_pass;
mod drafter;
mod executor;
mod local;
mod pooling;
pub(crate) mod record;
mod request;
mod rows;
mod shared_params;
mod slots;
mod transfers;

use std::sync::Arc;

use device::profile::{Phase, Step};
use device::{Device, Profile};
use models::Pooling;
use models::lora::AdapterRef;
use sampling::device::Limits;
use sampling::{Likely, Sampled, SamplingParams, TokenLogprobs, TokenSet};
use sched::{HostBlockId, RequestId, SeqId, StepPlan};
use serde::{Deserialize, Serialize};

use crate::speculate::ProposeError;
pub(crate) use draft_pass::Sizes;
pub(crate) use drafter::Drafter;
pub(crate) use local::LocalWorker;

/// Computes steps, in the order in which they are submitted.
pub trait Worker: Send {
    /// Computes the drafts of a step, whose spans have as many placeholders. No step may be in flight, and this one must be
    /// submitted next, with these drafts or others. Returns the drafts of all spans in order; what it writes to `input`'s blocks
    /// affects no other result.
    ///
    /// # Errors
    /// The worker computes no drafts, or it cannot go on.
    fn draft(&mut self, input: &StepInput) -> Result<Vec<u32>, ProposeError> {
        let _ = input;
        Err(ProposeError("the worker has no model for drafts".to_string()))
    }

    /// Submits a step. Its errors are returned by [`Worker::collect`].
    fn submit(&mut self, input: Arc<StepInput>);

    /// Waits for the oldest step that was not collected and writes its results to `output`, whose lists are reused.
    ///
    /// # Errors
    /// The step failed. It is dropped together with every step that was submitted behind it, and none of them is collected. The
    /// device no longer accesses their blocks.
    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError>;

    /// Returns the contents of a block of host memory, after all copies of the steps that were submitted.
    ///
    /// # Errors
    /// The memory cannot be read.
    fn read_host_block(&mut self, block: HostBlockId) -> Result<Vec<u8>, StepError> {
        Err(StepError(format!("{block} cannot be read: the worker gives no access to its host memory")))
    }

    /// Overwrites a block of host memory, after all copies of the steps that were submitted and before those of later ones. Not
    /// part of a recording.
    ///
    /// # Errors
    /// The contents have another length, or the memory cannot be written.
    fn write_host_block(&mut self, block: HostBlockId, contents: &[u8]) -> Result<(), StepError> {
        let _ = contents;
        Err(StepError(format!("{block} cannot be written: the worker gives no access to its host memory")))
    }

    /// Has all other ranks read an adapter that the store of this one has read, and drop those that are not `kept`. Called before the first
    /// step that needs it, and again after the store had dropped it.
    ///
    /// # Errors
    /// A rank cannot read it, or finds other contents. The group goes on without it.
    fn share_adapter(&mut self, adapter: &AdapterRef, kept: &[String]) -> Result<(), String> {
        let _ = (adapter, kept);
        Ok(())
    }

    /// Number of sequences that the worker keeps state of: 0 once all have [ended](StepInput::ended).
    fn num_sequences(&self) -> usize;

    /// Gives the memory of the cache back. All blocks lose their contents. Called between steps, when none is submitted.
    ///
    /// # Errors
    /// The worker cannot.
    fn free_cache(&mut self) -> Result<(), StepError> {
        Err(StepError(
            "an engine of several ranks, or with a recording, cannot give its cache back; stop it instead".to_string(),
        ))
    }

    /// Allocates the cache again. Its contents are those of a new one.
    ///
    /// # Errors
    /// There is not enough memory.
    fn allocate_cache(&mut self) -> Result<(), StepError> {
        Ok(())
    }

    /// Waits for a sign of life of all ranks that compute with it, if there are others. Called between steps, when none is submitted.
    fn probe(&mut self) {}

    /// Whether the worker can compute no further step, so that every later one fails.
    fn is_lost(&self) -> bool {
        false
    }

    /// Starts a step in the device's profile, if it has one.
    fn profile_step(&self) -> Option<Step> {
        None
    }
}

/// Properties of a worker that the engine needs to know.
#[derive(Clone)]
pub struct WorkerInfo {
    /// Size of the vocabulary in tokens.
    pub vocab_size: usize,
    /// Greatest number of steps that are submitted and not collected. 2 if the device computes asynchronously, so that the
    /// host plans one step while the other runs.
    pub max_in_flight: usize,
    /// Limits of the device's sampler; `None` if the host draws.
    pub sampler: Option<Limits>,
    /// Where the times of steps are recorded, if at all.
    pub profile: Option<Arc<Profile>>,
    /// Bytes of a block of host memory.
    pub host_block_bytes: usize,
}

/// One step: everything that a worker needs in addition to earlier inputs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepInput {
    /// What is computed, and in which blocks.
    pub plan: StepPlan,
    /// Requests whose first span is in this step. Serialized with each distinct set of sampling parameters once: the prompts of a call
    /// share theirs.
    #[serde(with = "shared_params")]
    pub requests: Vec<Arc<NewRequest>>,
    /// Sequences that have ended since the previous input. The worker drops a request with its last sequence.
    pub ended: Vec<SeqId>,
    /// What is drawn from each span of the plan, in the order of the spans.
    pub draws: Vec<Draw>,
}

/// A request, as the worker is told once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewRequest {
    /// Id of the request.
    pub id: RequestId,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Number of sequences that draw. A beam search counts as one.
    pub sequences: u32,
    /// Index of the first of them among all sequences that continue the prompt, for the random numbers.
    pub first_sequence: u32,
    /// Sampling parameters. Serialized by the [`StepInput`].
    #[serde(skip)]
    pub sampling: SamplingParams,
    /// End-of-sequence and stop ids, which are not drawn before `min_tokens`.
    pub stop_ids: Vec<u32>,
    /// Key of the random numbers.
    pub seed: u64,
    /// The host draws for it, because it exceeds a [limit](WorkerInfo::sampler) of the device's sampler.
    pub on_host: bool,
    /// Number of alternatives per prompt token, if log-probabilities of the prompt were asked for.
    pub prompt_logprobs: Option<usize>,
    /// How to pool the hidden states of the prompt, if an embedding or labels were asked for.
    pub pooling: Option<Pooling>,
    /// Position of the first token of the second text of a pair, for models with token types.
    pub second: Option<u32>,
    /// The adapter that computes it.
    pub adapter: Option<Arc<AdapterRef>>,
    /// Its sequences may get drafts that the worker computes.
    pub speculative: bool,
}

/// What is drawn from the last rows of a span.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Draw {
    /// No draw.
    #[default]
    Nothing,
    /// A token for each sequence of [`Span::sample`](sched::Span::sample) that has not ended.
    Tokens {
        /// The tokens that the grammar allows; `None` without a grammar.
        allowed: Option<Arc<TokenSet>>,
    },
    /// The likeliest tokens after a beam.
    Likeliest {
        /// Tokens of the beam so far.
        output: Vec<u32>,
        /// Number of tokens.
        count: usize,
    },
    /// A token from the row before each [draft](sched::Span::drafts) of a span and one from its last row, up to the first that
    /// differs from its draft.
    Drafts {
        /// The tokens that the grammar allows in each row; rows without a set are not drawn from. Empty without a grammar.
        allowed: Vec<Arc<TokenSet>>,
    },
}

/// Results of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepOutput {
    /// Tokens drawn, those of a sequence in order. Some may belong to sequences that have ended since the step was submitted.
    pub drawn: Vec<(SeqId, Sampled)>,
    /// The likeliest tokens after each beam of the step, in the order of its spans.
    pub likeliest: Vec<(SeqId, Vec<Likely>)>,
    /// Log-probabilities of prompt tokens, continuing those of earlier steps. The first token of a prompt has none.
    pub prompt_logprobs: Vec<(RequestId, Vec<TokenLogprobs>)>,
    /// Embeddings, or logits of labels, of prompts that this step completed.
    pub embeddings: Vec<(RequestId, Vec<f32>)>,
}

impl StepOutput {
    /// Empties the lists.
    pub fn clear(&mut self) {
        self.drawn.clear();
        self.likeliest.clear();
        self.prompt_logprobs.clear();
        self.embeddings.clear();
    }
}

/// The cause of a failed step, in one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct StepError(pub String);

impl StepInput {
    /// Whether the worker has nothing to do.
    pub fn is_empty(&self) -> bool {
        self.plan.is_empty() && self.requests.is_empty() && self.ended.is_empty()
    }
}

/// Starts a phase of the step in the device's profile, if it has one.
fn phase(device: &dyn Device, name: &'static str) -> Option<Phase> {
    device.profile()?.phase(name)
}
