//! The synchronous engine on token ids: plan, submit, collect, publish, commit.

mod adapter_memory;
mod adapters;
mod beam;
mod check;
mod drafts;
mod exchange;
mod guide;
mod in_flight;
mod kv_events;
mod prefix_cache;
mod prompt_budget;
mod publish;
mod request;
mod run;
mod sleep;
mod stats;
mod step_time;

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use device::profile::Phase;
use models::Pooling;
use models::lora::AdapterStore;
use sampling::device::SampleError;
use sampling::{Constraint, SamplingParams};
use sched::{Request, RequestId, SchedConfig, Scheduler, SeqId};

use crate::api::{AdapterInfo, GenerationParams, GenerationRequest, ItlTarget, StepTokens};
use crate::error::{AdapterError, EngineError, SubmitError};
use crate::speculate::{DraftScope, Speculation, Speculator};
use crate::watch::Recent;
use crate::worker::{NewRequest, StepInput, StepOutput, Worker, WorkerInfo};
use adapters::AdapterNames;
pub(crate) use adapters::LoadedAdapter;
use beam::BeamSearchState;
pub(crate) use check::MOST_SEQUENCES;
use check::{check, refused};
pub use exchange::KvTransferParts;
pub(crate) use exchange::LoadId;
use exchange::{Exchange, ExchangedPrompt};
use guide::{Guides, Limits, MaskThreads};
pub(crate) use in_flight::CurrentStep;
use in_flight::StepInFlight;
use kv_events::KvEvents;
use prompt_budget::PromptBudget;
use publish::Outcomes;
pub(crate) use request::Origin;
use request::{EngineRequest, end_reason};

/// Runs requests on token ids, one step at a time. The engine owns the scheduler and the state of all requests; a worker
/// computes the steps.
pub struct Engine {
    scheduler: Scheduler,
    worker: Box<dyn Worker>,
    /// Several steps are in flight, none of which reads what another draws.
    is_pipeline: bool,
    info: WorkerInfo,
    mask_threads: MaskThreads,
    /// Sequences whose next mask is computed, perhaps more than once.
    awaits_mask: Vec<SeqId>,
    requests: HashMap<RequestId, EngineRequest>,
    adapters: AdapterNames,
    eos_token_ids: Vec<u32>,
    is_headless: bool,
    max_model_len: usize,
    max_num_seqs: usize,
    seed: u64,
    next_id: u64,
    generation_tokens: u64,
    /// Steps that computed something and were committed.
    completed_steps: u64,
    failed_steps: u64,
    step_tokens: StepTokens,
    /// Requests that exceed a limit of the device's sampler.
    requests_drawn_on_host: u64,
    /// Limits that were logged because a request exceeded them.
    logged_limits: Vec<&'static str>,
    current_step: CurrentStep,
    /// Steps that were submitted and not committed, oldest first.
    in_flight: VecDeque<StepInFlight>,
    last_collected: Option<Instant>,
    /// Sequences that have ended since the last step was planned.
    ended: Vec<SeqId>,
    /// Requests whose first span was planned during the last [`Engine::step`].
    scheduled: Vec<RequestId>,
    recent: Recent,
    /// `None` if steps have no target.
    prompt_budget: Option<PromptBudget>,
    /// `None` without speculation.
    speculator: Option<Speculator>,
    /// `None` if no KV events are published.
    kv_events: Option<KvEvents>,
    /// `None` if no blocks are exchanged with other replicas.
    exchange: Option<Exchange>,
    // Reused by every step.
    output: StepOutput,
    outcomes: Outcomes,
    recycled: StepInput,
}

