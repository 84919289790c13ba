//! Which steps are measured.

use sched::{RequestId, Span};

use super::*;
use crate::speculate::Ngram;

fn span(tokens: usize, drafts: usize) -> Span {
    let seq = SeqId { request: RequestId(0), index: 0 };
    let (groups, tokens) = (Vec::new(), vec![5; tokens]);
    Span { seq, start: 20, tokens, drafts, awaits: None, groups, cached: 0, sample: 0..1 }
}

#[test]
fn a_span_that_computes_accepted_drafts_again_is_measured_as_a_decode() {
    for recomputes in [false, true] {
        let proposer = Box::new(Ngram::new(1, 3));
        let speculation = Speculation { proposer, num_speculative_tokens: 4, is_adaptive: true };
        let mut speculator = Speculator::new(speculation, 100, recomputes);
        let seq = span(1, 0).seq;
        speculator.token(seq, &(DraftScope::default(), vec![1, 2, 3]), 4);
        assert!(speculator.is_decode(&span(1, 0)) && speculator.is_decode(&span(4, 3)));
        assert!(!speculator.is_decode(&span(2, 0)));
        speculator.verified(seq, 3, 2);
        assert_eq!(speculator.is_decode(&span(3, 0)), recomputes);
        assert_eq!(speculator.is_decode(&span(7, 4)), recomputes);
        assert!(!speculator.is_decode(&span(8, 4)), "a longer span is of a prompt");
    }
}

#[test]
fn wrong_drafts_are_tried_again_after_a_pause_if_what_must_be_computed_for_a_trial_is_cheap() {
    let asked = |threshold: f64, cost: &StepCost| {
        let (mut acceptance, mut asked) = (Acceptance::default(), 0);
        for _ in 0..4000 {
            acceptance.token();
            let count = acceptance.num_drafts(threshold, 4, |pause| cost.may_try(pause, 8));
            if count > 0 {
                asked += 1;
                acceptance.asked(true);
                acceptance.verified(count, 0);
            }
        }
        asked
    };
    let (lookups, model) = (StepCost::new(false), StepCost::new(true));
    assert!((100..140).contains(&asked(0.5, &lookups)), "one in 32 tokens");
    assert_eq!(asked(0.97, &lookups), 0, "not even right drafts are worth their rows");
    assert!((1..10).contains(&asked(0.5, &model)), "only the first ones");
    // Before the first pass its time is assumed.
    assert!(model.threshold(1, false) > lookups.threshold(1, false));
}
