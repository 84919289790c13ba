//! Asks the proposer for drafts, with as many for each sequence as its recent drafts and the batch justify.
//!
//! Costs a lookup for each sequence and step. Without speculation the engine has no speculator, so a step costs nothing more.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use std::vec::Drain;

use sched::{SeqId, Span, StepPlan};

use super::control::{Acceptance, StepCost};
use super::proposer::{DraftScope, Proposal, ProposeError, Proposer};

/// A source of drafts, and how many it may propose.
pub struct Speculation {
    /// The source.
    pub proposer: Box<dyn Proposer>,
    /// Greatest number of drafts of a sequence in a step.
    pub num_speculative_tokens: usize,
    /// The number of drafts follows their success and the size of the batch. Otherwise it is always the greatest, for tests and
    /// measurements.
    pub is_adaptive: bool,
}

/// See the [module](self).
pub(crate) struct Speculator {
    speculation: Speculation,
    vocab_size: usize,
    /// Accepted drafts are computed again ([`SchedConfig::recompute_drafts`](sched::SchedConfig::recompute_drafts)).
    recomputes: bool,
    /// In this order, so that equal histories give equal plans.
    sequences: BTreeMap<SeqId, Acceptance>,
    cost: StepCost,
    /// Number of sequences in the last step.
    batch: usize,
    proposals: Vec<Proposal>,
    /// Verifications, drafts, and right drafts since the last line of the log, and when that was.
    recent: ([usize; 3], Instant),
    /// The proposer has failed.
    is_off: bool,
}

/// Time between two lines of the log.
const LOG_EVERY: Duration = Duration::from_secs(10);

impl Speculator {
    pub fn new(speculation: Speculation, vocab_size: usize, recomputes: bool) -> Speculator {
        let cost = StepCost::new(speculation.proposer.by_worker());
        Speculator {
            speculation,
            vocab_size,
            recomputes,
            sequences: BTreeMap::new(),
            cost,
            batch: 0,
            proposals: Vec::new(),
            recent: ([0; 3], Instant::now()),
            is_off: false,
        }
    }

    /// A sequence of a request with this scope and prompt has drawn a token.
    pub fn token(&mut self, seq: SeqId, (scope, prompt): &(DraftScope, Vec<u32>), token: u32) {
        if self.is_off {
            return;
        }
        let is_new = !self.sequences.contains_key(&seq);
        self.sequences.entry(seq).or_default().token();
        self.call(|proposer| {
            if is_new {
                proposer.begin(seq, scope, prompt);
            }
            proposer.extend(seq, token);
            Ok(())
        });
    }

    /// These sequences have ended.
    pub fn end(&mut self, ended: &[SeqId]) {
        for seq in ended {
            if self.sequences.remove(seq).is_some() {
                self.call(|proposer| {
                    proposer.end(*seq);
                    Ok(())
                });
            }
        }
    }

    /// Returns drafts for some sequences, at least one for each. `limit` returns how many drafts a sequence can use.
    pub fn propose(&mut self, limit: impl Fn(SeqId) -> usize) -> Drain<'_, Proposal> {
        let mut proposals = std::mem::take(&mut self.proposals);
        proposals.clear();
        for (seq, acceptance) in &self.sequences {
            let most = self.num_wanted(acceptance).min(limit(*seq));
            if most > 0 {
                proposals.push(Proposal { seq: *seq, most, drafts: Vec::new() });
            }
        }
        if !proposals.is_empty() {
            self.call(|proposer| proposer.propose(&mut proposals));
        }
        for Proposal { seq, most, drafts } in &mut proposals {
            // The model has no row for other ids.
            let valid = drafts.iter().take(*most).take_while(|token| (**token as usize) < self.vocab_size).count();
            drafts.truncate(if self.is_off { 0 } else { valid });
            if let Some(acceptance) = self.sequences.get_mut(seq) {
                acceptance.asked(valid > 0);
            }
        }
        proposals.retain(|proposal| !proposal.drafts.is_empty());
        self.proposals = proposals;
        self.proposals.drain(..)
    }

    /// Whether the drafts are placeholders, which the worker replaces.
    pub fn is_by_worker(&self) -> bool {
        !self.is_off && self.speculation.proposer.by_worker()
    }

    /// The worker has computed drafts, in so many passes over the sequences.
    pub fn computed(&mut self, passes: usize, time: Duration) {
        self.cost.add_passes(passes, time.as_secs_f64());
    }

    /// Whether the host should see the token that a step draws for this sequence before it plans the next step.
    pub fn waits_for(&self, seq: SeqId) -> bool {
        // A sequence without a token yet has not been looked at.
        let is_worth = |acceptance: &Acceptance| acceptance.is_worth_waiting() && self.num_wanted(acceptance) > 0;
        !self.is_off && self.sequences.get(&seq).is_none_or(is_worth)
    }

    /// Greatest number of drafts for a sequence.
    fn num_wanted(&self, acceptance: &Acceptance) -> usize {
        let greatest = self.speculation.num_speculative_tokens;
        if self.speculation.is_adaptive {
            let may_try = |pause| self.cost.may_try(pause, self.batch);
            acceptance.num_drafts(self.cost.threshold(self.batch, self.recomputes), greatest, may_try)
        } else {
            greatest
        }
    }

    /// Records a verification of a sequence: the first `right` of its `drafts` drafts were right.
    pub fn verified(&mut self, seq: SeqId, drafts: usize, right: usize) {
        if let Some(acceptance) = self.sequences.get_mut(&seq) {
            acceptance.verified(drafts, right);
        }
        self.recent.0 = [self.recent.0[0] + 1, self.recent.0[1] + drafts, self.recent.0[2] + right];
    }

    /// A step that took `seconds` has just been collected.
    pub fn collected(&mut self, plan: &StepPlan, seconds: f64) {
        self.batch = plan.spans.len();
        self.log(Instant::now());
        // The rows of a prompt cost something else.
        if plan.spans.iter().all(|span| self.is_decode(span)) {
            self.cost.add(plan.num_tokens(), seconds);
        }
    }

    /// Whether a span computes nothing but the last known token, accepted drafts again, and drafts.
    fn is_decode(&self, span: &Span) -> bool {
        let accepted = self.sequences.get(&span.seq).filter(|_| self.recomputes).map_or(0, Acceptance::num_accepted);
        span.tokens.len() <= 1 + accepted + span.drafts
    }

    fn log(&mut self, now: Instant) {
        let ([verified, drafts, right], since) = self.recent;
        if verified == 0 || now - since < LOG_EVERY {
            return;
        }
        let (share, length) = (100.0 * right as f64 / drafts as f64, 1.0 + right as f64 / verified as f64);
        tracing::info!(
            "speculative decoding: {right} of {drafts} drafts accepted ({share:.0} %), {length:.2} tokens per verification"
        );
        self.recent = ([0; 3], now);
    }

    /// Calls the proposer. If it fails or panics, speculation is off from then on.
    fn call(&mut self, work: impl FnOnce(&mut dyn Proposer) -> Result<(), ProposeError>) {
        if self.is_off {
            return;
        }
        let proposer = &mut *self.speculation.proposer;
        let outcome = catch_unwind(AssertUnwindSafe(|| work(proposer)));
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.fail(&error),
            Err(_) => self.fail(&ProposeError("it panicked".to_string())),
        }
    }

    /// Turns speculation off.
    pub fn fail(&mut self, problem: &ProposeError) {
        tracing::warn!("the source of drafts failed: {problem}; requests go on without speculation");
        self.is_off = true;
        self.sequences.clear();
    }
}

#[cfg(test)]
mod tests;
