//! The share of a step in a pipeline.
//!
//! A sequence that decodes is in at most one step in flight, because its next token is unknown until that step is
//! committed. If one step took all sequences, nothing would be left for the other stages. So each step takes a share:
//! with `N` sequences that decode, in flight or not, and `S` stages, `N / S` of them, and one more in `N mod S` of the
//! steps in flight.
//!
//! ```text
//! N = 5, S = 4      4 sequences, and then 40 prompts that end in one step
//! 2 | 1 | 1 | 1     1 | 1 | 1 | 1 + 40 | 1 | 1 | 1 | 11 | 11 | 11 | 11
//! ```
//!
//! Thus `S` or more sequences fill `S` stages, and fewer are in one step each. The share goes to the first request by priority
//! and arrival, which the progress theorem requires, and then to the sequences that were planned least recently. The beams of a search
//! draw in one step and are not divided.
//!
//! Prompts and admissions are not divided. Their tokens are known, so the chunks of one prompt are in consecutive steps.

use crate::Scheduler;
use crate::live_request::LiveRequest;
use crate::step_state::{ScheduledSpan, SpanInFlight};

impl Scheduler {
    /// Removes the decodes that exceed the step's share, and returns their tokens to the budget. Each has taken one.
    pub(crate) fn limit_to_share(&self, spans: &mut Vec<ScheduledSpan>, budget: &mut usize) {
        let share = self.share();
        let live = |unit: &[ScheduledSpan]| self.requests.get(&unit[0].request);
        // The end of a prompt can be a span of one token.
        let decodes = |unit: &[ScheduledSpan]| live(unit).is_some_and(|live| !live.is_partial());
        let last_step = |unit: &[ScheduledSpan]| {
            live(unit).and_then(|live| unit.iter().map(|s| live.seqs[s.index].last_step).min())
        };
        let mut units = self.units(spans);
        let decoding = units.iter().filter(|(_, unit)| decodes(unit));
        let first = decoding.min_by_key(|(_, unit)| (self.key_of(&unit[0]), last_step(unit)));
        let first = first.map(|(position, _)| *position);
        units.sort_by_key(|(position, unit)| (Some(*position) != first, last_step(unit)));
        let mut taken = 0;
        units.retain(|(_, unit)| {
            let is_kept = taken < share || !decodes(unit);
            taken += if is_kept && decodes(unit) { unit.len() } else { 0 };
            is_kept
        });
        units.sort_by_key(|(position, _)| *position);
        let kept: Vec<ScheduledSpan> = units.into_iter().flat_map(|(_, unit)| unit).copied().collect();
        *budget += spans.len() - kept.len();
        *spans = kept;
    }

    /// Number of sequences that decode in the step being planned, at least 1.
    pub(crate) fn share(&self) -> usize {
        let sequences: usize = self.decoding_requests().map(LiveRequest::num_live).sum();
        let (least, rest) = (sequences / self.config.max_in_flight, sequences % self.config.max_in_flight);
        let decodes = |span: &&SpanInFlight| {
            self.requests.get(&span.seq.request).is_some_and(|live| span.start >= live.request.prompt.len())
        };
        let num_larger = self.in_flight.iter().filter(|step| step.spans.iter().filter(decodes).count() > least).count();
        // Steps in flight can decode sequences that have ended or been preempted since.
        (least + usize::from(num_larger < rest)).max(1)
    }
}
