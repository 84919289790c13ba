//! Commit: applies the outcomes of a step, and enters what it computed into the prefix cache.
//!
//! Steps are committed in the order of their plans. All outcomes are checked (`accept`) before the first is applied.
//! Outcomes of requests that have ended since the plan are ignored. A token that the next step was planned with as a
//! placeholder replaces it in the table; only then can its block enter the prefix cache. Rejected drafts are cut off
//! the table, and with [`SchedConfig::recompute_drafts`](crate::SchedConfig::recompute_drafts) accepted ones too: they
//! become known tokens that the next span computes.

use kvblock::BlockTable;

use crate::scheduler::PendingRelease;
use crate::step_state::SpanInFlight;
use crate::{CommitError, Outcome, RequestId, Scheduler, StepId};

impl Scheduler {
    /// Reports that the executor has enqueued a plan behind the steps before it, so that the next step can be planned
    /// if `max_in_flight` allows. Optional if `max_in_flight` is 1.
    pub fn submitted(&mut self, step: StepId) -> Result<(), CommitError> {
        match self.in_flight.iter_mut().find(|f| f.step == step) {
            Some(in_flight) => in_flight.is_submitted = true,
            None if step == self.last_step => {} // an empty plan
            None => return Err(CommitError::NotInFlight { step, in_flight: self.oldest_in_flight() }),
        }
        Ok(())
    }

    /// Reports the oldest step in flight as computed. `outcomes` has one entry for every live sequence that the plan
    /// samples, in any order; spans that sample nothing need none. A sequence with `max_tokens` outputs has finished,
    /// whatever its outcome says. An error commits nothing.
    pub fn commit(&mut self, step: StepId, outcomes: &[Outcome]) -> Result<(), CommitError> {
        let mut committed = match self.in_flight.pop_front() {
            Some(oldest) if oldest.step == step => oldest,
            other => {
                let in_flight = other.as_ref().map(|f| f.step);
                let newest = self.in_flight.back().map(|f| f.step).or(in_flight);
                other.into_iter().for_each(|f| self.in_flight.push_front(f));
                if newest != Some(step) && step == self.last_step && outcomes.is_empty() {
                    return Ok(()); // an empty plan
                }
                return Err(CommitError::NotInFlight { step, in_flight });
            }
        };
        if committed.is_behind_failure {
            self.in_flight.push_front(committed);
            return Err(CommitError::BehindFailure { step });
        }
        let accepted = match self.accept(&mut committed, outcomes) {
            Ok(accepted) => accepted,
            Err(error) => {
                self.in_flight.push_front(committed);
                return Err(error);
            }
        };
        for span in &committed.spans {
            self.commit_span(span);
        }
        let mut to_update: Vec<RequestId> = Vec::new();
        for outcomes in accepted.chunk_by(|a, b| a.seq.request == b.seq.request) {
            let id = outcomes[0].seq.request;
            let is_search = self.requests.get(&id).is_some_and(|live| live.request.beam_search);
            let ended = if is_search { self.fork_beams(id, outcomes) } else { self.append_tokens(id, outcomes) };
            to_update.extend(ended.then_some(id));
        }
        // Forks come after the outcomes, so that a sequence that ends with its first token never gets a table.
        let unforked = |id: &RequestId| self.requests.get(id).is_some_and(|live| !live.is_forked());
        to_update.extend(committed.spans.iter().map(|s| s.seq.request).filter(unforked));
        to_update.dedup();
        for id in to_update {
            self.update_stage(id);
        }
        self.finish_step(step);
        committed.spans.clear();
        self.recycled.in_flight = committed.spans;
        Ok(())
    }

