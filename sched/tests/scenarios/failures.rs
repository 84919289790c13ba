//! Failed steps: nothing that they wrote enters the prefix cache, whatever the caller does afterwards.

use sched::{
    CacheGroup, CommitError, MemOp, Policy, PreemptionMode, Request, RequestId, SchedConfig, Scheduler, StepId,
    StepPlan,
};

use super::{drain, scheduler, step, submit_next};
use crate::common::{commit_all, config, outcomes, request, sampled, seq, spans};

fn caching(num_blocks: usize) -> SchedConfig {
    SchedConfig { enable_prefix_caching: true, ..config(num_blocks, 4) }
}

/// Number of cached tokens of a prompt.
fn cached(s: &mut Scheduler, prompt: &[u32]) -> usize {
    let id = RequestId(1000);
    s.submit(Request { prompt: prompt.to_vec(), ..request(id.0, 1, 1) }).unwrap();
    let plan = submit_next(s);
    let span = plan.spans.iter().find(|span| span.seq.request == id).unwrap();
    let cached = span.cached;
    s.abort(id);
    s.commit(plan.step, &[]).unwrap();
    cached
}

#[test]
fn a_failed_step_cannot_be_committed_and_its_requests_are_computed_again() {
    let mut s = scheduler(caching(20));
    s.submit(request(0, 10, 3)).unwrap();
    let plan = submit_next(&mut s);
    s.fail(plan.step, &plan.memory).unwrap();
    let error = s.commit(plan.step, &outcomes(&plan, 7)).unwrap_err();
    assert_eq!(error, CommitError::NotInFlight { step: plan.step, in_flight: None });
    let stats = s.stats();
    assert_eq!((stats.blocks_in_use, stats.blocks_cached, stats.num_waiting), (0, 0, 1));
    let again = submit_next(&mut s);
    assert_eq!((spans(&again), again.spans[0].cached), (vec![(0, 10)], 0));
    commit_all(&mut s, &again, 7);
    assert_eq!(drain(&mut s), 2);
}

#[test]
fn a_step_behind_a_failed_one_can_only_fail_and_nothing_is_planned_before() {
    let mut s = scheduler(SchedConfig { max_in_flight: 2, ..caching(20) });
    s.submit(request(0, 9, 8)).unwrap();
    let first = submit_next(&mut s);
    s.submit(request(1, 9, 8)).unwrap();
    let second = submit_next(&mut s);
    let error = s.fail(second.step, &second.memory).unwrap_err();
    assert_eq!(error, CommitError::NotInFlight { step: second.step, in_flight: Some(first.step) });
    assert!(s.fail(StepId(99), &[]).is_err(), "no such step was planned");

    s.fail(first.step, &first.memory).unwrap();
    let error = s.commit(second.step, &outcomes(&second, 7)).unwrap_err();
    assert_eq!(error, CommitError::BehindFailure { step: second.step });
    assert!(s.plan().is_empty(), "the device still writes to the blocks of the second step");
    s.fail(second.step, &second.memory).unwrap();
    s.audit().unwrap();
    assert_eq!((s.stats().blocks_in_use, s.stats().blocks_cached), (0, 0));
    let again = submit_next(&mut s);
    assert_eq!(spans(&again), [(0, 9), (1, 9)]);
    commit_all(&mut s, &again, 7);
    drain(&mut s);
}

#[test]
fn the_destination_of_a_failed_copy_on_write_is_never_cached() {
    let mut s = scheduler(caching(20));
    let prompt: Vec<u32> = (1..=6).collect();
    s.submit(Request { prompt: prompt.clone(), n: 2, ..request(0, 1, 9) }).unwrap();
    let plan = submit_next(&mut s);
    commit_all(&mut s, &plan, 8);
    let plan = submit_next(&mut s);
    assert!(plan.memory.iter().any(|op| matches!(op, MemOp::Copy { .. })), "two sequences write to one block");
    s.fail(plan.step, &plan.memory).unwrap();
    s.audit().unwrap();
    assert_eq!(cached(&mut s, &[&prompt[..], &[8, 7, 0]].concat()), 4, "only the block before the copy");
    let again = submit_next(&mut s);
    commit_all(&mut s, &again, 7);
    drain(&mut s);
}

