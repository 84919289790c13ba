//! The step loop: plan, submit, collect, publish, commit.
//!
//! On a device that computes asynchronously, the next step is planned and submitted while the current one runs. The tokens that
//! the current step draws are not known to the host yet; the device copies them to where the next step reads them
//! ([`Span::awaits`](sched::Span::awaits)). So the device never waits for the host, and the host waits once per step.
//!
//! ```text
//! host      submit 1, submit 2 | collect 1, publish, commit, submit 3 | collect 2, publish, commit, submit 4 | …
//! device    step 1 .............. step 2 ................................. step 3 ..............................
//! ```
//!
//! No step is planned behind one that [blocks planning](StepInFlight::blocks_planning) because the host takes part in it: the
//! next mask of a grammar depends on the last token, the surviving beams depend on the rows of all beams, and rows that the host
//! draws from must be read before they are overwritten. A CPU plans no step ahead, because it computes within the submission.
//!
//! **Drafts** follow the last token that is known, so they are proposed only while no step is in flight. A step that verifies drafts
//! blocks planning, because its tokens decide where the next one begins; so does a step whose next tokens are worth drafts.
//!
//! **Failures.** A step that fails ends its requests. A step submitted behind it has read data that the failed step should have
//! written: the worker drops that step, and its other requests are computed again.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sched::{RequestId, SeqId, StepPlan};
use simd::lock;

use super::Engine;
use super::drafts::Drafts;
use super::guide::MASK_WAIT;
use super::in_flight::StepInFlight;
use super::publish::Publisher;
use super::request::EngineRequest;
use crate::api::{DraftCounts, FinishReason, TokenEvent};
use crate::watch;
use crate::worker::{Draw, StepError, StepInput};

/// Longest wait of a step that has nothing to compute for what another thread does.
const IDLE: Duration = Duration::from_millis(1);

impl Engine {
    /// Waits for a sign of life of all ranks that compute the model, if there are several. For an engine without work.
    pub(crate) fn probe(&mut self) {
        self.worker.probe();
    }

    /// Runs one step and passes what each running request has gained to `emit`. If the step fails, its requests end with
    /// [`FinishReason::Error`]; all other requests go on, and those that were being swapped are computed again.
    ///
    /// If the device draws the tokens, the following step is already in flight when this returns. A call computes nothing if all
    /// requests wait for something, such as a mask that is late.
    pub fn step(&mut self, mut emit: impl FnMut(RequestId, TokenEvent)) {
        self.advance(true, &mut emit);
    }

    /// Completes the steps in flight without planning another. Their events are passed to `emit`.
    pub fn finish_steps(&mut self, mut emit: impl FnMut(RequestId, TokenEvent)) {
        self.advance(false, &mut emit);
    }

    fn advance(&mut self, plans: bool, emit: &mut dyn FnMut(RequestId, TokenEvent)) {
        let _profile = self.worker.profile_step();
        self.scheduled.clear();
        self.take_adapter(Duration::ZERO, emit);
        let mut is_idle = self.in_flight.is_empty();
        loop {
            while plans && self.can_plan() {
                let step = self.plan();
                if !self.submit_step(step) {
                    break;
                }
            }
            let Some((step, collected)) = self.collect() else { break };
            is_idle = false;
            let published = collected.map(|()| self.publish(&step, emit));
            self.commit(step, published, emit);
            // After the last request has ended, the steps still in flight are collected too, so that their blocks are free
            // when the caller gets the last event.
            if self.in_flight.is_empty() || (plans && self.scheduler.has_work()) {
                break;
            }
        }
        if is_idle {
            self.take_adapter(IDLE, emit);
        }
        self.settle();
        if is_idle && self.has_exports() {
            std::thread::sleep(IDLE);
        }
    }

    /// Does what may follow each step and each call that ends sequences: nothing of it waits for a further step.
    pub(super) fn settle(&mut self) {
        self.report_ended();
        self.advance_exchange();
        self.publish_kv_events();
    }

    /// Tells the worker which sequences have ended, and has it make copies for other replicas, if no later step will.
    fn report_ended(&mut self) {
        if self.ended.is_empty() && !self.has_unordered_exports() || self.computes() {
            return;
        }
        let mut input = StepInput { plan: self.schedule(), ..StepInput::default() };
        self.take_ended(&mut input);
        let input = Arc::new(input);
        self.worker.submit(input.clone());
        if let Err(error) = self.worker.collect(&mut self.output) {
            tracing::error!("after the last step: {error}");
            self.abandon(&input.plan);
        }
    }

    /// The scheduler's plan of the next step.
    fn schedule(&mut self) -> StepPlan {
        self.before_plan();
        self.order_exports();
        let plan = self.scheduler.plan();
        self.exports_planned(plan.step);
        self.after_plan();
        plan
    }

    fn can_plan(&self) -> bool {
        let newest_allows = self.in_flight.back().is_none_or(|step| !step.blocks_planning);
        self.in_flight.len() < self.info.max_in_flight && newest_allows
    }

