//! From a row of logits, or a token that the device drew, to what a request has made so far and what is told of it.

use std::time::Instant;

use sampling::{Context, Sampled, Sampler, TokenLogprobs, TokenSet};
use sched::{Outcome, RequestId, SeqId, Span};

use crate::api::{FinishReason, GenerationParams, GenerationRequest, StopCause};
use crate::beam::{Beams, Fork};
use crate::core::TokenEvent;
use crate::grammar::{Guides, MaskThreads};
use crate::pooling::Pool;

/// A request that has not ended.
pub(crate) struct Active {
    pub request: GenerationRequest,
    pub arrived: Instant,
    /// Held back until `min_tokens`: end-of-sequence and stop ids.
    pub stop_ids: Vec<u32>,
    /// Key of the request's draws.
    pub seed: u64,
    /// Output tokens of each sequence, or of each result of a beam search; `None` once it has ended.
    pub outputs: Vec<Option<Vec<u32>>>,
    /// Where the device draws for each of them.
    pub slots: Vec<Option<u32>>,
    /// No slot has room for what it asks for.
    pub on_host: bool,
    pub beams: Option<Beams>,
    pub guides: Option<Guides>,
    pub cached_tokens: usize,
    /// A step has computed some of it.
    pub scheduled: bool,
    pub started: bool,
    /// Filled row by row while the prompt is computed, when asked for.
    pub prompt_logprobs: Vec<Option<TokenLogprobs>>,
    /// For a request that wants an embedding.
    pub pool: Option<Pool>,
}

impl Active {
    /// The most tokens that a sequence may make.
    pub fn limit(&self, max_model_len: usize) -> usize {
        self.request.params.max_tokens.unwrap_or(usize::MAX).min(max_model_len - self.request.prompt.len())
    }

    /// Some results need its rows on the host.
    pub fn is_scored(&self) -> bool {
        self.pool.is_some() || self.request.params.prompt_logprobs.is_some()
    }

    /// Whether all its sequences have ended.
    pub fn is_over(&self) -> bool {
        self.outputs.iter().all(Option::is_none)
    }
}

/// What a step gave its sequences, in a list that is used again by the next step.
#[derive(Default)]
pub(crate) struct Outcomes {
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

/// What drawing needs of the engine.
pub(crate) struct Draw<'a> {
    pub sampler: &'a mut Sampler,
    pub mask_threads: &'a mut MaskThreads,
    pub eos_token_ids: &'a [u32],
    pub max_model_len: usize,
    pub outcomes: &'a mut Outcomes,
    /// Counts tokens.
    pub drawn: &'a mut u64,
}

