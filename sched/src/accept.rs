//! Whether outcomes belong to the plan that they answer, and which of them count.

use crate::flight::Flight;
use crate::ids::IdMap;
use crate::{Outcome, Scheduler, SeqId, StepId};

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
    /// A step before it has [failed](Scheduler::fail), so that it computed with what was never written.
    #[error("{step} was planned behind a step that failed: it cannot be committed, only fail as well")]
    BehindFailure {
        /// The step that was to be committed.
        step: StepId,
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
    /// A sequence continues another that it must not continue.
    #[error("{seq}: it continues sequence {parent}, expected itself, or in a beam search one that this step sampled")]
    Parent {
        /// The sequence.
        seq: SeqId,
        /// Index of the sequence that it is said to continue.
        parent: u32,
    },
}

impl Scheduler {
    /// Matches outcomes with the plan, and returns those whose sequence is still the planned one and live, each
    /// request's together. Spans with wrong drafts are cut to what counts.
    pub(crate) fn accept<'a>(
        &mut self,
        flight: &mut Flight,
        outcomes: &'a [Outcome],
    ) -> Result<Vec<&'a Outcome>, CommitError> {
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
            if is_search && !outcome.finished && outcome.tokens.is_empty() && !is_gone {
                return Err(CommitError::MissingToken { seq });
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
