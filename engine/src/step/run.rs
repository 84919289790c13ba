//! Steps, one behind another: plan, submit, collect, publish, commit.
//!
//! Where the device computes by itself, a step is planned and submitted while the one before it runs: what it needs of the
//! tokens that are not known yet is on the device already (`Span::awaits`). So the device goes from one step to the next
//! without waiting for the host, which waits once for each step.
//!
//! ```text
//! host      submit 1, submit 2 | collect 1, publish, commit, submit 3 | collect 2, publish, commit, submit 4 | …
//! device    step 1 .............. step 2 ................................. step 3 ..............................
//! ```
//!
//! No step is planned behind one that [holds up](StepInFlight::holds_up) the next, as the host has a part in it: the mask of a grammar
//! follows from the last token; the beams that live on, from all their rows; and the rows that the host draws from must be read
//! before they are overwritten. Nor on a CPU, which has nothing to do while it waits for itself.
//!
//! **Failures.** A step that fails ends the requests that are in it. One that was submitted behind it read what it should have
//! written: the worker drops it, and those of its requests that were not in the failed one are computed again.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;

use sched::{RequestId, Span, StepPlan};

use super::Engine;
use super::flight::StepInFlight;
use super::publish::Publisher;
use super::request::Active;
use super::under_way::lock;
use crate::api::{FinishReason, TokenEvent};
use crate::watch;
use crate::worker::{Draw, StepError, StepInput};

impl Engine {
    /// One step: what every running request has gained goes to `emit`. If it fails, the requests of this step end with
    /// [`FinishReason::Error`] and the engine goes on with the others; those that were on their way to host memory or back
    /// are computed again.
    ///
    /// Where the device draws, the step after it is under way when this returns.
    pub fn step(&mut self, mut emit: impl FnMut(RequestId, TokenEvent)) {
        let _profile = self.worker.profile_step();
        self.scheduled.clear();
        loop {
            while self.may_plan() {
                let flight = self.plan();
                if !self.submit_step(flight) {
                    break;
                }
            }
            let Some((flight, collected)) = self.collect() else { break };
            let published = collected.map(|()| self.publish(&flight, &mut emit));
            self.commit(flight, published, &mut emit);
            // Whoever has the last answer finds all blocks free: nobody waits for what is still computed.
            if self.scheduler.has_work() || self.flights.is_empty() {
                break;
            }
        }
        self.tell_ends();
    }

    /// Tells the worker who has ended where no step follows that would.
    pub(super) fn tell_ends(&mut self) {
        if self.ended.is_empty() || self.scheduler.has_work() || !self.flights.is_empty() {
            return;
        }
        let mut input = StepInput { plan: self.scheduler.plan(), ..StepInput::default() };
        input.ended.append(&mut self.ended);
        self.worker.submit(Arc::new(input));
        if let Err(error) = self.worker.collect(&mut self.output) {
            tracing::error!("behind the last step: {error}");
        }
    }

    fn may_plan(&self) -> bool {
        self.flights.len() < self.info.max_in_flight && self.flights.back().is_none_or(|flight| !flight.holds_up)
    }

    /// Plans a step, and says what is drawn from each of its spans.
    fn plan(&mut self) -> StepInFlight {
        let _phase = self.phase("plan");
        let plan = self.scheduler.plan();
        let mut input = StepInput { plan, ..std::mem::take(&mut self.spare) };
        input.ended.append(&mut self.ended);
        let (mut ends, mut holds_up) = (Vec::new(), input.plan.spans.is_empty());
        for (index, span) in input.plan.spans.iter().enumerate() {
            let Some(active) = self.requests.get_mut(&span.seq.request) else {
                input.draws.push(Draw::Nothing);
                continue;
            };
            if let Some(new) = active.new.take() {
                self.scheduled.push(active.id);
                let ended = (0..new.sequences).filter(|&index| active.made[index as usize].is_none());
                input.ended.extend(ended.map(|index| sched::SeqId { index, ..span.seq }));
                input.requests.push(new);
            }
            let draw = active.draw(span);
            holds_up |= active.is_scored() || active.is_followed_by_host(&draw);
            input.draws.push(draw.unwrap_or_else(|reason| {
                ends.push((index, reason));
                Draw::Nothing
            }));
        }
        StepInFlight { input: Arc::new(input), ends, holds_up }
    }

