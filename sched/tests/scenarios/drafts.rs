//! Speculative decoding: drafts are verified in the span of the token before them.

use sched::{CacheGroup, CommitError, Outcome, Request, SchedConfig, Scheduler, SpecStats, StepPlan};

use super::{drain, scheduler};
use crate::common::{commit_all, config, request, seq, spans};

/// A request in decode with 10 prompt tokens. The last known token is 7.
fn decoding(config: SchedConfig, max_tokens: usize) -> Scheduler {
    let mut s = scheduler(config);
    s.submit(request(0, 10, max_tokens)).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    s
}

fn commit(s: &mut Scheduler, plan: &StepPlan, tokens: &[u32]) {
    let outcome = Outcome { seq: seq(0, 0), parent: 0, tokens: tokens.to_vec(), finished: false };
    s.submitted(plan.step).unwrap();
    s.commit(plan.step, &[outcome]).unwrap();
    s.audit().unwrap();
}

#[test]
fn s9_statistics_count_drafts_and_accepted_drafts_by_position() {
    let stats = |tokens: &[u32]| {
        let mut s = decoding(config(20, 4), 20);
        assert!(s.propose(seq(0, 0), vec![1, 2, 3]));
        let plan = s.plan();
        assert_eq!(
            (spans(&plan), plan.spans[0].drafts, &plan.spans[0].tokens[..]),
            (vec![(0, 4)], 3, &[7, 1, 2, 3][..])
        );
        commit(&mut s, &plan, tokens);
        let next = s.plan();
        assert_eq!((next.spans[0].start, next.spans[0].tokens[0]), (10 + tokens.len(), *tokens.last().unwrap()));
        let SpecStats { num_drafts, num_draft_tokens, num_accepted_tokens, accepted_per_pos } = s.spec_stats();
        (*num_drafts, *num_draft_tokens, *num_accepted_tokens, accepted_per_pos.clone())
    };
    assert_eq!(stats(&[1, 2, 3, 4]), (1, 3, 3, vec![1, 1, 1]));
    assert_eq!(stats(&[1, 9]), (1, 3, 1, vec![1]));
    assert_eq!(stats(&[9]), (1, 3, 0, vec![]));
}

#[test]
fn s9_a_sequence_that_ends_without_a_token_counts_nothing() {
    let mut s = decoding(config(20, 4), 20);
    s.propose(seq(0, 0), vec![1, 2]);
    let plan = s.plan();
    s.commit(plan.step, &[Outcome { seq: seq(0, 0), parent: 0, tokens: vec![], finished: true }]).unwrap();
    assert_eq!((s.spec_stats(), s.stats().blocks_free), (&SpecStats::default(), 20));
}

#[test]
fn s9_no_drafts_are_verified_in_a_prefill() {
    let mut s = scheduler(SchedConfig { max_num_batched_tokens: 17, ..config(20, 4) });
    s.submit(request(0, 30, 5)).unwrap();
    s.propose(seq(0, 0), vec![1, 2]);
    let first = s.plan();
    commit_all(&mut s, &first, 7);
    s.propose(seq(0, 0), vec![1, 2]);
    let second = s.plan();
    assert_eq!((first.spans[0].drafts, second.spans[0].drafts), (0, 0));
    assert_eq!((spans(&first), spans(&second)), (vec![(0, 17)], vec![(0, 13)]));
}

#[test]
fn s9_no_drafts_are_verified_while_tokens_are_computed_again_one_by_one() {
    let mut s = scheduler(SchedConfig { max_num_seqs: 2, max_num_batched_tokens: 8, ..config(20, 4) });
    s.submit(request(0, 4, 9)).unwrap();
    s.submit(request(1, 1, 9)).unwrap();
    (0..3).for_each(|_| {
        let plan = s.plan();
        commit_all(&mut s, &plan, 7);
    });
    // Seven tokens of request 0 are computed again, and one of request 1. Then request 0 decodes, and the prompt budget is 1.
    assert!(s.reset_prefix_cache(true));
    s.set_prompt_budget(1);
    let drafts: Vec<(usize, usize)> = (0..4)
        .map(|_| {
            s.propose(seq(1, 0), vec![1, 2]);
            let plan = s.plan();
            commit_all(&mut s, &plan, 7);
            let span = plan.spans.iter().find(|span| span.seq == seq(1, 0)).unwrap();
            (span.start, span.drafts)
        })
        .collect();
    assert_eq!(drafts, [(0, 0), (1, 0), (2, 0), (3, 2)]);
}

#[test]
fn s7_drafts_beyond_the_token_limit_are_not_verified() {
    let mut s = decoding(config(20, 4), 4);
    s.propose(seq(0, 0), vec![1, 2, 3, 4, 5]);
    let plan = s.plan();
    assert_eq!(plan.spans[0].tokens, [7, 1, 2], "three more tokens are allowed: two drafts and the token after them");
    commit(&mut s, &plan, &[1, 2, 3]);
    assert!(!s.has_work());
}

