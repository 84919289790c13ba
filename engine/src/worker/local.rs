//! The worker of this process: a device, a model on it, and the sampler's state of each sequence.
//!
//! On a device that computes asynchronously, submitting a step waits for nothing: block copies, the forward pass and the draws
//! are ordered on its queues, and tokens that the previous step draws are already on the device ([`Span::awaits`]). Collecting a
//! step waits for its draws, or reads the rows of logits that the host draws from. On a CPU, the forward pass runs during the
//! submission, and the host draws during the collection.
//!
//! The device draws the rows of a span with drafts too, unless a grammar restricts them or the step has more rows than its sampler.

mod failure;
mod prompt;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use attention_kernels::{KernelError, KvCache, SwapSpace};
use device::profile::Step;
use device::{Device, Event, Profile, Queue};
use models::lora::{AdapterRef, AdapterStore};
use models::{LOGIT_ROWS, Model, Pooler};
use sampling::device::{Limits, MAX_DRAFTS, Pending, SampleError};
use sched::{HostBlockId, RequestId, SeqId, Span, StepPlan};

use super::adapters::AdapterSlots;
use super::drafter::Drafter;
use super::executor::{Executor, Needed, OfSpan};
use super::request::RequestState;
use super::rows::{Drawn, HostRow, LogitsRow, draw_rows};
use super::slots::{DeviceRow, Slots, num_single_draws};
use super::{Draw, StepError, StepInput, StepOutput, Worker, WorkerInfo, phase};
use crate::speculate::ProposeError;
use failure::Failure;

/// A step that was submitted and not collected.
struct SubmittedStep {
    input: Arc<StepInput>,
    /// Rows that the device draws from, in the order of its results.
    drawn: Vec<DeviceRow>,
    /// Rows that the host draws from; those of a span are consecutive.
    on_host: Vec<HostRow>,
    /// The host reads log-probabilities or hidden states of a prompt.
    reads_prompt: bool,
    /// Why the step was not launched completely.
    failure: Option<Failure>,
    results: Results,
}

impl SubmittedStep {
    fn new(input: Arc<StepInput>, (drawn, on_host): (Vec<DeviceRow>, Vec<HostRow>)) -> SubmittedStep {
        SubmittedStep { input, drawn, on_host, reads_prompt: false, failure: None, results: Results::Host }
    }
}

/// How the host learns that a step is over.
enum Results {
    /// From its draws on the device.
    Drawn(Pending),
    /// From an event; the step has no draws.
    Event(Event),
    /// From the call that launched it, or from its logits, which the host waits for.
    Host,
}

/// See the [module](self).
pub(crate) struct LocalWorker {
    device: Arc<dyn Device>,
    executor: Executor,
    /// `None` if the host draws everything.
    slots: Option<Slots>,
    /// `None` if the model takes no adapters.
    adapters: Option<AdapterSlots>,
    /// What becomes of pooled hidden states.
    pooler: Arc<Pooler>,
    /// `None` if the worker computes no drafts.
    drafter: Option<Drafter>,
    /// What became of the beginning of the next step, if its drafts have been computed.
    begun: Option<Result<(), KernelError>>,
    requests: HashMap<RequestId, RequestState>,
    /// Steps that were not collected, oldest first.
    in_flight: VecDeque<SubmittedStep>,
    /// The device has failed: every further call of it does.
    is_lost: bool,
    // Reused by every step.
    rows: Vec<u32>,
    lists: (Vec<DeviceRow>, Vec<HostRow>),
}

impl Worker for LocalWorker {
    fn draft(&mut self, input: &StepInput) -> Result<Vec<u32>, ProposeError> {
        let begun = self.begin(input);
        let failed = begun.as_ref().err().map(|error| ProposeError(error.to_string()));
        self.begun = Some(begun);
        let LocalWorker { drafter, executor, requests, .. } = self;
        match (drafter, failed) {
            (Some(drafter), None) => drafter.propose(&input.plan, requests, executor.for_drafts()),
            // The step will fail too, and report it.
            (_, Some(failed)) => Err(failed),
            (None, None) => Err(ProposeError("the worker has no model for drafts".to_string())),
        }
    }

