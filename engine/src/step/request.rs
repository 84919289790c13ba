//! A request that has not ended, as the engine knows it.

use std::sync::Arc;
use std::time::Instant;

use sampling::TokenLogprobs;
use sched::{RequestId, SeqId};

use super::beam::Beams;
use crate::api::{FinishReason, GenerationParams, StopCause};
use crate::grammar::Guides;
use crate::worker::NewRequest;

/// See the [module](self).
pub(super) struct Active {
    pub id: RequestId,
    pub params: GenerationParams,
    pub arrived: Instant,
    /// For the worker, until it is told with the first span of the request.
    pub new: Option<Arc<NewRequest>>,
    /// Tokens of each sequence, or of each result of a beam search; `None` once it has ended.
    pub made: Vec<Option<usize>>,
    /// The most tokens that a sequence may make.
    pub limit: usize,
    /// The host draws for it on a device that draws.
    pub on_host: bool,
    /// Different tokens that may end a sequence, at most.
    pub num_stop_ids: usize,
    pub beams: Option<Beams>,
    pub guides: Option<Guides>,
    pub cached_tokens: usize,
    pub started: bool,
    /// Filled while the prompt is computed, when asked for.
    pub prompt_logprobs: Vec<Option<TokenLogprobs>>,
    pub embedding: Option<Vec<f32>>,
}

impl Active {
    /// Whether the host reads rows of its prompt: for log-probabilities or an embedding that it has not been told of.
    pub fn is_scored(&self) -> bool {
        !self.started && (self.params.pooling.is_some() || self.params.prompt_logprobs.is_some())
    }

    /// Whether all its sequences have ended.
    pub fn is_over(&self) -> bool {
        self.made.iter().all(Option::is_none)
    }

    /// The sequences that have not ended.
    pub fn live(&self) -> impl Iterator<Item = u32> + '_ {
        self.made.iter().zip(0..).filter(|(made, _)| made.is_some()).map(|(_, index)| index)
    }

    /// Ends a sequence, and notes it for the worker. `false` if it has ended before.
    pub fn end(&mut self, index: u32, ended: &mut Vec<SeqId>) -> bool {
        if self.made.get_mut(index as usize).and_then(Option::take).is_none() {
            return false;
        }
        // A beam search is one sequence to the worker.
        if self.new.is_none() && (self.beams.is_none() || self.is_over()) {
            ended.push(SeqId { request: self.id, index: if self.beams.is_none() { index } else { 0 } });
        }
        true
    }
}

/// Whether a token ends its sequence, and why.
pub(super) fn ending(params: &GenerationParams, eos_token_ids: &[u32], token: u32) -> Option<FinishReason> {
    if params.stop_token_ids.contains(&token) {
        Some(FinishReason::Stop(Some(StopCause::Token(token))))
    } else {
        (!params.ignore_eos && eos_token_ids.contains(&token)).then_some(FinishReason::Stop(None))
    }
}
