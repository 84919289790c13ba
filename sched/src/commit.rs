//! The other half of a step: what was computed becomes known, and findable in the prefix cache.
//!
//! Steps are committed in the order of their plans. Outcomes are checked as a whole (`accept`) before the first
//! is applied. Those for requests that have ended since the plan are ignored. A token that the next step was
//! planned with, not yet known, takes its place in the table; only then can its block ever be found. Drafts that
//! were wrong are cut off the table.

use kvblock::BlockTable;

use crate::flight::InFlight;
use crate::{CommitError, Outcome, RequestId, Scheduler, StepId};

impl Scheduler {
    /// Says that the executor has taken a plan: its work stands in line behind that of the steps before, so
    /// that the next may be planned if `max_in_flight` allows. Where it is 1 nothing depends on it.
    pub fn submitted(&mut self, step: StepId) -> Result<(), CommitError> {
        match self.flights.iter_mut().find(|f| f.step == step) {
            Some(flight) => flight.submitted = true,
            None if step == self.last_step => {} // an empty plan
            None => return Err(CommitError::NotInFlight { step, in_flight: self.oldest_in_flight() }),
        }
        Ok(())
    }

    /// Reports the oldest step in flight as computed. `outcomes` holds one entry for every sequence that the
    /// plan samples and that is still live, in any order; spans that sample nothing need none. A sequence that
    /// has `max_tokens` outputs has finished, whether its outcome says so or not. An error commits nothing.
    pub fn commit(&mut self, step: StepId, outcomes: &[Outcome]) -> Result<(), CommitError> {
        let mut flight = match self.flights.pop_front() {
            Some(flight) if flight.step == step => flight,
            other => {
                let in_flight = other.as_ref().map(|f| f.step);
                let newest = self.flights.back().map(|f| f.step).or(in_flight);
                other.into_iter().for_each(|f| self.flights.push_front(f));
                if newest != Some(step) && step == self.last_step && outcomes.is_empty() {
                    return Ok(()); // the commit of an empty plan
                }
                return Err(CommitError::NotInFlight { step, in_flight });
            }
        };
        if flight.is_behind_failure {
            self.flights.push_front(flight);
            return Err(CommitError::BehindFailure { step });
        }
        let accepted = match self.accept(&mut flight, outcomes) {
            Ok(accepted) => accepted,
            Err(error) => {
                self.flights.push_front(flight);
                return Err(error);
            }
        };
        for span in &flight.spans {
            self.commit_span(span);
        }
        let mut unsettled: Vec<RequestId> = Vec::new();
        for outcomes in accepted.chunk_by(|a, b| a.seq.request == b.seq.request) {
            let id = outcomes[0].seq.request;
            let is_search = self.groups.get(&id).is_some_and(|g| g.request.beam_search);
            let ended = if is_search { self.fork_beams(id, outcomes) } else { self.take_tokens(id, outcomes) };
            unsettled.extend(ended.then_some(id));
        }
        // A fork waits for the outcomes, so that a sequence that ends with its first token never gets a table.
        unsettled.extend(
            flight.spans.iter().map(|s| s.seq.request).filter(|id| self.groups.get(id).is_some_and(|g| !g.is_forked())),
        );
        unsettled.dedup();
        for id in unsettled {
            self.settle(id);
        }
        self.step_is_over(step);
        flight.spans.clear();
        self.spare.in_flight = flight.spans;
        Ok(())
    }

    /// Gives the sequences of a request their tokens; whether one has ended.
    fn take_tokens(&mut self, id: RequestId, outcomes: &[&Outcome]) -> bool {
        let Some(group) = self.groups.get_mut(&id) else {
            return false;
        };
        let (prompt, max_tokens) = (group.request.prompt.len(), group.request.max_tokens);
        let mut ended = false;
        for outcome in outcomes {
            let sequence = &mut group.seqs[outcome.seq.index as usize];
            sequence.output.extend_from_slice(&outcome.tokens);
            sequence.drafts.clear();
            sequence.live = !outcome.finished && sequence.output.len() < max_tokens;
            ended |= !sequence.live;
            let place = (prompt + sequence.output.len()).wrapping_sub(1);
            if let Some(table) = sequence.table.as_mut().filter(|t| t.len() > place)
                && let [.., token] = outcome.tokens[..]
            {
                // The next step was planned with a placeholder there.
                self.pool.replace(table, place, token);
            }
        }
        ended
    }

    /// Makes the beams of a search what the outcomes say: each continues itself or becomes a fork of another; those
    /// without an outcome have ended before. Whether one has ended.
    fn fork_beams(&mut self, id: RequestId, outcomes: &[&Outcome]) -> bool {
        let Some(group) = self.groups.get(&id) else {
            return false;
        };
        // All forks before the first change: a beam that others continue may itself become a fork.
        let mut forks: Vec<(usize, Vec<u32>, Option<BlockTable>)> = Vec::new();
        for outcome in outcomes.iter().filter(|o| !o.finished && o.parent != o.seq.index) {
            let parent = &group.seqs[outcome.parent as usize];
            // Before the prompt is forked, and while the request waits, there is nothing but outputs.
            let table = parent.table.as_ref().filter(|_| group.is_forked()).and_then(|table| {
                let fork = self.pool.fork(table);
                debug_assert!(fork.is_ok(), "a search is never planned ahead, yet {fork:?}");
                fork.ok()
            });
            forks.push((outcome.seq.index as usize, parent.output.clone(), table));
        }
        if group.is_forked() {
            self.release_tables(id, |index, _| forks.iter().any(|(fork, ..)| *fork == index));
        }
        let Some(group) = self.groups.get_mut(&id) else {
            return false;
        };
        for (index, output, table) in forks {
            let sequence = &mut group.seqs[index];
            sequence.output = output;
            sequence.planned = table.as_ref().map_or(sequence.planned, BlockTable::committed);
            sequence.table = table.or(sequence.table.take());
        }
        let mut ended = false;
        for outcome in outcomes {
            let sequence = &mut group.seqs[outcome.seq.index as usize];
            sequence.output.extend_from_slice(&outcome.tokens);
            sequence.live = !outcome.finished && sequence.output.len() < group.request.max_tokens;
            ended |= !sequence.live;
        }
        ended
    }

    /// Notes that a span is computed. A request that has ended since the plan has no part in it, nor has a new
    /// one of the same id; one that was preempted since still finds its tokens in the prefix cache.
    fn commit_span(&mut self, span: &InFlight) {
        let Some(group) = self.groups.get_mut(&span.seq.request).filter(|g| g.arrival == span.arrival) else {
            return;
        };
        for index in span.sample.clone() {
            group.seqs[index as usize].promised -= 1;
        }
        let sequence = &mut group.seqs[span.seq.index as usize];
        let mut parked = self.parked.iter_mut().filter(|p| p.seq == span.seq && p.arrival == span.arrival);
        let table = match &mut sequence.table {
            None if sequence.live => parked.next().map(|p| &mut p.table),
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
            sequence.planned = span.end;
        }
        // What is computed of a prompt may be shared with the head of the queue, which needs fewer blocks then.
        self.changes += u64::from(span.start < group.request.prompt.len());
    }
}
