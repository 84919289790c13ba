//! The worker of this process: a device, a model on it, and what its sampler knows of each sequence.
//!
//! On a device that launches kernels, submitting a step waits for nothing: block copies, the forward pass and the draws go to
//! its queues. Tokens that the step before it draws are on the device already ([`Span::awaits`]). Collecting a step waits for
//! its draws, or reads the rows of logits that the host draws from. On a CPU the forward pass runs when it is submitted, and
//! the host draws when it is collected.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use attention_kernels::{KernelError, KvCache, SwapSpace};
use device::profile::Step;
use device::{Device, DeviceError, Event};
use models::{LOGIT_ROWS, Model};
use sampling::device::{Limits, Pending, SampleError};
use sampling::token_logprobs;
use sched::{RequestId, SeqId, Span, StepPlan};

use super::executor::{Executor, Needed};
use super::request::RequestState;
use super::rows::{Drawn, Row, draw_rows, row_work};
use super::slots::Slots;
use super::{Draw, StepError, StepInput, StepOutput, Worker, WorkerInfo};

/// Why a step could not be computed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Sample(#[from] SampleError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("{0}: the step awaits its last token, and the device does not draw for it")]
    Unknown(SeqId),
    #[error("the step was submitted behind one that failed")]
    Behind,
    #[error("no step is in flight")]
    Nothing,
}

/// The rows of a batch that hold these positions of a span, whose last row is `last`.
fn rows_of(span: &Span, last: u32, positions: Range<usize>) -> Range<u32> {
    let row = |position: usize| last + 1 - (span.start + span.tokens.len() - position) as u32;
    row(positions.start)..row(positions.end)
}

/// A step that was submitted and not collected.
struct SubmittedStep {
    input: Arc<StepInput>,
    /// Whose tokens the device draws, in the order of its results.
    drawn: Vec<SeqId>,
    /// Spans whose last row the host draws from.
    on_host: Vec<usize>,
    /// The host takes prompt log-probabilities or hidden states of it.
    scored: bool,
    /// It was not launched whole.
    failure: Option<Failure>,
    results: Results,
}

impl SubmittedStep {
    fn new(input: Arc<StepInput>, (drawn, on_host): (Vec<SeqId>, Vec<usize>)) -> SubmittedStep {
        SubmittedStep { input, drawn, on_host, scored: false, failure: None, results: Results::Host }
    }
}

/// How a step is known to be over.
enum Results {
    /// By its draws on the device.
    Drawn(Pending),
    /// By an event alone.
    Marked(Event),
    /// By the call that launched it, or by its logits, which the host waits for.
    Host,
}

/// See the [module](self).
pub(crate) struct LocalWorker {
    executor: Executor,
    /// Where the device draws; `None`: all is drawn on the host.
    slots: Option<Slots>,
    requests: HashMap<RequestId, RequestState>,
    /// Oldest first.
    flights: VecDeque<SubmittedStep>,
    // Reused by every step.
    rows: Vec<u32>,
    lists: (Vec<SeqId>, Vec<usize>),
}

impl Worker for LocalWorker {
    fn submit(&mut self, input: Arc<StepInput>) {
        self.learn(&input);
        let mut flight = SubmittedStep::new(input, std::mem::take(&mut self.lists));
        let launched = match self.flights.back() {
            Some(SubmittedStep { failure: Some(_), .. }) => Err(Failure::Behind),
            _ => self.launch(&mut flight),
        };
        flight.failure = launched.err();
        self.flights.push_back(flight);
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        output.clear();
        let Some(mut flight) = self.flights.pop_front() else { return Err(StepError(Failure::Nothing.to_string())) };
        let taken = match flight.failure.take() {
            Some(failure) => Err(failure),
            None => self.wait_for(&flight, output),
        };
        if let Err(failure) = taken {
            self.drop_steps(flight);
            output.clear();
            return Err(StepError(failure.to_string()));
        }
        let SubmittedStep { mut drawn, mut on_host, .. } = flight;
        drawn.clear();
        on_host.clear();
        self.lists = (drawn, on_host);
        Ok(())
    }

