//! What came of a step becomes events, and outcomes for the scheduler.

use sampling::{Likely, Sampled};
use sched::{Outcome, RequestId, SeqId, Span};

use super::beam::Fork;
use super::request::{Active, ending};
use crate::api::{FinishReason, StopCause, TokenEvent};
use crate::grammar::MaskThreads;

/// What a step gave its sequences, in a list that is used again by the next step.
#[derive(Default)]
pub(super) struct Outcomes {
    list: Vec<Outcome>,
    spare: Vec<Outcome>,
}

impl Outcomes {
    pub fn clear(&mut self) {
        self.spare.append(&mut self.list);
    }

    pub fn list(&self) -> &[Outcome] {
        &self.list
    }

    fn push(&mut self, outcome: Outcome) {
        // So that there are never more than of the greatest step.
        self.spare.pop();
        self.list.push(outcome);
    }

    /// As [`Outcome::token`].
    fn push_token(&mut self, seq: SeqId, token: u32, finished: bool) {
        let mut outcome = self.spare.pop().unwrap_or_else(|| Outcome::token(seq, token, finished));
        outcome.tokens.clear();
        outcome.tokens.push(token);
        self.list.push(Outcome { seq, parent: seq.index, finished, ..outcome });
    }
}

/// What publishing needs of the engine.
pub(super) struct Publisher<'a, E: FnMut(RequestId, TokenEvent)> {
    pub mask_threads: &'a mut MaskThreads,
    pub eos_token_ids: &'a [u32],
    pub outcomes: &'a mut Outcomes,
    /// Sequences that have ended, for the worker.
    pub ended: &'a mut Vec<SeqId>,
    /// Counts tokens.
    pub drawn: &'a mut u64,
    pub emit: &'a mut E,
}

impl<E: FnMut(RequestId, TokenEvent)> Publisher<'_, E> {
    /// A token that was drawn for a sequence: it may be its last. Nothing if the sequence has ended meanwhile.
    pub fn token(&mut self, active: &mut Active, seq: SeqId, sampled: Sampled) {
        let Some(made) = active.made.get_mut(seq.index as usize).and_then(Option::as_mut) else { return };
        *made += 1;
        let at_limit = (*made >= active.limit).then_some(FinishReason::Length);
        self.begin(active);
        *self.drawn += 1;
        let Active { params, guides, .. } = active;
        let by_grammar = || match guides.as_mut()?.accept(seq.index, sampled.token, self.mask_threads) {
            Ok(complete) => complete.then_some(FinishReason::Stop(Some(StopCause::Complete))),
            Err(error) => Some(FinishReason::Grammar(error.0)),
        };
        let finish = ending(params, self.eos_token_ids, sampled.token).or_else(by_grammar).or(at_limit);
        if finish.is_some() {
            active.end(seq.index, self.ended);
        }
        self.outcomes.push_token(seq, sampled.token, finish.is_some());
        (self.emit)(seq.request, TokenEvent::Token { index: seq.index, token: Some(sampled), finish });
    }

    /// Ends the sequences that draw from a span, without a token.
    pub fn end(&mut self, active: &mut Active, span: &Span, reason: &FinishReason) {
        self.begin(active);
        let request = span.seq.request;
        for index in span.sample.clone() {
            if active.end(index, self.ended) {
                (self.emit)(request, TokenEvent::Token { index, token: None, finish: Some(reason.clone()) });
                let seq = SeqId { request, index };
                self.outcomes.push(Outcome { seq, parent: index, tokens: Vec::new(), finished: true });
            }
        }
    }

    /// The likeliest continuations of a beam. With those of the last beam it is decided which live on, and the last token
    /// gives the results.
    pub fn beam(&mut self, active: &mut Active, seq: SeqId, likeliest: Vec<Likely>) {
        self.begin(active);
        let Active { params, beams: Some(beams), .. } = active else { return };
        if !beams.offer(seq.index, likeliest) {
            return;
        }
        let before = beams.num_tokens();
        let forks = beams.advance(|token| ending(params, self.eos_token_ids, token));
        *self.drawn += (beams.num_tokens() - before) as u64;
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
        results.resize_with(active.made.len(), || (Vec::new(), FinishReason::Length));
        for ((mut tokens, reason), index) in results.into_iter().zip(0..) {
            active.end(index, self.ended);
            let last = tokens.pop();
            for token in tokens {
                (self.emit)(seq.request, TokenEvent::Token { index, token: Some(token), finish: None });
            }
            (self.emit)(seq.request, TokenEvent::Token { index, token: last, finish: Some(reason) });
        }
    }

    /// Tells what is told before a request's first token.
    fn begin(&mut self, active: &mut Active) {
        if std::mem::replace(&mut active.started, true) {
            return;
        }
        if active.params.prompt_logprobs.is_some() {
            let mut scores = std::mem::take(&mut active.prompt_logprobs);
            scores.insert(0, None); // nothing predicts the first token
            (self.emit)(active.id, TokenEvent::PromptLogprobs(scores));
        }
        if let Some(embedding) = active.embedding.take() {
            (self.emit)(active.id, TokenEvent::Embedding(embedding));
        }
        (self.emit)(active.id, TokenEvent::Started { cached_tokens: active.cached_tokens });
    }
}
