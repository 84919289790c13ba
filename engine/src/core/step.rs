//! Steps, one behind another: plan and launch, then wait for the oldest, publish and commit it.
//!
//! Where tokens are drawn on the device a step is planned and launched while the one before it runs: what it needs of the
//! tokens that are not known yet is on the device already (`Span::awaits`). So the device goes from one step to the next
//! without waiting for the host, which waits once for each step.
//!
//! ```text
//! host      launch 1, launch 2 | wait 1, publish, commit, launch 3 | wait 2, publish, commit, launch 4 | …
//! device    step 1 ............ step 2 ............................ step 3 ............................
//! ```
//!
//! Not ahead of a step that [holds up](Flight::holds_up) the next, as the host has a part in it: a mask of a grammar follows
//! from the last token; the beams that live on, from all their rows; and what the host draws it must have read. And not on
//! a CPU, which has nothing to do while it waits for itself.
//!
//! **Failures.** A step that was not launched whole, or went wrong on the device, ends the requests that are in it. One
//! that was launched behind it read what it should have written: nothing of that step is looked at, and those of its
//! requests who were not in the failed one are computed again.

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;

use models::LOGIT_ROWS;
use sampling::token_logprobs;
use sched::{RequestId, Span, StepPlan};

use super::flight::{Flight, Results, StepError};
use super::{Engine, TokenEvent};
use crate::api::FinishReason;
use crate::draw::{Active, Draw, Row, draw_rows, ready, row_work};
use crate::status::lock;
use crate::watch;

impl Engine {
    /// One step: what every running request has gained goes to `emit`. If it fails, the requests of this step end with
    /// [`FinishReason::Error`] and the engine goes on with the others; those that were on their way to host memory or back
    /// are computed again.
    ///
    /// Where the device draws, the step after it is under way when this returns.
    pub fn step(&mut self, mut emit: impl FnMut(RequestId, TokenEvent)) {
        let (_step, profile) = (self.executor.profile_step(), self.executor.profile());
        let mut emit = |id, event| {
            let _phase = profile.as_ref().and_then(|profile| profile.phase("publish"));
            emit(id, event);
        };
        self.scheduled.clear();
        while self.may_plan() {
            let phase = self.executor.phase("plan");
            let plan = self.scheduler.plan();
            drop(phase);
            tracing::debug!("{plan}");
            if !self.launch(plan) {
                break;
            }
        }
        self.complete(&mut emit);
        // Whoever has the last answer finds all blocks free: nobody waits for what is still computed.
        while !self.scheduler.has_work() && !self.flights.is_empty() {
            self.complete(&mut emit);
        }
    }

    fn may_plan(&self) -> bool {
        // A profile reads the times of a step when it is over.
        let ahead = self.slots.is_some() && self.executor.profile().is_none();
        let depth = if ahead { 2 } else { 1 };
        self.flights.len() < depth && self.flights.back().is_none_or(|flight| !flight.holds_up)
    }

    /// Gives the device a step; `false` if it computes nothing.
    fn launch(&mut self, plan: StepPlan) -> bool {
        self.note_scheduled(&plan);
        let mut flight = Flight::new(Arc::new(plan), std::mem::take(&mut self.spare));
        let computes = !flight.plan.spans.is_empty();
        // Before anything that could hang: a CPU computes the whole step in here.
        lock(&self.under_way).get_or_insert_with(|| flight.plan.clone());
        if let Err(error) = self.give(&mut flight) {
            (flight.failure, flight.holds_up) = (Some(error), true);
        }
        if computes {
            if let Err(error) = self.scheduler.submitted(flight.plan.step) {
                tracing::error!("{error}");
            }
            self.flights.push_back(flight);
            return true;
        }
        *lock(&self.under_way) = self.flights.front().map(|flight| flight.plan.clone());
        if let Some(error) = flight.failure {
            self.fail(&flight.plan, &error, &mut |_, _| {});
        }
        false
    }