    fn submit(&mut self, input: Arc<StepInput>) {
        let is_behind_failure = self.in_flight.back().is_some_and(|step| step.failure.is_some());
        let begun = match self.begun.take() {
            Some(begun) => begun.map_err(Failure::from),
            None if is_behind_failure => {
                self.update_requests(&input);
                Err(Failure::AfterFailed)
            }
            None => self.begin(&input).map_err(Failure::from),
        };
        let mut step = SubmittedStep::new(input, std::mem::take(&mut self.lists));
        let launched = begun.and_then(|()| self.launch(&mut step));
        step.failure = launched.err();
        self.in_flight.push_back(step);
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        output.clear();
        let Some(mut step) = self.in_flight.pop_front() else { return Err(StepError(Failure::NoStep.to_string())) };
        let collected = match step.failure.take() {
            Some(failure) => Err(failure),
            None => self.wait_for(&step, output),
        };
        if let Err(failure) = collected {
            self.drop_steps(step);
            output.clear();
            return Err(StepError(failure.to_string()));
        }
        let SubmittedStep { mut drawn, mut on_host, .. } = step;
        drawn.clear();
        on_host.clear();
        self.lists = (drawn, on_host);
        Ok(())
    }

    fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn num_sequences(&self) -> usize {
        let live = self.requests.values().flat_map(|state| &state.outputs).flatten().count();
        let drafted = self.drafter.as_ref().map_or(0, Drafter::num_sequences);
        live.max(self.slots.as_ref().map_or(0, Slots::in_use)).max(drafted)
    }

    fn read_host_block(&mut self, block: HostBlockId) -> Result<Vec<u8>, StepError> {
        self.executor.read_host_block(block.0).map_err(|error| StepError(error.to_string()))
    }

    fn write_host_block(&mut self, block: HostBlockId, contents: &[u8]) -> Result<(), StepError> {
        self.executor.write_host_block(block.0, contents).map_err(|error| StepError(error.to_string()))
    }

    fn free_cache(&mut self) -> Result<(), StepError> {
        self.executor.free_cache()
    }

    fn allocate_cache(&mut self) -> Result<(), StepError> {
        self.executor.allocate_cache().map_err(|error| StepError(error.to_string()))
    }

    fn profile_step(&self) -> Option<Step> {
        Profile::step(&self.device)
    }
}

impl LocalWorker {
    /// Creates a worker. With `limits`, the device draws the tokens.
    ///
    /// # Errors
    /// The device has no memory for its sampler.
    pub fn new(
        device: Arc<dyn Device>,
        model: Model,
        caches: Vec<KvCache>,
        swap_space: SwapSpace,
        limits: Option<Limits>,
        (adapters, drafter, pooler): (Option<Arc<AdapterStore>>, Option<Drafter>, Arc<Pooler>),
    ) -> Result<(LocalWorker, WorkerInfo), SampleError> {
        let slots = limits.map(|limits| Slots::new(device.clone(), limits)).transpose()?;
        let num_slots = model.decoder().adapters.map_or(0, |limits| limits.slots);
        let profile = device.profile().cloned();
        // A predictor reads what the next step overwrites.
        let keeps_states = drafter.as_ref().is_some_and(Drafter::reads_states);
        let vocab_size = model.decoder().vocab_size();
        let executor = Executor::new(device.clone(), model, caches, swap_space);
        let info = WorkerInfo {
            host_block_bytes: executor.host_block_bytes(),
            vocab_size,
            // A profile reads the times of a step at its end, so it allows one step in flight.
            max_in_flight: if slots.is_some() && profile.is_none() && !keeps_states { 2 } else { 1 },
            sampler: limits,
            profile,
        };
        let worker = LocalWorker {
            executor,
            device,
            slots,
            adapters: adapters.map(|store| AdapterSlots::new(store, num_slots)),
            pooler,
            drafter,
            begun: None,
            requests: HashMap::new(),
            in_flight: VecDeque::new(),
            is_lost: false,
            rows: Vec::new(),
            lists: Default::default(),
        };
        Ok((worker, info))
    }

    /// Does what precedes the forward pass and the drafts.
    fn begin(&mut self, input: &StepInput) -> Result<(), KernelError> {
        self.update_requests(input);
        self.executor.begin(&input.plan)?;
        if let Some(drafter) = &mut self.drafter {
            drafter.begin(&input.plan);
        }
        Ok(())
    }