    /// Has the next step compute as many prompt tokens as the target of its time allows.
    fn limit_prompts(&mut self) {
        if let Some(budget) = &mut self.prompt_budget {
            let (rows, sequences) = (self.scheduler.num_decode_rows(), self.scheduler.num_sequences_in_reach());
            self.scheduler.set_prompt_budget(budget.next(rows, sequences));
        }
    }

    /// Leaves the sequences whose masks are late out of the next step.
    fn hold_late(&mut self) {
        let deadline = Instant::now() + MASK_WAIT;
        let Engine { requests, scheduler, awaits_mask, .. } = self;
        awaits_mask.retain(|seq| {
            let guides = requests.get_mut(&seq.request).and_then(|request| request.guides.as_mut());
            let is_late = guides.is_some_and(|guides| guides.is_late(seq.index, deadline));
            scheduler.hold(*seq, is_late);
            is_late
        });
    }

    /// Plans a step, and decides what is drawn from each of its spans.
    fn plan(&mut self) -> StepInFlight {
        let _phase = self.phase("plan");
        self.hold_late();
        self.propose_drafts();
        self.limit_prompts();
        let plan = self.schedule();
        let mut input = StepInput { plan, ..std::mem::take(&mut self.recycled) };
        self.take_ended(&mut input);
        for span in &input.plan.spans {
            let Some(request) = self.requests.get_mut(&span.seq.request) else { continue };
            if let Some(new) = request.unsent.take() {
                self.scheduled.push(request.id);
                let ended = (0..new.sequences).filter(|&index| request.num_tokens[index as usize].is_none());
                input.ended.extend(ended.map(|index| SeqId { index, ..span.seq }));
                input.requests.push(new);
            }
        }
        self.compute_drafts(&mut input);
        let (mut ends, mut blocks_planning) = (Vec::new(), input.plan.spans.is_empty());
        // In a pipeline, only the sequences of a step wait for its tokens.
        let is_pipeline = self.is_pipeline;
        for (index, span) in input.plan.spans.iter().enumerate() {
            let Some(request) = self.requests.get_mut(&span.seq.request) else {
                input.draws.push(Draw::Nothing);
                continue;
            };
            let draw = request.draw(span);
            blocks_planning |= !is_pipeline && (request.needs_prompt_rows() || request.host_decides_after(&draw));
            if let (Some(speculator), Some(_)) = (&self.speculator, &request.speculation) {
                blocks_planning |= span.sample.clone().any(|index| speculator.waits_for(SeqId { index, ..span.seq }));
            }
            input.draws.push(draw.unwrap_or_else(|reason| {
                ends.push((index, reason));
                Draw::Nothing
            }));
        }
        StepInFlight { input: Arc::new(input), ends, submitted: Instant::now(), blocks_planning }
    }

    /// Tells the worker and the source of drafts which sequences have ended.
    fn take_ended(&mut self, input: &mut StepInput) {
        let before = input.ended.len();
        input.ended.append(&mut self.ended);
        if let Some(speculator) = &mut self.speculator {
            speculator.end(&input.ended[before..]);
        }
    }

    /// Submits a step to the worker. Returns `false` if it computes nothing.
    fn submit_step(&mut self, mut step: StepInFlight) -> bool {
        let (has_work, num_tokens) = (step.has_work(), step.plan().num_tokens());
        if step.input.is_empty() {
            self.recycle(step);
            return false;
        }
        tracing::debug!("{}", step.plan());
        // Published before anything that could hang: a CPU computes the whole step within `submit`.
        lock(&self.current_step).get_or_insert_with(|| step.input.clone());
        step.submitted = Instant::now();
        self.worker.submit(step.input.clone());
        if has_work {
            self.step_tokens.count(num_tokens);
            if let Err(error) = self.scheduler.submitted(step.plan().step) {
                tracing::error!("{error}");
            }
        }
        self.in_flight.push_back(step);
        has_work
    }

    /// Waits for the oldest step in flight. Its results are in `self.output`.
    fn collect(&mut self) -> Option<(StepInFlight, Result<(), StepError>)> {
        let step = self.in_flight.pop_front()?;
        let collected = self.worker.collect(&mut self.output);
        let now = Instant::now();
        // A step behind another begins when that one ends.
        let begun = self.last_collected.replace(now).map_or(step.submitted, |last| last.max(step.submitted));
        if collected.is_ok() {
            let seconds = (now - begun).as_secs_f64();
            if let Some(speculator) = &mut self.speculator {
                speculator.collected(step.plan(), seconds);
            }
            if let Some(budget) = &mut self.prompt_budget {
                budget.measured(step.plan(), seconds);
            }
        }
        Some((step, collected))
    }