    /// Waits for the oldest step in flight, publishes and commits it.
    fn complete(&mut self, emit: &mut impl FnMut(RequestId, TokenEvent)) {
        let Some(mut flight) = self.flights.pop_front() else { return };
        let plan = flight.plan.clone();
        self.outcomes.clear();
        let taken = match flight.failure.take() {
            Some(error) => Err(error),
            None => self.take(&flight, emit),
        };
        let _phase = taken.is_ok().then(|| self.executor.phase("commit"));
        let failure: Option<Box<dyn Error>> = match taken {
            Err(error) => Some(error.into()),
            // An error can only be a fault of this file. The requests of the step end with it.
            Ok(()) => self.scheduler.commit(plan.step, self.outcomes.list()).err().map(Into::into),
        };
        if let Some(error) = failure {
            self.fail(&plan, &*error, emit);
            self.fail_behind();
        } else {
            self.completed_steps += 1;
        }
        *lock(&self.under_way) = self.flights.front().map(|next| next.plan.clone());
        let stats = self.scheduler.stats();
        let (prefill, preemptions) = (stats.prompt_tokens_computed, stats.preemptions);
        let counters = watch::Counters { prefill, decode: self.generation_tokens, preemptions };
        self.recent.step(plan.spans.len(), counters);
        self.spare = flight.lists;
        drop(flight.plan);
        // Somebody may be looking at it still.
        if let Ok(plan) = Arc::try_unwrap(plan) {
            self.scheduler.recycle(plan);
        }
    }

    /// Counts the step, and whom it computes for the first time.
    fn note_scheduled(&mut self, plan: &StepPlan) {
        for span in &plan.spans {
            if let Some(active) = self.requests.get_mut(&span.seq.request)
                && !std::mem::replace(&mut active.scheduled, true)
            {
                self.scheduled.push(span.seq.request);
            }
        }
        if !plan.spans.is_empty() {
            self.step_tokens.count(plan.num_tokens());
        }
    }

    /// Waits for a step and takes its results: the one wait of a step, unless the host looks at its rows.
    fn take(&mut self, flight: &Flight, emit: &mut impl FnMut(RequestId, TokenEvent)) -> Result<(), StepError> {
        #[cfg(test)]
        if flight.fails_late {
            let found = "a fault that a test asked for".to_string();
            return Err(attention_kernels::KernelError::Unsupported { variant: "forward", found }.into());
        }
        match &flight.results {
            Results::Drawn(_) | Results::Host => {}
            Results::Marked(event) => {
                let _phase = self.executor.phase("wait");
                event.synchronize()?;
            }
        }
        for (span, index) in flight.plan.spans.iter().zip(0..) {
            if flight.scored {
                let last_row = self.executor.last_row(index);
                self.score_prompt(span, last_row)?;
                self.pool_prompt(span, last_row)?;
            }
            if let Some(active) = self.requests.get_mut(&span.seq.request) {
                active.cached_tokens = active.cached_tokens.max(span.cached);
            }
        }
        self.take_drawn(flight, emit)?;
        self.end_without_token(flight, emit);
        self.draw_on_host(flight, emit)
    }

    /// Publishes what the device drew.
    fn take_drawn(&mut self, flight: &Flight, emit: &mut impl FnMut(RequestId, TokenEvent)) -> Result<(), StepError> {
        let Results::Drawn(pending) = &flight.results else { return Ok(()) };
        let Engine { slots: Some(slots), requests, mask_threads, outcomes, generation_tokens, .. } = self else {
            return Ok(());
        };
        let (eos_token_ids, max_model_len, drawn) = (&self.eos_token_ids[..], self.max_model_len, generation_tokens);
        let mut draw = Draw { mask_threads, eos_token_ids, max_model_len, outcomes, drawn };
        let mut over = false;
        for (&seq, sampled) in flight.lists.drawn.iter().zip(slots.collect(pending)?) {
            let Some(active) = requests.get_mut(&seq.request) else { continue };
            draw.drawn(active, seq, sampled, emit);
            over |= active.outputs[seq.index as usize].is_none();
        }
        for &seq in flight.lists.drawn.iter().filter(|_| over) {
            if let Some(active) = requests.get_mut(&seq.request) {
                slots.release_ended(active);
                if active.is_over() {
                    requests.remove(&seq.request);
                }
            }
        }
        Ok(())
    }