/// Parts of an [`Engine`]: a worker, and what the engine needs to know about it and about the model.
pub struct EngineParts {
    /// Computes the steps.
    pub worker: Box<dyn Worker>,
    /// Properties of the worker.
    pub info: WorkerInfo,
    /// Sizes of the block pool and of a step. The engine replaces `max_in_flight` by that of `info`.
    pub sched: SchedConfig,
    /// Token ids that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// The model has no output layer for tokens, so that it only gives embeddings or labels.
    pub is_headless: bool,
    /// Base from which the seeds of requests without a seed are derived.
    pub seed: u64,
    /// Where the worker finds adapters; `None` if it takes none.
    pub adapters: Option<Arc<AdapterStore>>,
    /// The time between two tokens of a sequence that prompts beside it are cut for; `None`: as many tokens as `sched` allows.
    pub itl_target: Option<ItlTarget>,
    /// Where drafts come from; `None`: no speculation.
    pub speculation: Option<Speculation>,
    /// Where KV events are published; `None`: nowhere.
    pub kv_events: Option<kvevents::Sockets>,
    /// How blocks are exchanged with other replicas; `None`: not at all.
    pub kv_transfer: Option<KvTransferParts>,
}

impl Engine {
    /// Creates an engine over any [`Worker`]: the one that [`load`](crate::load) returns, a wrapper around it, or another
    /// implementation.
    ///
    /// # Errors
    /// The sizes in `sched` contradict each other.
    pub fn new(parts: EngineParts) -> Result<Engine, EngineError> {
        let EngineParts { worker, info, sched, eos_token_ids, is_headless, seed, itl_target, .. } = parts;
        let EngineParts { adapters, speculation, kv_events, kv_transfer, .. } = parts;
        let (max_model_len, max_num_seqs) = (sched.max_model_len, sched.max_num_seqs);
        let block_events = kv_events.is_some();
        let sched = SchedConfig { max_in_flight: info.max_in_flight, block_events, ..sched };
        let kv_events = kv_events.map(|sockets| KvEvents::start(sockets, &sched)).transpose()?;
        let exchange = kv_transfer.map(|parts| Exchange::start(parts, &sched, info.host_block_bytes)).transpose();
        let exchange = exchange.map_err(|error| EngineError::Config {
            flag: "--kv-transfer-config",
            found: error.to_string(),
            expected: "that the system can start a thread; raise its limit of threads".to_string(),
        })?;
        let (recompute_drafts, is_pipeline) = (sched.recompute_drafts, sched.pipeline);
        let prompt_budget = itl_target.map(|target| PromptBudget::new(target, &sched));
        let scheduler = Scheduler::new(sched)?;
        Ok(Engine {
            scheduler,
            worker,
            prompt_budget,
            speculator: speculation.map(|speculation| Speculator::new(speculation, info.vocab_size, recompute_drafts)),
            kv_events,
            is_pipeline,
            exchange,
            info,
            mask_threads: MaskThreads::default(),
            awaits_mask: Vec::new(),
            requests: HashMap::new(),
            adapters: AdapterNames::new(adapters),
            eos_token_ids,
            is_headless,
            max_model_len,
            max_num_seqs,
            seed,
            next_id: 0,
            generation_tokens: 0,
            completed_steps: 0,
            failed_steps: 0,
            step_tokens: StepTokens::default(),
            requests_drawn_on_host: 0,
            logged_limits: Vec::new(),
            current_step: CurrentStep::default(),
            in_flight: VecDeque::new(),
            last_collected: None,
            ended: Vec::new(),
            scheduled: Vec::new(),
            recent: Recent::new(),
            output: StepOutput::default(),
            outcomes: Outcomes::default(),
            recycled: StepInput::default(),
        })
    }

    /// Returns the number of tokens per block.
    pub fn block_size(&self) -> usize {
        self.scheduler.pool().block_size()
    }

    /// Adds a request to the queue.
    ///
    /// With `best_of`, the tokens of every candidate are reported under its own index: the caller chooses the best, because
    /// only it knows where the texts end. The results of a beam search are reported in its last step as sequences 0 to `n`,
    /// best first.
    ///
    /// An engine on token ids knows no texts, so it refuses
    /// [`structured_outputs`](crate::GenerationParams::structured_outputs): compile the grammar with
    /// [`Grammars`](text::Grammars) and pass a [`GrammarConstraint`](crate::GrammarConstraint) to [`Engine::submit_constrained`].
    ///
    /// # Errors
    /// The request can never run.
    pub fn submit(&mut self, request: GenerationRequest) -> Result<RequestId, SubmitError> {
        if let Some(wanted) = &request.params.structured_outputs {
            let problem = "an engine on token ids has no grammars: call submit_constrained";
            return Err(SubmitError::invalid(wanted.param, problem));
        }
        self.admit(request, None, None)
    }

