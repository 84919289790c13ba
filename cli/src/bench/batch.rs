//! Batches of random prompts through an engine, with timing.
//!
//! The engine is driven step by step on token ids, without text or HTTP. Decoding is greedy, and no token ends a sequence.

use std::collections::HashMap;
use std::time::Instant;

use ::bench::random::Random;
use engine::{
    Engine, EngineConfig, FinishReason, GenerationParams, GenerationRequest, Group, LoadOn, RequestId, Roofline,
    TokenEvent, WorkCounts,
};
use serde_json::{Value, json};

use crate::error::CliError;

/// Prompts of equal length that are submitted together.
#[derive(Clone, Copy)]
pub struct Batch {
    pub prompts: usize,
    pub input_len: usize,
    pub output_len: usize,
}

pub struct Run {
    /// Until every sequence had its first token.
    pub first: Phase,
    pub all: Phase,
    /// Seconds to each sequence's first token, ascending.
    pub first_tokens: Vec<f64>,
}

impl Run {
    /// From the last first token to the end.
    pub fn rest(&self) -> Phase {
        let (all, first) = (&self.all, &self.first);
        Phase {
            seconds: all.seconds - first.seconds,
            prompt_tokens: all.prompt_tokens - first.prompt_tokens,
            tokens: all.tokens - first.tokens,
            work: WorkCounts {
                steps: all.work.steps - first.work.steps,
                tokens: all.work.tokens - first.work.tokens,
                logits: all.work.logits - first.work.logits,
                context: all.work.context - first.work.context,
            },
        }
    }
}

/// Time and work of a part of a run.
#[derive(Clone, Copy, Default)]
pub struct Phase {
    pub seconds: f64,
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub tokens: u64,
    pub work: WorkCounts,
}

/// A loaded engine, and the roofline of its machine.
pub struct Bench {
    pub(super) engine: Engine,
    pub roofline: Roofline,
    random: Random,
    /// Names of adapters, which the sequences take in turn.
    pub(super) adapters: Vec<String>,
    submitted: usize,
    pub(super) block_size: usize,
    pub(super) max_num_seqs: usize,
    pub(super) max_num_batched_tokens: usize,
}

impl Bench {
    /// Measures the machine, then loads the model.
    pub fn start(config: &EngineConfig) -> Result<Bench, CliError> {
        Bench::start_in(config, Group::open(&config.parallel)?)
    }

    /// Like [`Bench::start`], as rank 0 of a group.
    pub fn start_in(config: &EngineConfig, group: Group) -> Result<Bench, CliError> {
        let (roofline, device) = Roofline::measure(config).inspect_err(|error| group.refuse(error))?;
        // A rank of a group has fewer threads, and opens its device itself.
        let on = if config.parallel.ranks() == 1 { LoadOn::Device(device) } else { LoadOn::Group(group) };
        let engine = Engine::new(engine::load(config, on, &|_, _| {})?.parts)?;
        let &EngineConfig { max_num_seqs, max_num_batched_tokens, .. } = config;
        let block_size = engine.block_size();
        let random = Random::new(config.seed.unwrap_or(0));
        let (adapters, submitted) = (Vec::new(), 0);
        Ok(Bench { engine, roofline, random, adapters, submitted, block_size, max_num_seqs, max_num_batched_tokens })
    }

    /// Runs a batch of new random prompts.
    pub fn run(&mut self, batch: &Batch) -> Result<Run, CliError> {
        self.run_lengths(&vec![(batch.input_len, batch.output_len); batch.prompts])
    }

    /// Runs new random prompts, given the prompt and output length of each.
    pub fn run_lengths(&mut self, lengths: &[(usize, usize)]) -> Result<Run, CliError> {
        let mut inputs = HashMap::new();
        for &(input_len, output_len) in lengths {
            inputs.insert(self.submit(input_len, output_len)?, input_len as u64);
        }
        let start = Instant::now();
        let mut generated = HashMap::new();
        let (mut first, mut all) = (Phase::default(), Phase::default());
        let mut first_tokens = Vec::with_capacity(lengths.len());
        while self.engine.has_work() {
            let (tokens, _) = self.step(|id| {
                let generated: &mut u64 = generated.entry(id).or_default();
                let input_len = inputs.get(&id).copied().unwrap_or_default();
                if *generated == 0 {
                    first_tokens.push(start.elapsed().as_secs_f64());
                    all.prompt_tokens += input_len;
                    all.work.tokens += input_len;
                    all.work.context += input_len;
                } else {
                    all.work.tokens += 1;
                    all.work.context += input_len + *generated;
                }
                *generated += 1;
            })?;
            all.tokens += tokens;
            all.work.logits += tokens;
            all.work.steps += 1;
            all.seconds = start.elapsed().as_secs_f64();
            if first_tokens.len() == lengths.len() && first.work.steps == 0 {
                first = all;
            }
        }
        Ok(Run { first, all, first_tokens })
    }

    /// Runs one step and calls `on_token` for each sequence that got a token. Returns the number of tokens, and whether a sequence
    /// has finished.
    pub(super) fn step(&mut self, mut on_token: impl FnMut(RequestId)) -> Result<(u64, bool), CliError> {
        let (mut tokens, mut finished, mut failed) = (0, false, None);
        self.engine.step(|id, event| {
            let TokenEvent::Token { token, finish, .. } = event else { return };
            if token.is_some() {
                tokens += 1;
                on_token(id);
            }
            finished |= finish.is_some();
            if let Some(FinishReason::Error(message)) = finish {
                failed.get_or_insert(message);
            }
        });
        failed.map_or(Ok((tokens, finished)), |message| Err(CliError::Failed(message)))
    }

    pub(super) fn submit(&mut self, input_len: usize, output_len: usize) -> Result<RequestId, CliError> {
        let vocab_size = self.engine.vocab_size() as u64;
        let prompt = (0..input_len).map(|_| (self.random.next() % vocab_size) as u32).collect();
        let params = GenerationParams {
            sampling: engine::SamplingParams { temperature: 0.0, ..Default::default() },
            max_tokens: Some(output_len),
            ignore_eos: true,
            ..Default::default()
        };
        let adapter = self.adapters.get(self.submitted % self.adapters.len().max(1)).cloned();
        self.submitted += 1;
        Ok(self.engine.submit(GenerationRequest { prompt, params, adapter, ..Default::default() })?)
    }

    /// The lower bound on a phase's time as a fraction of its time: 1 is the best possible.
    pub fn share(&self, phase: &Phase) -> f64 {
        if phase.seconds > 0.0 { self.roofline.seconds(&phase.work) / phase.seconds } else { 0.0 }
    }

    pub fn roofline_line(&self) -> String {
        let Roofline { threads, read, peak, weight_bytes, kv_bytes_per_token, .. } = self.roofline;
        format!(
            "roofline with {threads} threads: reads {:.1} GB/s, computes {:.0} GOP/s; a step reads {:.1} MB \
             of weights and {:.1} kB of cache per token of context",
            read / 1e9,
            peak / 1e9,
            weight_bytes as f64 / 1e6,
            kv_bytes_per_token as f64 / 1e3
        )
    }

    pub fn roofline_json(&self) -> Value {
        json!({
            "threads": self.roofline.threads,
            "read_bytes_per_second": self.roofline.read,
            "peak_operations_per_second": self.roofline.peak,
            "weight_bytes": self.roofline.weight_bytes,
            "kv_bytes_per_token": self.roofline.kv_bytes_per_token,
        })
    }
}