    /// Ends the requests that want no token and whose prompts the step has completed.
    fn end_without_token(&mut self, flight: &Flight, emit: &mut impl FnMut(RequestId, TokenEvent)) {
        for span in flight.lists.no_token.iter().map(|&span| &flight.plan.spans[span]) {
            let (requests, mask_threads, outcomes) = (&mut self.requests, &mut self.mask_threads, &mut self.outcomes);
            let (eos_token_ids, max_model_len) = (&self.eos_token_ids[..], self.max_model_len);
            let drawn = &mut self.generation_tokens;
            let Some(active) = requests.get_mut(&span.seq.request) else { continue };
            Draw { mask_threads, eos_token_ids, max_model_len, outcomes, drawn }.no_token(active, span, emit);
            if active.is_over() {
                requests.remove(&span.seq.request);
            }
        }
    }

    /// Draws from the rows of logits that the host has to see.
    fn draw_on_host(&mut self, flight: &Flight, emit: &mut impl FnMut(RequestId, TokenEvent)) -> Result<(), StepError> {
        let (profile, threads) = (self.executor.profile(), self.executor.threads().clone());
        for chunk in flight.lists.on_host.chunks(LOGIT_ROWS) {
            self.rows.clear();
            self.rows.extend(chunk.iter().map(|&span| self.executor.last_row(span)));
            let logits = self.executor.logits(&self.rows)?;
            let vocab_size = logits.len() / chunk.len();
            let _phase = profile.as_ref().and_then(|profile| profile.phase("sample"));
            let (requests, mask_threads, outcomes) = (&mut self.requests, &mut self.mask_threads, &mut self.outcomes);
            let (eos_token_ids, max_model_len) = (&self.eos_token_ids[..], self.max_model_len);
            let drawn = &mut self.generation_tokens;
            for span in chunk.iter().map(|&span| &flight.plan.spans[span]) {
                if let Some(Active { guides: Some(guides), request, stop_ids, .. }) =
                    requests.get_mut(&span.seq.request)
                {
                    ready(guides, span.sample.start, &request.params, stop_ids, eos_token_ids);
                }
            }
            let known = chunk.iter().map(|&span| &flight.plan.spans[span]).zip(logits.chunks(vocab_size));
            let rows = known
                .filter_map(|(span, logits)| Some((span, Row::new(requests.get(&span.seq.request)?, span, logits))));
            let (spans, rows): (Vec<_>, Vec<_>) = rows.unzip();
            let choices = draw_rows(&threads, rows);
            let mut draw = Draw { mask_threads, eos_token_ids, max_model_len, outcomes, drawn };
            for (span, choice) in spans.into_iter().zip(choices) {
                let Some(active) = requests.get_mut(&span.seq.request) else { continue };
                draw.row(active, span, choice, emit);
                if let Some(slots) = &mut self.slots {
                    // A grammar that nothing can follow ends a sequence that the device drew for.
                    slots.release_ended(active);
                }
                if active.is_over() {
                    requests.remove(&span.seq.request);
                }
            }
        }
        Ok(())
    }

