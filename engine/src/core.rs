//! The synchronous engine on token ids: schedule, execute, sample, commit.

use std::collections::HashMap;
use std::ops::Range;

use attention_kernels::KernelError;
use models::LOGIT_ROWS;
use sampling::{Context, Sampled, Sampler, TokenLogprobs, token_logprobs};
use sched::{Outcome, Request, RequestId, Scheduler, SeqId, Span, StepPlan};

use crate::api::{EngineConfig, EngineStats, FinishReason, GenerationParams, GenerationRequest, StopCause};
use crate::beam::{Beams, Fork};
use crate::check::{check, refused};
use crate::error::{EngineError, SubmitError};
use crate::executor::Executor;
use crate::load::{Progress, load};

/// What a step gave one request, on token ids.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// Log-probabilities of the prompt, once, before any token.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
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

/// A request that has not ended.
struct Active {
    request: GenerationRequest,
    /// Held back until `min_tokens`: end-of-sequence and stop ids.
    stop_ids: Vec<u32>,
    /// Key of the request's draws.
    seed: u64,
    /// Output tokens of each sequence, or of each result of a beam search; `None` once it has ended.
    outputs: Vec<Option<Vec<u32>>>,
    beams: Option<Beams>,
    cached_tokens: usize,
    started: bool,
    /// Filled row by row while the prompt is computed, when asked for.
    prompt_logprobs: Vec<Option<TokenLogprobs>>,
}

