//! A step planned while the one before it runs.

use sched::{CommitError, Outcome, Policy, Request, RequestId, SchedConfig, Scheduler, StepId, StepPlan};

use super::{scheduler, submit_next};
use crate::common::{blocks_per_request, commit_all, config, request, sampled, seq, spans};

fn ahead(num_blocks: usize) -> Scheduler {
    scheduler(SchedConfig { max_in_flight: 2, ..config(num_blocks, 16) })
}

fn awaits(plan: &StepPlan) -> Vec<Option<StepId>> {
    plan.spans.iter().map(|span| span.awaits).collect()
}

#[test]
fn s5_a_step_is_planned_while_another_is_in_flight() {
    let mut s = ahead(20);
    s.submit(request(0, 10, 4)).unwrap();
    let first = submit_next(&mut s);
    assert_eq!((spans(&first), awaits(&first)), (vec![(0, 10)], vec![None]));

    s.submit(request(1, 10, 4)).unwrap();
    let second = submit_next(&mut s);
    assert_eq!((spans(&second), awaits(&second)), (vec![(0, 1), (1, 10)], vec![Some(first.step), None]));
    assert_eq!((second.spans[0].start, second.spans[0].tokens[0], second.spans[0].sample.clone()), (10, 0, 0..1));
    let refused = s.plan();
    assert!(refused.is_empty(), "two steps are in flight");
    assert!(refused.step > second.step && s.plan().step > refused.step, "each plan has its own id");
    assert_eq!(s.stats().num_in_flight, 2);

    commit_all(&mut s, &first, 100);
    let third = submit_next(&mut s);
    assert_eq!((spans(&third), awaits(&third)), (vec![(0, 1), (1, 1)], vec![Some(second.step); 2]));
    commit_all(&mut s, &second, 101);
    commit_all(&mut s, &third, 102);
    // The fourth and last token of request 0; nothing is planned after it.
    let last = submit_next(&mut s);
    assert_eq!((spans(&last), awaits(&last)), (vec![(0, 1), (1, 1)], vec![None; 2]));
    assert_eq!((last.spans[0].start, &last.spans[0].tokens[..]), (12, &[102][..]));
    let behind = submit_next(&mut s);
    assert_eq!(spans(&behind), [(1, 1)]);
    commit_all(&mut s, &last, 103);
    commit_all(&mut s, &behind, 103);
    assert!(!s.has_work());
}

#[test]
fn s5_a_step_is_not_planned_before_the_last_one_is_submitted() {
    let mut s = ahead(20);
    s.submit(request(0, 10, 4)).unwrap();
    let first = s.plan();
    assert!(s.plan().is_empty());
    let error = s.submitted(StepId(7)).unwrap_err();
    assert_eq!(error, CommitError::NotInFlight { step: StepId(7), in_flight: Some(first.step) });
    s.submitted(first.step).unwrap();
    let second = submit_next(&mut s);
    assert_eq!(spans(&second), [(0, 1)]);
    let error = s.commit(second.step, &[]).unwrap_err();
    assert_eq!(error, CommitError::NotInFlight { step: second.step, in_flight: Some(first.step) });
}

#[test]
fn s5_a_token_computed_after_the_end_of_its_sequence_is_dropped() {
    let mut s = ahead(20);
    s.submit(request(0, 16, 9)).unwrap();
    let first = submit_next(&mut s);
    let second = submit_next(&mut s);
    assert_eq!(spans(&second), [(0, 1)]);
    s.commit(first.step, &[Outcome::token(seq(0, 0), 5, true)]).unwrap();
    assert!(!s.has_work());
    assert_eq!(s.stats().blocks_in_use, 2, "the second step still writes to them");

    s.submit(request(1, 10, 9)).unwrap();
    let third = submit_next(&mut s);
    assert_eq!((third.released.clone(), spans(&third)), (vec![seq(0, 0)], vec![(1, 10)]));
    let issued = &third.spans[0].groups[0].table.append;
    assert!(
        !first.spans[0].groups[0].table.append.contains(&issued[0])
            && !second.spans[0].groups[0].table.append.contains(&issued[0])
    );
    commit_all(&mut s, &second, 6);
    assert_eq!(s.stats().blocks_in_use, 1);
    commit_all(&mut s, &third, 6);
}