    fn num_sequences(&self) -> usize {
        let live = self.requests.values().flat_map(|state| &state.outputs).flatten().count();
        live.max(self.slots.as_ref().map_or(0, Slots::in_use))
    }

    fn profile_step(&self) -> Option<Step> {
        self.executor.profile_step()
    }
}

impl LocalWorker {
    /// With `limits` the device draws.
    ///
    /// # Errors
    /// The device has no memory for its sampler.
    pub fn new(
        device: Arc<dyn Device>,
        model: Model,
        caches: Vec<KvCache>,
        swap_space: SwapSpace,
        limits: Option<Limits>,
    ) -> Result<(LocalWorker, WorkerInfo), SampleError> {
        let slots = limits.map(|limits| Slots::new(device.clone(), limits)).transpose()?;
        let profile = device.profile().cloned();
        let info = WorkerInfo {
            vocab_size: model.decoder().vocab_size(),
            // A profile reads the times of a step when it is over.
            max_in_flight: if slots.is_some() && profile.is_none() { 2 } else { 1 },
            sampler: limits,
            profile,
        };
        let executor = Executor::new(device, model, caches, swap_space);
        let (requests, flights) = (HashMap::new(), VecDeque::new());
        let worker = LocalWorker { executor, slots, requests, flights, rows: Vec::new(), lists: Default::default() };
        Ok((worker, info))
    }

    /// Takes in what an input says of requests and sequences; it holds whether the step fails or not.
    fn learn(&mut self, input: &StepInput) {
        let LocalWorker { executor, slots, requests, .. } = self;
        executor.forget(&input.plan.released);
        for request in &input.requests {
            requests.insert(request.id, RequestState::new(request.clone()));
        }
        for seq in &input.ended {
            let Some(state) = requests.get_mut(&seq.request) else { continue };
            if let Some(output) = state.outputs.get_mut(seq.index as usize) {
                *output = None;
            }
        }
        let Some(slots) = slots else {
            return forget_ended(requests, &input.ended);
        };
        // Sequences that have ended, and those that have lost their keys and values: who comes back has its slot set anew.
        for seq in input.ended.iter().chain(&input.plan.released) {
            if let Some(slot) = requests.get_mut(&seq.request).and_then(|s| s.slots.get_mut(seq.index as usize)) {
                slots.release(slot);
            }
        }
        // Sequences that have not forked from their prompt yet have a slot, but no table of their own.
        for id in &input.plan.preempted {
            if let Some(state) = requests.get_mut(id) {
                slots.release_all(state);
            }
        }
        forget_ended(requests, &input.ended);
    }

    /// Gives a step to the device: block copies, forward pass, draws.
    fn launch(&mut self, flight: &mut SubmittedStep) -> Result<(), Failure> {
        let input = flight.input.clone();
        let LocalWorker { executor, requests, .. } = self;
        let mut scored = false;
        executor.prepare(&input.plan, |index, span| {
            let state = requests.get(&span.seq.request);
            if state.is_some_and(|state| !state.to_score(span).is_empty() || !state.to_pool(span).is_empty()) {
                scored = true;
                return Needed::All;
            }
            match input.draws.get(index) {
                None | Some(Draw::Nothing) => Needed::None,
                Some(Draw::Tokens { .. } | Draw::Likeliest { .. }) => Needed::Last,
            }
        })?;
        flight.scored = scored;
        if input.plan.spans.is_empty() {
            return Ok(());
        }
        self.assign(flight)?;
        let LocalWorker { executor, slots, rows, .. } = self;
        let Some(slots) = slots else { return Ok(executor.forward(None)?) };
        slots.stage()?;
        executor.forward(Some(&|tokens| slots.fill(tokens)))?;
        flight.results = if flight.drawn.is_empty() {
            Results::Marked(executor.mark()?)
        } else {
            Results::Drawn(slots.draw(executor.device_logits(rows)?)?)
        };
        Ok(())
    }