    /// Gives the worker a step; `false` if it computes nothing.
    fn submit_step(&mut self, flight: StepInFlight) -> bool {
        let (computes, tokens) = (flight.computes(), flight.plan().num_tokens());
        if flight.input.is_empty() {
            self.recycle(flight);
            return false;
        }
        tracing::debug!("{}", flight.plan());
        // Before anything that could hang: a CPU computes the whole step in here.
        lock(&self.under_way).get_or_insert_with(|| flight.input.clone());
        self.worker.submit(flight.input.clone());
        if computes {
            self.step_tokens.count(tokens);
            if let Err(error) = self.scheduler.submitted(flight.plan().step) {
                tracing::error!("{error}");
            }
        }
        self.flights.push_back(flight);
        computes
    }

    /// Waits for the oldest step in flight. What came of it is in `output`.
    fn collect(&mut self) -> Option<(StepInFlight, Result<(), StepError>)> {
        let flight = self.flights.pop_front()?;
        Some((flight, self.worker.collect(&mut self.output)))
    }

    /// Makes events and outcomes of what came of a step.
    fn publish(&mut self, flight: &StepInFlight, emit: &mut impl FnMut(RequestId, TokenEvent)) {
        let _phase = self.phase("publish");
        self.outcomes.clear();
        let spans = &flight.plan().spans;
        let Engine { requests, output, .. } = self;
        for span in spans.iter().filter(|span| span.cached > 0) {
            if let Some(active) = requests.get_mut(&span.seq.request) {
                active.cached_tokens = active.cached_tokens.max(span.cached);
            }
        }
        for (id, scores) in output.prompt_logprobs.drain(..) {
            if let Some(active) = requests.get_mut(&id) {
                active.prompt_logprobs.extend(scores.into_iter().map(Some));
            }
        }
        for (id, embedding) in output.embeddings.drain(..) {
            if let Some(active) = requests.get_mut(&id) {
                active.embedding = Some(embedding);
            }
        }
        let Engine { mask_threads, eos_token_ids, outcomes, ended, generation_tokens: drawn, .. } = self;
        let mut publisher = Publisher { mask_threads, eos_token_ids, outcomes, ended, drawn, emit };
        for (seq, sampled) in output.drawn.drain(..) {
            let Some(active) = requests.get_mut(&seq.request) else { continue };
            publisher.token(active, seq, sampled);
            remove_if_over(requests, seq.request);
        }
        for (span, reason) in &flight.ends {
            let (span, id) = (&spans[*span], spans[*span].seq.request);
            let Some(active) = requests.get_mut(&id) else { continue };
            publisher.end(active, span, reason);
            remove_if_over(requests, id);
        }
        for (seq, likeliest) in output.likeliest.drain(..) {
            let Some(active) = requests.get_mut(&seq.request) else { continue };
            publisher.beam(active, seq, likeliest);
            remove_if_over(requests, seq.request);
        }
    }

