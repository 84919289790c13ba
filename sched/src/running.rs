//! Spans for the running requests, and blocks for the spans.
//!
//! The spans are first chosen as numbers, before any table changes. Every decode gets a token, then decodes that compute
//! accepted drafts again get their further tokens in order of admission, then prefills share the rest of the budget in two
//! halves. The first half goes to the oldest, in order of the queue. The second goes to the shortest, which have the fewest
//! tokens left; admissions may take it from them. `max_num_batched_tokens > max_num_seqs` leaves at least one token for
//! prefills. While sequences decode, prefills and admissions get at most the
//! [prompt budget](Scheduler::set_prompt_budget). In a pipeline only a share of the decodes is chosen (`share`). While the
//! spans need more blocks than are free, the request of worst rank is preempted and the spans are chosen again.
//!
//! Draft tokens are verified last, after admissions, with the tokens and blocks that are left. While requests wait, at
//! most half of the remaining tokens are kept for drafts. While the head of the queue lacks blocks, drafts get none.
//!
//! Blocks that a step in flight writes to are freed only by that step's commit. That holds for the blocks of a
//! preempted request and for blocks behind the windows of the step's spans. Once those blocks suffice, further
//! preemptions would not help, so the plan defers spans: it keeps those that need no block, and of the others, the oldest
//! first, those before the first that does not fit.

use crate::live_request::LiveRequest;
use crate::step_state::{RunningSpans, ScheduledSpan};
use crate::{RequestId, Scheduler};

impl Scheduler {
    /// Chooses the spans of the running requests. Preempts requests until the blocks for the spans are free, or will be
    /// freed by the next commit. Terminates, because each request fits alone.
    pub(crate) fn schedule_running(&mut self, preempted: &mut Vec<RequestId>) -> RunningSpans {
        loop {
            let mut budget = self.config.max_num_batched_tokens;
            let (mut spans, for_drafts) = self.choose_spans(&mut budget);
            let mut needed = self.blocks_for(&spans);
            let available = self.pool.available();
            let freed_by_commit = if needed > available { self.num_blocks_freed_by_commit() } else { 0 };
            if self.running.len() == 1 && needed > available + freed_by_commit {
                self.end_at_block(&mut spans, &mut budget);
                needed = self.blocks_for(&spans);
            }
            if needed > available && freed_by_commit > 0 && needed <= available + freed_by_commit {
                self.counters.deferrals += 1;
                let spans = self.affordable(&spans);
                return RunningSpans { spans, blocks: needed, budget, for_drafts, is_deferred: true };
            }
            match self.victim().filter(|_| needed > available) {
                Some(victim) => {
                    self.preempt(victim);
                    preempted.push(victim);
                    self.recycled.scheduled = spans;
                }
                None => return RunningSpans { spans, blocks: needed, budget, for_drafts, is_deferred: false },
            }
        }
    }

    /// Leaves in `budget` what prompts may still take, and returns the rest of the step's tokens beside it.
    fn choose_spans(&mut self, budget: &mut usize) -> (Vec<ScheduledSpan>, usize) {
        let mut spans = std::mem::take(&mut self.recycled.scheduled);
        spans.clear();
        let mut prefills = Vec::new();
        for live in self.running_requests() {
            Self::choose_decodes(live, budget, &mut spans, &mut prefills);
        }
        if self.config.pipeline {
            self.limit_to_share(&mut spans, budget);
        }
        Self::limit_decodes(&mut spans, budget);
        let left = *budget;
        *budget = left.min(self.most_prompt_tokens());
        let for_drafts = left - *budget;
        self.choose_prefills(prefills, budget, &mut spans);
        (spans, for_drafts)
    }

    /// Greatest number of prompt tokens of a step, at least 1.
    fn most_prompt_tokens(&self) -> usize {
        let is_limited = self.config.enable_chunked_prefill && self.decoding_requests().next().is_some();
        if is_limited { self.prompt_budget } else { usize::MAX }
    }

    /// Adds the pending tokens of a request: decodes to `spans`, taking the first token of each off the budget, and
    /// other spans to `prefills`.
    pub(crate) fn choose_decodes(
        live: &LiveRequest,
        budget: &mut usize,
        spans: &mut Vec<ScheduledSpan>,
        prefills: &mut Vec<ScheduledSpan>,
    ) {
        for (index, num_tokens) in live.pending() {
            let span = ScheduledSpan { request: live.request.id, index, num_tokens, num_drafts: 0, num_spare: 0 };
            if live.is_decode(index, num_tokens) {
                spans.push(span);
                *budget = budget.saturating_sub(1);
            } else {
                prefills.push(span);
            }
        }
    }

    /// Gives decodes of several tokens their tokens after the first. One token of the budget is left for prefills.
    pub(crate) fn limit_decodes(spans: &mut [ScheduledSpan], budget: &mut usize) {
        for span in spans {
            let further = (span.num_tokens - 1).min(budget.saturating_sub(1));
            span.num_tokens = 1 + further;
            *budget -= further;
        }
    }

    /// Ends each span at the end of its sequence's next block. Such spans of a single request always fit: at submission
    /// each sequence was counted with the blocks that its window touches and the next one.
    pub(crate) fn end_at_block(&self, spans: &mut [ScheduledSpan], budget: &mut usize) {
        let block_size = self.config.block_size;
        for span in spans {
            let live = self.requests.get(&span.request);
            let computed = live.map_or(0, |live| live.seqs[span.index].num_computed_tokens);
            let num_tokens = span.num_tokens.min(block_size - computed % block_size);
            *budget += span.num_tokens - num_tokens;
            span.num_spare = span.num_spare.saturating_sub(span.num_tokens - num_tokens);
            span.num_tokens = num_tokens;
        }
    }