    /// Like [`Engine::submit`], with a constraint on every sequence of the request.
    ///
    /// # Errors
    /// As [`Engine::submit`]; a beam search cannot be constrained.
    pub fn submit_constrained(
        &mut self,
        request: GenerationRequest,
        constraint: Box<dyn Constraint>,
    ) -> Result<RequestId, SubmitError> {
        self.admit(request, Some(constraint), None)
    }

    /// Greatest number of sequences of a step.
    pub(crate) fn max_num_seqs(&self) -> usize {
        self.max_num_seqs
    }

    /// What further sequences of a request that was just submitted have in common with it.
    pub(crate) fn origin(&self, id: RequestId) -> Option<Origin> {
        let request = self.requests.get(&id)?;
        Some(Origin { seed: request.unsent.as_ref()?.seed, adapter: request.adapter.clone() })
    }

    /// Adds a request whose first sequence is number `first` of all that continue the prompt of another request.
    pub(crate) fn submit_later(
        &mut self,
        request: GenerationRequest,
        constraint: Option<Box<dyn Constraint>>,
        (origin, first): (&Origin, u32),
    ) -> Result<RequestId, SubmitError> {
        self.admit(request, constraint, Some((origin, first)))
    }

    fn admit(
        &mut self,
        request: GenerationRequest,
        constraint: Option<Box<dyn Constraint>>,
        later: Option<(&Origin, u32)>,
    ) -> Result<RequestId, SubmitError> {
        check(&request, self.info.vocab_size, (self.max_model_len, !self.is_headless), &self.eos_token_ids)?;
        if self.is_headless && request.params.pooling.is_none() {
            let problem =
                "the model has no output layer for tokens, so it cannot generate: request embeddings or labels";
            return Err(SubmitError::invalid("model", problem));
        }
        if request.params.thinking.is_some() {
            let problem = "an engine on token ids knows no reasoning: use AsyncEngine or Llm";
            return Err(SubmitError::invalid("thinking_token_budget", problem));
        }
        let GenerationRequest { prompt, params, priority, cache_salt, second, adapter, kv_transfer } = request;
        let adapter = match later {
            Some((origin, _)) => origin.adapter.clone(),
            None => adapter.map(|name| self.adapters.find(&name)).transpose()?,
        };
        if constraint.is_some() && params.beam.is_some() {
            return Err(SubmitError::invalid("use_beam_search", "cannot be combined with a constraint"));
        }
        let left = self.max_model_len - prompt.len();
        let max_tokens = params.max_tokens.unwrap_or(left).min(left);
        // A request for no token has nothing to search.
        let beam = params.beam.filter(|_| max_tokens > 0);
        let samples = params.best_of.unwrap_or(params.n);
        let id = RequestId(self.next_id);
        self.scheduler
            .submit(Request {
                n: beam.map_or(samples, |beam| beam.width),
                priority,
                cache_salt: cache_salt.clone(),
                // Its contents, so that cached prefixes are shared under every name that they have.
                adapter: adapter.as_ref().map(|adapter| adapter.digest.clone()),
                read_prefix_cache: params.prompt_logprobs.is_none() && params.pooling.is_none_or(Pooling::is_of_last),
                beam_search: beam.is_some(),
                // A request for no token still takes one step, which computes its prompt.
                ..Request::new(id, prompt.clone(), params.max_tokens.unwrap_or(left).max(1))
            })
            .map_err(|refusal| refused(&params, &refusal))?;
        self.next_id += 1;
        let stop_ids: Vec<u32> = self.eos_token_ids.iter().chain(&params.stop_token_ids).copied().collect();
        let is_draw = beam.is_none() && max_tokens > 0;
        let on_host = is_draw && self.exceeds_device_sampler(&params, &stop_ids);
        let guides = constraint.map(|constraint| {
            let is_end = |token: &u32| end_reason(&params, &self.eos_token_ids, *token).is_some();
            let limits = Limits {
                ends: stop_ids.iter().copied().filter(is_end).collect(),
                allowed: params.sampling.allowed_token_ids.clone(),
                bad_words: params.sampling.bad_words.clone(),
            };
            Guides::new(constraint, samples, limits, &mut self.mask_threads)
        });
        // The beams of a search are chosen anew with every token, so no draft follows one of them.
        let speculates = self.speculator.is_some() && params.speculative && is_draw;
        let digest = adapter.as_ref().map(|adapter| adapter.digest.clone());
        self.store_later(id, kv_transfer, || ExchangedPrompt::new(&prompt, cache_salt.as_ref(), digest.as_ref()));
        let speculation = speculates.then(|| (DraftScope { cache_salt, adapter: digest }, prompt.clone()));
        let request = EngineRequest {
            id,
            arrived: Instant::now(),
            num_tokens: vec![Some(0); if beam.is_some() { params.n } else { samples }],
            max_tokens,
            on_host,
            num_stop_ids: stop_ids.len(),
            beams: beam.map(|beam| BeamSearchState::new(beam, max_tokens)),
            guides,
            cached_tokens: 0,
            started: false,
            prompt_logprobs: Vec::new(),
            embedding: None,
            speculation,
            adapter: adapter.clone(),
            unsent: Some(Arc::new(NewRequest {
                id,
                prompt,
                sequences: if beam.is_some() { 1 } else { samples as u32 },
                first_sequence: later.map_or(0, |(_, first)| first),
                // The seed is in `seed`, so that all prompts of a call have the same parameters.
                sampling: SamplingParams { seed: None, ..params.sampling.clone() },
                stop_ids,
                seed: match later {
                    Some((origin, _)) => origin.seed,
                    None => params.sampling.seed.unwrap_or_else(|| derive_seed(self.seed, id.0)),
                },
                on_host,
                prompt_logprobs: params.prompt_logprobs,
                pooling: params.pooling,
                second: second.and_then(|at| u32::try_from(at).ok()),
                adapter,
                speculative: speculates,
            })),
            params,
        };
        self.requests.insert(id, request);
        Ok(id)
    }

