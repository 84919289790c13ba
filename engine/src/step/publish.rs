//! The results of a step become events for callers and outcomes for the scheduler.

use sampling::{Likely, Sampled};
use sched::{Outcome, RequestId, SeqId, Span};

use super::beam::Fork;
use super::guide::MaskThreads;
use super::request::{EngineRequest, end_reason};
use crate::api::{DraftCounts, FinishReason, StopCause, TokenEvent};
use crate::speculate::Speculator;

/// Outcomes of the sequences of a step. The next step reuses the lists.
#[derive(Default)]
pub(super) struct Outcomes {
    list: Vec<Outcome>,
    recycled: Vec<Outcome>,
}

impl Outcomes {
    pub fn clear(&mut self) {
        self.recycled.append(&mut self.list);
    }

    pub fn list(&self) -> &[Outcome] {
        &self.list
    }

    fn push(&mut self, outcome: Outcome) {
        // Keeps the two lists together as long as those of the greatest step.
        self.recycled.pop();
        self.list.push(outcome);
    }

    /// As [`Outcome::token`], without an allocation.
    fn push_token(&mut self, seq: SeqId, token: u32, finished: bool) {
        // Further tokens of a step follow drafts that were right.
        if let Some(last) = self.list.last_mut().filter(|last| last.seq == seq) {
            last.tokens.push(token);
            last.finished = finished;
            return;
        }
        let mut outcome = self.recycled.pop().unwrap_or_else(|| Outcome::token(seq, token, finished));
        outcome.tokens.clear();
        outcome.tokens.push(token);
        self.list.push(Outcome { seq, parent: seq.index, finished, ..outcome });
    }
}

/// The parts of the engine that publishing uses.
pub(super) struct Publisher<'a> {
    pub mask_threads: &'a mut MaskThreads,
    /// Sequences whose next mask is computed.
    pub awaits_mask: &'a mut Vec<SeqId>,
    pub eos_token_ids: &'a [u32],
    pub outcomes: &'a mut Outcomes,
    /// Sequences that have ended, for the worker.
    pub ended: &'a mut Vec<SeqId>,
    pub generation_tokens: &'a mut u64,
    pub speculator: Option<&'a mut Speculator>,
    pub emit: &'a mut dyn FnMut(RequestId, TokenEvent),
}

impl Publisher<'_> {
    /// Publishes a token drawn for a sequence, and ends the sequence if this is its last token. Does nothing if the sequence
    /// has ended in the meantime. `drafts` are those that the token and the following ones of the step were compared with: the last
    /// token of the step is followed by none, be its draft wrong or the masks behind it late.
    pub fn token(
        &mut self,
        request: &mut EngineRequest,
        seq: SeqId,
        sampled: Sampled,
        drafts: &[u32],
        is_last_of_step: bool,
    ) {
        let Some(count) = request.num_tokens.get_mut(seq.index as usize).and_then(Option::as_mut) else { return };
        *count += 1;
        let at_limit = (*count >= request.max_tokens).then_some(FinishReason::Length);
        self.start(request);
        *self.generation_tokens += 1;
        let EngineRequest { params, guides, .. } = request;
        let is_last = at_limit.is_some();
        let by_grammar = || match guides.as_mut()?.accept(seq.index, sampled.token, is_last, self.mask_threads) {
            Ok(complete) => complete.then_some(FinishReason::Stop(Some(StopCause::Complete))),
            Err(error) => Some(FinishReason::Grammar(error.0)),
        };
        let finish = end_reason(params, self.eos_token_ids, sampled.token).or_else(by_grammar).or(at_limit);
        if finish.is_some() {
            request.end(seq.index, self.ended);
        } else if request.guides.is_some() {
            self.awaits_mask.push(seq);
        }
        if let (Some(speculator), Some(told)) = (&mut self.speculator, &request.speculation) {
            speculator.token(seq, told, sampled.token);
        }
        self.outcomes.push_token(seq, sampled.token, finish.is_some());
        let is_right = drafts.first() == Some(&sampled.token);
        let is_last = is_last_of_step || finish.is_some();
        let accepted = usize::from(is_right);
        let drafts = DraftCounts { accepted, rejected: if is_last { drafts.len() - accepted } else { 0 } };
        (self.emit)(seq.request, TokenEvent::Token { index: seq.index, token: Some(sampled), finish, drafts });
    }

    /// Ends the sequences that draw from a span, without a token.
    pub fn end(&mut self, request: &mut EngineRequest, span: &Span, reason: &FinishReason) {
        self.start(request);
        let id = span.seq.request;
        for index in span.sample.clone() {
            if request.end(index, self.ended) {
                (self.emit)(
                    id,
                    TokenEvent::Token {
                        index,
                        token: None,
                        finish: Some(reason.clone()),
                        drafts: DraftCounts::default(),
                    },
                );
                let seq = SeqId { request: id, index };
                self.outcomes.push(Outcome { seq, parent: index, tokens: Vec::new(), finished: true });
            }
        }
    }

    /// Adds the likeliest continuations of one beam. Those of the last beam of the step decide which beams survive; when the
    /// search has ended, its results are published.
    pub fn beam(&mut self, request: &mut EngineRequest, seq: SeqId, likeliest: Vec<Likely>) {
        self.start(request);
        let EngineRequest { params, beams: Some(beams), .. } = request else { return };
        if !beams.add_candidates(seq.index, likeliest) {
            return;
        }
        let before = beams.num_tokens();
        let forks = beams.advance(|token| end_reason(params, self.eos_token_ids, token));
        *self.generation_tokens += (beams.num_tokens() - before) as u64;
        for (fork, index) in forks.into_iter().zip(0..) {
            let seq = SeqId { index, ..seq };
            self.outcomes.push(match fork {
                Some(Fork { parent, token }) => Outcome { seq, parent, tokens: vec![token], finished: false },
                None => Outcome { seq, parent: index, tokens: Vec::new(), finished: true },
            });
        }
        if !beams.is_done() {
            return;
        }
        let mut results: Vec<_> = beams.results().collect();
        results.resize_with(request.num_tokens.len(), || (Vec::new(), FinishReason::Length));
        let drafts = DraftCounts::default();
        for ((mut tokens, reason), index) in results.into_iter().zip(0..) {
            request.end(index, self.ended);
            let last = tokens.pop();
            for token in tokens {
                (self.emit)(seq.request, TokenEvent::Token { index, token: Some(token), finish: None, drafts });
            }
            (self.emit)(seq.request, TokenEvent::Token { index, token: last, finish: Some(reason), drafts });
        }
    }

    /// Emits the events that precede a request's first token.
    fn start(&mut self, request: &mut EngineRequest) {
        if std::mem::replace(&mut request.started, true) {
            return;
        }
        if request.params.prompt_logprobs.is_some() {
            let mut logprobs = std::mem::take(&mut request.prompt_logprobs);
            logprobs.insert(0, None); // nothing predicts the first token
            (self.emit)(request.id, TokenEvent::PromptLogprobs(logprobs));
        }
        if let Some(embedding) = request.embedding.take() {
            (self.emit)(request.id, TokenEvent::Embedding(embedding));
        }
        (self.emit)(request.id, TokenEvent::Started { cached_tokens: request.cached_tokens });
    }
}