    /// Distributes the rest of the budget over prefills: half to the oldest, and what is left to the shortest. Adds their
    /// spans, the shortest first.
    pub(crate) fn choose_prefills(
        &self,
        mut prefills: Vec<ScheduledSpan>,
        budget: &mut usize,
        spans: &mut Vec<ScheduledSpan>,
    ) {
        prefills.sort_by_cached_key(|span| self.key_of(span));
        let mut half = budget.div_ceil(2);
        let of_oldest = |span: ScheduledSpan| {
            let num_tokens = span.num_tokens.min(half);
            half -= num_tokens;
            (span.num_tokens - num_tokens, ScheduledSpan { num_tokens, ..span })
        };
        let mut shares: Vec<(usize, ScheduledSpan)> = prefills.into_iter().map(of_oldest).collect();
        *budget -= shares.iter().map(|(_, span)| span.num_tokens).sum::<usize>();
        shares.sort_by_cached_key(|(left, span)| (self.key_of(span).map(|key| key.0), left + span.num_tokens));
        for (left, span) in shares {
            let num_spare = left.min(*budget);
            let num_tokens = span.num_tokens + num_spare;
            if num_tokens > 0 {
                spans.push(ScheduledSpan { num_tokens, num_spare, ..span });
                *budget -= num_spare;
            }
        }
    }

    /// Numbers of tokens of these spans that admissions may take, with the priorities of the requests.
    pub(crate) fn spare_tokens(&self, spans: &[ScheduledSpan]) -> Vec<(i32, usize)> {
        let spare = spans.iter().filter(|span| span.num_spare > 0);
        spare.filter_map(|span| Some((self.key_of(span)?.0, span.num_spare))).collect()
    }

    /// Takes tokens that admissions got away from spans: those of the worst priority, and the longest, first.
    pub(crate) fn take_spare_tokens(spans: &mut Vec<ScheduledSpan>, mut tokens: usize) {
        for span in spans.iter_mut().rev() {
            let taken = span.num_spare.min(tokens);
            span.num_tokens -= taken;
            tokens -= taken;
        }
        spans.retain(|span| span.num_tokens > 0);
    }

    /// Number of tokens of the budget to keep for drafts while others are admitted.
    pub(crate) fn budget_for_drafts(&self, spans: &[ScheduledSpan], budget: usize) -> usize {
        let is_queue_empty = self.waiting.is_empty() && self.swapped.is_empty();
        let most = if is_queue_empty { budget } else { budget / 2 };
        spans.iter().map(|span| self.num_drafts(span)).sum::<usize>().min(most)
    }

    /// Extends decodes by drafts, with the tokens and blocks that are left.
    pub(crate) fn add_drafts(&self, spans: &mut [ScheduledSpan], mut budget: usize) {
        let (block_size, groups) = (self.config.block_size, self.config.groups.len());
        let mut free = if self.is_head_blocked() {
            0
        } else {
            self.pool.available().saturating_sub(self.blocks_for(spans)) / groups
        };
        for span in spans {
            let Some(sequence) = self.requests.get(&span.request).map(|live| &live.seqs[span.index]) else {
                continue;
            };
            let end = sequence.num_computed_tokens + span.num_tokens;
            let slots = sequence.table.as_ref().map_or(0, kvblock::BlockTable::len).max(end);
            let entries = slots.div_ceil(block_size);
            let drafts = self.num_drafts(span).min(budget).min((entries + free) * block_size - end);
            free -= (end + drafts).div_ceil(block_size).saturating_sub(entries);
            budget -= drafts;
            span.num_drafts = drafts;
            span.num_tokens += drafts;
        }
    }

    /// Number of drafts that could extend a span.
    fn num_drafts(&self, span: &ScheduledSpan) -> usize {
        self.requests.get(&span.request).map_or(0, |live| live.num_drafts(span.index, span.num_tokens))
    }

    /// Returns the spans whose blocks are free now. The beams of a search are kept or deferred together. After the
    /// oldest span that does not fit, no other span gets a block, so that the first is served as soon as blocks
    /// are freed.
    fn affordable(&self, spans: &[ScheduledSpan]) -> Vec<ScheduledSpan> {
        let mut units = self.units(spans);
        units.sort_by_cached_key(|(_, unit)| self.key_of(&unit[0]));
        let mut free = self.pool.available();
        units.retain(|(_, unit)| {
            let needed = self.blocks_for(unit);
            let fits = needed <= free;
            free = if fits { free - needed } else { 0 };
            fits
        });
        units.sort_by_key(|(position, _)| *position);
        units.into_iter().flat_map(|(_, unit)| unit).copied().collect()
    }

    /// Divides spans into those that are planned or left out together: the beams of a search, or a single span. Returns them
    /// with their positions.
    pub(crate) fn units<'a>(&self, spans: &'a [ScheduledSpan]) -> Vec<(usize, &'a [ScheduledSpan])> {
        let are_beams = |a: &ScheduledSpan, b: &ScheduledSpan| {
            a.request == b.request && self.requests.get(&a.request).is_some_and(|live| live.request.beam_search)
        };
        spans.chunk_by(are_beams).enumerate().collect()
    }

    /// Number of blocks that these spans need together.
    pub(crate) fn blocks_for(&self, spans: &[ScheduledSpan]) -> usize {
        let append = |span: &ScheduledSpan| {
            let sequence = &self.requests.get(&span.request)?.seqs[span.index];
            let table = sequence.table.as_ref()?;
            Some((table, (sequence.num_computed_tokens + span.num_tokens).saturating_sub(table.len())))
        };
        self.pool.blocks_needed(spans.iter().filter_map(append))
    }
}
