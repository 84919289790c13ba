//! The other half of a step: what was computed becomes known, and findable in the prefix cache.
//!
//! Steps are committed in the order of their plans. Outcomes are checked as a whole before the first is
//! applied. Those for requests that have ended since the plan are ignored. A token that the next step was
//! planned with, not yet known, takes its place in the table; only then can its block ever be found.

use std::ops::Range;

use kvblock::{BlockPool, BlockTable};

use crate::ids::IdMap;
use crate::{Outcome, RequestId, Scheduler, SeqId, StepId};

/// A step that has been planned and not committed.
pub(crate) struct Flight {
    pub step: StepId,
    pub spans: Vec<InFlight>,
    /// The executor has taken it, so that the next may be planned behind it.
    pub submitted: bool,
}

/// A span of it.
pub(crate) struct InFlight {
    pub seq: SeqId,
    /// Tells the request from a later one of the same id.
    pub arrival: u64,
    /// Tokens of the sequence that are computed when the step is.
    pub end: usize,
    pub sample: Range<u32>,
}

/// Outcomes that do not belong to the plan. Nothing was committed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// Another step is in flight before it, or it is not in flight at all.
    #[error("{step} is not the oldest in flight ({}): commit each plan that has spans once, in their order",
            match .in_flight { Some(s) => format!("{s} is"), None => "none is".into() })]
    NotInFlight {
        /// The step that was to be committed.
        step: StepId,
        /// The oldest step in flight.
        in_flight: Option<StepId>,
    },
    /// The plan has no span for this sequence.
    #[error("{seq}: an outcome, but no span in this step")]
    Unplanned {
        /// The sequence.
        seq: SeqId,
    },
    /// Two outcomes for one sequence.
    #[error("{seq}: more than one outcome")]
    Duplicate {
        /// The sequence.
        seq: SeqId,
    },
    /// A sequence that wanted a token and goes on got none.
    #[error("{seq}: no token, expected one, or that the sequence has finished")]
    MissingToken {
        /// The sequence.
        seq: SeqId,
    },
    /// More tokens than the plan asked for.
    #[error("{seq}: {found} tokens, expected at most {expected}")]
    TooManyTokens {
        /// The sequence.
        seq: SeqId,
        /// Tokens in the outcome.
        found: usize,
        /// One where the plan samples, none in the midst of a prefill.
        expected: usize,
    },
}

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
        let flight = match self.flights.pop_front() {
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
        let accepted = match self.accept(&flight, outcomes) {
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
        for outcome in accepted {
            let Some(group) = self.groups.get_mut(&outcome.seq.request) else {
                continue;
            };
            let prompt = group.request.prompt.len();
            let sequence = &mut group.seqs[outcome.seq.index as usize];
            sequence.output.extend_from_slice(&outcome.tokens);
            sequence.live = !outcome.finished && sequence.output.len() < group.request.max_tokens;
            if !sequence.live {
                unsettled.push(outcome.seq.request);
            } else if let Some(table) = &mut sequence.table
                && let [.., token] = outcome.tokens[..]
                && table.len() == prompt + sequence.output.len()
            {
                self.memory.extend(self.pool.drain_memory_ops().filter_map(crate::MemOp::of_pool));
                replace_last(&mut self.pool, table, token);
            }
        }
        // A fork waits for the outcomes, so that a sequence that ends with its first token never gets a table.
        unsettled.extend(
            flight.spans.iter().map(|s| s.seq.request).filter(|id| self.groups.get(id).is_some_and(|g| !g.forked)),
        );
        unsettled.dedup();
        for id in unsettled {
            self.settle(id);
        }
        self.release_parked(step);
        Ok(())
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
            self.pool.commit(table, span.end);
        }
    }

    /// Matches outcomes with the plan, and returns those whose sequence is still the planned one and live.
    fn accept<'a>(&self, flight: &Flight, outcomes: &'a [Outcome]) -> Result<Vec<&'a Outcome>, CommitError> {
        struct Wanted<'a> {
            tokens: usize,
            live: bool,
            outcome: Option<&'a Outcome>,
        }
        let mut wanted: IdMap<SeqId, Wanted<'a>> =
            IdMap::with_capacity_and_hasher(flight.spans.len(), Default::default());
        for span in &flight.spans {
            let group = self.groups.get(&span.seq.request).filter(|g| g.arrival == span.arrival);
            let live = |index: u32| group.is_some_and(|g| g.seqs[index as usize].live);
            if !span.sample.contains(&span.seq.index) {
                wanted.insert(span.seq, Wanted { tokens: 0, live: live(span.seq.index), outcome: None });
            }
            for index in span.sample.clone() {
                wanted.insert(SeqId { index, ..span.seq }, Wanted { tokens: 1, live: live(index), outcome: None });
            }
        }
        let mut accepted = Vec::with_capacity(outcomes.len());
        for outcome in outcomes {
            let seq = outcome.seq;
            let entry = wanted.get_mut(&seq).ok_or(CommitError::Unplanned { seq })?;
            if entry.outcome.replace(outcome).is_some() {
                return Err(CommitError::Duplicate { seq });
            }
            if outcome.tokens.len() > entry.tokens {
                return Err(CommitError::TooManyTokens { seq, found: outcome.tokens.len(), expected: entry.tokens });
            }
            if entry.live {
                accepted.push(outcome);
            }
        }
        for span in &flight.spans {
            for index in span.sample.clone() {
                let seq = SeqId { index, ..span.seq };
                let served = |w: &Wanted<'_>| !w.live || w.outcome.is_some_and(|o| o.finished || !o.tokens.is_empty());
                if !wanted.get(&seq).is_some_and(served) {
                    return Err(CommitError::MissingToken { seq });
                }
            }
        }
        Ok(accepted)
    }
}

/// Writes a token in the place of the placeholder at the table's end. To the pool the last slot is given back
/// and taken again; the block is the same, and what the pool orders for its memory is void, as a step in
/// flight writes to that slot.
fn replace_last(pool: &mut BlockPool, table: &mut BlockTable, token: u32) {
    let last = table.blocks().last().copied();
    pool.truncate(table, table.len() - 1);
    let taken = pool.append(table, &[token]);
    debug_assert!(taken.is_ok() && table.blocks().last().copied() == last, "a slot given back is not taken again");
    pool.drain_memory_ops().for_each(drop);
}