    /// Decides for each row that is drawn from whether the device does it, and tells that what it has to know.
    fn assign(&mut self, flight: &mut SubmittedStep) -> Result<(), Failure> {
        let LocalWorker { executor, slots, requests, rows, .. } = self;
        let StepInput { plan: StepPlan { spans, .. }, draws, .. } = &*flight.input;
        rows.clear();
        if let Some(slots) = slots {
            slots.begin();
        }
        for (index, (span, draw)) in spans.iter().zip(draws).enumerate() {
            let state = requests.get_mut(&span.seq.request);
            if span.awaits.is_some() {
                let slot = state.as_ref().and_then(|state| *state.slots.get(span.seq.index as usize)?);
                let (Some(slots), Some(slot)) = (&mut *slots, slot) else { return Err(Failure::Unknown(span.seq)) };
                slots.awaits(slot, executor.last_row(index));
            }
            let Some(state) = state else { continue };
            match (draw, slots.as_mut().filter(|_| !state.request.on_host)) {
                (Draw::Nothing, _) => {}
                (Draw::Tokens { allowed }, Some(slots)) => {
                    let before = flight.drawn.len();
                    flight.drawn.extend(state.live(span));
                    let live = &flight.drawn[before..];
                    if !live.is_empty() {
                        slots.add_rows(state, live, rows.len() as u32, allowed.as_deref())?;
                        rows.push(executor.last_row(index));
                    }
                }
                (Draw::Tokens { .. }, None) | (Draw::Likeliest { .. }, _) => flight.on_host.push(index),
            }
        }
        Ok(())
    }

    /// Waits for a step and takes its results: the one wait of a step, unless the host looks at its rows.
    fn wait_for(&mut self, flight: &SubmittedStep, output: &mut StepOutput) -> Result<(), Failure> {
        if let Results::Marked(event) = &flight.results {
            let _phase = self.executor.phase("wait");
            event.synchronize()?;
        }
        for (span, index) in flight.input.plan.spans.iter().zip(0..).filter(|_| flight.scored) {
            let last = self.executor.last_row(index);
            self.score_prompt(span, last, output)?;
            self.pool_prompt(span, last, output)?;
        }
        if let (Results::Drawn(pending), Some(slots)) = (&flight.results, &self.slots) {
            let before = output.drawn.len();
            output.drawn.extend(flight.drawn.iter().copied().zip(slots.collect(pending)?));
            for (seq, sampled) in &output.drawn[before..] {
                push(&mut self.requests, *seq, sampled.token);
            }
        }
        self.draw_on_host(flight, output)
    }

    /// Draws from the rows of logits that the host has to see.
    fn draw_on_host(&mut self, flight: &SubmittedStep, output: &mut StepOutput) -> Result<(), Failure> {
        let LocalWorker { executor, requests, rows, .. } = self;
        let StepInput { plan: StepPlan { spans, .. }, draws, .. } = &*flight.input;
        for chunk in flight.on_host.chunks(LOGIT_ROWS) {
            rows.clear();
            rows.extend(chunk.iter().map(|&span| executor.last_row(span)));
            let (threads, profile) = (executor.threads().clone(), executor.profile());
            let logits = executor.logits(rows)?;
            let _phase = profile.as_ref().and_then(|profile| profile.phase("sample"));
            let row = |(&index, logits): (&usize, _)| {
                let span = &spans[index];
                let state = requests.get(&span.seq.request)?;
                let is_beam = matches!(draws[index], Draw::Likeliest { .. });
                let live = if is_beam { vec![span.seq] } else { state.live(span).collect() };
                Some(Row::new(state, live, &draws[index], logits))
            };
            let with_logits = chunk.iter().zip(logits.chunks(logits.len() / chunk.len()));
            for drawn in draw_rows(&threads, with_logits.filter_map(row).collect()) {
                match drawn {
                    Drawn::Tokens(tokens) => {
                        tokens.iter().for_each(|(seq, sampled)| push(requests, *seq, sampled.token));
                        output.drawn.extend(tokens);
                    }
                    Drawn::Likeliest(seq, likeliest) => output.likeliest.push((seq, likeliest)),
                }
            }
        }
        Ok(())
    }