    /// Whether a request exceeds a limit of the device's sampler, so that the host has to draw its tokens. Such requests are
    /// counted, and the first one for each limit is logged.
    fn exceeds_device_sampler(&mut self, params: &GenerationParams, stop_ids: &[u32]) -> bool {
        let Some(limits) = &self.info.sampler else { return false };
        let Err(SampleError::TooMany { what, found, most }) = limits.check_request(&params.sampling, stop_ids) else {
            return false;
        };
        self.requests_drawn_on_host += 1;
        if !self.logged_limits.contains(&what) {
            self.logged_limits.push(what);
            tracing::warn!(
                "a request has {found} {what}, but the device's sampler holds at most {most}: its tokens are drawn on the host, \
                 and steps wait for it; further requests of this kind are counted (requests_drawn_on_host), not logged"
            );
        }
        true
    }

    /// Reads the adapter in a folder and gives it a name. With `replace`, it takes the place of another of this name, which the
    /// requests that were submitted before keep.
    ///
    /// # Errors
    /// The engine takes no adapters, the name is taken, or the adapter cannot be used.
    pub fn load_adapter(&mut self, name: &str, path: &Path, replace: bool) -> Result<(), AdapterError> {
        self.remove_unloaded();
        self.adapters.check(name, replace)?;
        let loaded = self.adapters.read(path)?;
        self.add_adapter(name, loaded, replace)
    }