/// Runs requests on token ids, one step at a time. It owns the scheduler and the executor, and nothing of text.
pub struct Engine {
    scheduler: Scheduler,
    executor: Executor,
    sampler: Sampler,
    requests: HashMap<RequestId, Active>,
    eos_token_ids: Vec<u32>,
    max_model_len: usize,
    seed: u64,
    next_id: u64,
    generation_tokens: u64,
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
            requests: HashMap::new(),
            eos_token_ids,
            max_model_len,
            seed,
            next_id: 0,
            generation_tokens: 0,
            wanted: Vec::new(),
            rows: Vec::new(),
            outcomes: Vec::new(),
        }
    }

    /// Takes a request in, or says why it can never run.
    ///
    /// With `best_of` every candidate is told of, each under its own index: to choose is for who knows where texts end.
    /// The results of a beam search come in its last step, as sequences 0 to `n`, best first.
    pub fn submit(&mut self, request: GenerationRequest) -> Result<RequestId, SubmitError> {
        check(&request, self.executor.vocab_size(), self.max_model_len)?;
        let params = &request.params;
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
                read_prefix_cache: params.prompt_logprobs.is_none(),
                beam_search: beam.is_some(),
            })
            .map_err(|refusal| refused(params, &refusal))?;
        self.next_id += 1;
        let stop_ids = self.eos_token_ids.iter().chain(&params.stop_token_ids).copied().collect();
        let seed = params.sampling.seed.unwrap_or_else(|| mix(self.seed, id.0));
        let outputs = vec![Some(Vec::new()); if beam.is_some() { params.n } else { samples }];
        let beams = beam.map(|beam| Beams::new(beam, limit));
        let (cached_tokens, started, prompt_logprobs) = (0, false, Vec::new());
        let active = Active { request, stop_ids, seed, outputs, beams, cached_tokens, started, prompt_logprobs };
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
        }
    }

    /// One step: what every running request has gained goes to `emit`. If the forward pass fails, the requests of this
    /// step end with [`FinishReason::Error`] and the engine goes on with the others.
    pub fn step(&mut self, mut emit: impl FnMut(RequestId, TokenEvent)) {
        let plan = self.scheduler.plan();
        tracing::debug!("{plan}");
        self.outcomes.clear();
        if let Err(error) = self.execute(&plan, &mut emit) {
            self.fail(&plan, &error, &mut emit);
        }
        if let Err(error) = self.scheduler.commit(plan.step, &self.outcomes) {
            // Can only be a fault of this file; the requests concerned must not wait for ever.
            tracing::error!("step {} was not committed: {error}", plan.step.0);
            self.fail(&plan, &error, &mut emit);
            let _ = self.scheduler.commit(plan.step, &[]);
        }
    }

    fn execute(&mut self, plan: &StepPlan, emit: &mut impl FnMut(RequestId, TokenEvent)) -> Result<(), KernelError> {
        self.executor.run(plan)?;
        for (span, index) in plan.spans.iter().zip(0..) {
            self.score_prompt(span, self.executor.last_row(index))?;
            if let Some(active) = self.requests.get_mut(&span.seq.request) {
                active.cached_tokens = active.cached_tokens.max(span.cached);
            }
        }
        self.wanted.clear();
        let sampled = plan.spans.iter().enumerate().filter(|(_, span)| !span.sample.is_empty());
        self.wanted.extend(sampled.map(|(i, _)| (i, self.executor.last_row(i))));
        let wanted = std::mem::take(&mut self.wanted);
        for chunk in wanted.chunks(LOGIT_ROWS) {
            self.rows.clear();
            self.rows.extend(chunk.iter().map(|&(_, row)| row));
            let logits = self.executor.logits(&self.rows)?;
            let vocab_size = logits.len() / chunk.len();
            for (&(span, _), logits) in chunk.iter().zip(logits.chunks(vocab_size)) {
                let span = &plan.spans[span];
                let Some(active) = self.requests.get_mut(&span.seq.request) else { continue };
                let (eos_token_ids, max_model_len) = (&self.eos_token_ids[..], self.max_model_len);
                let (sampler, outcomes, drawn) = (&mut self.sampler, &mut self.outcomes, &mut self.generation_tokens);
                Draw { sampler, eos_token_ids, max_model_len, outcomes, drawn }.row(active, span, logits, emit);
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

    /// Ends every request of the step with the error.
    fn fail(&mut self, plan: &StepPlan, error: &dyn std::error::Error, emit: &mut impl FnMut(RequestId, TokenEvent)) {
        tracing::error!("step {} failed: {error}", plan.step.0);
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
    }
}

/// What drawing needs of the engine.
struct Draw<'a> {
    sampler: &'a mut Sampler,
    eos_token_ids: &'a [u32],
    max_model_len: usize,
    outcomes: &'a mut Vec<Outcome>,
    /// Counts tokens.
    drawn: &'a mut u64,
}

impl Draw<'_> {
    /// What comes of the last row of a span that samples.
    fn row(&mut self, active: &mut Active, span: &Span, logits: &[f32], emit: &mut impl FnMut(RequestId, TokenEvent)) {
        let id = span.seq.request;
        if !active.started {
            active.started = true;
            if active.request.params.prompt_logprobs.is_some() {
                emit(id, TokenEvent::PromptLogprobs(std::mem::take(&mut active.prompt_logprobs)));
            }
            emit(id, TokenEvent::Started { cached_tokens: active.cached_tokens });
        }
        if active.beams.is_some() {
            self.beam(active, span.seq, logits, emit);
        } else {
            self.samples(active, span, logits, emit);
        }
    }

    /// Draws a token for each sequence that wants one from this row.
    fn samples(
        &mut self,
        active: &mut Active,
        span: &Span,
        logits: &[f32],
        emit: &mut impl FnMut(RequestId, TokenEvent),
    ) {
        let id = span.seq.request;
        let Active { request, stop_ids, seed, outputs, .. } = active;
        let (prompt, params) = (&request.prompt, &request.params);
        let limit = params.max_tokens.unwrap_or(usize::MAX).min(self.max_model_len - prompt.len());
        let indices: Vec<u32> = span.sample.clone().filter(|&index| outputs[index as usize].is_some()).collect();
        if limit == 0 {
            for index in indices {
                outputs[index as usize] = None;
                emit(id, TokenEvent::Token { index, token: None, finish: Some(FinishReason::Length) });
                self.outcomes.push(Outcome {
                    seq: SeqId { request: id, index },
                    parent: index,
                    tokens: Vec::new(),
                    finished: true,
                });
            }
            return;
        }
        // Sequences that share a row have the same output so far: none, or it is a single one.
        let output: &[u32] = indices.first().and_then(|&first| outputs[first as usize].as_deref()).unwrap_or_default();
        let context = Context { prompt, output, stop_ids, seed: *seed, sequence: 0 };
        let sampled: Vec<Sampled> =
            self.sampler.sample_each(logits, &params.sampling, &context, indices.iter().copied()).collect();
        for (index, sampled) in indices.into_iter().zip(sampled) {
            let output = &mut outputs[index as usize];
            let made = output.as_mut().map_or(0, |output| {
                output.push(sampled.token);
                output.len()
            });
            *self.drawn += 1;
            let at_limit = (made >= limit).then_some(FinishReason::Length);
            let finish = ending(params, self.eos_token_ids, sampled.token).or(at_limit);
            if finish.is_some() {
                *output = None;
            }
            let seq = SeqId { request: id, index };
            self.outcomes.push(Outcome::token(seq, sampled.token, finish.is_some()));
            emit(id, TokenEvent::Token { index, token: Some(sampled), finish });
        }
    }

    /// Hears what the row says of a beam. The row of the last beam decides which live on, and that of the last token gives
    /// the results.
    fn beam(&mut self, active: &mut Active, seq: SeqId, logits: &[f32], emit: &mut impl FnMut(RequestId, TokenEvent)) {
        let Active { request, stop_ids, seed, outputs, beams: Some(beams), .. } = active else { return };
        let (id, params) = (seq.request, &request.params);
        let mut output = Vec::new();
        beams.tokens(seq.index, &mut output);
        let context = Context { prompt: &request.prompt, output: &output, stop_ids, seed: *seed, sequence: 0 };
        let likeliest = self.sampler.likeliest(logits, &params.sampling, &context, beams.wanted(stop_ids.len()));
        if !beams.offer(seq.index, likeliest) {
            return;
        }
        let before = beams.num_tokens();
        let forks = beams.advance(|token| ending(params, self.eos_token_ids, token));
        *self.drawn += (beams.num_tokens() - before) as u64;
        self.outcomes.extend(forks.into_iter().zip(0..).map(|(fork, index)| {
            let seq = SeqId { request: id, index };
            match fork {
                Some(Fork { parent, token }) => Outcome { seq, parent, tokens: vec![token], finished: false },
                None => Outcome { seq, parent: index, tokens: Vec::new(), finished: true },
            }
        }));
        if !beams.is_done() {
            return;
        }
        let mut results = beams.results();
        for (output, index) in outputs.iter_mut().zip(0..) {
            *output = None;
            let (mut tokens, reason) = results.next().unwrap_or((Vec::new(), FinishReason::Length));
            let last = tokens.pop();
            for token in tokens {
                emit(id, TokenEvent::Token { index, token: Some(token), finish: None });
            }
            emit(id, TokenEvent::Token { index, token: last, finish: Some(reason) });
        }
    }
}

/// Whether a token ends its sequence, and why.
fn ending(params: &GenerationParams, eos_token_ids: &[u32], token: u32) -> Option<FinishReason> {
    if params.stop_token_ids.contains(&token) {
        Some(FinishReason::Stop(Some(StopCause::Token(token))))
    } else {
        (!params.ignore_eos && eos_token_ids.contains(&token)).then_some(FinishReason::Stop(None))
    }
}

/// A seed for a request that brought none: different for each, the same in every run of the same base (SplitMix64).
fn mix(base: u64, id: u64) -> u64 {
    let mut z = base.wrapping_add((id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
