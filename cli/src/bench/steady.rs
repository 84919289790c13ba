//! Timing of decode steps in which all sequences of a batch decode: none is still in prefill, none has finished.

use std::collections::HashSet;
use std::time::Instant;

use engine::RequestId;

use super::batch::{Bench, Phase};
use crate::error::CliError;

/// Decode steps of the whole batch before those that are timed.
const WARMUP: usize = 3;

impl Bench {
    /// Runs prompts of `input_len` tokens until all decode, times the next `steps` steps, and cancels them. Fails if they do not fit
    /// in the cache together.
    pub fn decode(&mut self, prompts: usize, input_len: usize, steps: usize) -> Result<Phase, CliError> {
        // The first sequence already decodes while the last one is in prefill.
        let until_all_decode = 2 * (prompts * input_len).div_ceil(self.max_num_batched_tokens) + prompts;
        let output_len = until_all_decode + WARMUP + steps + 1;
        let holds = self.engine.stats().scheduler.blocks_total * self.block_size;
        let needs = prompts * (input_len + output_len).next_multiple_of(self.block_size);
        if needs > holds || prompts > self.max_num_seqs {
            return Err(CliError::Failed(format!(
                "{prompts} sequences of {input_len} tokens: found a cache of {holds} tokens and --max-num-seqs {}, expected {needs} and {prompts}",
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
            context += self.decode_step(|id| {
                begun.insert(id);
            })?;
        }
        // The first step of a size captures its graph.
        for _ in 0..WARMUP {
            context += self.decode_step(|_| {})?;
        }
        let (start, mut phase) = (Instant::now(), Phase::default());
        for _ in 0..steps {
            let tokens = self.decode_step(|_| {})?;
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

    /// A step in which no sequence may finish. Returns the number of tokens.
    fn decode_step(&mut self, on_token: impl FnMut(RequestId)) -> Result<u64, CliError> {
        match self.step(on_token)? {
            (tokens, false) => Ok(tokens),
            (_, true) => Err(CliError::Failed("a sequence finished before all of them were decoding".into())),
        }
    }
}