/// Plans and commits until a plan has such a memory operation, and returns that plan.
fn until(s: &mut Scheduler, is_wanted: impl Fn(&MemOp) -> bool) -> StepPlan {
    for _ in 0..50 {
        let plan = submit_next(s);
        if plan.memory.iter().any(&is_wanted) {
            return plan;
        }
        commit_all(s, &plan, 7);
    }
    panic!("no plan has such an operation");
}

/// Two requests in a pool too small for both at full length, so that the second is swapped out.
fn crowded() -> Scheduler {
    let mut s = scheduler(SchedConfig { host_blocks: 20, preemption_mode: PreemptionMode::Swap, ..caching(10) });
    s.submit(request(0, 16, 20)).unwrap();
    s.submit(request(1, 16, 20)).unwrap();
    s
}

#[test]
fn the_destinations_of_a_failed_swap_in_are_never_cached() {
    let mut s = crowded();
    let out = until(&mut s, |op| matches!(op, MemOp::SwapOut { .. }));
    commit_all(&mut s, &out, 7);
    let back = until(&mut s, |op| matches!(op, MemOp::SwapIn { .. }));
    let destinations =
        back.memory.iter().filter_map(|op| if let MemOp::SwapIn { dst, .. } = op { Some(*dst) } else { None });
    let destinations: Vec<_> = destinations.collect();
    assert!(
        destinations.iter().any(|block| s.pool().is_cached(*block)),
        "blocks are cached when the swap-in is planned"
    );
    s.fail(back.step, &back.memory).unwrap();
    s.audit().unwrap();
    assert_eq!((s.stats().num_swapped, s.stats().host_blocks_in_use), (0, 0), "the request is computed again");
    assert!(destinations.iter().all(|block| !s.pool().is_cached(*block)));
    drain(&mut s);
}

#[test]
fn a_request_whose_swap_out_failed_is_computed_again() {
    let mut s = crowded();
    let plan = until(&mut s, |op| matches!(op, MemOp::SwapOut { .. }));
    assert_eq!(s.stats().num_swapped, 1);
    s.fail(plan.step, &plan.memory).unwrap();
    s.audit().unwrap();
    assert_eq!((s.stats().num_swapped, s.stats().host_blocks_in_use, s.stats().num_waiting), (0, 0, 2));
    drain(&mut s);
}

#[test]
fn a_failed_step_leaves_nothing_of_a_request_preempted_in_flight() {
    let mut s = scheduler(SchedConfig { max_in_flight: 2, ..caching(10) });
    s.submit(request(0, 16, 12)).unwrap();
    s.submit(request(1, 16, 12)).unwrap();
    let mut running = submit_next(&mut s);
    let preempting = loop {
        let next = submit_next(&mut s);
        if !next.preempted.is_empty() {
            break next;
        }
        commit_all(&mut s, &running, 7);
        running = next;
    };
    assert_eq!((preempting.preempted.clone(), s.stats().num_waiting), (vec![RequestId(1)], 1));
    let in_use = s.stats().blocks_in_use;
    s.fail(running.step, &running.memory).unwrap();
    s.fail(preempting.step, &preempting.memory).unwrap();
    s.audit().unwrap();
    assert_eq!((in_use, s.stats().blocks_in_use, s.stats().num_waiting), (10, 0, 2));
    drain(&mut s);
    assert_eq!(s.stats().blocks_in_use, 0);
}

#[test]
fn an_empty_plan_never_commits_a_step_in_flight() {
    for max_in_flight in [1, 2] {
        let mut s = scheduler(SchedConfig { max_num_batched_tokens: 17, max_in_flight, ..config(20, 4) });
        s.submit(request(0, 30, 5)).unwrap();
        let first = s.plan();
        let second = s.plan();
        assert!(second.is_empty() && second.step != first.step);
        s.commit(second.step, &[]).unwrap();
        assert_eq!(s.stats().num_in_flight, 1, "the first step is not committed by the empty one");
        s.submitted(first.step).unwrap();
        commit_all(&mut s, &first, 7);
        let next = s.plan();
        assert_eq!((next.spans[0].start, next.spans[0].tokens.len()), (17, 13));
        commit_all(&mut s, &next, 7);
        assert_eq!(seq(0, 0), next.spans[0].seq);
    }
}

