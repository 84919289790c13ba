//! The other half of a step: what was computed becomes known, and findable in the prefix cache.
//!
//! Steps are committed in the order of their plans. Outcomes are checked as a whole before the first is
//! applied. Those for requests that have ended since the plan are ignored. A token that the next step was
//! planned with, not yet known, takes its place in the table; only then can its block ever be found. Drafts that
//! were wrong are cut off the table.

use std::ops::Range;

use kvblock::BlockTable;

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
    pub start: usize,
    /// Tokens of the sequence that are computed when the step is; those behind a wrong draft do not count.
    pub end: usize,
    /// The last of them that are drafts.
    pub drafts: Vec<u32>,
    pub sample: Range<u32>,
    /// Sequences of the search that it belongs to, 0 for none.
    pub beams: u32,
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
        /// One and the drafts where the plan samples, none in the midst of a prefill.
        expected: usize,
    },
    /// A token before the last is not the draft that it should have confirmed.
    #[error("{seq}: token {found} follows where {expected} was drafted; an outcome ends with the first that differs")]
    NotTheDraft {
        /// The sequence.
        seq: SeqId,
        /// The token of the outcome.
        found: u32,
        /// The draft.
        expected: u32,
    },
    /// A sequence continues one that it can not.
    #[error("{seq}: it continues sequence {parent}, expected itself, or in a beam search one that this step sampled")]
    Parent {
        /// The sequence.
        seq: SeqId,
        /// Index of the sequence that it is said to continue.
        parent: u32,
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
            flight.spans.iter().map(|s| s.seq.request).filter(|id| self.groups.get(id).is_some_and(|g| !g.forked)),
        );
        unsettled.dedup();
        for id in unsettled {
            self.settle(id);
        }
        self.step_is_over(step);
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
            let table = parent.table.as_ref().filter(|_| group.forked).and_then(|t| self.pool.fork(t).ok());
            forks.push((outcome.seq.index as usize, parent.output.clone(), table));
        }
        if group.forked {
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
            self.pool.commit(table, span.end);
            if !span.drafts.is_empty() {
                self.pool.truncate(table, span.end);
            }
        }
        if !span.drafts.is_empty() && sequence.table.is_some() {
            sequence.planned = span.end;
        }
    }

    /// Matches outcomes with the plan, and returns those whose sequence is still the planned one and live, each
    /// request's together. Spans with wrong drafts are cut to what counts.
    fn accept<'a>(&mut self, flight: &mut Flight, outcomes: &'a [Outcome]) -> Result<Vec<&'a Outcome>, CommitError> {
        struct Wanted<'a> {
            span: usize,
            /// The span's last row draws for it.
            is_sampled: bool,
            is_live: bool,
            outcome: Option<&'a Outcome>,
        }
        let mut wanted: IdMap<SeqId, Wanted<'a>> =
            IdMap::with_capacity_and_hasher(flight.spans.len(), Default::default());
        for (place, span) in flight.spans.iter().enumerate() {
            let group = self.groups.get(&span.seq.request).filter(|g| g.arrival == span.arrival);
            let mut expect = |index: u32, is_sampled| {
                let is_live = group.is_some_and(|g| g.seqs[index as usize].live);
                wanted
                    .entry(SeqId { index, ..span.seq })
                    .and_modify(|w| w.is_sampled |= is_sampled)
                    .or_insert(Wanted { span: place, is_sampled, is_live, outcome: None });
            };
            expect(span.seq.index, false);
            span.sample.clone().for_each(|index| expect(index, true));
            // Ended beams may come back.
            (0..span.beams).for_each(|index| expect(index, false));
        }
        let mut accepted = Vec::with_capacity(outcomes.len());
        for outcome in outcomes {
            let (seq, parent) = (outcome.seq, outcome.parent);
            let is_continued = wanted.get(&SeqId { index: parent, ..seq }).is_some_and(|w| w.is_sampled && w.is_live);
            let entry = wanted.get_mut(&seq).ok_or(CommitError::Unplanned { seq })?;
            if entry.outcome.replace(outcome).is_some() {
                return Err(CommitError::Duplicate { seq });
            }
            let span = &flight.spans[entry.span];
            let is_search = span.beams > 0;
            let draws = entry.is_sampled || is_search && !span.sample.is_empty();
            let expected = if draws { 1 + span.drafts.len() } else { 0 };
            if outcome.tokens.len() > expected {
                return Err(CommitError::TooManyTokens { seq, found: outcome.tokens.len(), expected });
            }
            let confirmed = outcome.tokens.iter().zip(&span.drafts).take(outcome.tokens.len().saturating_sub(1));
            if let Some((&found, &expected)) = confirmed.into_iter().find(|(token, draft)| token != draft) {
                return Err(CommitError::NotTheDraft { seq, found, expected });
            }
            let is_gone = self.groups.get(&seq.request).is_none_or(|g| g.arrival != span.arrival || g.num_live() == 0);
            let has_parent = if is_search { outcome.finished || is_continued } else { parent == seq.index };
            if !has_parent && !is_gone {
                return Err(CommitError::Parent { seq, parent });
            }
            if entry.is_live || is_search && is_continued && !outcome.finished {
                accepted.push(outcome);
            }
        }
        for span in &flight.spans {
            for index in span.sample.clone() {
                let seq = SeqId { index, ..span.seq };
                let served =
                    |w: &Wanted<'_>| !w.is_live || w.outcome.is_some_and(|o| o.finished || !o.tokens.is_empty());
                if !wanted.get(&seq).is_some_and(served) {
                    return Err(CommitError::MissingToken { seq });
                }
            }
        }
        for span in flight.spans.iter_mut().filter(|s| !s.drafts.is_empty()) {
            let outcome = wanted.get(&span.seq).filter(|w| w.is_live).and_then(|w| w.outcome);
            let tokens = outcome.map_or(0, |o| o.tokens.len());
            // Without a token the sequence has ended, and only the known one counts.
            span.end = span.start + tokens.max(1);
            if tokens > 0 {
                self.spec.count(span.drafts.len(), tokens - 1);
            }
        }
        // Sequences of one request may have spans in different parts of the plan.
        accepted.sort_by_key(|o| o.seq.request);
        Ok(accepted)
    }
}
