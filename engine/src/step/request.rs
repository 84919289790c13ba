//! The engine's state of a request that has not ended.

use std::sync::Arc;
use std::time::Instant;

use models::lora::AdapterRef;
use sampling::TokenLogprobs;
use sched::{RequestId, SeqId, Span};

use super::beam::BeamSearchState;
use super::guide::Guides;
use crate::api::{FinishReason, GenerationParams, StopCause};
use crate::speculate::DraftScope;
use crate::worker::{Draw, NewRequest};

/// See the [module](self).
pub(super) struct EngineRequest {
    pub id: RequestId,
    pub params: GenerationParams,
    pub arrived: Instant,
    /// What the worker is told with the request's first span; `None` afterwards.
    pub unsent: Option<Arc<NewRequest>>,
    /// Number of tokens of each sequence, or of each result of a beam search; `None` once the sequence has ended.
    pub num_tokens: Vec<Option<usize>>,
    /// Greatest number of tokens of a sequence.
    pub max_tokens: usize,
    /// The host draws for the request even if the device draws for others.
    pub on_host: bool,
    /// Upper bound of the number of different tokens that end a sequence.
    pub num_stop_ids: usize,
    pub beams: Option<BeamSearchState>,
    pub guides: Option<Guides>,
    pub cached_tokens: usize,
    /// [`TokenEvent::Started`](crate::TokenEvent::Started) was emitted.
    pub started: bool,
    /// Collected while the prompt is computed, if they were asked for.
    pub prompt_logprobs: Vec<Option<TokenLogprobs>>,
    pub embedding: Option<Vec<f32>>,
    /// What the source of drafts is told of the request; `None` without speculation.
    pub speculation: Option<(DraftScope, Vec<u32>)>,
    /// The adapter, which is not removed before the request has ended.
    pub adapter: Option<Arc<AdapterRef>>,
}

/// What sequences of one request share that are submitted at different times.
pub(crate) struct Origin {
    pub seed: u64,
    /// The adapter that its name stood for at first.
    pub adapter: Option<Arc<AdapterRef>>,
}

impl EngineRequest {
    /// Whether the host still has to read rows of the prompt, for log-probabilities or for an embedding.
    pub fn needs_prompt_rows(&self) -> bool {
        !self.started && (self.params.pooling.is_some() || self.params.prompt_logprobs.is_some())
    }

    /// Whether all sequences have ended.
    pub fn has_ended(&self) -> bool {
        self.num_tokens.iter().all(Option::is_none)
    }

    /// Indices of the sequences that have not ended.
    pub fn live(&self) -> impl Iterator<Item = u32> + '_ {
        self.num_tokens.iter().zip(0..).filter(|(count, _)| count.is_some()).map(|(_, index)| index)
    }

    /// Ends a sequence and adds it to `ended`, for the worker. Returns `false` if it had ended before.
    pub fn end(&mut self, index: u32, ended: &mut Vec<SeqId>) -> bool {
        if self.num_tokens.get_mut(index as usize).and_then(Option::take).is_none() {
            return false;
        }
        // To the worker a beam search is one sequence.
        if self.unsent.is_none() && (self.beams.is_none() || self.has_ended()) {
            ended.push(SeqId { request: self.id, index: if self.beams.is_none() { index } else { 0 } });
        }
        true
    }

    /// Greatest number of drafts that a sequence can use: one more token than these is drawn. None if its masks take long, because the
    /// step does not wait for those behind drafts.
    pub fn num_usable_drafts(&self, index: u32) -> usize {
        let is_slow = self.guides.as_ref().is_some_and(|guides| guides.is_slow(index));
        let drawn = self.num_tokens.get(index as usize).copied().flatten().filter(|_| !is_slow);
        drawn.map_or(0, |drawn| self.max_tokens.saturating_sub(drawn + 1))
    }

    /// Returns what is drawn from a span, or why the span's sequences end without a token.
    pub fn draw(&mut self, span: &Span) -> Result<Draw, FinishReason> {
        if span.sample.is_empty() {
            return Ok(Draw::Nothing);
        }
        if self.max_tokens == 0 {
            return Err(FinishReason::Length);
        }
        if let Some(beams) = &self.beams {
            let count = beams.num_candidates(self.num_stop_ids);
            return Ok(Draw::Likeliest { output: beams.tokens(span.seq.index), count });
        }
        let live = span.sample.clone().find(|&index| self.num_tokens.get(index as usize).is_some_and(Option::is_some));
        Ok(match (live, &mut self.guides) {
            (None, _) => Draw::Nothing,
            (Some(_), None) if span.drafts > 0 => Draw::Drafts { allowed: Vec::new() },
            (Some(live), Some(guides)) if span.drafts > 0 => {
                Draw::Drafts { allowed: guides.allowed_ahead(live, span.drafts)? }
            }
            (Some(_), None) => Draw::Tokens { allowed: None },
            (Some(live), Some(guides)) => Draw::Tokens { allowed: Some(guides.allowed(live).clone()?) },
        })
    }

    /// Whether the host must see the result of a draw before it can plan the request's next step.
    pub fn host_decides_after(&self, draw: &Result<Draw, FinishReason>) -> bool {
        match draw {
            Ok(Draw::Nothing) => false,
            Ok(Draw::Tokens { allowed }) => self.on_host || allowed.is_some(),
            Ok(Draw::Likeliest { .. } | Draw::Drafts { .. }) => true,
            // The scheduler learns of the end only when the step is committed.
            Err(_) => self.guides.is_some(),
        }
    }
}

/// Returns why a token ends its sequence, if it does.
pub(super) fn end_reason(params: &GenerationParams, eos_token_ids: &[u32], token: u32) -> Option<FinishReason> {
    if params.stop_token_ids.contains(&token) {
        Some(FinishReason::Stop(Some(StopCause::Token(token))))
    } else {
        (!params.ignore_eos && eos_token_ids.contains(&token)).then_some(FinishReason::Stop(None))
    }
}