#[test]
fn a_request_that_fits_only_because_of_its_window_can_be_computed_again_in_the_same_pool() {
    let groups = vec![CacheGroup::Full, CacheGroup::Sliding { window: 1 }];
    // The smallest pools that accept the request. At the failure it has all but one of its tokens, and the sliding
    // group has too few blocks for all of them at once.
    for (n, prompt, outputs, num_blocks) in [(1, 23, 11, 31), (2, 23, 11, 40), (1, 2, 40, 25), (2, 2, 40, 48)] {
        for enable_chunked_prefill in [true, false] {
            let config = SchedConfig { max_model_len: 64, ..config(num_blocks, 2) };
            let mut s = scheduler(SchedConfig { groups: groups.clone(), enable_chunked_prefill, ..config });
            s.submit(Request { n, ..request(0, prompt, outputs) }).unwrap();
            let (mut steps, mut drawn) = (0, 0);
            while s.has_work() {
                let plan = s.plan();
                assert!(!plan.spans.is_empty(), "n = {n}: nothing is computed after {steps} steps");
                s.audit().unwrap();
                steps += 1;
                if steps == outputs {
                    s.fail(plan.step, &plan.memory).unwrap();
                    continue;
                }
                drawn += sampled(&plan).count();
                commit_all(&mut s, &plan, 7);
            }
            assert_eq!(drawn, outputs * n);
        }
    }
}

#[test]
fn a_request_can_be_aborted_between_a_failed_step_and_the_step_behind_it() {
    let mut s = scheduler(SchedConfig { max_in_flight: 2, max_num_batched_tokens: 64, ..caching(40) });
    s.submit(request(0, 9, 8)).unwrap();
    let first = submit_next(&mut s);
    s.submit(request(1, 21, 8)).unwrap();
    let second = submit_next(&mut s);
    assert_eq!(spans(&second), [(0, 1), (1, 21)]);
    s.abort(RequestId(0));
    s.fail(first.step, &first.memory).unwrap();
    s.fail(second.step, &second.memory).unwrap();
    s.audit().unwrap();
    let stats = s.stats();
    assert_eq!((stats.num_running, stats.num_waiting, stats.blocks_in_use, stats.blocks_cached), (0, 1, 0, 0));

    let again = submit_next(&mut s);
    assert_eq!((&again.released[..], spans(&again)), (&[seq(0, 0), seq(1, 0)][..], vec![(1, 21)]));
    commit_all(&mut s, &again, 5);
    assert_eq!(drain(&mut s), 7);
}

#[test]
fn a_step_behind_a_failed_plan_without_spans_can_only_fail() {
    let limits = SchedConfig { max_num_seqs: 4, max_in_flight: 2, policy: Policy::Priority, ..caching(12) };
    let mut s = scheduler(SchedConfig { host_blocks: 20, preemption_mode: PreemptionMode::Swap, ..limits });
    s.submit(Request { n: 2, priority: 1, ..request(0, 8, 20) }).unwrap();
    (0..2).for_each(|_| drop(step(&mut s)));
    s.submit(request(1, 31, 8)).unwrap();
    let out = until(&mut s, |op| matches!(op, MemOp::SwapOut { .. }));
    commit_all(&mut s, &out, 7);
    // The swapped request needs two sequences of the four.
    s.submit(Request { n: 2, beam_search: true, ..request(2, 4, 9) }).unwrap();
    s.submit(request(3, 3, 9)).unwrap();
    (0..2).for_each(|_| drop(step(&mut s)));
    s.abort(RequestId(1));
    let before = submit_next(&mut s);
    assert_eq!(spans(&before), [(2, 1), (2, 1), (3, 1)]);
    s.abort(RequestId(3));
    // The search is not planned ahead of its outcome, and the swapped request has two tokens to compute.
    s.set_prompt_budget(1);
    let failed = submit_next(&mut s);
    assert_eq!(spans(&failed), []);
    assert!(failed.memory.iter().any(|op| matches!(op, MemOp::SwapIn { .. })), "{failed}");
    commit_all(&mut s, &before, 7);
    let behind = submit_next(&mut s);
    assert!(spans(&behind).contains(&(0, 1)), "{behind}");

    s.fail(failed.step, &failed.memory).unwrap();
    let error = s.commit(behind.step, &outcomes(&behind, 7)).unwrap_err();
    assert_eq!(error, CommitError::BehindFailure { step: behind.step });
    s.fail(behind.step, &behind.memory).unwrap();
    s.audit().unwrap();
    drain(&mut s);
}