#[test]
fn s6_a_request_preempted_in_flight_keeps_the_token_of_the_step_in_flight() {
    let mut s = ahead(10);
    s.submit(request(0, 80, 4)).unwrap();
    s.submit(request(1, 80, 4)).unwrap();
    let first = submit_next(&mut s);
    assert_eq!((spans(&first), s.stats().blocks_free), (vec![(0, 80), (1, 80)], 0));

    // Request 0 needs a sixth block. Those of request 1 are not free while the first step writes to them, so request 0
    // waits for one plan.
    let second = submit_next(&mut s);
    assert_eq!((second.preempted.clone(), spans(&second)), (vec![RequestId(1)], vec![]));
    assert_eq!(blocks_per_request(&s), [(RequestId(0), 5)]);
    assert_eq!((s.stats().blocks_in_use, s.stats().deferrals, s.stats().tokens_lost), (10, 1, 80));
    commit_all(&mut s, &first, 42);
    assert_eq!(s.stats().blocks_in_use, 5);

    for _ in 0..3 {
        let plan = submit_next(&mut s);
        assert_eq!(spans(&plan), [(0, 1)], "request 1 needs six blocks, and four are free");
        commit_all(&mut s, &plan, 7);
    }
    let resumed = submit_next(&mut s);
    assert_eq!((spans(&resumed), resumed.spans[0].tokens[80]), (vec![(1, 81)], 42));
    commit_all(&mut s, &resumed, 7);
    for _ in 0..2 {
        let plan = submit_next(&mut s);
        assert_eq!(spans(&plan), [(1, 1)]);
        commit_all(&mut s, &plan, 7);
    }
    assert!(!s.has_work(), "both have four tokens");
}

#[test]
fn s6_tokens_of_a_preempted_request_computed_in_flight_are_cached() {
    let mut s = scheduler(SchedConfig { max_in_flight: 2, enable_prefix_caching: true, ..config(10, 16) });
    s.submit(request(0, 80, 4)).unwrap();
    s.submit(request(1, 80, 4)).unwrap();
    let first = submit_next(&mut s);
    assert_eq!(submit_next(&mut s).preempted, [RequestId(1)]);
    commit_all(&mut s, &first, 42);
    s.abort(RequestId(0));
    let resumed = submit_next(&mut s);
    assert_eq!((resumed.spans[0].cached, spans(&resumed)), (80, vec![(1, 1)]));
    commit_all(&mut s, &resumed, 7);
}

#[test]
fn only_known_tokens_are_cached() {
    let mut s = scheduler(SchedConfig { max_in_flight: 2, enable_prefix_caching: true, ..config(20, 4) });
    s.submit(request(0, 3, 9)).unwrap();
    let mut in_flight = submit_next(&mut s);
    for token in 50..57 {
        let next = submit_next(&mut s);
        assert_eq!(next.spans[0].tokens, [0], "a placeholder");
        commit_all(&mut s, &in_flight, token);
        in_flight = next;
    }
    commit_all(&mut s, &in_flight, 57);
    let known = [&request(0, 3, 9).prompt[..], &[50, 51, 52, 53, 54, 55]].concat();
    s.submit(Request { prompt: known, ..request(1, 0, 1) }).unwrap();
    let placeholders = [&request(0, 3, 9).prompt[..], &[0; 6]].concat();
    s.submit(Request { prompt: placeholders, ..request(2, 0, 1) }).unwrap();
    let plan = submit_next(&mut s);
    assert_eq!(
        plan.spans.iter().map(|span| (span.seq.request.0, span.cached)).collect::<Vec<_>>(),
        [(0, 0), (1, 8), (2, 0)]
    );
    commit_all(&mut s, &plan, 7);
}

