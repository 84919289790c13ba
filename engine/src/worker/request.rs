//! The worker's state of a request.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use sched::{RequestId, SeqId, Span};

use super::NewRequest;
use super::pooling::Pooled;

/// The state of all requests.
pub(super) type Requests = HashMap<RequestId, RequestState>;

/// See the [module](self).
pub(super) struct RequestState {
    pub request: Arc<NewRequest>,
    /// Tokens drawn for each sequence; `None` once the sequence has ended.
    pub outputs: Vec<Option<Vec<u32>>>,
    /// Slot of each sequence in the device's sampler.
    pub slots: Vec<Option<u32>>,
    /// Number of leading prompt positions whose log-probabilities were returned.
    pub scored: usize,
    /// `Some` if an embedding was asked for.
    pub pooled: Option<Pooled>,
}

impl RequestState {
    pub fn new(request: Arc<NewRequest>) -> RequestState {
        let sequences = request.sequences as usize;
        let pooled = request.pooling.map(Pooled::new);
        RequestState {
            request,
            outputs: vec![Some(Vec::new()); sequences],
            slots: vec![None; sequences],
            scored: 0,
            pooled,
        }
    }

    /// The sequences that draw from the last row of the span and have not ended.
    pub fn live(&self, span: &Span) -> impl Iterator<Item = SeqId> + '_ {
        let indices = span.sample.start..span.sample.end.min(self.outputs.len() as u32);
        let seq = span.seq;
        indices.filter(|index| self.outputs[*index as usize].is_some()).map(move |index| SeqId { index, ..seq })
    }

    /// Appends the drafts of a span to the output of its sequence.
    pub fn append_drafts(&mut self, span: &Span) {
        if let Some(Some(output)) = self.outputs.get_mut(span.seq.index as usize) {
            output.extend_from_slice(&span.tokens[span.tokens.len() - span.drafts..]);
        }
    }

    /// Removes them again.
    pub fn remove_drafts(&mut self, span: &Span) {
        if let Some(Some(output)) = self.outputs.get_mut(span.seq.index as usize) {
            output.truncate(output.len() - span.drafts);
        }
    }

    /// Positions of the span whose logits give the log-probability of a prompt token that has none yet: position p predicts
    /// token p + 1.
    pub fn to_score(&self, span: &Span) -> Range<usize> {
        if self.request.prompt_logprobs.is_none() {
            return 0..0;
        }
        let end = (span.start + span.tokens.len()).min(self.request.prompt.len().saturating_sub(1));
        let start = self.scored.max(span.start);
        start..end.max(start)
    }

    /// Positions of the span whose hidden states are still missing in the embedding.
    pub fn to_pool(&self, span: &Span) -> Range<usize> {
        let end = span.start + span.tokens.len();
        self.pooled.as_ref().map_or(0..0, |pooled| pooled.positions(span.start..end, self.request.prompt.len()))
    }
}
