//! Validation of outcomes against the plan that they answer.

use crate::ids::IdMap;
use crate::step_state::StepInFlight;
use crate::{Outcome, Scheduler, SeqId, StepId};

/// Why a commit was refused. Nothing was committed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The step is not in flight, or not the oldest in flight.
    #[error("{step} is not the oldest in flight ({}): commit each plan that has spans once, in order",
            match .in_flight { Some(s) => format!("{s} is"), None => "none is".into() })]
    NotInFlight {
        /// The step of the call.
        step: StepId,
        /// The oldest step in flight.
        in_flight: Option<StepId>,
    },
    /// A step before it has [failed](Scheduler::fail), so that it read contents that were never written.
    #[error("{step} was planned behind a failed step: call Scheduler::fail for it instead of commit")]
    BehindFailure {
        /// The step of the call.
        step: StepId,
    },
    /// The plan has no span for this sequence.
    #[error("{seq}: found an outcome, expected none: the step has no span of this sequence")]
    Unplanned {
        /// The sequence.
        seq: SeqId,
    },
    /// Two outcomes for one sequence.
    #[error("{seq}: found more than one outcome, expected at most one")]
    Duplicate {
        /// The sequence.
        seq: SeqId,
    },
    /// There is no token for a sequence that the plan samples and that has not finished.
    #[error("{seq}: found no token, expected at least one, or a finished sequence")]
    MissingToken {
        /// The sequence.
        seq: SeqId,
    },
    /// There are more tokens than the plan samples.
    #[error("{seq}: found {found} tokens, expected at most {expected}")]
    TooManyTokens {
        /// The sequence.
        seq: SeqId,
        /// Number of tokens in the outcome.
        found: usize,
        /// 1 + the number of drafts if the plan samples the sequence, else 0.
        expected: usize,
    },
    /// A token before the last differs from the draft at its position.
    #[error(
        "{seq}: found token {found}, expected the draft {expected}; an outcome ends with the first token that differs"
    )]
    NotTheDraft {
        /// The sequence.
        seq: SeqId,
        /// The token of the outcome.
        found: u32,
        /// The draft.
        expected: u32,
    },
    /// The outcome names a sequence that this one cannot continue.
    #[error(
        "{seq}: found parent {parent}, expected the sequence itself, or in a beam search one that this step sampled"
    )]
    Parent {
        /// The sequence.
        seq: SeqId,
        /// [`Outcome::parent`].
        parent: u32,
    },
}

impl Scheduler {
    /// Checks the outcomes against the plan. Returns those of sequences that are still live, grouped by request. Cuts
    /// spans with rejected drafts.
    pub(crate) fn accept<'a>(
        &mut self,
        step: &mut StepInFlight,
        outcomes: &'a [Outcome],
    ) -> Result<Vec<&'a Outcome>, CommitError> {
        /// A sequence that may have an outcome.
        struct Expected<'a> {
            span: usize,
            is_sampled: bool,
            is_live: bool,
            outcome: Option<&'a Outcome>,
        }
        let mut expected_seqs: IdMap<SeqId, Expected<'a>> =
            IdMap::with_capacity_and_hasher(step.spans.len(), Default::default());
        for (position, span) in step.spans.iter().enumerate() {
            let live = self.requests.get(&span.seq.request).filter(|live| live.arrival == span.arrival);
            let mut expect = |index: u32, is_sampled| {
                let is_live = live.is_some_and(|live| live.seqs[index as usize].live);
                expected_seqs
                    .entry(SeqId { index, ..span.seq })
                    .and_modify(|w| w.is_sampled |= is_sampled)
                    .or_insert(Expected { span: position, is_sampled, is_live, outcome: None });
            };
            expect(span.seq.index, false);
            span.sample.clone().for_each(|index| expect(index, true));
            // An ended beam can become a fork of another.
            (0..span.num_beams).for_each(|index| expect(index, false));
        }
        let mut accepted = Vec::with_capacity(outcomes.len());
        for outcome in outcomes {
            let (seq, parent) = (outcome.seq, outcome.parent);
            let is_continued =
                expected_seqs.get(&SeqId { index: parent, ..seq }).is_some_and(|w| w.is_sampled && w.is_live);
            let entry = expected_seqs.get_mut(&seq).ok_or(CommitError::Unplanned { seq })?;
            if entry.outcome.replace(outcome).is_some() {
                return Err(CommitError::Duplicate { seq });
            }
            let span = &step.spans[entry.span];
            let is_search = span.num_beams > 0;
            let draws = entry.is_sampled || is_search && !span.sample.is_empty();
            let expected = if draws { 1 + span.drafts.len() } else { 0 };
            if outcome.tokens.len() > expected {
                return Err(CommitError::TooManyTokens { seq, found: outcome.tokens.len(), expected });
            }
            let confirmed = outcome.tokens.iter().zip(&span.drafts).take(outcome.tokens.len().saturating_sub(1));
            if let Some((&found, &expected)) = confirmed.into_iter().find(|(token, draft)| token != draft) {
                return Err(CommitError::NotTheDraft { seq, found, expected });
            }
            let live = self.requests.get(&seq.request);
            let has_ended = live.is_none_or(|live| live.arrival != span.arrival || live.num_live() == 0);
            let has_parent = if is_search { outcome.finished || is_continued } else { parent == seq.index };
            if !has_parent && !has_ended {
                return Err(CommitError::Parent { seq, parent });
            }
            if is_search && !outcome.finished && outcome.tokens.is_empty() && !has_ended {
                return Err(CommitError::MissingToken { seq });
            }
            if entry.is_live || is_search && is_continued && !outcome.finished {
                accepted.push(outcome);
            }
        }
        for span in &step.spans {
            for index in span.sample.clone() {
                let seq = SeqId { index, ..span.seq };
                let served =
                    |w: &Expected<'_>| !w.is_live || w.outcome.is_some_and(|o| o.finished || !o.tokens.is_empty());
                if !expected_seqs.get(&seq).is_some_and(served) {
                    return Err(CommitError::MissingToken { seq });
                }
            }
        }
        for span in step.spans.iter_mut().filter(|s| !s.drafts.is_empty()) {
            let outcome = expected_seqs.get(&span.seq).filter(|w| w.is_live).and_then(|w| w.outcome);
            let tokens = outcome.map_or(&[][..], |o| &o.tokens);
            // Drafts that are computed again leave nothing behind. Without a token the sequence has ended, and only its
            // known tokens are kept.
            let kept = if self.config.recompute_drafts { 0 } else { tokens.len().saturating_sub(1) };
            span.end = span.end - span.drafts.len() + kept;
            if !tokens.is_empty() {
                // A sequence may end with a draft that was right.
                let right = tokens.iter().zip(&span.drafts).take_while(|(token, draft)| token == draft);
                self.spec.count(span.drafts.len(), right.count());
            }
        }
        // Spans of one request can be in different parts of the plan.
        accepted.sort_by_key(|o| o.seq.request);
        Ok(accepted)
    }
}