    /// Tells the scheduler what came of a step.
    fn commit(
        &mut self,
        flight: StepInFlight,
        published: Result<(), StepError>,
        emit: &mut impl FnMut(RequestId, TokenEvent),
    ) {
        let _phase = self.phase("commit");
        match published {
            Ok(()) if !flight.computes() => {}
            Ok(()) => match self.scheduler.commit(flight.plan().step, self.outcomes.list()) {
                Ok(()) => self.completed_steps += 1,
                // Can only be a fault of this file. Nobody knows what the steps behind it have read.
                Err(error) => {
                    self.fail(flight.plan(), &error, emit);
                    while let Some((behind, _)) = self.collect() {
                        self.fail(behind.plan(), &error, emit);
                    }
                }
            },
            Err(error) => {
                self.fail(flight.plan(), &error, emit);
                self.give_up_steps();
            }
        }
        *lock(&self.under_way) = self.flights.front().map(|next| next.input.clone());
        let stats = self.scheduler.stats();
        let (prefill, preemptions) = (stats.prompt_tokens_computed, stats.preemptions);
        let counters = watch::Counters { prefill, decode: self.generation_tokens, preemptions };
        self.recent.step(flight.plan().spans.len(), counters);
        self.recycle(flight);
    }

    /// Keeps the lists of a step for another.
    fn recycle(&mut self, flight: StepInFlight) {
        // Somebody may be looking at it still.
        let Ok(StepInput { plan, mut requests, mut ended, mut draws }) = Arc::try_unwrap(flight.input) else { return };
        self.scheduler.recycle(plan);
        requests.clear();
        ended.clear();
        draws.clear();
        self.spare = StepInput { requests, ended, draws, ..StepInput::default() };
    }

    /// Ends every request of a step that failed, and tells the scheduler.
    fn fail(&mut self, plan: &StepPlan, error: &dyn Error, emit: &mut impl FnMut(RequestId, TokenEvent)) {
        tracing::error!("{} failed: {error}", plan.step);
        self.failed_steps += 1;
        for span in &plan.spans {
            let id = span.seq.request;
            if let Some(active) = self.forget(id) {
                for index in active.live() {
                    let finish = Some(FinishReason::Error(error.to_string()));
                    emit(id, TokenEvent::Token { index, token: None, finish });
                }
            }
            self.scheduler.abort(id);
        }
        self.give_up(plan);
    }

    /// Gives up the steps behind one that failed. The worker has dropped them.
    fn give_up_steps(&mut self) {
        for flight in std::mem::take(&mut self.flights) {
            // The memory operations of a plan without spans failed with the step before it.
            if flight.computes() {
                self.give_up(flight.plan());
            }
        }
    }

    fn give_up(&mut self, plan: &StepPlan) {
        if let Err(error) = self.scheduler.fail(plan.step, &plan.memory) {
            tracing::error!("{} was not given up: {error}", plan.step);
        }
    }
}

fn remove_if_over(requests: &mut HashMap<RequestId, Active>, id: RequestId) {
    if requests.get(&id).is_some_and(Active::is_over) {
        requests.remove(&id);
    }
}

impl Active {
    /// What is drawn from the last row of a span, or why its sequences end without a token.
    fn draw(&mut self, span: &Span) -> Result<Draw, FinishReason> {
        if span.sample.is_empty() {
            return Ok(Draw::Nothing);
        }
        if self.limit == 0 {
            return Err(FinishReason::Length);
        }
        if let Some(beams) = &self.beams {
            let mut output = Vec::new();
            beams.tokens(span.seq.index, &mut output);
            return Ok(Draw::Likeliest { output, count: beams.wanted(self.num_stop_ids) });
        }
        let live = span.sample.clone().find(|&index| self.made.get(index as usize).is_some_and(Option::is_some));
        Ok(match (live, &mut self.guides) {
            (None, _) => Draw::Nothing,
            (Some(_), None) => Draw::Tokens { allowed: None },
            (Some(live), Some(guides)) => Draw::Tokens { allowed: Some(guides.allowed(live).clone()?) },
        })
    }

    /// Whether the host has a part in what follows a draw.
    fn is_followed_by_host(&self, draw: &Result<Draw, FinishReason>) -> bool {
        match draw {
            Ok(Draw::Nothing) => false,
            Ok(Draw::Tokens { allowed }) => self.on_host || allowed.is_some(),
            Ok(Draw::Likeliest { .. }) => true,
            // That it has ended is known when the step is committed.
            Err(_) => self.guides.is_some(),
        }
    }
}
