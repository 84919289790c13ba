//! Sequences and requests that end, or are ended, in every state.

use sched::{Outcome, Request, RequestId, SchedConfig};

use super::{drain, scheduler};
use crate::common::{commit_all, config, request, seq, spans};

#[test]
fn s1_an_ended_request_leaves_nothing_in_any_state() {
    let mut s = scheduler(SchedConfig { max_num_batched_tokens: 40, ..config(20, 16) });
    (0..10).for_each(|id| s.submit(request(id, 30, 5)).unwrap());
    for round in 0..3 {
        let plan = s.plan();
        commit_all(&mut s, &plan, 7);
        assert!(s.abort(RequestId(round)) && s.abort(RequestId(9 - round)));
    }
    drain(&mut s);
    let stats = s.stats();
    assert_eq!((stats.num_running, stats.num_waiting, stats.blocks_in_use, stats.blocks_free), (0, 0, 0, 20));
    assert!((0..10).all(|id| !s.abort(RequestId(id))));
}

#[test]
fn s7_a_sequence_ends_by_its_outcome_or_at_max_tokens() {
    let mut s = scheduler(config(20, 16));
    s.submit(request(0, 10, 3)).unwrap();
    s.submit(request(1, 10, 3)).unwrap();
    s.submit(request(2, 10, 3)).unwrap();
    let plan = s.plan();
    let outcome =
        |id, tokens: &[u32], finished| Outcome { seq: seq(id, 0), parent: 0, tokens: tokens.to_vec(), finished };
    s.commit(plan.step, &[outcome(0, &[1], true), outcome(1, &[], true), outcome(2, &[1], false)]).unwrap();
    let plan = s.plan();
    assert_eq!((spans(&plan), plan.released.clone()), (vec![(2, 1)], vec![seq(0, 0), seq(1, 0)]));
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    assert!(!s.has_work(), "request 2 has its three tokens");
    assert_eq!(s.stats().blocks_in_use, 0);
}

#[test]
fn s7_a_stop_string_found_later_ends_one_sequence_of_a_request() {
    let mut s = scheduler(config(20, 16));
    s.submit(Request { n: 2, ..request(0, 10, 9) }).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    assert!(s.finish_sequence(seq(0, 1)) && !s.finish_sequence(seq(0, 1)) && !s.finish_sequence(seq(0, 2)));
    commit_all(&mut s, &plan, 7); // holds a late token for sequence 1
    let plan = s.plan();
    assert_eq!((plan.spans.len(), plan.spans[0].seq, plan.released.clone()), (1, seq(0, 0), vec![seq(0, 1)]));
    commit_all(&mut s, &plan, 7);
    assert!(s.finish_sequence(seq(0, 0)) && !s.has_work());
}

#[test]
fn s13_no_block_leaks_over_many_cycles() {
    let mut s = scheduler(SchedConfig { enable_prefix_caching: true, ..config(30, 4) });
    for cycle in 0..200u64 {
        for k in 0..3 {
            s.submit(Request { n: 1 + (cycle as usize + k) % 3, ..request(3 * cycle + k as u64, 7 + k, 6) }).unwrap();
        }
        for round in 0..4 {
            let plan = s.plan();
            if round == cycle % 4 {
                s.abort(RequestId(3 * cycle + cycle % 3));
            }
            commit_all(&mut s, &plan, 7);
        }
        if cycle % 10 == 0 {
            drain(&mut s);
            let stats = s.stats();
            assert_eq!((stats.blocks_in_use, stats.blocks_cached + stats.blocks_free), (0, 30));
        }
    }
}

#[test]
fn s14_abort_while_waiting() {
    let mut s = scheduler(config(4, 16));
    s.submit(request(0, 10, 5)).unwrap();
    assert!(s.abort(RequestId(0)) && !s.has_work());
    assert!(s.plan().is_empty());
}

#[test]
fn s14_abort_during_a_prefill_and_while_running() {
    let mut s = scheduler(SchedConfig { max_num_batched_tokens: 17, ..config(4, 16) });
    s.submit(request(0, 40, 5)).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    assert!(s.abort(RequestId(0)));
    s.audit().unwrap();
    s.submit(request(1, 10, 5)).unwrap();
    let plan = s.plan();
    assert_eq!((plan.released.clone(), spans(&plan)), (vec![seq(0, 0)], vec![(1, 10)]));
    commit_all(&mut s, &plan, 7);
    assert!(s.abort(RequestId(1)));
    assert_eq!((s.plan().released, s.stats().blocks_free), (vec![seq(1, 0)], 4));
}

#[test]
fn s14_abort_while_preempted() {
    let mut s = scheduler(config(4, 16));
    s.submit(request(0, 32, 10)).unwrap();
    s.submit(request(1, 31, 10)).unwrap();
    for _ in 0..2 {
        let plan = s.plan();
        commit_all(&mut s, &plan, 7);
    }
    assert_eq!(s.stats().num_waiting, 1);
    assert!(s.abort(RequestId(1)));
    drain(&mut s);
    assert_eq!(s.stats().blocks_free, 4);
}

#[test]
fn s14_blocks_of_a_request_aborted_in_flight_are_not_reused_before_the_commit() {
    let mut s = scheduler(config(4, 16));
    s.submit(request(0, 60, 4)).unwrap();
    let plan = s.plan();
    assert!(s.abort(RequestId(0)));
    assert!(!s.has_work());
    // A new request with the same id gets neither those blocks before the commit nor the token of the step in flight.
    s.submit(request(0, 20, 4)).unwrap();
    assert!(s.plan().is_empty(), "the first step is not committed yet");
    commit_all(&mut s, &plan, 42);
    assert_eq!((s.stats().blocks_in_use, s.stats().num_waiting), (0, 1));
    let plan = s.plan();
    assert_eq!((plan.released.clone(), spans(&plan)), (vec![seq(0, 0)], vec![(0, 20)]));
    commit_all(&mut s, &plan, 7);
}
