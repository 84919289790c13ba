//! What computes the steps that the engine plans: one interface, with plain values on both sides.
//!
//! ```text
//! engine ── submit(StepInput) ──▶ Worker ── collect() ──▶ StepOutput
//! ```
//!
//! A worker owns a device, or a shard of one model on it: weights, cache, block tables, CUDA graphs, and the sampler with what
//! it has to know of each sequence. It decides nothing: equal inputs in equal order give equal outputs, to the bit. So inputs
//! can be recorded and computed again by a worker alone, and sent to every rank of a group.
//!
//! The engine may submit a step before it has collected the one before it, up to [`WorkerInfo::max_in_flight`].
//! A step that fails takes with it those that were submitted behind it: they read what it should have written.

mod executor;
mod local;
mod pooling;
pub(crate) mod record;
mod request;
mod rows;
mod slots;
mod transfers;

use std::sync::Arc;

use device::Profile;
use device::profile::Step;
use models::Pooling;
use sampling::device::Limits;
use sampling::{Likely, Sampled, SamplingParams, TokenLogprobs, TokenSet};
use sched::{RequestId, SeqId, StepPlan};
use serde::{Deserialize, Serialize};

pub(crate) use local::LocalWorker;

/// Computes steps, in the order in which they are submitted.
pub trait Worker: Send {
    /// Takes a step. What goes wrong with it is told by its [`Worker::collect`].
    fn submit(&mut self, input: Arc<StepInput>);

    /// Waits for the oldest step that has not been collected and writes what came of it to `output`, whose lists are used
    /// again.
    ///
    /// # Errors
    /// The step failed. It is dropped, and with it every step that was submitted behind it: none of them is collected. The
    /// device has let go of their blocks.
    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError>;

    /// Sequences that the worker keeps something of: 0 once it has been told that all have [ended](StepInput::ended).
    fn num_sequences(&self) -> usize;

    /// Begins a step of the device's profile, if it has one.
    fn profile_step(&self) -> Option<Step> {
        None
    }
}

/// What the engine has to know of a worker.
#[derive(Clone)]
pub struct WorkerInfo {
    /// Tokens that the model knows.
    pub vocab_size: usize,
    /// Steps that may be submitted and not collected. 2 where the device computes by itself: the host plans one while the
    /// other runs.
    pub max_in_flight: usize,
    /// What a slot of the device's sampler has room for; `None`: the host draws.
    pub sampler: Option<Limits>,
    /// Where the times of steps are recorded, if they are.
    pub profile: Option<Arc<Profile>>,
}

/// One step, as a plain value: all that a worker needs beside the inputs before it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepInput {
    /// What is computed, and where it lies.
    pub plan: StepPlan,
    /// Requests that the worker has not heard of.
    pub requests: Vec<Arc<NewRequest>>,
    /// Sequences that have ended since the last input. With its last sequence a request is forgotten.
    pub ended: Vec<SeqId>,
    /// What is drawn from the last row of each span of the plan.
    pub draws: Vec<Draw>,
}

/// What a worker has to know of a request, once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewRequest {
    /// Its name.
    pub id: RequestId,
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Sequences that draw. A beam search counts as one.
    pub sequences: u32,
    /// What shapes each draw.
    pub sampling: SamplingParams,
    /// Held back until `min_tokens`: end-of-sequence and stop ids.
    pub stop_ids: Vec<u32>,
    /// Key of its draws.
    pub seed: u64,
    /// It asks for more than a [slot](WorkerInfo::sampler) holds, so the host draws for it.
    pub on_host: bool,
    /// Log-probabilities of the prompt's tokens are wanted, with so many alternatives each.
    pub prompt_logprobs: Option<usize>,
    /// An embedding of the prompt is wanted.
    pub pooling: Option<Pooling>,
}

/// What is drawn from the last row of a span.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Draw {
    /// Nothing.
    #[default]
    Nothing,
    /// A token for each sequence of [`Span::sample`](sched::Span::sample) that has not ended.
    Tokens {
        /// The only ones that may come, where a grammar holds the sequences.
        allowed: Option<Arc<TokenSet>>,
    },
    /// The likeliest tokens after a beam.
    Likeliest {
        /// Tokens of the beam so far.
        output: Vec<u32>,
        /// How many.
        count: usize,
    },
}

/// What came of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepOutput {
    /// Tokens drawn. Some may be of sequences that have ended since the step was submitted.
    pub drawn: Vec<(SeqId, Sampled)>,
    /// The likeliest tokens after each beam of the step, in the order of its spans.
    pub likeliest: Vec<(SeqId, Vec<Likely>)>,
    /// Of prompt tokens: those that follow the ones told of before. The first token of a prompt has none.
    pub prompt_logprobs: Vec<(RequestId, Vec<TokenLogprobs>)>,
    /// Embeddings of prompts that were completed.
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

/// Why a step failed, in one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct StepError(pub String);

impl StepInput {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.plan.is_empty() && self.requests.is_empty() && self.ended.is_empty()
    }
}