#[test]
fn c14_rejected_drafts_leave_no_trace() {
    let caching = SchedConfig { enable_prefix_caching: true, ..config(20, 4) };
    let mut s = decoding(caching, 20);
    s.propose(seq(0, 0), vec![1, 1, 1, 1, 1, 1, 1]);
    let plan = s.plan();
    assert_eq!(s.stats().blocks_in_use, 5);
    commit(&mut s, &plan, &[1, 9]);
    assert_eq!(s.stats().blocks_in_use, 3, "the blocks of the drafts are freed");
    drain(&mut s);
    // Prompt, 7, 1, 9 and 7s: accepted tokens are cached, rejected drafts are not.
    let prompt = |tail: &[u32]| [&request(0, 10, 1).prompt, tail, &[5; 9]].concat();
    for (tail, cached) in [(&[7, 1, 9, 7, 7, 7][..], 16), (&[7, 1, 1, 1, 1, 1][..], 12)] {
        s.submit(Request { prompt: prompt(tail), ..request(1, 1, 1) }).unwrap();
        let plan = s.plan();
        assert_eq!(plan.spans[0].cached, cached, "{tail:?}");
        commit_all(&mut s, &plan, 7);
    }
}

#[test]
fn drafts_are_dropped_before_any_request_is_preempted() {
    let mut s = scheduler(config(6, 4));
    s.submit(request(0, 10, 9)).unwrap();
    s.submit(request(1, 10, 2)).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    s.propose(seq(0, 0), vec![1; 5]);
    let plan = s.plan();
    assert_eq!((spans(&plan), plan.preempted.len()), (vec![(0, 2), (1, 1)], 0), "one draft fits the last block");
    commit_all(&mut s, &plan, 7);
    s.propose(seq(0, 0), vec![1; 5]);
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 6)], "blocks are free again, and earlier proposals are replaced");
}

#[test]
fn drafts_leave_half_of_the_budget_to_waiting_requests() {
    let mut s = decoding(SchedConfig { max_num_batched_tokens: 21, ..config(20, 4) }, 60);
    s.propose(seq(0, 0), vec![1; 30]);
    s.submit(request(1, 40, 2)).unwrap();
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 11), (1, 10)]);
}

#[test]
fn an_outcome_that_differs_from_the_drafts_is_refused() {
    let mut s = decoding(config(20, 4), 20);
    s.propose(seq(0, 0), vec![1, 2]);
    let plan = s.plan();
    let outcome = |tokens: &[u32]| [Outcome { seq: seq(0, 0), parent: 0, tokens: tokens.to_vec(), finished: false }];
    let mut error = |tokens: &[u32]| s.commit(plan.step, &outcome(tokens)).unwrap_err();
    assert_eq!(error(&[1, 3, 4]), CommitError::NotTheDraft { seq: seq(0, 0), found: 3, expected: 2 });
    assert_eq!(error(&[1, 2, 3, 4]), CommitError::TooManyTokens { seq: seq(0, 0), found: 4, expected: 3 });
    assert_eq!(error(&[]), CommitError::MissingToken { seq: seq(0, 0) });
    commit(&mut s, &plan, &[1, 2, 3]);
    assert!(!s.propose(seq(0, 1), vec![1]) && !s.propose(seq(4, 0), vec![1]), "no such sequence is live");
    drain(&mut s);
}

#[test]
fn drafts_take_no_block_that_the_head_of_the_queue_needs() {
    // One request decodes with three of eight blocks. The second needs exactly the other five.
    let mut s = decoding(config(8, 4), 20);
    s.propose(seq(0, 0), vec![1; 12]);
    s.submit(request(1, 20, 1)).unwrap();
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 2), (1, 20)], "one draft fits the last block");
    assert_eq!((plan.spans[0].drafts, s.stats().blocks_free), (1, 0));
}

#[test]
fn drafts_take_no_block_while_the_head_of_the_queue_lacks_one() {
    let mut s = decoding(config(8, 4), 20);
    s.propose(seq(0, 0), vec![1; 12]);
    s.submit(request(1, 24, 1)).unwrap();
    let plan = s.plan();
    assert_eq!(
        (spans(&plan), s.stats().blocks_free),
        (vec![(0, 2)], 5),
        "the head needs six blocks, and five are free"
    );
    assert_eq!(s.stats().num_waiting, 1);
}

/// A request as in [`decoding`], in a pool with a group of states. Accepted drafts are computed again.
fn recurrent(config: SchedConfig, max_tokens: usize) -> Scheduler {
    let groups = vec![CacheGroup::Full, CacheGroup::Sliding { window: 2 }];
    decoding(SchedConfig { recompute_drafts: true, groups, ..config }, max_tokens)
}

/// First position, tokens and number of drafts of the only span.
fn only_span(plan: &StepPlan) -> (usize, &[u32], usize) {
    assert_eq!(plan.spans.len(), 1, "{plan}");
    (plan.spans[0].start, &plan.spans[0].tokens, plan.spans[0].drafts)
}

