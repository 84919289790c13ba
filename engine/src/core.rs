//! The synchronous engine on token ids: schedule, execute, sample, commit.

mod faults;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use attention_kernels::KernelError;
use models::{LOGIT_ROWS, Pooling};
use sampling::{Constraint, Sampled, Sampler, TokenLogprobs, token_logprobs};
use sched::{Outcome, Request, RequestId, Scheduler, SeqId, Span, StepPlan};

use crate::api::{EngineConfig, EngineStats, FinishReason, GenerationRequest, StepTokens};
use crate::beam::Beams;
use crate::check::{check, refused};
use crate::draw::{Active, Draw};
use crate::error::{EngineError, SubmitError};
use crate::executor::Executor;
use crate::grammar::{Guides, MaskThreads};
use crate::load::{Progress, load};
use crate::pooling::Pool;
use crate::status::{StepUnderWay, lock};
use crate::watch::{self, Recent, Snapshot};

/// What a step gave one request, on token ids.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// Log-probabilities of the prompt, once, before any token.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// The embedding of the prompt, once.
    Embedding(Vec<f32>),
    /// The prompt has been computed; so many of its tokens came from the prefix cache.
    Started {
        /// Prompt tokens that were not recomputed.
        cached_tokens: usize,
    },
    /// A token (none if the sequence ends without) and, if it was the last, why.
    Token {
        /// Which of the request's sequences.
        index: u32,
        /// The token and its log-probability.
        token: Option<Sampled>,
        /// Set on the last.
        finish: Option<FinishReason>,
    },
}

/// Runs requests on token ids, one step at a time. It owns the scheduler and the executor, and nothing of text.
pub struct Engine {
    scheduler: Scheduler,
    executor: Executor,
    sampler: Sampler,
    mask_threads: MaskThreads,
    requests: HashMap<RequestId, Active>,
    eos_token_ids: Vec<u32>,
    max_model_len: usize,
    seed: u64,
    next_id: u64,
    generation_tokens: u64,
    failed_steps: u64,
    step_tokens: StepTokens,
    under_way: StepUnderWay,
    /// Requests that the last step computed for the first time.
    scheduled: Vec<RequestId>,
    recent: Recent,
    // Reused by every step.
    wanted: Vec<(usize, u32)>,
    rows: Vec<u32>,
    outcomes: Vec<Outcome>,
}

