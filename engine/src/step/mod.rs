//! The synchronous engine on token ids: plan, submit, collect, publish, commit.

mod beam;
mod check;
mod flight;
mod publish;
mod request;
mod run;
mod under_way;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use device::profile::Phase;
use models::Pooling;
use sampling::Constraint;
use sampling::device::SampleError;
use sched::{Request, RequestId, SchedConfig, Scheduler, SeqId};

use crate::api::{EngineStats, GenerationParams, GenerationRequest, StepTokens};
use crate::error::{AuditError, EngineError, SubmitError};
use crate::grammar::{Guides, MaskThreads};
use crate::watch::{self, Recent, Snapshot};
use crate::worker::{NewRequest, StepInput, StepOutput, Worker, WorkerInfo};
use beam::Beams;
use check::{check, refused};
use flight::StepInFlight;
use publish::Outcomes;
use request::{Active, ending};
pub(crate) use under_way::{StepUnderWay, lock};

/// Runs requests on token ids, one step at a time. It owns the scheduler and what requests have made so far; a worker computes.
pub struct Engine {
    scheduler: Scheduler,
    worker: Box<dyn Worker>,
    info: WorkerInfo,
    mask_threads: MaskThreads,
    requests: HashMap<RequestId, Active>,
    eos_token_ids: Vec<u32>,
    max_model_len: usize,
    seed: u64,
    next_id: u64,
    generation_tokens: u64,
    /// Steps whose results were taken and committed.
    completed_steps: u64,
    failed_steps: u64,
    step_tokens: StepTokens,
    /// Requests that a slot of the device's sampler has no room for.
    requests_drawn_on_host: u64,
    /// Kinds of wishes that were logged because of it.
    logged: Vec<&'static str>,
    under_way: StepUnderWay,
    /// Steps that the worker has been given and that are not committed, oldest first.
    flights: VecDeque<StepInFlight>,
    /// Sequences that have ended since the last step was planned.
    ended: Vec<SeqId>,
    /// Requests that a step computed for the first time during the last [`Engine::step`].
    scheduled: Vec<RequestId>,
    recent: Recent,
    // Reused by every step.
    output: StepOutput,
    outcomes: Outcomes,
    spare: StepInput,
}

/// What an [`Engine`] is made of: a worker, and what the engine has to know of it and of the model.
pub struct EngineParts {
    /// Computes the steps.
    pub worker: Box<dyn Worker>,
    /// What the worker can do.
    pub info: WorkerInfo,
    /// Sizes of the block pool and of a step. The engine sets `max_in_flight` to that of `info`.
    pub sched: SchedConfig,
    /// Token ids that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Base of the seeds of requests that bring none.
    pub seed: u64,
}

impl Engine {
    /// Makes an engine over any [`Worker`]: that of [`EngineParts::load`], one that wraps it, or another implementation.
    ///
    /// # Errors
    /// The sizes for the scheduler contradict each other.
    pub fn new(parts: EngineParts) -> Result<Engine, EngineError> {
        let EngineParts { worker, info, sched, eos_token_ids, seed } = parts;
        let max_model_len = sched.max_model_len;
        let scheduler = Scheduler::new(SchedConfig { max_in_flight: info.max_in_flight, ..sched })?;
        Ok(Engine {
            scheduler,
            worker,
            info,
            mask_threads: MaskThreads::default(),
            requests: HashMap::new(),
            eos_token_ids,
            max_model_len,
            seed,
            next_id: 0,
            generation_tokens: 0,
            completed_steps: 0,
            failed_steps: 0,
            step_tokens: StepTokens::default(),
            requests_drawn_on_host: 0,
            logged: Vec::new(),
            under_way: StepUnderWay::default(),
            flights: VecDeque::new(),
            ended: Vec::new(),
            scheduled: Vec::new(),
            recent: Recent::new(),
            output: StepOutput::default(),
            outcomes: Outcomes::default(),
            spare: StepInput::default(),
        })
    }

    /// Takes a request in, or says why it can never run.
    ///
    /// With `best_of` every candidate is told of, each under its own index: to choose is for who knows where texts end.
    /// The results of a beam search come in its last step, as sequences 0 to `n`, best first.
    ///
    /// An engine on token ids knows no texts, so [`structured_outputs`](crate::GenerationParams::structured_outputs) is
    /// refused here; what holds its sequences is handed to [`Engine::submit_constrained`].
    pub fn submit(&mut self, request: GenerationRequest) -> Result<RequestId, SubmitError> {
        if let Some(wanted) = &request.params.structured_outputs {
            let message = format!("{}: an engine on token ids has no grammars, give it a constraint", wanted.param);
            return Err(SubmitError::Invalid { param: wanted.param, message });
        }
        self.admit(request, None)
    }