#[test]
fn accepted_drafts_are_computed_again_in_front_of_the_next_drafts() {
    let mut s = recurrent(config(20, 4), 20);
    s.propose(seq(0, 0), vec![1, 2, 3]);
    let plan = s.plan();
    assert_eq!(only_span(&plan), (10, &[7, 1, 2, 3][..], 3));
    commit(&mut s, &plan, &[1, 2, 9]);
    s.propose(seq(0, 0), vec![4, 5]);
    let plan = s.plan();
    assert_eq!(only_span(&plan), (11, &[1, 2, 9, 4, 5][..], 2));
    commit(&mut s, &plan, &[4, 5, 6]);
    let plan = s.plan();
    assert_eq!(only_span(&plan), (14, &[4, 5, 6][..], 0), "also without drafts");
    commit(&mut s, &plan, &[8]);
    let plan = s.plan();
    assert_eq!(only_span(&plan), (17, &[8][..], 0));
    assert_eq!((s.spec_stats().num_draft_tokens, s.spec_stats().num_accepted_tokens), (5, 4));
}

#[test]
fn a_block_that_only_accepted_drafts_reach_is_cached_after_they_are_computed_again() {
    let caching = SchedConfig { enable_prefix_caching: true, ..config(40, 4) };
    let mut s = recurrent(caching, 20);
    s.propose(seq(0, 0), vec![1; 6]);
    let plan = s.plan();
    commit(&mut s, &plan, &[1; 7]);
    // Prompt, 7 and six drafts are 17 tokens, of which 11 are computed.
    let probe = |s: &mut Scheduler| {
        let tokens = [&request(0, 10, 1).prompt, &[7, 1, 1, 1, 1, 1, 1, 5][..]].concat();
        s.submit(Request { prompt: tokens, ..request(1, 1, 1) }).unwrap();
        let plan = s.plan();
        let cached = plan.spans.iter().find(|span| span.seq == seq(1, 0)).unwrap().cached;
        commit_all(s, &plan, 7);
        cached
    };
    assert_eq!(probe(&mut s), 8, "two blocks are computed");
    assert_eq!(probe(&mut s), 16, "the step of the first probe has computed the drafts again");
}

#[test]
fn a_request_that_is_computed_again_keeps_its_accepted_drafts_as_outputs() {
    let mut s = recurrent(config(20, 4), 20);
    s.propose(seq(0, 0), vec![1, 2]);
    let plan = s.plan();
    commit(&mut s, &plan, &[1, 2, 3]);
    assert!(s.reset_prefix_cache(true));
    s.propose(seq(0, 0), vec![4, 5]);
    let plan = s.plan();
    let (start, tokens, drafts) = only_span(&plan);
    assert_eq!((start, &tokens[10..], drafts), (0, &[7, 1, 2, 3][..], 0), "the drafts do not follow a decode");
    commit(&mut s, &plan, &[4]);
    s.propose(seq(0, 0), vec![5]);
    assert_eq!(only_span(&s.plan()), (14, &[4, 5][..], 1));
}

#[test]
fn drafts_behind_accepted_ones_fill_the_last_block() {
    let groups = vec![CacheGroup::Full];
    let mut s = decoding(SchedConfig { recompute_drafts: true, groups, ..config(5, 4) }, 11);
    s.propose(seq(0, 0), vec![1; 3]);
    let plan = s.plan();
    commit(&mut s, &plan, &[1; 4]);
    s.propose(seq(0, 0), vec![2; 9]);
    assert_eq!(only_span(&s.plan()), (11, &[1, 1, 1, 1, 2, 2, 2, 2, 2][..], 5), "20 tokens are in five blocks");
}

#[test]
fn accepted_drafts_share_the_budget_and_leave_a_token_for_prompts() {
    let small = SchedConfig { max_num_seqs: 4, max_num_batched_tokens: 9, recompute_drafts: true, ..config(60, 4) };
    let mut s = scheduler(small);
    (0..2).for_each(|id| s.submit(request(id, 3, 20)).unwrap());
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    let propose = |s: &mut Scheduler| (0..2).for_each(|id| assert!(s.propose(seq(id, 0), vec![1; 3])));
    propose(&mut s);
    s.submit(request(2, 1, 20)).unwrap();
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 4), (1, 4), (2, 1)]);
    let outcome = |id: u64, count| Outcome { seq: seq(id, 0), parent: 0, tokens: vec![1; count], finished: false };
    s.commit(plan.step, &[outcome(0, 4), outcome(1, 4), outcome(2, 1)]).unwrap();
    s.submit(request(3, 30, 2)).unwrap();
    propose(&mut s);
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 4), (1, 3), (2, 1), (3, 1)], "no draft fits the budget");
    assert_eq!(plan.spans.iter().map(|span| span.sample.len()).collect::<Vec<_>>(), [1, 0, 1, 0]);
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 1), (1, 1), (2, 1), (3, 6)], "the rest of a span is a decode too");
}
