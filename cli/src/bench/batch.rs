//! Prompts of random tokens through an engine, with the clock beside them.
//!
//! The engine is driven step by step on token ids: no text, no HTTP. Draws are greedy and no token ends a sequence.

use std::time::Instant;

use engine::{Engine, EngineConfig, Floor, GenerationParams, GenerationRequest, RequestId, TokenEvent, Work};
use serde_json::{Value, json};

use crate::error::CliError;

/// Prompts that come at once.
#[derive(Clone, Copy)]
pub struct Batch {
    pub prompts: usize,
    pub input_len: usize,
    pub output_len: usize,
}

/// What one run of a batch took.
pub struct Run {
    /// Until every sequence had its first token.
    pub first: Phase,
    /// From there to the end.
    pub rest: Phase,
    /// Seconds to each sequence's first token, ascending.
    pub first_tokens: Vec<f64>,
}

/// A part of a run.
#[derive(Clone, Copy, Default)]
pub struct Phase {
    pub seconds: f64,
    /// Prompt tokens and generated ones.
    pub prompt_tokens: u64,
    pub tokens: u64,
    pub work: Work,
}

impl Phase {
    /// Both parts of a run.
    pub fn and(self, other: Phase) -> Phase {
        let (a, b) = (self.work, other.work);
        Phase {
            seconds: self.seconds + other.seconds,
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            tokens: self.tokens + other.tokens,
            work: Work {
                steps: a.steps + b.steps,
                tokens: a.tokens + b.tokens,
                logits: a.logits + b.logits,
                context: a.context + b.context,
            },
        }
    }
}

/// A loaded engine and the floors of its machine.
pub struct Bench {
    pub(super) engine: Engine,
    pub floor: Floor,
    random: u64,
    /// As it was configured.
    pub(super) block_size: usize,
    pub(super) max_num_seqs: usize,
    pub(super) max_num_batched_tokens: usize,
}

impl Bench {
    /// Measures the machine, then loads the model.
    pub fn start(config: &EngineConfig) -> Result<Bench, CliError> {
        let floor = Floor::measure(config)?;
        let engine = Engine::load(config, &|_, _| {})?;
        let &EngineConfig { block_size, max_num_seqs, max_num_batched_tokens, .. } = config;
        let random = config.seed.unwrap_or(0);
        Ok(Bench { engine, floor, random, block_size, max_num_seqs, max_num_batched_tokens })
    }

    /// Runs prompts that were never seen before.
    pub fn run(&mut self, batch: &Batch) -> Result<Run, CliError> {
        self.run_lengths(&vec![(batch.input_len, batch.output_len); batch.prompts])
    }

    /// The same with prompts of so many tokens each, and so many tokens to generate for it.
    pub fn run_lengths(&mut self, lengths: &[(usize, usize)]) -> Result<Run, CliError> {
        let mut inputs = std::collections::HashMap::new();
        for &(input_len, output_len) in lengths {
            inputs.insert(self.submit(input_len, output_len)?, input_len as u64);
        }
        let (start, mut steps) = (Instant::now(), 0u64);
        let mut made = std::collections::HashMap::new();
        let (mut first, mut all) = (Phase::default(), Phase::default());
        let mut first_tokens = Vec::with_capacity(lengths.len());
        let mut failed = None;
        while self.engine.has_work() {
            let mut tokens = 0;
            self.engine.step(|id, event| {
                let TokenEvent::Token { token, finish, .. } = event else { return };
                if let Some(engine::FinishReason::Error(message)) = finish {
                    failed.get_or_insert(message);
                }
                if token.is_some() {
                    tokens += 1;
                    let made: &mut u64 = made.entry(id).or_default();
                    let input_len = inputs.get(&id).copied().unwrap_or_default();
                    if *made == 0 {
                        first_tokens.push(start.elapsed().as_secs_f64());
                        all.prompt_tokens += input_len;
                        all.work.tokens += input_len;
                        all.work.context += input_len;
                    } else {
                        all.work.tokens += 1;
                        all.work.context += input_len + *made;
                    }
                    *made += 1;
                }
            });
            if let Some(message) = failed {
                return Err(CliError::Bench(message));
            }
            steps += 1;
            all.tokens += tokens;
            all.work.logits += tokens;
            all.work.steps = steps;
            all.seconds = start.elapsed().as_secs_f64();
            if first_tokens.len() == lengths.len() && first.work.steps == 0 {
                first = all;
            }
        }
        let (a, b) = (all.work, first.work);
        let rest = Phase {
            seconds: all.seconds - first.seconds,
            prompt_tokens: 0,
            tokens: all.tokens - first.tokens,
            work: Work {
                steps: a.steps - b.steps,
                tokens: a.tokens - b.tokens,
                logits: a.logits - b.logits,
                context: a.context - b.context,
            },
        };
        Ok(Run { first, rest, first_tokens })
    }

    /// Hands in a prompt of tokens that were never seen before.
    pub(super) fn submit(&mut self, input_len: usize, output_len: usize) -> Result<RequestId, CliError> {
        let prompt = (0..input_len).map(|_| self.token()).collect();
        let params = GenerationParams {
            sampling: engine::SamplingParams { temperature: 0.0, ..Default::default() },
            max_tokens: Some(output_len),
            ignore_eos: true,
            ..Default::default()
        };
        Ok(self.engine.submit(GenerationRequest { prompt, params, ..Default::default() })?)
    }

    /// Any token (SplitMix64).
    fn token(&mut self) -> u32 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.random ^ (self.random >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z >> 32) % self.engine.vocab_size() as u64) as u32
    }

    /// The share of its floor that a phase took: 1 is all that the machine can do.
    pub fn share(&self, phase: &Phase) -> f64 {
        if phase.seconds > 0.0 { self.floor.seconds(&phase.work) / phase.seconds } else { 0.0 }
    }

    /// The floors in a line.
    pub fn floors(&self) -> String {
        let Floor { threads, read, peak, weight_bytes, kv_bytes_per_token, .. } = self.floor;
        format!(
            "floors of this run, {threads} threads: read {:.1} GB/s, {:.0} GOP/s; a step reads {:.1} MB of weights and {:.1} kB of cache \
             for each token of context",
            read / 1e9,
            peak / 1e9,
            weight_bytes as f64 / 1e6,
            kv_bytes_per_token as f64 / 1e3
        )
    }

    /// The floors as JSON.
    pub fn floors_json(&self) -> Value {
        json!({
            "threads": self.floor.threads,
            "read_bytes_per_second": self.floor.read,
            "peak_operations_per_second": self.floor.peak,
            "weight_bytes": self.floor.weight_bytes,
            "kv_bytes_per_token": self.floor.kv_bytes_per_token,
        })
    }
}