    /// Applies the changes to requests and sequences. They hold even if the step fails.
    fn update_requests(&mut self, input: &StepInput) {
        let LocalWorker { executor, slots, requests, drafter, .. } = self;
        executor.release(&input.plan.released);
        if let Some(drafter) = drafter {
            drafter.forget(&input.plan.released);
            drafter.forget(&input.ended);
        }
        for request in &input.requests {
            requests.insert(request.id, RequestState::new(request.clone()));
        }
        for seq in &input.ended {
            let Some(state) = requests.get_mut(&seq.request) else { continue };
            if let Some(output) = state.outputs.get_mut(seq.index as usize) {
                *output = None;
            }
        }
        if let Some(slots) = slots {
            // Sequences that have ended, and those that lost their keys and values: they get a new slot when they resume.
            for seq in input.ended.iter().chain(&input.plan.released) {
                if let Some(slot) = requests.get_mut(&seq.request).and_then(|s| s.slots.get_mut(seq.index as usize)) {
                    slots.release(slot);
                }
            }
            // Sequences that have not forked from their prompt yet have a slot but no block table.
            for id in &input.plan.preempted {
                if let Some(state) = requests.get_mut(id) {
                    slots.release_all(state);
                }
            }
        }
        for seq in &input.ended {
            if requests.get(&seq.request).is_some_and(|state| state.outputs.iter().all(Option::is_none)) {
                requests.remove(&seq.request);
            }
        }
    }

    /// Orders a step that has begun on the device: forward pass, draws.
    fn launch(&mut self, step: &mut SubmittedStep) -> Result<(), Failure> {
        let input = step.input.clone();
        let LocalWorker { executor, adapters, requests, .. } = self;
        let of_span = |span: &Span| requests.get(&span.seq.request)?.request.adapter.as_deref();
        match adapters {
            Some(adapters) => adapters.assign(input.plan.spans.iter().filter_map(of_span), executor)?,
            None => {
                if let Some(span) = input.plan.spans.iter().find(|span| of_span(span).is_some()) {
                    return Err(Failure::NoAdapters(span.seq.request));
                }
            }
        }
        // The other stages of a pipeline compute all rows, and draw nothing.
        let draws = executor.draws();
        let keeps_all = self.drafter.as_ref().is_some_and(Drafter::reads_states);
        let slot_of = |adapter: &AdapterRef| adapters.as_ref()?.slot_of(adapter);
        let mut reads_prompt = false;
        executor.prepare(&input.plan, |index, span| {
            let state = requests.get(&span.seq.request);
            let second = state.and_then(|state| state.request.second);
            let of_span = OfSpan { needed: Needed::All, adapter: of_span(span).and_then(slot_of), second };
            if !draws {
                return of_span;
            }
            if state.is_some_and(|state| !state.to_score(span).is_empty() || !state.to_pool(span).is_empty()) {
                reads_prompt = true;
                return of_span;
            }
            let needed = match input.draws.get(index) {
                _ if keeps_all => Needed::All,
                None | Some(Draw::Nothing) => Needed::None,
                Some(Draw::Tokens { .. } | Draw::Likeliest { .. }) => Needed::Last(1),
                Some(Draw::Drafts { .. }) => Needed::Last(1 + span.drafts),
            };
            OfSpan { needed, ..of_span }
        })?;
        step.reads_prompt = reads_prompt;
        if input.plan.spans.is_empty() {
            return Ok(());
        }
        if draws {
            self.assign_draws(step)?;
        }
        let LocalWorker { device, executor, slots, rows, drafter, requests, .. } = self;
        if let Some(drafter) = drafter {
            drafter.follow(&input.plan, requests, executor.for_drafts());
        }
        let Some(slots) = slots.as_mut().filter(|_| draws) else { return Ok(executor.forward(None)?) };
        slots.stage()?;
        executor.forward(Some(&|tokens| slots.fill(tokens)))?;
        step.results = if step.drawn.is_empty() {
            Results::Event(device.record(Queue::Compute)?)
        } else {
            Results::Drawn(slots.draw(executor.device_logits(rows)?)?)
        };
        Ok(())
    }