    /// Log-probabilities of the prompt tokens that follow the span's rows, for a request that asks for them.
    fn score_prompt(&mut self, span: &Span, last: u32, output: &mut StepOutput) -> Result<(), Failure> {
        let Some(state) = self.requests.get_mut(&span.seq.request) else { return Ok(()) };
        let (request, positions) = (state.request.clone(), state.to_score(span));
        let Some(alternatives) = request.prompt_logprobs.filter(|_| !positions.is_empty()) else { return Ok(()) };
        state.scored = positions.end;
        let threads = self.executor.threads().clone();
        let mut scores = vec![None; positions.len()];
        let mut next = positions.start + 1;
        self.rows.clear();
        self.rows.extend(rows_of(span, last, positions));
        for (rows, scores) in self.rows.chunks(LOGIT_ROWS).zip(scores.chunks_mut(LOGIT_ROWS)) {
            let logits = self.executor.logits(rows)?;
            let vocab_size = logits.len() / rows.len();
            threads.chunks_mut(scores, 1, row_work(vocab_size), |i, score| {
                let logits = &logits[i * vocab_size..][..vocab_size];
                score.fill(Some(token_logprobs(logits, request.prompt[next + i], alternatives)));
            });
            next += rows.len();
        }
        output.prompt_logprobs.push((request.id, scores.into_iter().flatten().collect()));
        Ok(())
    }

    /// Takes the hidden states of a prompt that becomes an embedding, and makes it of the last.
    fn pool_prompt(&mut self, span: &Span, last: u32, output: &mut StepOutput) -> Result<(), Failure> {
        let LocalWorker { executor, requests, rows, .. } = self;
        let Some(state) = requests.get_mut(&span.seq.request) else { return Ok(()) };
        let positions = state.to_pool(span);
        let is_last = positions.end == state.request.prompt.len();
        let Some(pooled) = state.pooled.as_mut().filter(|_| !positions.is_empty()) else { return Ok(()) };
        rows.clear();
        rows.extend(rows_of(span, last, positions));
        let width = executor.hidden_size();
        for rows in rows.chunks(LOGIT_ROWS) {
            pooled.add_rows(executor.hidden(rows)?, width);
        }
        if is_last {
            output.embeddings.push((span.seq.request, pooled.finish()));
        }
        Ok(())
    }

    /// Drops a step that failed and all that were submitted behind it. Their sequences have their slots set anew when they are
    /// computed again.
    fn drop_steps(&mut self, failed: SubmittedStep) {
        // Their blocks are given to others, and they may still write to them.
        if let Err(error) = self.executor.synchronize() {
            tracing::error!("behind {}: {error}", failed.input.plan.step);
        }
        let LocalWorker { slots, requests, flights, .. } = self;
        for flight in std::iter::once(failed).chain(flights.drain(..)) {
            for span in &flight.input.plan.spans {
                if let (Some(slots), Some(state)) = (&mut *slots, requests.get_mut(&span.seq.request)) {
                    slots.release_all(state);
                }
            }
        }
    }
}

/// A token becomes part of its sequence's output, unless that has ended.
fn push(requests: &mut HashMap<RequestId, RequestState>, seq: SeqId, token: u32) {
    let output = requests.get_mut(&seq.request).and_then(|state| state.outputs.get_mut(seq.index as usize));
    if let Some(Some(output)) = output {
        output.push(token);
    }
}

/// Forgets the requests whose last sequence is among these.
fn forget_ended(requests: &mut HashMap<RequestId, RequestState>, ended: &[SeqId]) {
    for seq in ended {
        if requests.get(&seq.request).is_some_and(|state| state.outputs.iter().all(Option::is_none)) {
            requests.remove(&seq.request);
        }
    }
}