impl Draw<'_> {
    /// What comes of the last row of a span that samples.
    pub fn row(
        &mut self,
        active: &mut Active,
        span: &Span,
        logits: &[f32],
        emit: &mut impl FnMut(RequestId, TokenEvent),
    ) {
        begin(active, span.seq.request, emit);
        if active.beams.is_some() {
            self.beam(active, span.seq, logits, emit);
        } else {
            self.samples(active, span, logits, emit);
        }
    }

    /// What comes of a token that the device drew for a sequence; nothing if that has ended meanwhile.
    pub fn drawn(
        &mut self,
        active: &mut Active,
        seq: SeqId,
        sampled: Sampled,
        emit: &mut impl FnMut(RequestId, TokenEvent),
    ) {
        if active.outputs[seq.index as usize].is_some() {
            begin(active, seq.request, emit);
            self.take(active, seq, sampled, emit);
        }
    }

    /// Draws a token for each sequence that wants one from this row.
    fn samples(
        &mut self,
        active: &mut Active,
        span: &Span,
        logits: &[f32],
        emit: &mut impl FnMut(RequestId, TokenEvent),
    ) {
        let id = span.seq.request;
        let limit = active.limit(self.max_model_len);
        let Active { request, stop_ids, seed, outputs, guides, .. } = &mut *active;
        let (prompt, params) = (&request.prompt, &request.params);
        let indices: Vec<u32> = span.sample.clone().filter(|&index| outputs[index as usize].is_some()).collect();
        let Some(&first) = indices.first() else { return };
        // Sequences that share a row have the same output so far, none, or it is a single one; and the same mask.
        let allowed = match guides {
            _ if limit == 0 => Err(FinishReason::Length),
            Some(guides) => allowed(guides, first, params, stop_ids, self.eos_token_ids).map(Some),
            None => Ok(None),
        };
        let allowed = match allowed {
            Ok(allowed) => allowed,
            Err(reason) => {
                for index in indices {
                    outputs[index as usize] = None;
                    emit(id, TokenEvent::Token { index, token: None, finish: Some(reason.clone()) });
                    let seq = SeqId { request: id, index };
                    self.outcomes.push(Outcome { seq, parent: index, tokens: Vec::new(), finished: true });
                }
                return;
            }
        };
        let output: &[u32] = outputs[first as usize].as_deref().unwrap_or_default();
        let context = Context { prompt, output, stop_ids, allowed, seed: *seed, sequence: 0 };
        let sampled: Vec<Sampled> =
            self.sampler.sample_each(logits, &params.sampling, &context, indices.iter().copied()).collect();
        for (index, sampled) in indices.into_iter().zip(sampled) {
            self.take(active, SeqId { request: id, index }, sampled, emit);
        }
    }

    /// What comes of a token, wherever it was drawn: it is the sequence's, and may be its last.
    fn take(
        &mut self,
        active: &mut Active,
        seq: SeqId,
        sampled: Sampled,
        emit: &mut impl FnMut(RequestId, TokenEvent),
    ) {
        let limit = active.limit(self.max_model_len);
        let Active { request, outputs, guides, .. } = active;
        let (params, index) = (&request.params, seq.index);
        let output = &mut outputs[index as usize];
        let made = output.as_mut().map_or(0, |output| {
            output.push(sampled.token);
            output.len()
        });
        *self.drawn += 1;
        let at_limit = (made >= limit).then_some(FinishReason::Length);
        let by_grammar = || match guides.as_mut()?.accept(index, sampled.token, self.mask_threads) {
            Ok(complete) => complete.then_some(FinishReason::Stop(Some(StopCause::Complete))),
            Err(error) => Some(FinishReason::Grammar(error.0)),
        };
        let finish = ending(params, self.eos_token_ids, sampled.token).or_else(by_grammar).or(at_limit);
        if finish.is_some() {
            *output = None;
        }
        self.outcomes.push_token(seq, sampled.token, finish.is_some());
        emit(seq.request, TokenEvent::Token { index, token: Some(sampled), finish });
    }

    /// Hears what the row says of a beam. The row of the last beam decides which live on, and that of the last token gives
    /// the results.
    fn beam(&mut self, active: &mut Active, seq: SeqId, logits: &[f32], emit: &mut impl FnMut(RequestId, TokenEvent)) {
        let Active { request, stop_ids, seed, outputs, beams: Some(beams), .. } = active else { return };
        let (id, params) = (seq.request, &request.params);
        let mut output = Vec::new();
        beams.tokens(seq.index, &mut output);
        let context =
            Context { prompt: &request.prompt, output: &output, stop_ids, allowed: None, seed: *seed, sequence: 0 };
        let likeliest = self.sampler.likeliest(logits, &params.sampling, &context, beams.wanted(stop_ids.len()));
        if !beams.offer(seq.index, likeliest) {
            return;
        }
        let before = beams.num_tokens();
        let forks = beams.advance(|token| ending(params, self.eos_token_ids, token));
        *self.drawn += (beams.num_tokens() - before) as u64;
        for (fork, index) in forks.into_iter().zip(0..) {
            let seq = SeqId { request: id, index };
            self.outcomes.push(match fork {
                Some(Fork { parent, token }) => Outcome { seq, parent, tokens: vec![token], finished: false },
                None => Outcome { seq, parent: index, tokens: Vec::new(), finished: true },
            });
        }
        if !beams.is_done() {
            return;
        }
        let mut results = beams.results();
        for (output, index) in outputs.iter_mut().zip(0..) {
            *output = None;
            let (mut tokens, reason) = results.next().unwrap_or((Vec::new(), FinishReason::Length));
            let last = tokens.pop();
            for token in tokens {
                emit(id, TokenEvent::Token { index, token: Some(token), finish: None });
            }
            emit(id, TokenEvent::Token { index, token: last, finish: Some(reason) });
        }
    }
}

/// Tells what is told before a request's first token.
fn begin(active: &mut Active, id: RequestId, emit: &mut impl FnMut(RequestId, TokenEvent)) {
    if std::mem::replace(&mut active.started, true) {
        return;
    }
    if active.request.params.prompt_logprobs.is_some() {
        emit(id, TokenEvent::PromptLogprobs(std::mem::take(&mut active.prompt_logprobs)));
    }
    if let Some(pool) = &mut active.pool {
        emit(id, TokenEvent::Embedding(pool.finish()));
    }
    emit(id, TokenEvent::Started { cached_tokens: active.cached_tokens });
}

/// The tokens that a sequence's constraint lets through, those that end it among them where it may end; or why there is
/// none.
pub(crate) fn allowed<'g>(
    guides: &'g mut Guides,
    index: u32,
    params: &GenerationParams,
    stop_ids: &[u32],
    eos_token_ids: &[u32],
) -> Result<&'g TokenSet, FinishReason> {
    let mask = guides.mask(index).map_err(|error| FinishReason::Grammar(error.0))?;
    if mask.may_end {
        let ends = stop_ids.iter().filter(|&&token| ending(params, eos_token_ids, token).is_some());
        ends.for_each(|&token| mask.tokens.insert(token));
    }
    match (mask.tokens.is_empty(), mask.may_end) {
        (false, _) => Ok(&mask.tokens),
        (true, true) => Err(FinishReason::Stop(Some(StopCause::Complete))),
        (true, false) => Err(FinishReason::Grammar("no token of the vocabulary goes on from here".to_string())),
    }
}

/// Whether a token ends its sequence, and why.
fn ending(params: &GenerationParams, eos_token_ids: &[u32], token: u32) -> Option<FinishReason> {
    if params.stop_token_ids.contains(&token) {
        Some(FinishReason::Stop(Some(StopCause::Token(token))))
    } else {
        (!params.ignore_eos && eos_token_ids.contains(&token)).then_some(FinishReason::Stop(None))
    }
}