    /// Decides for each draw whether the device or the host does it, and sets up the draws of the device.
    fn assign_draws(&mut self, step: &mut SubmittedStep) -> Result<(), Failure> {
        let LocalWorker { executor, slots, requests, rows, .. } = self;
        let StepInput { plan: StepPlan { spans, .. }, draws, .. } = &*step.input;
        rows.clear();
        // Rows of the device's sampler that are left for spans with drafts.
        let mut left = 0;
        if let Some(slots) = slots {
            slots.begin();
            left = slots.max_rows().saturating_sub(num_single_draws(spans, draws, requests));
        }
        for (index, (span, draw)) in spans.iter().zip(draws).enumerate() {
            let state = requests.get_mut(&span.seq.request);
            if span.awaits.is_some() {
                let slot = state.as_ref().and_then(|state| *state.slots.get(span.seq.index as usize)?);
                let (Some(slots), Some(slot)) = (&mut *slots, slot) else { return Err(Failure::NotOnDevice(span.seq)) };
                slots.add_awaited(slot, executor.last_row(index));
            }
            let Some(state) = state else { continue };
            match (draw, slots.as_mut().filter(|_| !state.request.on_host)) {
                (Draw::Nothing, _) => {}
                (Draw::Tokens { allowed }, Some(slots)) => {
                    let before = step.drawn.len();
                    step.drawn.extend(state.live(span).map(|seq| DeviceRow { seq, draft: None }));
                    let live = &step.drawn[before..];
                    if !live.is_empty() {
                        let live = live.iter().map(|row| row.seq);
                        slots.add_rows(state, live, rows.len() as u32, (allowed.as_deref(), &[]))?;
                        rows.push(executor.last_row(index));
                    }
                }
                (Draw::Tokens { .. }, None) | (Draw::Likeliest { .. }, _) => {
                    step.on_host.push(HostRow { span: index, drafts: 0 });
                }
                (Draw::Drafts { allowed }, Some(slots))
                    if allowed.is_empty() && span.drafts < left && span.drafts <= MAX_DRAFTS =>
                {
                    let Some(seq) = state.live(span).next() else { continue };
                    let drafts = &span.tokens[span.tokens.len() - span.drafts..];
                    slots.add_rows(state, [seq], rows.len() as u32, (None, drafts))?;
                    step.drawn.extend(DeviceRow::each(seq, drafts));
                    let last = executor.last_row(index);
                    rows.extend(last - span.drafts as u32..=last);
                    left -= 1 + span.drafts;
                }
                (Draw::Drafts { allowed }, slots) => {
                    // A constraint of a slot holds for all of its rows. The slot is set again when the device draws for the
                    // sequence.
                    if let (Some(slots), Some(slot)) = (slots, state.slots.get_mut(span.seq.index as usize)) {
                        slots.release(slot);
                    }
                    let rows = if allowed.is_empty() { usize::MAX } else { allowed.len() };
                    let rows = (0..(1 + span.drafts).min(rows)).map(|drafts| HostRow { span: index, drafts });
                    step.on_host.extend(rows);
                }
            }
        }
        Ok(())
    }

    /// Waits for a step and reads its results. This is the only wait of a step, unless the host reads rows.
    fn wait_for(&mut self, step: &SubmittedStep, output: &mut StepOutput) -> Result<(), Failure> {
        if let Results::Event(event) = &step.results {
            let _phase = phase(&*self.device, "wait");
            event.synchronize()?;
        }
        for (span, index) in step.input.plan.spans.iter().zip(0..).filter(|_| step.reads_prompt) {
            let last = self.executor.last_row(index);
            self.score_prompt(span, last, output)?;
            self.pool_prompt(span, last, output)?;
        }
        if let (Results::Drawn(pending), Some(slots)) = (&step.results, &self.slots) {
            // The sequence whose draft was wrong last. Its further rows follow tokens that were not drawn.
            let mut wrong = None;
            for (&DeviceRow { seq, draft }, sampled) in step.drawn.iter().zip(slots.collect(pending)?) {
                if wrong == Some(seq) {
                    continue;
                }
                if draft.is_some_and(|draft| draft != sampled.token) {
                    wrong = Some(seq);
                }
                output.drawn.push((seq, sampled));
            }
        }
        // Each row of drafts is drawn behind the drafts before it.
        self.each_with_drafts(step, RequestState::append_drafts);
        let drawn = self.draw_on_host(step, output);
        self.each_with_drafts(step, RequestState::remove_drafts);
        for (seq, sampled) in &output.drawn {
            append(&mut self.requests, *seq, sampled.token);
        }
        let LocalWorker { executor, requests, drafter, .. } = self;
        if let (Some(drafter), Ok(())) = (drafter, &drawn) {
            drafter.follow_states(&step.input.plan, requests, executor.for_drafts());
        }
        drawn
    }