    /// Appends the tokens of the outcomes to the sequences of a request. Returns whether a sequence has ended.
    fn append_tokens(&mut self, id: RequestId, outcomes: &[&Outcome]) -> bool {
        let Some(live) = self.requests.get_mut(&id) else { return false };
        let (prompt, max_tokens) = (live.request.prompt.len(), live.request.max_tokens);
        let mut ended = false;
        for outcome in outcomes {
            let sequence = &mut live.seqs[outcome.seq.index as usize];
            sequence.output.extend_from_slice(&outcome.tokens);
            sequence.drafts.clear();
            if self.config.recompute_drafts {
                sequence.num_accepted = outcome.tokens.len().saturating_sub(1);
            }
            sequence.live = !outcome.finished && sequence.output.len() < max_tokens;
            ended |= !sequence.live;
            let position = (prompt + sequence.output.len()).wrapping_sub(1);
            if let Some(table) = sequence.table.as_mut().filter(|t| t.len() > position)
                && let [.., token] = outcome.tokens[..]
            {
                // The next step was planned with a placeholder for the token.
                self.pool.replace(table, position, token);
            }
        }
        ended
    }

    /// Applies the outcomes of a beam search: each beam continues itself or becomes a fork of another. Beams without an
    /// outcome have ended before. Returns whether a beam has ended.
    fn fork_beams(&mut self, id: RequestId, outcomes: &[&Outcome]) -> bool {
        let Some(live) = self.requests.get(&id) else { return false };
        let is_forked = live.is_forked();
        // All forks come before the first change, because a beam that is forked may itself become a fork of another.
        let mut forks: Vec<(usize, Vec<u32>, Option<BlockTable>)> = Vec::new();
        for outcome in outcomes.iter().filter(|o| !o.finished && o.parent != o.seq.index) {
            let parent = &live.seqs[outcome.parent as usize];
            // In the prompt stage, and while the request waits, there are only outputs to copy.
            let table = parent.table.as_ref().filter(|_| is_forked).and_then(|table| {
                let fork = self.pool.fork(table);
                debug_assert!(fork.is_ok(), "a search is never planned ahead, yet {fork:?}");
                fork.ok()
            });
            forks.push((outcome.seq.index as usize, parent.output.clone(), table));
        }
        if is_forked {
            self.release_tables(id, |index, _| forks.iter().any(|(fork, ..)| *fork == index));
        }
        let Some(live) = self.requests.get_mut(&id) else { return false };
        for (index, output, table) in forks {
            let sequence = &mut live.seqs[index];
            sequence.output = output;
            let computed = table.as_ref().map_or(sequence.num_computed_tokens, BlockTable::committed);
            sequence.num_computed_tokens = computed;
            sequence.table = table.or(sequence.table.take());
        }
        let mut ended = false;
        for outcome in outcomes {
            let sequence = &mut live.seqs[outcome.seq.index as usize];
            sequence.output.extend_from_slice(&outcome.tokens);
            sequence.live = !outcome.finished && sequence.output.len() < live.request.max_tokens;
            ended |= !sequence.live;
        }
        ended
    }

    /// Commits the tokens of a span. Ignores requests that have ended since the plan, even if a new one has the same
    /// id. The tokens of a request that was preempted since still enter the prefix cache.
    fn commit_span(&mut self, span: &SpanInFlight) {
        let Some(live) = self.requests.get_mut(&span.seq.request).filter(|live| live.arrival == span.arrival) else {
            return;
        };
        for index in span.sample.clone() {
            live.seqs[index as usize].num_output_placeholders -= 1;
        }
        let sequence = &mut live.seqs[span.seq.index as usize];
        let table = match &mut sequence.table {
            None if sequence.live => {
                let of_span = |p: &&mut PendingRelease| p.seq == span.seq && p.arrival == span.arrival;
                self.pending_releases.iter_mut().find(of_span).map(|p| &mut p.table)
            }
            table => table.as_mut(),
        };
        if let Some(table) = table {
            let mut done = self.pool.commit(table, span.end);
            if !span.drafts.is_empty() {
                done = done.and_then(|()| self.pool.truncate(table, span.end));
            }
            debug_assert!(done.is_ok(), "the table has slots for all of its spans, yet {done:?}");
        }
        if !span.drafts.is_empty() && sequence.table.is_some() {
            sequence.num_computed_tokens = span.end;
        }
        // The head of the queue may share what was computed of a prompt, and then needs fewer blocks.
        self.changes += u64::from(span.start < live.request.prompt.len());
    }
}