    /// Refuses new requests for an adapter. It is removed when its last request has ended; see [`Engine::adapters`].
    ///
    /// # Errors
    /// No adapter has this name.
    pub fn unload_adapter(&mut self, name: &str) -> Result<(), AdapterError> {
        self.adapters.unload(name)?;
        self.remove_unloaded();
        Ok(())
    }

    /// Removes adapters to unload whose requests have all ended, and returns their names.
    pub(crate) fn remove_unloaded(&mut self) -> Vec<String> {
        self.adapters.remove_unused()
    }

    /// The adapters, in the order of their names.
    pub fn adapters(&mut self) -> Vec<AdapterInfo> {
        self.remove_unloaded();
        self.adapters.list()
    }

    pub(crate) fn adapter_store(&self) -> Option<&Arc<AdapterStore>> {
        self.adapters.store()
    }

    /// Cancels a request, at any time, and frees its blocks. Returns `false` if it has ended already.
    pub fn abort(&mut self, id: RequestId) -> bool {
        self.remove(id);
        let was_live = self.scheduler.abort(id);
        self.settle();
        was_live
    }

    /// Sets the greatest number of prompt tokens of later steps while sequences decode, for a caller that runs the steps itself. With
    /// [`EngineParts::itl_target`] the engine sets it before each step. No token depends on it.
    pub fn set_prompt_budget(&mut self, tokens: usize) {
        self.scheduler.set_prompt_budget(tokens);
    }

    /// Ends one sequence of a request, for example because its text contains a stop string. Returns `false` if the sequence does
    /// not exist or has ended already, and for a beam search, whose results are unknown until it ends.
    pub fn finish_sequence(&mut self, id: RequestId, index: u32) -> bool {
        if let Some(request) = self.requests.get_mut(&id) {
            if request.beams.is_some() || !request.end(index, &mut self.ended) {
                return false;
            }
            if request.has_ended() {
                self.requests.remove(&id);
            }
        }
        let was_live = self.scheduler.finish_sequence(SeqId { request: id, index });
        self.settle();
        was_live
    }

    /// Removes a request, and ends its sequences in the worker.
    fn remove(&mut self, id: RequestId) -> Option<EngineRequest> {
        let request = self.requests.remove(&id)?;
        if let Some(exchange) = &mut self.exchange {
            exchange.to_store.remove(&id);
        }
        if request.unsent.is_none() {
            let known = if request.beams.is_some() { vec![0] } else { request.live().collect() };
            self.ended.extend(known.into_iter().map(|index| SeqId { request: id, index }));
        }
        Some(request)
    }

    /// Starts a phase of the step in the profile, if there is one.
    fn phase(&self, name: &'static str) -> Option<Phase> {
        self.info.profile.as_ref()?.phase(name)
    }

    /// Size of the model's vocabulary in tokens.
    pub fn vocab_size(&self) -> usize {
        self.info.vocab_size
    }

    /// Whether the worker can compute nothing more, so that every step fails.
    pub(crate) fn is_lost(&self) -> bool {
        self.worker.is_lost()
    }

    /// Whether a step would do anything: compute, or hand over blocks for other replicas.
    pub fn has_work(&self) -> bool {
        self.computes() || self.has_exports()
    }

    /// Whether requests have not ended, or a step is in flight.
    fn computes(&self) -> bool {
        self.scheduler.has_work() || !self.in_flight.is_empty()
    }

    /// Number of requests that have not ended.
    pub fn num_unfinished(&self) -> usize {
        self.requests.len()
    }

    /// The oldest step in flight, for other threads.
    pub(crate) fn current_step(&self) -> CurrentStep {
        self.current_step.clone()
    }

    /// Requests that the last [`Engine::step`] took from the queue for the first time.
    pub(crate) fn scheduled(&self) -> &[RequestId] {
        &self.scheduled
    }
}

/// Derives the seed of a request without one: different for each request, equal in every run with the same base (SplitMix64).
fn derive_seed(base: u64, id: u64) -> u64 {
    let mut z = base.wrapping_add((id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
