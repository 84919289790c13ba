//! One plan: choose, make room, apply, admit.
//!
//! 1. *Choose* spans for the running requests and *make room* for them (`room`).
//! 2. *Apply* the choice to the tables. With drafts to verify this comes last: they get what the admissions leave.
//! 3. *Admit* from the head of the waiting queue (`admit`). A step that preempted, or that had to leave
//!    something out for want of blocks, admits nothing.
//!
//! Cost: O(running sequences). A head of the queue that did not fit is not looked up again until something
//! has changed.

use crate::draft::{Choice, Draft, Room};
use crate::flight::{Flight, InFlight};
use crate::group::Sequence;
use crate::plan::Span;
use crate::{Scheduler, StepId, StepPlan};

impl Scheduler {
    /// Plans the next step. The plan may be empty.
    ///
    /// Nothing can be planned while `max_in_flight` steps are not committed, while the newest is not
    /// [submitted](Scheduler::submitted) (where more than one may be in flight), or while one is in flight that was planned
    /// behind a [failed](Scheduler::fail) step. The plan is empty then. Every plan has a step id of its own, an empty one
    /// too. A plan without spans need be neither submitted nor committed.
    pub fn plan(&mut self) -> StepPlan {
        self.last_step = StepId(self.last_step.0 + 1);
        let plan = StepPlan::empty(self.last_step);
        if let Some(newest) = self.flights.back()
            && (self.flights.len() >= self.config.max_in_flight || !newest.submitted || newest.is_behind_failure)
        {
            return plan;
        }
        let mut draft = Draft { plan, spans: std::mem::take(&mut self.spare.in_flight) };
        draft.plan.spans = self.spare.list();
        let Room { mut choices, mut budget, deferred } = self.make_room(&mut draft.plan.preempted);
        draft.plan.spans.reserve(choices.len());
        draft.spans.reserve(choices.len());
        let may_admit = draft.plan.preempted.is_empty() && !deferred;
        let kept = if may_admit { self.tokens_for_drafts(&choices, budget) } else { 0 };
        if kept == 0 {
            self.push_spans(&mut draft, &choices);
            if may_admit {
                self.admit(&mut draft, &mut budget, 0);
            }
        } else {
            // Drafts get what the admissions leave, so their spans are made after these and stand before them.
            budget -= kept;
            self.admit(&mut draft, &mut budget, self.blocks_for(&choices));
            self.add_drafts(&mut choices, budget + kept);
            self.push_spans(&mut draft, &choices);
            draft.plan.spans.rotate_right(choices.len());
            draft.spans.rotate_right(choices.len());
        }
        self.spare.choices = choices;
        self.spare.choices.clear();
        let Draft { mut plan, spans } = draft;
        plan.memory = self.pool.drain_memory_ops().collect();
        plan.released = std::mem::take(&mut self.released);
        if !plan.spans.is_empty() {
            self.counters.steps += 1;
            let (submitted, is_behind_failure, behind) = (false, false, Vec::new());
            self.flights.push_back(Flight { step: plan.step, spans, submitted, is_behind_failure, behind });
        } else if let Some(newest) = self.flights.back_mut() {
            newest.behind.extend(&plan.memory);
        }
        plan
    }

    /// Takes back a plan that is no longer needed, so that the next one reuses its memory. Calling it is optional.
    pub fn recycle(&mut self, mut plan: StepPlan) {
        self.spare.spans.append(&mut plan.spans);
        self.spare.list = plan.spans;
    }

    fn push_spans(&mut self, draft: &mut Draft, choices: &[Choice]) {
        for &choice in choices {
            self.push_span(draft, choice, 0);
        }
    }

    /// Gives the chosen tokens their slots and writes the span.
    pub(crate) fn push_span(&mut self, draft: &mut Draft, choice: Choice, cached: usize) {
        let Choice { request, index, count, drafts } = choice;
        let before = self.flights.back().map(|f| f.step);
        let Some(group) = self.groups.get_mut(&request) else {
            return;
        };
        let Some(len) = group.seqs[index].table.as_ref().map(kvblock::BlockTable::len) else {
            return;
        };
        let start = group.seqs[index].planned;
        let (drawn, end) = (start + count - drafts, start + count);
        let sample = group.sample(index, drawn);
        self.scratch.clear();
        group.copy_tokens(index, len..drawn.max(len), &mut self.scratch);
        let (prompt, seq, arrival) = (group.request.prompt.len(), group.seq_id(index), group.arrival);
        let beams = if group.request.beam_search { group.seqs.len() as u32 } else { 0 };
        let Sequence { table: Some(table), output, planned, sent, drafts: proposed, last_step, .. } =
            &mut group.seqs[index]
        else {
            return;
        };
        let mut drafted = std::mem::take(proposed);
        drafted.truncate(drafts);
        self.scratch.extend_from_slice(&drafted);
        let mut keep = *sent;
        if end > len {
            match self.pool.append(table, &self.scratch) {
                Ok(first_changed) => keep = keep.min(first_changed),
                Err(no_space) => {
                    debug_assert!(false, "room was made, yet {no_space}");
                    return;
                }
            }
        }
        let entries = table.len().div_ceil(self.config.block_size);
        let mut span = self.spare.span(seq, &table.tokens()[start..end], table.groups().len());
        for (g, (own, group)) in span.groups.iter_mut().zip(table.groups()).enumerate() {
            let holes = group.holes();
            let append = (keep.max(holes)..entries).filter_map(|k| group.entry(k));
            own.refill(holes, keep, append, table.slots_in(g, start..end));
        }
        let awaits = if drawn <= prompt + output.len() { None } else { before };
        draft.plan.spans.push(Span { start, drafts, awaits, cached, sample: sample.clone(), ..span });
        *sent = entries;
        *planned = end;
        *last_step = draft.plan.step;
        draft.spans.push(InFlight { seq, arrival, start, end, drafts: drafted, sample: sample.clone(), beams });
        for index in sample {
            group.seqs[index as usize].promised += 1;
        }
        self.counters.prompt_tokens_computed += (end.min(prompt) - start.min(prompt)) as u64;
        // One partial prefill less.
        self.changes += u64::from(start < prompt && prompt <= end);
    }
}
