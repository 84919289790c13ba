//! How many prompt tokens a step may compute beside decodes, so that the time between two tokens of a sequence meets a target.
//!
//! A step that computes a chunk of a prompt takes longer than one that only decodes, and every sequence that decodes waits for it.
//! [`StepTime`] estimates both times from recent steps, and the budget is the number of tokens with which the next step takes the
//! time of the target:
//!
//! ```text
//! target of a step    |------------------------------|
//! estimated time      |- decodes -|----- prompts ----|
//! ```
//!
//! If nobody decodes, there is no budget but that of the step ([`Scheduler::set_prompt_budget`](sched::Scheduler::set_prompt_budget)).
//! A budget has at least [`LEAST_TOKENS`], even if decodes alone miss the target, so that prompts make progress, unless the whole step
//! has fewer.
//!
//! [`ItlTarget::Auto`] depends on the estimated time of decodes. While prompts queue up, each step may have as many rows and prompt
//! tokens as the one before, which says nothing about the part of decodes. If that were guessed too low, the target would be too
//! low, the budget the least, and all steps equal: after a slow first step, a simulated server stays so. Budgets therefore alternate
//! between a quarter more and less (at the least, between half more and the least) whenever recent steps are too much alike.
//!
//! The budget steers times alone: a token's value does not depend on the chunks of its prompt. Only the rank that schedules has one.
//! No clock is read here; the engine passes times in.

use sched::{SchedConfig, StepPlan};

use super::step_time::StepTime;
use crate::api::ItlTarget;

/// The least number of prompt tokens.
const LEAST_TOKENS: usize = 16;
/// [`ItlTarget::Auto`]: target of a step as a multiple of the time of a step in which all sequences decode. Below 3, so that the 99th percentile of the
/// time between tokens stays below three times the median although times vary.
const AUTO_MULTIPLE: f64 = 2.2;

/// See the [module](self).
pub(super) struct PromptBudget {
    target: ItlTarget,
    /// Number of steps from a token of a sequence to its next one: the stages of a pipeline, otherwise 1.
    steps_per_token: f64,
    /// `max_num_batched_tokens`.
    most: usize,
    time: StepTime,
    /// Greatest number of rows of decodes in a step so far.
    most_rows: usize,
    /// Whether the last of alternating budgets was above the one that meets the target.
    more: bool,
    /// Seconds between two tokens that the last budget was chosen for.
    seconds: f64,
}

impl PromptBudget {
    pub fn new(target: ItlTarget, sched: &SchedConfig) -> PromptBudget {
        let steps_per_token = if sched.pipeline { sched.max_in_flight as f64 } else { 1.0 };
        let seconds = if let ItlTarget::Millis(millis) = target { millis / 1000.0 } else { 0.0 };
        let (most, time) = (sched.max_num_batched_tokens, StepTime::default());
        PromptBudget { target, steps_per_token, most, time, most_rows: 0, more: false, seconds }
    }

    /// A step has taken `seconds`.
    pub fn measured(&mut self, plan: &StepPlan, seconds: f64) {
        let (mut rows, mut tokens) = (0, 0);
        for span in &plan.spans {
            let is_decode = span.drafts > 0 || span.tokens.len() == 1;
            *if is_decode { &mut rows } else { &mut tokens } += span.tokens.len();
        }
        self.most_rows = self.most_rows.max(rows);
        self.time.add(rows, tokens, seconds);
    }

    /// Returns the number of prompt tokens of the next step, which computes `rows` rows for decodes. `sequences` would decode if
    /// their prompts were computed. [`ItlTarget::Auto`] is a multiple of the time with all of these: with few rows a step is short,
    /// and a multiple of that would let others wait long, which keeps the rows few. More rows than any step has had do not count,
    /// because their time would be a guess: after a start it was three times too long.
    pub fn next(&mut self, rows: usize, sequences: usize) -> usize {
        if rows == 0 {
            return self.most;
        }
        let (decodes, token) = (self.time.of_decodes(rows), self.time.of_prompt_token());
        if self.target == ItlTarget::Auto {
            let all = rows.max(self.most_rows.min((sequences as f64 / self.steps_per_token) as usize));
            self.seconds = AUTO_MULTIPLE * self.time.of_decodes(all) * self.steps_per_token;
        }
        let left = self.seconds / self.steps_per_token - decodes;
        // A step without a measurement has no estimate: 0 / 0 is no number, which becomes 0.
        let mut tokens = ((left / token) as usize).max(LEAST_TOKENS);
        if self.target == ItlTarget::Auto && !self.time.tokens_vary() {
            let change = (tokens / 4).max(LEAST_TOKENS / 2);
            self.more = !self.more;
            tokens = if self.more { tokens + change } else { (tokens - change).max(LEAST_TOKENS) };
        }
        tokens.min(self.most)
    }

    /// Seconds between two tokens of a sequence that the last budget was chosen for.
    pub fn target(&self) -> f64 {
        self.seconds
    }
}

#[cfg(test)]
mod tests;