#[test]
fn a_request_with_two_sequences_forks_when_its_prompt_is_committed_and_then_runs_ahead() {
    let mut s = ahead(20);
    s.submit(Request { n: 2, ..request(0, 20, 5) }).unwrap();
    let prompt = submit_next(&mut s);
    assert!(submit_next(&mut s).is_empty(), "two sequences have no table yet");
    commit_all(&mut s, &prompt, 7);
    let first = submit_next(&mut s);
    let second = submit_next(&mut s);
    assert_eq!((awaits(&first), awaits(&second)), (vec![None; 2], vec![Some(first.step); 2]));
    assert_eq!(sampled(&second).collect::<Vec<_>>(), [seq(0, 0), seq(0, 1)]);
    assert_eq!(blocks_per_request(&s), [(RequestId(0), 3)]);
    commit_all(&mut s, &first, 7);
    commit_all(&mut s, &second, 7);
}

#[test]
fn s5_a_placeholder_after_the_end_of_its_sequence_is_never_cached() {
    let mut s = scheduler(SchedConfig { max_in_flight: 2, enable_prefix_caching: true, ..config(20, 4) });
    let prompt: Vec<u32> = (1..7).collect();
    s.submit(Request { n: 2, prompt: prompt.clone(), ..request(0, 0, 9) }).unwrap();
    let plan = submit_next(&mut s);
    commit_all(&mut s, &plan, 8);
    let first = submit_next(&mut s);
    let second = submit_next(&mut s);
    assert_eq!((second.spans[0].start, &second.spans[0].tokens[..]), (7, &[0][..]));
    s.commit(first.step, &[Outcome::token(seq(0, 0), 5, true), Outcome::token(seq(0, 1), 6, false)]).unwrap();
    s.commit(second.step, &[Outcome::token(seq(0, 1), 7, true)]).unwrap();
    // The second block of sequence 0 ends with the key of token 5, which was never committed, and the placeholder is 0.
    // That of sequence 1 ends with token 6.
    for (last, cached) in [(0, 4), (5, 4), (6, 8)] {
        s.submit(Request { prompt: [&prompt[..], &[8, last, 9, 9]].concat(), ..request(1, 0, 1) }).unwrap();
        let plan = submit_next(&mut s);
        assert_eq!(plan.spans[0].cached, cached, "after token {last}");
        s.abort(RequestId(1));
        s.commit(plan.step, &[]).unwrap();
    }
}

#[test]
fn no_request_takes_a_free_block_before_the_first_that_waits_for_more() {
    let limits = SchedConfig { max_num_seqs: 4, max_num_batched_tokens: 18, max_in_flight: 2, ..config(15, 4) };
    let mut s = scheduler(SchedConfig { policy: Policy::Priority, ..limits });
    s.submit(Request { priority: 1, ..request(1, 6, 5) }).unwrap();
    s.submit(Request { priority: 1, ..request(2, 11, 5) }).unwrap();
    let first = submit_next(&mut s);
    s.submit(request(0, 40, 1)).unwrap();
    let second = submit_next(&mut s);
    commit_all(&mut s, &first, 7);
    let third = submit_next(&mut s);
    let chunk = vec![(1, 1), (2, 1), (0, 16)];
    assert_eq!((spans(&second), spans(&third), s.stats().blocks_free), (chunk.clone(), chunk, 1));
    // The blocks of request 2 are freed by the commit of the third step.
    s.abort(RequestId(2));
    commit_all(&mut s, &second, 7);
    let fourth = submit_next(&mut s);
    assert_eq!(
        (spans(&fourth), s.stats().deferrals),
        (vec![], 1),
        "request 0 needs two blocks, request 1 the free one"
    );
    commit_all(&mut s, &third, 7);
    assert_eq!(spans(&submit_next(&mut s)), [(1, 1), (0, 8)]);
}