impl Engine {
    /// Loads a model, for a caller that has token ids and runs the steps itself.
    ///
    /// ```
    /// use engine::{Engine, EngineConfig, GenerationRequest, TokenEvent};
    /// let mut engine = Engine::load(&EngineConfig::default(), &|_, _| {})?;
    /// engine.submit(GenerationRequest { prompt: vec![0, 300, 301], ..Default::default() })?;
    /// let mut tokens = Vec::new();
    /// while engine.has_work() {
    ///     engine.step(|_, event| {
    ///         if let TokenEvent::Token { token: Some(token), .. } = event {
    ///             tokens.push(token.token);
    ///         }
    ///     });
    /// }
    /// assert!(!tokens.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn load(config: &EngineConfig, progress: Progress<'_>) -> Result<Engine, EngineError> {
        Ok(load(config, progress)?.engine)
    }

    pub(crate) fn new(
        scheduler: Scheduler,
        executor: Executor,
        eos_token_ids: Vec<u32>,
        max_model_len: usize,
        seed: u64,
    ) -> Engine {
        Engine {
            scheduler,
            executor,
            sampler: Sampler::new(),
            mask_threads: MaskThreads::default(),
            requests: HashMap::new(),
            eos_token_ids,
            max_model_len,
            seed,
            next_id: 0,
            generation_tokens: 0,
            failed_steps: 0,
            step_tokens: StepTokens::default(),
            under_way: StepUnderWay::default(),
            scheduled: Vec::new(),
            recent: Recent::new(),
            wanted: Vec::new(),
            rows: Vec::new(),
            outcomes: Vec::new(),
        }
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
        check(&request, self.executor.vocab_size(), self.max_model_len)?;
        let params = &request.params;
        if constraint.is_some() && params.beam.is_some() {
            let message = "use_beam_search: not together with a constraint".to_string();
            return Err(SubmitError::Invalid { param: "use_beam_search", message });
        }
        let room = self.max_model_len - request.prompt.len();
        let limit = params.max_tokens.unwrap_or(room).min(room);
        // Where no token is asked for there is nothing to search.
        let beam = params.beam.filter(|_| limit > 0);
        let samples = params.best_of.unwrap_or(params.n);
        let id = RequestId(self.next_id);
        self.scheduler
            .submit(Request {
                id,
                prompt: request.prompt.clone(),
                n: beam.map_or(samples, |beam| beam.width),
                // A request for no token still takes one step: its prompt is computed.
                max_tokens: params.max_tokens.unwrap_or(room).max(1),
                priority: request.priority,
                cache_salt: request.cache_salt.clone(),
                read_prefix_cache: params.prompt_logprobs.is_none() && params.pooling != Some(Pooling::Mean),
                beam_search: beam.is_some(),
            })
            .map_err(|refusal| refused(params, &refusal))?;
        self.next_id += 1;
        let stop_ids = self.eos_token_ids.iter().chain(&params.stop_token_ids).copied().collect();
        let seed = params.sampling.seed.unwrap_or_else(|| mix(self.seed, id.0));
        let outputs = vec![Some(Vec::new()); if beam.is_some() { params.n } else { samples }];
        let beams = beam.map(|beam| Beams::new(beam, limit));
        let guides = constraint.map(|constraint| Guides::new(constraint, samples, &mut self.mask_threads));
        let pool = params.pooling.map(Pool::new);
        let active = Active {
            request,
            arrived: Instant::now(),
            stop_ids,
            seed,
            outputs,
            beams,
            guides,
            cached_tokens: 0,
            scheduled: false,
            started: false,
            prompt_logprobs: Vec::new(),
            pool,
        };
        self.requests.insert(id, active);
        Ok(id)
    }

    /// Cancels a request at any moment and frees what it holds. `false` if it has ended already.
    pub fn abort(&mut self, id: RequestId) -> bool {
        self.requests.remove(&id);
        self.scheduler.abort(id)
    }

    /// Ends one sequence of a request, e.g. because its text holds a stop string. `false` if it has ended already, and for a
    /// beam search, whose results are not known before they end.
    pub fn finish_sequence(&mut self, id: RequestId, index: u32) -> bool {
        if let Some(active) = self.requests.get_mut(&id) {
            if active.beams.is_some() {
                return false;
            }
            active.outputs[index as usize] = None;
            if active.outputs.iter().all(Option::is_none) {
                self.requests.remove(&id);
            }
        }
        self.scheduler.finish_sequence(SeqId { request: id, index })
    }

    /// Number of tokens that the model knows.
    pub fn vocab_size(&self) -> usize {
        self.executor.vocab_size()
    }

    /// Whether a step would do something.
    pub fn has_work(&self) -> bool {
        self.scheduler.has_work()
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
            steps: stats.steps,
            blocks_in_use: stats.blocks_in_use,
            blocks_cached: stats.blocks_cached,
            blocks_free: stats.blocks_free,
            blocks_total: stats.blocks_total,
            tokens_lost: stats.tokens_lost,
            preemptions_by_priority: stats.preemptions_by_priority,
            prefix_lookups: *self.scheduler.prefix_stats(),
            failed_steps: self.failed_steps,
            step_tokens: self.step_tokens,
        }
    }

    /// Where the plan of the step under way can be seen from another thread.
    pub(crate) fn step_under_way(&self) -> StepUnderWay {
        self.under_way.clone()
    }

    /// Requests that the last step took out of the queue for the first time.
    pub(crate) fn scheduled(&self) -> &[RequestId] {
        &self.scheduled
    }

    /// One step: what every running request has gained goes to `emit`. If the forward pass fails, the requests of this
    /// step end with [`FinishReason::Error`] and the engine goes on with the others; those that were on their way to host
    /// memory or back are computed again.
    pub fn step(&mut self, mut emit: impl FnMut(RequestId, TokenEvent)) {
        let (_step, profile) = (self.executor.profile_step(), self.executor.profile());
        let mut emit = |id, event| {
            let _phase = profile.as_ref().and_then(|profile| profile.phase("publish"));
            emit(id, event);
        };
        let phase = self.executor.phase("plan");
        let plan = Arc::new(self.scheduler.plan());
        drop(phase);
        tracing::debug!("{plan}");
        *lock(&self.under_way) = Some(plan.clone());
        self.note_scheduled(&plan);
        self.outcomes.clear();
        if let Err(error) = self.execute(&plan, &mut emit) {
            self.fail(&plan, &error, &mut emit);
        }
        let _phase = self.executor.phase("commit");
        if let Err(error) = self.scheduler.commit(plan.step, &self.outcomes) {
            // Can only be a fault of this file; the requests concerned must not wait for ever.
            tracing::error!("step {} was not committed: {error}", plan.step.0);
            self.fail(&plan, &error, &mut emit);
            let _ = self.scheduler.commit(plan.step, &[]);
        }
        *lock(&self.under_way) = None;
        let sequences = plan.spans.len();
        let stats = self.scheduler.stats();
        let (prefill, preemptions) = (stats.prompt_tokens_computed, stats.preemptions);
        self.recent.step(sequences, watch::Counters { prefill, decode: self.generation_tokens, preemptions });
    }

    /// Counts the step, and whom it computes for the first time.
    fn note_scheduled(&mut self, plan: &StepPlan) {
        self.scheduled.clear();
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

    /// What there is to see now, for whoever watches: [the cost](watch) is a pass over the block tables.
    pub fn snapshot(&mut self) -> Snapshot {
        let stats = self.stats();
        let Engine { scheduler, recent, requests, .. } = self;
        let age = |id| requests.get(&id).map_or(0.0, |active: &Active| active.arrived.elapsed().as_secs_f64());
        watch::snapshot(scheduler, &stats, recent, age)
    }

    fn execute(&mut self, plan: &StepPlan, emit: &mut impl FnMut(RequestId, TokenEvent)) -> Result<(), KernelError> {
        let requests = &self.requests;
        let scored = |span: &Span| {
            requests
                .get(&span.seq.request)
                .is_some_and(|active| active.pool.is_some() || active.request.params.prompt_logprobs.is_some())
        };
        self.executor.run(plan, scored)?;
        for (span, index) in plan.spans.iter().zip(0..) {
            self.score_prompt(span, self.executor.last_row(index))?;
            self.pool_prompt(span, self.executor.last_row(index))?;
            if let Some(active) = self.requests.get_mut(&span.seq.request) {
                active.cached_tokens = active.cached_tokens.max(span.cached);
            }
        }
        let profile = self.executor.profile();
        self.wanted.clear();
        let sampled = plan.spans.iter().enumerate().filter(|(_, span)| !span.sample.is_empty());
        self.wanted.extend(sampled.map(|(i, _)| (i, self.executor.last_row(i))));
        let wanted = std::mem::take(&mut self.wanted);
        for chunk in wanted.chunks(LOGIT_ROWS) {
            self.rows.clear();
            self.rows.extend(chunk.iter().map(|&(_, row)| row));
            let logits = self.executor.logits(&self.rows)?;
            let vocab_size = logits.len() / chunk.len();
            let _phase = profile.as_ref().and_then(|profile| profile.phase("sample"));
            for (&(span, _), logits) in chunk.iter().zip(logits.chunks(vocab_size)) {
                let span = &plan.spans[span];
                let Some(active) = self.requests.get_mut(&span.seq.request) else { continue };
                let (eos_token_ids, max_model_len) = (&self.eos_token_ids[..], self.max_model_len);
                let (sampler, mask_threads) = (&mut self.sampler, &mut self.mask_threads);
                let (outcomes, drawn) = (&mut self.outcomes, &mut self.generation_tokens);
                let mut draw = Draw { sampler, mask_threads, eos_token_ids, max_model_len, outcomes, drawn };
                draw.row(active, span, logits, emit);
                if active.outputs.iter().all(Option::is_none) {
                    self.requests.remove(&span.seq.request);
                }
            }
        }
        self.wanted = wanted;
        Ok(())
    }

    /// Log-probabilities of the prompt tokens that follow the span's rows, for a request that asks for them.
    fn score_prompt(&mut self, span: &Span, last_row: u32) -> Result<(), KernelError> {
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
        for chunk in positions.chunks(LOGIT_ROWS) {
            self.rows.clear();
            self.rows.extend(chunk.iter().map(|p| (first_row + p - span.start) as u32));
            let logits = self.executor.logits(&self.rows)?;
            let vocab_size = logits.len() / chunk.len();
            for (position, logits) in chunk.iter().zip(logits.chunks(vocab_size)) {
                active.prompt_logprobs.push(Some(token_logprobs(logits, prompt[position + 1], alternatives)));
            }
        }
        Ok(())
    }

    /// Takes the hidden states of a prompt that becomes an embedding.
    fn pool_prompt(&mut self, span: &Span, last_row: u32) -> Result<(), KernelError> {
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

    /// Ends every request of the step with the error, and takes back what the step was to do to the memory.
    fn fail(&mut self, plan: &StepPlan, error: &dyn std::error::Error, emit: &mut impl FnMut(RequestId, TokenEvent)) {
        tracing::error!("step {} failed: {error}", plan.step.0);
        self.failed_steps += 1;
        self.outcomes.clear();
        for span in &plan.spans {
            let id = span.seq.request;
            if let Some(active) = self.requests.remove(&id) {
                let live = active.outputs.iter().zip(0..).filter(|(output, _)| output.is_some());
                for (_, index) in live {
                    emit(
                        id,
                        TokenEvent::Token { index, token: None, finish: Some(FinishReason::Error(error.to_string())) },
                    );
                }
            }
            self.scheduler.abort(id);
        }
        self.scheduler.revoke(&plan.memory);
    }
}

/// A seed for a request that brought none: different for each, the same in every run of the same base (SplitMix64).
fn mix(base: u64, id: u64) -> u64 {
    let mut z = base.wrapping_add((id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