    /// Turns the results of a step into events for callers and outcomes for the scheduler.
    fn publish(&mut self, step: &StepInFlight, emit: &mut dyn FnMut(RequestId, TokenEvent)) {
        let _phase = self.phase("publish");
        self.outcomes.clear();
        let spans = &step.plan().spans;
        let Engine { requests, output, .. } = self;
        for span in spans.iter().filter(|span| span.cached > 0) {
            if let Some(request) = requests.get_mut(&span.seq.request) {
                request.cached_tokens = request.cached_tokens.max(span.cached);
            }
        }
        for (id, logprobs) in output.prompt_logprobs.drain(..) {
            if let Some(request) = requests.get_mut(&id) {
                request.prompt_logprobs.extend(logprobs.into_iter().map(Some));
            }
        }
        for (id, embedding) in output.embeddings.drain(..) {
            if let Some(request) = requests.get_mut(&id) {
                request.embedding = Some(embedding);
            }
        }
        let Engine { mask_threads, awaits_mask, eos_token_ids, outcomes, ended, generation_tokens, speculator, .. } =
            self;
        let mut drafts = Drafts::new(spans, &output.drawn, speculator.as_mut());
        let speculator = speculator.as_mut();
        let mut publisher = Publisher {
            mask_threads,
            awaits_mask,
            eos_token_ids,
            outcomes,
            ended,
            generation_tokens,
            speculator,
            emit,
        };
        let mut drawn = output.drawn.drain(..).peekable();
        while let Some((seq, sampled)) = drawn.next() {
            let is_last = drawn.peek().is_none_or(|(next, _)| *next != seq);
            let drafts = drafts.next(seq);
            update(requests, seq.request, |request| publisher.token(request, seq, sampled, drafts, is_last));
        }
        drop(drawn);
        for (span, reason) in &step.ends {
            let span = &spans[*span];
            update(requests, span.seq.request, |request| publisher.end(request, span, reason));
        }
        for (seq, likeliest) in output.likeliest.drain(..) {
            update(requests, seq.request, |request| publisher.beam(request, seq, likeliest));
        }
    }

    /// Reports the outcomes of a step to the scheduler.
    fn commit(
        &mut self,
        step: StepInFlight,
        published: Result<(), StepError>,
        emit: &mut dyn FnMut(RequestId, TokenEvent),
    ) {
        let _phase = self.phase("commit");
        match published {
            Ok(()) if !step.has_work() => {}
            Ok(()) => match self.scheduler.commit(step.plan().step, self.outcomes.list()) {
                Ok(()) => self.completed_steps += 1,
                // Only a bug in this module leads here. What the steps behind this one have read is unknown.
                Err(error) => {
                    self.fail(step.plan(), &error, emit);
                    while let Some((behind, _)) = self.collect() {
                        self.fail(behind.plan(), &error, emit);
                    }
                }
            },
            Err(error) => {
                self.fail(step.plan(), &error, emit);
                self.abandon_in_flight();
            }
        }
        *lock(&self.current_step) = self.in_flight.front().map(|next| next.input.clone());
        let stats = self.scheduler.stats();
        let (prefill, preemptions) = (stats.prompt_tokens_computed, stats.preemptions);
        let counters = watch::Counters { prefill, decode: self.generation_tokens, preemptions };
        self.recent.step(step.plan().spans.len(), counters);
        self.recycle(step);
    }

    /// Keeps the lists of a step for the next one.
    fn recycle(&mut self, step: StepInFlight) {
        // Another thread may still be reading it.
        let Ok(StepInput { plan, mut requests, mut ended, mut draws }) = Arc::try_unwrap(step.input) else { return };
        self.scheduler.recycle(plan);
        requests.clear();
        ended.clear();
        draws.clear();
        self.recycled = StepInput { requests, ended, draws, ..StepInput::default() };
    }

    /// Ends every request of a failed step, and tells the scheduler.
    fn fail(&mut self, plan: &StepPlan, error: &dyn Error, emit: &mut dyn FnMut(RequestId, TokenEvent)) {
        tracing::error!("{} failed: {error}", plan.step);
        self.failed_steps += 1;
        let message = error.to_string();
        plan.spans.iter().for_each(|span| self.end_with_error(span.seq.request, &message, emit));
        self.abandon(plan);
    }

    /// Ends a request with an error.
    pub(super) fn end_with_error(&mut self, id: RequestId, message: &str, emit: &mut dyn FnMut(RequestId, TokenEvent)) {
        if let Some(request) = self.remove(id) {
            for index in request.live() {
                let finish = Some(FinishReason::Error(message.to_string()));
                emit(id, TokenEvent::Token { index, token: None, finish, drafts: DraftCounts::default() });
            }
        }
        self.scheduler.abort(id);
    }

    /// Abandons the steps behind a failed one, which the worker has dropped.
    fn abandon_in_flight(&mut self) {
        for step in std::mem::take(&mut self.in_flight) {
            // The memory operations of a plan without spans failed with the step in front of it.
            if step.has_work() {
                self.abandon(step.plan());
            }
        }
    }

    /// Tells the scheduler that nothing of a step took place.
    fn abandon(&mut self, plan: &StepPlan) {
        if let Err(error) = self.scheduler.fail(plan.step, &plan.memory) {
            tracing::error!("the scheduler could not abandon {}: {error}", plan.step);
        }
    }
}

/// Updates a request if it is live, and removes it if that ended its last sequence.
fn update(requests: &mut HashMap<RequestId, EngineRequest>, id: RequestId, work: impl FnOnce(&mut EngineRequest)) {
    let Some(request) = requests.get_mut(&id) else { return };
    work(request);
    if request.has_ended() {
        requests.remove(&id);
    }
}