    /// Log-probabilities of the prompt tokens that follow the span's rows, for a request that asks for them.
    fn score_prompt(&mut self, span: &Span, last_row: u32) -> Result<(), StepError> {
        let Some(active) = self.requests.get_mut(&span.seq.request) else { return Ok(()) };
        let Some(alternatives) = active.request.params.prompt_logprobs else { return Ok(()) };
        let prompt = &active.request.prompt;
        if active.prompt_logprobs.is_empty() {
            active.prompt_logprobs.push(None);
        }
        // Position p predicts token p + 1. After a preemption the known ones are computed again, not scored again.
        let scored = active.prompt_logprobs.len();
        let positions: Range<usize> =
            (scored - 1).max(span.start)..(span.start + span.tokens.len()).min(prompt.len() - 1);
        let first_row = last_row as usize + 1 - span.tokens.len();
        let positions: Vec<usize> = positions.collect();
        let threads = self.executor.threads().clone();
        for chunk in positions.chunks(LOGIT_ROWS) {
            self.rows.clear();
            self.rows.extend(chunk.iter().map(|p| (first_row + p - span.start) as u32));
            let logits = self.executor.logits(&self.rows)?;
            let vocab_size = logits.len() / chunk.len();
            let first = active.prompt_logprobs.len();
            active.prompt_logprobs.resize(first + chunk.len(), None);
            threads.chunks_mut(&mut active.prompt_logprobs[first..], 1, row_work(vocab_size), |i, score| {
                let logits = &logits[i * vocab_size..][..vocab_size];
                score.fill(Some(token_logprobs(logits, prompt[chunk[i] + 1], alternatives)));
            });
        }
        Ok(())
    }

    /// Takes the hidden states of a prompt that becomes an embedding.
    fn pool_prompt(&mut self, span: &Span, last_row: u32) -> Result<(), StepError> {
        let Some(active) = self.requests.get_mut(&span.seq.request) else { return Ok(()) };
        let Some(pool) = &mut active.pool else { return Ok(()) };
        let end = span.start + span.tokens.len();
        let positions: Vec<usize> = pool.positions(span.start..end, active.request.prompt.len()).collect();
        let width = self.executor.hidden_size();
        for chunk in positions.chunks(LOGIT_ROWS) {
            self.rows.clear();
            self.rows.extend(chunk.iter().map(|p| last_row - (end - 1 - p) as u32));
            pool.take(self.executor.hidden(&self.rows)?, width);
        }
        Ok(())
    }

    /// Ends every request of the step with the error, and tells the scheduler that the step failed.
    fn fail(&mut self, plan: &StepPlan, error: &dyn Error, emit: &mut impl FnMut(RequestId, TokenEvent)) {
        tracing::error!("step {} failed: {error}", plan.step.0);
        self.failed_steps += 1;
        // Its blocks are given to others, and it may still write to them.
        if let Err(error) = self.executor.synchronize() {
            tracing::error!("behind step {}: {error}", plan.step.0);
        }
        self.outcomes.clear();
        for span in &plan.spans {
            let id = span.seq.request;
            if let Some(active) = self.forget(id) {
                let live = active.outputs.iter().zip(0..).filter(|(output, _)| output.is_some());
                for (_, index) in live {
                    let finish = Some(FinishReason::Error(error.to_string()));
                    emit(id, TokenEvent::Token { index, token: None, finish });
                }
            }
            self.scheduler.abort(id);
        }
        if let Err(error) = self.scheduler.fail(plan.step, &plan.memory) {
            tracing::error!("step {} was not given up: {error}", plan.step.0);
        }
    }

    /// Drops the step behind one that failed: it read what the failed one should have written.
    fn fail_behind(&mut self) {
        let Some(Flight { plan, .. }) = self.flights.pop_front() else { return };
        // It may still write to blocks that are to be given to others.
        if let Err(error) = self.executor.synchronize() {
            tracing::error!("step {}, behind a failed one: {error}", plan.step.0);
        }
        let Engine { slots, requests, scheduler, .. } = self;
        for span in &plan.spans {
            if let (Some(slots), Some(active)) = (&mut *slots, requests.get_mut(&span.seq.request)) {
                active.slots.iter_mut().for_each(|slot| slots.release(slot));
            }
        }
        if let Err(error) = scheduler.fail(plan.step, &plan.memory) {
            tracing::error!("step {} was not given up: {error}", plan.step.0);
        }
    }
}
