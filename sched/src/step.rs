//! Planning a step.
//!
//! 1. Choose spans for the running requests, preempting some if blocks are missing (`running`).
//! 2. Admit requests from the head of the queue (`admit`), unless this step preempted or deferred something. They may take
//!    tokens from the spans of 1; drafts get what they leave.
//! 3. Append the spans to the tables.
//!
//! Cost: O(running sequences). If the head of the queue did not fit, it is not looked up again until something changes.

use crate::live_request::Sequence;
use crate::plan::{GroupSpan, Span};
use crate::step_state::{PlanBuilder, RunningSpans, ScheduledSpan, SpanInFlight, StepInFlight};
use crate::{Scheduler, StepId, StepPlan};

impl Scheduler {
    /// Plans the next step. The plan may be empty.
    ///
    /// The plan is empty while `max_in_flight` steps are not committed, while the newest step is not
    /// [submitted](Scheduler::submitted) (if more than one may be in flight), and while a step is in flight that was
    /// planned behind a [failed](Scheduler::fail) one. Every plan has its own step id, even an empty one. A plan
    /// without spans need not be submitted or committed.
    pub fn plan(&mut self) -> StepPlan {
        self.last_step = StepId(self.last_step.0 + 1);
        let plan = StepPlan { step: self.last_step, ..StepPlan::default() };
        if let Some(newest) = self.in_flight.back()
            && (self.in_flight.len() >= self.config.max_in_flight || !newest.is_submitted || newest.is_behind_failure)
        {
            return plan;
        }
        let mut builder = PlanBuilder { plan, in_flight: std::mem::take(&mut self.recycled.in_flight) };
        builder.plan.spans = std::mem::take(&mut self.recycled.span_list);
        let RunningSpans { mut spans, blocks, mut budget, for_drafts: beyond, is_deferred } =
            self.schedule_running(&mut builder.plan.preempted);
        builder.plan.spans.reserve(spans.len());
        builder.in_flight.reserve(spans.len());
        if builder.plan.preempted.is_empty() && !is_deferred {
            let for_drafts = self.budget_for_drafts(&spans, budget + beyond);
            let of_prompts = for_drafts.saturating_sub(beyond);
            budget -= of_prompts;
            let taken = self.admit(&mut builder, &mut budget, (&spans, blocks));
            Self::take_spare_tokens(&mut spans, taken);
            if for_drafts > 0 {
                self.add_drafts(&mut spans, budget + of_prompts + beyond);
            }
        }
        // Admissions come last in the plan, but their spans are pushed first.
        let admitted = builder.plan.spans.len();
        for &span in &spans {
            self.push_span(&mut builder, span, 0);
        }
        builder.plan.spans.rotate_left(admitted);
        builder.in_flight.rotate_left(admitted);
        self.recycled.scheduled = spans;
        let PlanBuilder { mut plan, in_flight } = builder;
        plan.memory = self.pool.drain_memory_ops().collect();
        plan.released = std::mem::take(&mut self.released);
        if !plan.spans.is_empty() {
            self.counters.steps += 1;
            self.in_flight.push_back(StepInFlight {
                step: plan.step,
                spans: in_flight,
                is_submitted: false,
                is_behind_failure: false,
                later_memory_ops: Vec::new(),
            });
        } else if let Some(newest) = self.in_flight.back_mut() {
            newest.later_memory_ops.extend(&plan.memory);
        }
        plan
    }

    /// Returns a plan that is no longer needed, so that later plans reuse its memory. Optional.
    pub fn recycle(&mut self, mut plan: StepPlan) {
        self.recycled.spans.append(&mut plan.spans);
        self.recycled.span_list = plan.spans;
    }

    /// Appends the tokens of a span to its table, and the span to the plan.
    pub(crate) fn push_span(&mut self, builder: &mut PlanBuilder, span: ScheduledSpan, cached: usize) {
        let ScheduledSpan { request, index, num_tokens, num_drafts, .. } = span;
        let newest_in_flight = self.in_flight.back().map(|f| f.step);
        let Some(live) = self.requests.get_mut(&request) else { return };
        let Some(len) = live.seqs[index].table.as_ref().map(kvblock::BlockTable::len) else { return };
        let start = live.seqs[index].num_computed_tokens;
        let (first_draft, end) = (start + num_tokens - num_drafts, start + num_tokens);
        let sample = live.sample(index, first_draft);
        self.appended.clear();
        live.copy_tokens(index, len..first_draft.max(len), &mut self.appended);
        let (prompt, seq, arrival) = (live.request.prompt.len(), live.seq_id(index), live.arrival);
        let num_beams = if live.request.beam_search { live.seqs.len() as u32 } else { 0 };
        let sequence = &mut live.seqs[index];
        let Sequence { table: Some(table), output, num_sent_entries, drafts: proposed, .. } = sequence else { return };
        let mut drafts = std::mem::take(proposed);
        drafts.truncate(num_drafts);
        self.appended.extend_from_slice(&drafts);
        let mut keep = *num_sent_entries;
        if end > len {
            match self.pool.append(table, &self.appended) {
                Ok(first_changed) => keep = keep.min(first_changed),
                Err(no_space) => {
                    debug_assert!(false, "the blocks of the span were free, yet {no_space}");
                    return;
                }
            }
        }
        let entries = table.len().div_ceil(self.config.block_size);
        let recycled = self.recycled.spans.pop().map(|span| (span.tokens, span.groups));
        let (mut tokens, mut groups) = recycled.unwrap_or_default();
        tokens.clear();
        tokens.extend_from_slice(&table.tokens()[start..end]);
        groups.resize_with(table.groups().len(), GroupSpan::default);
        for (g, (span, group)) in groups.iter_mut().zip(table.groups()).enumerate() {
            let holes = group.holes();
            (span.table.holes, span.table.keep) = (holes, keep);
            span.table.append.clear();
            span.table.append.extend((keep.max(holes)..entries).filter_map(|k| group.entry(k)));
            span.slots.clear();
            span.slots.extend(table.slots_in(g, start..end));
        }
        let awaits = if first_draft <= prompt + output.len() { None } else { newest_in_flight };
        *num_sent_entries = entries;
        sequence.num_computed_tokens = end;
        sequence.last_step = builder.plan.step;
        sequence.num_last_drafts = num_drafts;
        for index in sample.clone() {
            live.seqs[index as usize].num_output_placeholders += 1;
        }
        let in_flight = SpanInFlight { seq, arrival, start, end, drafts, sample: sample.clone(), num_beams };
        builder.in_flight.push(in_flight);
        builder.plan.spans.push(Span { seq, start, tokens, drafts: num_drafts, awaits, groups, cached, sample });
        self.counters.prompt_tokens_computed += (end.min(prompt) - start.min(prompt)) as u64;
    }
}
