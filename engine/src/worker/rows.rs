//! Draws on the host: rows of logits become tokens, or the likeliest tokens after a beam.
//!
//! Each row is drawn from the state before the step, so the threads of the pool share the rows and the bits do not depend on the
//! number of threads.

use std::cell::Cell;

use sampling::{Context, Likely, Sampled, Sampler, SamplingParams};
use sched::{SeqId, Span};
use simd::Pool as Threads;

use super::request::RequestState;
use super::{Draw, NewRequest};

/// A row of logits that the host draws from.
#[derive(Clone, Copy)]
pub(super) struct HostRow {
    /// Index of the span.
    pub span: usize,
    /// Number of the span's drafts in front of the token to draw.
    pub drafts: usize,
}

/// The result of a draw from one row of logits.
pub(super) enum Drawn {
    /// A token for each sequence of the row.
    Tokens(Vec<(SeqId, Sampled)>),
    /// The likeliest tokens after a beam.
    Likeliest(SeqId, Vec<Likely>),
}

/// A row of logits and everything that determines what is drawn from it.
pub(super) struct LogitsRow<'a> {
    at: HostRow,
    logits: &'a [f32],
    sampling: &'a SamplingParams,
    context: Context<'a>,
    /// Number of likeliest tokens to return, for a beam.
    likeliest: Option<usize>,
    /// Sequences that draw from the row.
    live: Vec<SeqId>,
    drawn: Option<Drawn>,
}

thread_local! {
    /// One per thread, since its buffers have the size of the vocabulary.
    static SAMPLER: Cell<Sampler> = Cell::default();
}

impl<'a> LogitsRow<'a> {
    /// A row of `span`, from which the sequences `live` draw. Their outputs end with the drafts of the span, if it has any.
    pub fn new(
        state: &'a RequestState,
        (at, span): (HostRow, &Span),
        live: Vec<SeqId>,
        draw: &'a Draw,
        logits: &'a [f32],
    ) -> LogitsRow<'a> {
        let NewRequest { prompt, sampling, stop_ids, seed, first_sequence, .. } = &*state.request;
        // Sequences that share a row have no output yet, and they share the mask.
        let own = live.first().and_then(|first| state.outputs.get(first.index as usize)?.as_deref());
        let (output, allowed, likeliest) = match draw {
            Draw::Likeliest { output, count } => (Some(&output[..]), None, Some(*count)),
            Draw::Tokens { allowed } => (own, allowed.as_deref(), None),
            Draw::Drafts { allowed } => {
                let before = |output: &'a [u32]| &output[..output.len().saturating_sub(span.drafts - at.drafts)];
                (own.map(before), allowed.get(at.drafts).map(|set| &**set), None)
            }
            Draw::Nothing => (None, None, None),
        };
        let output = output.unwrap_or_default();
        let context = Context { prompt, output, stop_ids, allowed, seed: *seed, sequence: *first_sequence };
        LogitsRow { at, logits, sampling, context, likeliest, live, drawn: None }
    }

    /// A row of the logits of a draft model. The token is drawn as the sequence's next one would be, without a grammar.
    pub fn of_draft(state: &'a RequestState, at: HostRow, seq: SeqId, logits: &'a [f32]) -> LogitsRow<'a> {
        let NewRequest { prompt, sampling, stop_ids, seed, first_sequence, .. } = &*state.request;
        let output = state.outputs.get(seq.index as usize).and_then(Option::as_deref).unwrap_or_default();
        let context = Context { prompt, output, stop_ids, allowed: None, seed: *seed, sequence: *first_sequence };
        LogitsRow { at, logits, sampling, context, likeliest: None, live: vec![seq], drawn: None }
    }

    fn draw(&mut self, sampler: &mut Sampler) {
        let LogitsRow { logits, sampling, context, likeliest, ref live, .. } = *self;
        self.drawn = match (likeliest, live.first()) {
            (_, None) => None,
            (Some(count), Some(seq)) => {
                Some(Drawn::Likeliest(*seq, sampler.likeliest(logits, sampling, &context, count)))
            }
            (None, Some(_)) => {
                // The context has the number of index 0.
                let sequences = live.iter().map(|seq| context.sequence + seq.index);
                let sampled = sampler.sample_each(logits, sampling, &context, sequences);
                Some(Drawn::Tokens(live.iter().copied().zip(sampled).collect()))
            }
        };
    }
}

/// Draws from all rows, on all threads.
pub(super) fn draw_rows(threads: &Threads, mut rows: Vec<LogitsRow<'_>>) -> Vec<(HostRow, Drawn)> {
    let work = rows.first().map_or(0, |row| row_work(row.logits.len()));
    threads.chunks_mut(&mut rows, 1, work, |_, rows| {
        let mut sampler = SAMPLER.take();
        rows.iter_mut().for_each(|row| row.draw(&mut sampler));
        SAMPLER.set(sampler);
    });
    rows.into_iter().filter_map(|row| Some((row.at, row.drawn?))).collect()
}

/// Cost of a pass over a row of logits in multiply-adds: a few exponentials per token.
pub(super) fn row_work(vocab_size: usize) -> usize {
    16 * vocab_size
}