    /// Calls `work` for each span with drafts.
    fn each_with_drafts(&mut self, step: &SubmittedStep, work: fn(&mut RequestState, &Span)) {
        for span in step.input.plan.spans.iter().filter(|span| span.drafts > 0) {
            if let Some(state) = self.requests.get_mut(&span.seq.request) {
                work(state, span);
            }
        }
    }

    /// Draws from the rows of logits that the device does not draw from.
    fn draw_on_host(&mut self, step: &SubmittedStep, output: &mut StepOutput) -> Result<(), Failure> {
        let LocalWorker { device, executor, requests, rows, .. } = self;
        let StepInput { plan: StepPlan { spans, .. }, draws, .. } = &*step.input;
        // The span whose draft was wrong last. Its further rows follow tokens that were not drawn.
        let mut wrong = None;
        for chunk in step.on_host.chunks(LOGIT_ROWS) {
            rows.clear();
            rows.extend(chunk.iter().map(|at| executor.last_row(at.span) - (spans[at.span].drafts - at.drafts) as u32));
            let logits = executor.logits(rows)?;
            let _phase = phase(&**device, "sample");
            let row = |(&at, logits): (&HostRow, _)| {
                let (index, span) = (at.span, &spans[at.span]);
                let state = requests.get(&span.seq.request)?;
                let is_beam = matches!(draws[index], Draw::Likeliest { .. });
                let live = if is_beam { vec![span.seq] } else { state.live(span).collect() };
                Some(LogitsRow::new(state, (at, span), live, &draws[index], logits))
            };
            let with_logits = chunk.iter().zip(logits.chunks(logits.len() / chunk.len()));
            for (at, drawn) in draw_rows(device.pool(), with_logits.filter_map(row).collect()) {
                match drawn {
                    Drawn::Tokens(tokens) => {
                        if wrong == Some(at.span) {
                            continue;
                        }
                        let Span { tokens: known, drafts, .. } = &spans[at.span];
                        let draft = known[known.len() - drafts..].get(at.drafts);
                        if draft.is_some_and(|draft| tokens.iter().any(|(_, sampled)| sampled.token != *draft)) {
                            wrong = Some(at.span);
                        }
                        output.drawn.extend(tokens);
                    }
                    Drawn::Likeliest(seq, likeliest) => output.likeliest.push((seq, likeliest)),
                }
            }
        }
        Ok(())
    }

    /// Drops a failed step and all steps that were submitted behind it. Their sequences get new slots when they are computed
    /// again.
    fn drop_steps(&mut self, failed: SubmittedStep) {
        // The blocks will be reused, and the dropped steps may still be writing them. The wait does not report the failure of the step
        // again, unless the device has failed.
        if let Err(error) = self.device.synchronize() {
            tracing::error!("after the failure of {}: {error}", failed.input.plan.step);
            self.is_lost = true;
        }
        let LocalWorker { slots, requests, in_flight, .. } = self;
        for step in std::iter::once(failed).chain(in_flight.drain(..)) {
            for span in &step.input.plan.spans {
                if let (Some(slots), Some(state)) = (&mut *slots, requests.get_mut(&span.seq.request)) {
                    slots.release_all(state);
                }
            }
        }
    }
}

/// Appends a token to its sequence's output, unless the sequence has ended.
fn append(requests: &mut HashMap<RequestId, RequestState>, seq: SeqId, token: u32) {
    let output = requests.get_mut(&seq.request).and_then(|state| state.outputs.get_mut(seq.index as usize));
    if let Some(Some(output)) = output {
        output.push(token);
    }
}