    /// Like [`Engine::submit`]; each sequence of the request is held by `constraint`.
    pub fn submit_constrained(
        &mut self,
        request: GenerationRequest,
        constraint: Box<dyn Constraint>,
    ) -> Result<RequestId, SubmitError> {
        self.admit(request, Some(constraint))
    }

    fn admit(
        &mut self,
        request: GenerationRequest,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<RequestId, SubmitError> {
        check(&request, self.info.vocab_size, self.max_model_len)?;
        let GenerationRequest { prompt, params, priority, cache_salt } = request;
        if constraint.is_some() && params.beam.is_some() {
            let message = "use_beam_search: not together with a constraint".to_string();
            return Err(SubmitError::Invalid { param: "use_beam_search", message });
        }
        let left = self.max_model_len - prompt.len();
        let limit = params.max_tokens.unwrap_or(left).min(left);
        // Where no token is asked for there is nothing to search.
        let beam = params.beam.filter(|_| limit > 0);
        let samples = params.best_of.unwrap_or(params.n);
        let id = RequestId(self.next_id);
        self.scheduler
            .submit(Request {
                n: beam.map_or(samples, |beam| beam.width),
                priority,
                cache_salt,
                read_prefix_cache: params.prompt_logprobs.is_none() && params.pooling != Some(Pooling::Mean),
                beam_search: beam.is_some(),
                // A request for no token still takes one step: its prompt is computed.
                ..Request::new(id, prompt.clone(), params.max_tokens.unwrap_or(left).max(1))
            })
            .map_err(|refusal| refused(&params, &refusal))?;
        self.next_id += 1;
        let stop_ids: Vec<u32> = self.eos_token_ids.iter().chain(&params.stop_token_ids).copied().collect();
        let is_draw = beam.is_none() && limit > 0;
        let on_host = is_draw && self.is_too_large(&params, &stop_ids);
        let guides = constraint.map(|constraint| {
            let is_end = |token: &u32| ending(&params, &self.eos_token_ids, *token).is_some();
            let ends = stop_ids.iter().copied().filter(is_end).collect();
            Guides::new(constraint, samples, ends, &mut self.mask_threads)
        });
        let active = Active {
            id,
            arrived: Instant::now(),
            made: vec![Some(0); if beam.is_some() { params.n } else { samples }],
            limit,
            on_host,
            num_stop_ids: stop_ids.len(),
            beams: beam.map(|beam| Beams::new(beam, limit)),
            guides,
            cached_tokens: 0,
            started: false,
            prompt_logprobs: Vec::new(),
            embedding: None,
            new: Some(Arc::new(NewRequest {
                id,
                prompt,
                sequences: if beam.is_some() { 1 } else { samples as u32 },
                sampling: params.sampling.clone(),
                stop_ids,
                seed: params.sampling.seed.unwrap_or_else(|| mix(self.seed, id.0)),
                on_host,
                prompt_logprobs: params.prompt_logprobs,
                pooling: params.pooling,
            })),
            params,
        };
        self.requests.insert(id, active);
        Ok(id)
    }

    /// Whether a slot of the device's sampler has no room for what a request asks for. It is counted, and logged once for each
    /// kind of wish.
    fn is_too_large(&mut self, params: &GenerationParams, stop_ids: &[u32]) -> bool {
        let Some(limits) = &self.info.sampler else { return false };
        let Err(SampleError::TooMany { what, found, most }) = limits.check_request(&params.sampling, stop_ids) else {
            return false;
        };
        self.requests_drawn_on_host += 1;
        if !self.logged.contains(&what) {
            self.logged.push(what);
            tracing::warn!(
                "a request with {found} {what} is drawn on the host, since a slot of the device holds {most}: steps wait for it; \
                 others like it are counted, not logged"
            );
        }
        true
    }

    /// Cancels a request at any moment and frees what it holds. `false` if it has ended already.
    pub fn abort(&mut self, id: RequestId) -> bool {
        self.forget(id);
        let was_live = self.scheduler.abort(id);
        self.tell_ends();
        was_live
    }

    /// Ends one sequence of a request, e.g. because its text holds a stop string. `false` if it has ended already or does not
    /// exist, and for a beam search, whose results are not known before they end.
    pub fn finish_sequence(&mut self, id: RequestId, index: u32) -> bool {
        if let Some(active) = self.requests.get_mut(&id) {
            if active.beams.is_some() {
                return false;
            }
            if !active.end(index, &mut self.ended) {
                return false;
            }
            if active.is_over() {
                self.requests.remove(&id);
            }
        }
        let was_live = self.scheduler.finish_sequence(SeqId { request: id, index });
        self.tell_ends();
        was_live
    }

    /// Drops a request that has ended.
    fn forget(&mut self, id: RequestId) -> Option<Active> {
        let active = self.requests.remove(&id)?;
        if active.new.is_none() {
            let known = if active.beams.is_some() { vec![0] } else { active.live().collect() };
            self.ended.extend(known.into_iter().map(|index| SeqId { request: id, index }));
        }
        Some(active)
    }

    /// A phase of the step, if they are recorded.
    fn phase(&self, name: &'static str) -> Option<Phase> {
        self.info.profile.as_ref()?.phase(name)
    }

    /// Number of tokens that the model knows.
    pub fn vocab_size(&self) -> usize {
        self.info.vocab_size
    }

    /// Whether a step would do something.
    pub fn has_work(&self) -> bool {
        self.scheduler.has_work() || !self.flights.is_empty()
    }

    /// Requests that have not ended.
    pub fn num_unfinished(&self) -> usize {
        self.requests.len()
    }

    /// The numbers now.
    pub fn stats(&self) -> EngineStats {
        let stats = self.scheduler.stats();
        let share = |blocks: usize| blocks as f64 / stats.blocks_total.max(1) as f64;
        EngineStats {
            num_running: stats.num_running,
            num_waiting: stats.num_waiting,
            num_swapped: stats.num_swapped,
            kv_cache_usage: share(stats.blocks_in_use),
            kv_cache_cached: share(stats.blocks_cached),
            prompt_tokens: stats.prompt_tokens,
            generation_tokens: self.generation_tokens,
            prefix_cache_queries: stats.prefix_queries,
            prefix_cache_hits: stats.prefix_hits,
            num_preemptions: stats.preemptions,
            num_swap_preemptions: stats.swap_preemptions,
            host_cache_usage: stats.host_cache_usage(),
            blocks_peak: stats.blocks_peak,
            blocks_copied: stats.blocks_copied,
            steps: self.completed_steps,
            blocks_in_use: stats.blocks_in_use,
            blocks_cached: stats.blocks_cached,
            blocks_free: stats.blocks_free,
            blocks_total: stats.blocks_total,
            tokens_lost: stats.tokens_lost,
            preemptions_by_priority: stats.preemptions_by_priority,
            prefix_lookups: *self.scheduler.prefix_stats(),
            failed_steps: self.failed_steps,
            requests_drawn_on_host: self.requests_drawn_on_host,
            step_tokens: self.step_tokens,
        }
    }

    /// Checks the invariants that the engine relies on: the block pool agrees with all block tables, and when no work is
    /// left, nothing is in flight, no block is in use, and neither the engine nor the worker keeps state of a sequence.
    ///
    /// Costs a pass over all tokens of live requests; meant for tests and for debugging.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn audit(&self) -> Result<(), AuditError> {
        self.scheduler.audit()?;
        if self.has_work() {
            return Ok(());
        }
        let stats = self.scheduler.stats();
        let kept = [
            ("blocks in use", stats.blocks_in_use),
            ("requests in the scheduler", stats.num_running + stats.num_waiting + stats.num_swapped),
            ("requests in the engine", self.requests.len()),
            ("sequences in the worker", self.worker.num_sequences()),
            ("steps under way", usize::from(lock(&self.under_way).is_some())),
        ];
        match kept.into_iter().find(|(_, count)| *count > 0) {
            Some((what, count)) => Err(AuditError::Leftover { what, count }),
            None => Ok(()),
        }
    }

    /// Where the plan of the step under way can be seen from another thread.
    pub(crate) fn step_under_way(&self) -> StepUnderWay {
        self.under_way.clone()
    }

    /// Requests that the last [`Engine::step`] took out of the queue for the first time.
    pub(crate) fn scheduled(&self) -> &[RequestId] {
        &self.scheduled
    }

    /// What there is to see now, for whoever watches: [the cost](watch) is a pass over the block tables.
    pub fn snapshot(&mut self) -> Snapshot {
        let stats = self.stats();
        let Engine { scheduler, recent, requests, .. } = self;
        let age = |id| requests.get(&id).map_or(0.0, |active: &Active| active.arrived.elapsed().as_secs_f64());
        watch::snapshot(scheduler, &stats, recent, age)
    }
}

/// A seed for a request that brought none: different for each, the same in every run of the same base (SplitMix64).
fn mix(base: u64, id: u64) -> u64 {
    let mut z = base.wrapping_add((id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
