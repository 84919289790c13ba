//! From a row of logits, or a token that the device drew, to what a request has made so far and what is told of it.
//!
//! The host draws in two passes. The first is pure: each [`Row`] becomes a [`Choice`] from what the requests held before, so
//! the threads of the pool share the rows, and the bits do not depend on their number. The second gives each request its
//! choice in order, on the engine thread.

use std::cell::Cell;
use std::time::Instant;

use device::Pool as Threads;
use sampling::{Context, Likely, Sampled, Sampler, SamplingParams, TokenLogprobs, TokenSet};
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

    /// Whether the host still reads rows of its prompt: for log-probabilities or an embedding that it has not been told of.
    pub fn is_scored(&self) -> bool {
        !self.started && (self.pool.is_some() || self.request.params.prompt_logprobs.is_some())
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
        choice: Choice,
        emit: &mut impl FnMut(RequestId, TokenEvent),
    ) {
        begin(active, span.seq.request, emit);
        let id = span.seq.request;
        match choice {
            Choice::Tokens(tokens) => {
                for (index, sampled) in tokens {
                    self.take(active, SeqId { request: id, index }, sampled, emit);
                }
            }
            Choice::End(reason) => self.end(active, span, &reason, emit),
            Choice::Likeliest(likeliest) => self.beam(active, span.seq, likeliest, emit),
        }
    }

    /// Ends the sequences of a request that wants no token: its prompt is computed.
    pub fn no_token(&mut self, active: &mut Active, span: &Span, emit: &mut impl FnMut(RequestId, TokenEvent)) {
        begin(active, span.seq.request, emit);
        self.end(active, span, &FinishReason::Length, emit);
    }

    /// Ends the sequences of a span without a token.
    fn end(
        &mut self,
        active: &mut Active,
        span: &Span,
        reason: &FinishReason,
        emit: &mut impl FnMut(RequestId, TokenEvent),
    ) {
        let request = span.seq.request;
        for index in span.sample.clone() {
            if active.outputs.get_mut(index as usize).and_then(Option::take).is_some() {
                emit(request, TokenEvent::Token { index, token: None, finish: Some(reason.clone()) });
                let seq = SeqId { request, index };
                self.outcomes.push(Outcome { seq, parent: index, tokens: Vec::new(), finished: true });
            }
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

    /// Takes the likeliest continuations of a beam. With those of the last beam it is decided which live on, and the last token
    /// gives the results.
    fn beam(
        &mut self,
        active: &mut Active,
        seq: SeqId,
        likeliest: Vec<Likely>,
        emit: &mut impl FnMut(RequestId, TokenEvent),
    ) {
        let Active { request, outputs, beams: Some(beams), .. } = active else { return };
        let (id, params) = (seq.request, &request.params);
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

/// What the host draws from a row of logits.
pub(crate) enum Choice {
    /// A token for each sequence that the row is for.
    Tokens(Vec<(u32, Sampled)>),
    /// The likeliest continuations of a beam.
    Likeliest(Vec<Likely>),
    /// No token can follow.
    End(FinishReason),
}

/// A row of logits with all that its choice follows from.
pub(crate) struct Row<'a> {
    logits: &'a [f32],
    params: &'a SamplingParams,
    /// Without the output of a beam, which is made while drawing.
    context: Context<'a>,
    wanted: Wanted<'a>,
    choice: Choice,
}

enum Wanted<'a> {
    Tokens(Vec<u32>),
    Likeliest(&'a Beams, u32),
    Nothing,
}

thread_local! {
    /// Its buffers are as large as the vocabulary.
    static SAMPLER: Cell<Sampler> = Cell::default();
}

impl<'a> Row<'a> {
    /// The last row of a span that samples. A constraint's mask must be [ready](ready).
    pub fn new(active: &'a Active, span: &Span, logits: &'a [f32]) -> Row<'a> {
        let Active { request, stop_ids, seed, outputs, guides, beams, .. } = active;
        let output = |index: u32| outputs.get(index as usize).and_then(Option::as_deref);
        let live: Vec<u32> = span.sample.clone().filter(|&index| output(index).is_some()).collect();
        let mut choice = Choice::Tokens(Vec::new());
        // Sequences that share a row have the same output so far, none, or it is a single one; and the same mask.
        let (allowed, wanted) = match (live.first(), guides, beams) {
            (_, _, Some(beams)) => (None, Wanted::Likeliest(beams, span.seq.index)),
            (None, ..) => (None, Wanted::Nothing),
            (Some(_), None, _) => (None, Wanted::Tokens(live.clone())),
            (Some(&first), Some(guides), _) => match allowed(guides, first) {
                Ok(allowed) => (Some(allowed), Wanted::Tokens(live.clone())),
                Err(reason) => {
                    choice = Choice::End(reason);
                    (None, Wanted::Nothing)
                }
            },
        };
        let output = live.first().and_then(|&first| output(first)).unwrap_or_default();
        let (prompt, params) = (&request.prompt[..], &request.params.sampling);
        let context = Context { prompt, output, stop_ids, allowed, seed: *seed, sequence: 0 };
        Row { logits, params, context, wanted, choice }
    }

    fn draw(&mut self, sampler: &mut Sampler) {
        let Row { logits, params, context, .. } = *self;
        match &self.wanted {
            Wanted::Nothing => {}
            Wanted::Tokens(live) => {
                let sampled = sampler.sample_each(logits, params, &context, live.iter().copied());
                self.choice = Choice::Tokens(live.iter().copied().zip(sampled).collect());
            }
            Wanted::Likeliest(beams, index) => {
                let mut output = Vec::new();
                beams.tokens(*index, &mut output);
                let (context, wanted) = (Context { output: &output, ..context }, beams.wanted(context.stop_ids.len()));
                self.choice = Choice::Likeliest(sampler.likeliest(logits, params, &context, wanted));
            }
        }
    }
}

/// Draws from rows on all threads.
pub(crate) fn draw_rows(threads: &Threads, mut rows: Vec<Row<'_>>) -> Vec<Choice> {
    let work = rows.first().map_or(0, |row| row_work(row.logits.len()));
    threads.chunks_mut(&mut rows, 1, work, |_, rows| {
        let mut sampler = SAMPLER.take();
        rows.iter_mut().for_each(|row| row.draw(&mut sampler));
        SAMPLER.set(sampler);
    });
    rows.into_iter().map(|row| row.choice).collect()
}

/// What a pass over a row of logits costs, counted in multiply-adds: some exponentials for each token.
pub(crate) fn row_work(vocab_size: usize) -> usize {
    16 * vocab_size
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

/// Waits for the mask of a sequence's constraint, and adds the tokens that end the sequence where it may end.
pub(crate) fn ready(
    guides: &mut Guides,
    index: u32,
    params: &GenerationParams,
    stop_ids: &[u32],
    eos_token_ids: &[u32],
) {
    // Whoever asks for the mask then gets the error.
    let Ok(mask) = guides.wait(index) else { return };
    if mask.may_end {
        let ends = stop_ids.iter().filter(|&&token| ending(params, eos_token_ids, token).is_some());
        ends.for_each(|&token| mask.tokens.insert(token));
    }
}

/// The tokens that a sequence's constraint lets through, of a mask that is [`ready`]; or why there is none.
pub(crate) fn allowed(guides: &Guides, index: u32) -> Result<&TokenSet, FinishReason> {
    let mask = guides.mask(index).map_err(|error| FinishReason::Grammar(error.0))?;
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
