//! Decode steps of a batch whose sequences all run: none still computes its prompt, none has ended.

use std::collections::HashSet;
use std::time::Instant;

use engine::{FinishReason, TokenEvent};

use super::batch::{Bench, Phase};
use crate::error::CliError;

/// Steps of the whole batch before the clock counts.
const BEFORE: usize = 3;

/// What a step of decoding gave.
#[derive(Default)]
struct Gained {
    tokens: u64,
    /// Why there is nothing to measure any more.
    ended: Option<String>,
}

impl Bench {
    /// Brings so many prompts of `input_len` tokens to their first tokens, times the next `steps` steps, each of all of them, and
    /// cancels them.
    ///
    /// # Errors
    /// One line: they do not fit together, or a step failed.
    pub fn decode(&mut self, prompts: usize, input_len: usize, steps: usize) -> Result<Phase, CliError> {
        // The first one generates while the prompt of the last one is computed.
        let until_all_run = 2 * (prompts * input_len).div_ceil(self.max_num_batched_tokens) + prompts;
        let output_len = until_all_run + BEFORE + steps + 1;
        let holds = self.engine.stats().blocks_total * self.block_size;
        let needs = prompts * (input_len + output_len).next_multiple_of(self.block_size);
        if needs > holds || prompts > self.max_num_seqs {
            return Err(CliError::Bench(format!(
                "{prompts} sequences of {input_len} tokens: found a cache of {holds} tokens and --max-num-seqs {}, needs {needs} and {prompts}",
                self.max_num_seqs
            )));
        }
        let ids = (0..prompts).map(|_| self.submit(input_len, output_len)).collect::<Result<Vec<_>, _>>()?;
        let outcome = self.time_steps(prompts, input_len, steps);
        for id in ids {
            self.engine.abort(id);
        }
        while self.engine.has_work() {
            self.engine.step(|_, _| {});
        }
        outcome
    }

    fn time_steps(&mut self, prompts: usize, input_len: usize, steps: usize) -> Result<Phase, CliError> {
        let (mut begun, mut context) = (HashSet::new(), (prompts * input_len) as u64);
        while begun.len() < prompts {
            context += self.step(|id| {
                begun.insert(id);
            })?;
        }
        // The first of a size captures its graph.
        for _ in 0..BEFORE {
            context += self.step(|_| {})?;
        }
        let (start, mut phase) = (Instant::now(), Phase::default());
        for _ in 0..steps {
            let tokens = self.step(|_| {})?;
            context += tokens;
            phase.tokens += tokens;
            phase.work.steps += 1;
            phase.work.tokens += tokens;
            phase.work.logits += tokens;
            phase.work.context += context;
        }
        phase.seconds = start.elapsed().as_secs_f64();
        Ok(phase)
    }

    /// One step; says who has a token, and returns how many have.
    fn step(&mut self, mut has: impl FnMut(engine::RequestId)) -> Result<u64, CliError> {
        let mut gained = Gained::default();
        self.engine.step(|id, event| {
            let TokenEvent::Token { token, finish, .. } = event else { return };
            if token.is_some() {
                gained.tokens += 1;
                has(id);
            }
            match finish {
                None => {}
                Some(FinishReason::Error(message)) => gained.ended = Some(message),
                Some(_) => gained.ended = Some("a sequence ended before all had begun".into()),
            }
        });
        gained.ended.map_or(Ok(gained.tokens), |message| Err(CliError::Bench(message)))
    }
}
