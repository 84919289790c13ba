//! What the host reads of the rows of a prompt: log-probabilities of its tokens, and hidden states for an embedding.

use std::ops::Range;

use models::LOGIT_ROWS;
use sampling::token_logprobs;
use sched::Span;

use super::{Failure, LocalWorker};
use crate::worker::StepOutput;
use crate::worker::rows::row_work;

impl LocalWorker {
    /// Adds the log-probabilities of the prompt tokens that the span's rows predict, if they were asked for.
    pub(super) fn score_prompt(&mut self, span: &Span, last: u32, output: &mut StepOutput) -> Result<(), Failure> {
        let Some(state) = self.requests.get_mut(&span.seq.request) else { return Ok(()) };
        let (request, positions) = (state.request.clone(), state.to_score(span));
        let Some(alternatives) = request.prompt_logprobs.filter(|_| !positions.is_empty()) else { return Ok(()) };
        state.scored = positions.end;
        let mut scores = vec![None; positions.len()];
        let mut next = positions.start + 1;
        self.rows.clear();
        self.rows.extend(rows_of(span, last, positions));
        for (rows, scores) in self.rows.chunks(LOGIT_ROWS).zip(scores.chunks_mut(LOGIT_ROWS)) {
            let logits = self.executor.logits(rows)?;
            let vocab_size = logits.len() / rows.len();
            self.device.pool().chunks_mut(scores, 1, row_work(vocab_size), |i, score| {
                let logits = &logits[i * vocab_size..][..vocab_size];
                score.fill(Some(token_logprobs(logits, request.prompt[next + i], alternatives)));
            });
            next += rows.len();
        }
        output.prompt_logprobs.push((request.id, scores.into_iter().flatten().collect()));
        Ok(())
    }

    /// Adds the hidden states of the span to the embedding, if one was asked for, and completes it with the last.
    pub(super) fn pool_prompt(&mut self, span: &Span, last: u32, output: &mut StepOutput) -> Result<(), Failure> {
        let LocalWorker { device, executor, requests, rows, pooler, .. } = self;
        let Some(state) = requests.get_mut(&span.seq.request) else { return Ok(()) };
        let (positions, len) = (state.to_pool(span), state.request.prompt.len());
        let Some(pooled) = state.pooled.as_mut().filter(|_| !positions.is_empty()) else { return Ok(()) };
        rows.clear();
        rows.extend(rows_of(span, last, positions));
        for rows in rows.chunks(LOGIT_ROWS) {
            let (hidden, width) = executor.hidden(rows)?;
            pooled.add_rows(hidden, width);
        }
        if pooled.is_complete(len) {
            output.embeddings.push((span.seq.request, pooler.apply(pooled.finish(), device.pool())));
        }
        Ok(())
    }
}

/// The rows of the batch with these positions of a span, whose last row is `last`.
fn rows_of(span: &Span, last: u32, positions: Range<usize>) -> Range<u32> {
    let row = |position: usize| last + 1 - (span.start + span.tokens.len() - position) as u32;
    row(positions.start)..row(positions.end)
}
