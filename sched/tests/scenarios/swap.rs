//! Preemption by swapping: which requests are swapped out, when they are swapped in, and the resulting plans.

use sched::{MemOp, Policy, PreemptionMode, Request, RequestId, SchedConfig, Scheduler, StepPlan};

use super::{drain, scheduler, step};
use crate::common::{commit_all, config, request, seq, spans};

/// Five blocks of 4 tokens, and host blocks.
fn swapping(host_blocks: usize) -> SchedConfig {
    SchedConfig { host_blocks, policy: Policy::Priority, ..config(5, 4) }
}

/// Numbers of swap-outs and swap-ins in a plan.
fn swaps(plan: &StepPlan) -> (usize, usize) {
    let count = |f: fn(&MemOp) -> bool| plan.memory.iter().filter(|op| f(op)).count();
    (count(|op| matches!(op, MemOp::SwapOut { .. })), count(|op| matches!(op, MemOp::SwapIn { .. })))
}

/// A request of low priority (8 tokens) and one of high priority (4 tokens) fill five blocks, until the low one is
/// preempted.
fn preempt_low(config: SchedConfig, n: usize) -> (Scheduler, StepPlan) {
    let mut s = scheduler(config);
    s.submit(Request { n, priority: 1, ..request(0, 8, if n == 1 { 12 } else { 5 }) }).unwrap();
    step(&mut s);
    s.submit(request(1, 4, 8)).unwrap();
    for _ in 0..50 {
        let plan = step(&mut s);
        if !plan.preempted.is_empty() {
            assert_eq!(plan.preempted, [RequestId(0)]);
            return (s, plan);
        }
    }
    unreachable!("no request is preempted")
}

#[test]
fn a_swapped_request_resumes_without_losing_tokens() {
    let (mut s, plan) = preempt_low(swapping(8), 1);
    let stats = s.stats();
    assert_eq!((swaps(&plan), plan.released.clone(), spans(&plan)), ((3, 0), vec![seq(0, 0)], vec![(1, 1)]));
    assert_eq!((stats.num_swapped, stats.num_waiting, stats.host_blocks_in_use, stats.tokens_lost), (1, 0, 3, 0));
    assert_eq!(stats.host_cache_usage(), 3.0 / 8.0);

    s.abort(RequestId(1));
    let plan = s.plan();
    // Its blocks were not cached. It is swapped in and computes its next token in one step.
    assert_eq!((swaps(&plan), spans(&plan), plan.spans[0].start), ((0, 3), vec![(0, 1)], 12));
    assert_eq!((plan.spans[0].groups[0].table.keep, plan.spans[0].groups[0].table.append.len()), (0, 4));
    commit_all(&mut s, &plan, 7);
    drain(&mut s);
    let stats = s.stats();
    assert_eq!((stats.blocks_swapped_out, stats.blocks_swapped_in, stats.host_blocks_in_use), (3, 3, 0));
}

#[test]
fn a_request_is_swapped_if_computing_it_again_would_cost_more() {
    let cheap = |swap_cost, n| {
        let config = SchedConfig { swap_cost, ..swapping(8) };
        preempt_low(config, n).0.stats().swap_preemptions == 1
    };
    // The low request has computed 12 tokens in 3 blocks.
    assert!(cheap(3, 1) && !cheap(4, 1));
    // Several live sequences are swapped at any cost.
    assert!(cheap(1000, 2));
    let mode = |preemption_mode, host_blocks| {
        let config = SchedConfig { preemption_mode, swap_cost: 1000, ..swapping(host_blocks) };
        preempt_low(config, 1).0.stats().swap_preemptions
    };
    assert_eq!((mode(PreemptionMode::Swap, 8), mode(PreemptionMode::Auto, 8)), (1, 0));
    assert_eq!(
        (mode(PreemptionMode::Swap, 2), mode(PreemptionMode::Recompute, 8)),
        (0, 0),
        "too few host blocks; swapping is off"
    );
}

#[test]
fn a_cached_prefix_does_not_count_as_cost_of_computing_again() {
    let config = SchedConfig { enable_prefix_caching: true, ..swapping(8) };
    let mut s = scheduler(config);
    // The same prompt ran before, so that two of three blocks are hits.
    s.submit(Request { prompt: request(0, 9, 1).prompt, ..request(9, 9, 1) }).unwrap();
    drain(&mut s);
    s.submit(Request { priority: 1, ..request(0, 9, 12) }).unwrap();
    let plan = step(&mut s);
    assert_eq!(plan.spans[0].cached, 8);
    s.submit(request(1, 4, 6)).unwrap();
    assert!((0..20).any(|_| !step(&mut s).preempted.is_empty()));
    assert_eq!((s.stats().preemptions, s.stats().swap_preemptions), (1, 0), "4 tokens cost less than 3 blocks");
}

#[test]
fn swapped_requests_are_admitted_before_waiting_ones_but_not_before_a_higher_priority() {
    let (mut s, _) = preempt_low(swapping(8), 1);
    s.submit(Request { priority: 1, ..request(2, 4, 2) }).unwrap();
    s.submit(Request { priority: 0, ..request(3, 4, 2) }).unwrap();
    s.abort(RequestId(1));
    let order: Vec<u64> = std::iter::from_fn(|| {
        let plan = s.plan();
        commit_all(&mut s, &plan, 7);
        (!plan.spans.is_empty()).then(|| plan.spans.iter().map(|span| span.seq.request.0).collect::<Vec<_>>())
    })
    .flatten()
    .collect();
    let first = |id| order.iter().position(|other| *other == id).unwrap();
    assert!(first(3) < first(0) && first(0) < first(2), "{order:?}");
}

#[test]
fn s12_a_request_that_is_or_will_be_swapped_out_does_not_count_against_max_num_seqs() {
    for max_in_flight in [1, 2] {
        let config =
            SchedConfig { max_num_seqs: 2, max_in_flight, preemption_mode: PreemptionMode::Swap, ..swapping(8) };
        let mut s = scheduler(config);
        s.submit(Request { priority: 1, ..request(0, 8, 12) }).unwrap();
        s.submit(request(1, 8, 5)).unwrap();
        let mut flying: Vec<StepPlan> = Vec::new();
        let mut turn = |s: &mut Scheduler| {
            let plan = s.plan();
            s.submitted(plan.step).unwrap();
            flying.push(plan.clone());
            if flying.len() == max_in_flight {
                commit_all(s, &flying.remove(0), 7);
            }
            plan
        };
        for _ in 0..50 {
            if s.stats().num_swapped > 0 {
                break;
            }
            turn(&mut s);
        }
        // max_num_seqs is 2: one request runs, and one more can be admitted.
        s.submit(request(2, 1, 1)).unwrap();
        let ran: Vec<u64> = (0..3).flat_map(|_| turn(&mut s).spans).map(|span| span.seq.request.0).collect();
        assert!(ran.contains(&2), "depth {max_in_flight}: {ran:?}");
    }
}

#[test]
fn s14_abort_while_swapped_out_frees_the_host_blocks() {
    let (mut s, _) = preempt_low(swapping(8), 2);
    assert!(s.stats().host_blocks_in_use > 0);
    assert!(s.finish_sequence(seq(0, 1)), "a sequence can end while it is swapped out");
    assert!(s.abort(RequestId(0)) && !s.abort(RequestId(0)));
    s.audit().unwrap();
    drain(&mut s);
    let stats = s.stats();
    assert_eq!((stats.host_blocks_in_use, stats.blocks_free, stats.num_swapped), (0, 5, 0));
}

#[test]
fn s14_abort_of_a_request_to_be_swapped_out_while_a_step_in_flight_writes_to_it() {
    let config = SchedConfig { max_in_flight: 2, preemption_mode: PreemptionMode::Swap, ..swapping(8) };
    let mut s = scheduler(config);
    s.submit(Request { priority: 1, ..request(0, 8, 9) }).unwrap();
    s.submit(request(1, 8, 9)).unwrap();
    let first = s.plan();
    s.submitted(first.step).unwrap();
    let second = s.plan();
    s.submitted(second.step).unwrap();
    // Each request has two blocks and needs a third. The better one gets the fifth block, and the other is swapped out
    // after the step in flight.
    assert_eq!((second.preempted.clone(), swaps(&second), spans(&second)), (vec![RequestId(0)], (0, 0), vec![(1, 1)]));
    assert_eq!((s.stats().num_swapped, s.stats().host_blocks_in_use), (1, 0));
    assert!(s.abort(RequestId(0)));
    s.audit().unwrap();
    commit_all(&mut s, &first, 7);
    commit_all(&mut s, &second, 7);
    drain(&mut s);
    assert_eq!((s.stats().host_blocks_in_use, s.stats().blocks_free), (0, 5));
}

#[test]
fn c11_a_reset_puts_running_and_swapped_requests_back_into_the_queue_in_order() {
    let (mut s, _) = preempt_low(SchedConfig { enable_prefix_caching: true, ..swapping(8) }, 1);
    let plan = s.plan();
    assert!(!s.reset_prefix_cache(false) && !s.reset_prefix_cache(true), "a step is in flight");
    commit_all(&mut s, &plan, 7);
    assert!(!s.reset_prefix_cache(false), "a request runs");
    assert!(s.reset_prefix_cache(true));
    let stats = s.stats();
    assert_eq!((stats.num_waiting, stats.num_running, stats.num_swapped), (2, 0, 0));
    assert_eq!((stats.blocks_free, stats.host_blocks_in_use), (5, 0));
    // The request of higher priority comes first, with all of its tokens.
    let plan = s.plan();
    assert_eq!((spans(&plan)[0].0, plan.spans[0].start), (1, 0));
    assert!(plan.spans[0].tokens.ends_with(&[7, 7]));
    commit_all(&mut s, &plan, 7);
    drain(&mut s);
}

#[test]
fn a_prefix_cache_is_not_reset_while_a_swapped_request_could_bring_old_blocks_back() {
    let (mut s, _) = preempt_low(SchedConfig { enable_prefix_caching: true, ..swapping(8) }, 1);
    s.abort(RequestId(1));
    assert_eq!((s.stats().blocks_in_use, s.stats().host_blocks_in_use), (0, 3));
    assert!(!s.reset_prefix_cache(false));
    assert!(s.reset_prefix_cache(true), "the request is computed again");
    assert_eq!((s.stats().num_waiting, s.stats().host_blocks_in_use, s.stats().blocks_cached), (1, 0, 0));
    drain(&mut s);
}

#[test]
fn host_blocks_are_reserved_for_one_request_only() {
    // Five requests of two blocks each need a third block while their first step is in flight. Two are preempted.
    let config = SchedConfig { max_in_flight: 2, preemption_mode: PreemptionMode::Swap, num_blocks: 10, ..swapping(3) };
    let mut s = scheduler(config);
    for id in 0..5 {
        s.submit(Request { priority: 4 - id as i32, ..request(id, 8, 9) }).unwrap();
    }
    let first = s.plan();
    s.submitted(first.step).unwrap();
    let second = s.plan();
    assert_eq!(second.preempted, [RequestId(0), RequestId(1)]);
    let stats = s.stats();
    assert_eq!(
        (stats.num_swapped, stats.num_waiting, stats.swap_preemptions),
        (1, 1, 1),
        "three host blocks suffice for one request, not for two"
    );
    commit_all(&mut s, &first, 7);
    assert_eq!(s.stats().host_blocks_in_use, 2);
    s.submitted(second.step).unwrap();
    s.commit(second.step, &[]).unwrap();
    drain(&mut s);
}

#[test]
fn a_request_is_swapped_in_only_if_its_next_span_fits_too() {
    // The low request was swapped out with 12 tokens in 3 blocks. Its next token needs a fourth.
    let (mut s, _) = preempt_low(swapping(8), 1);
    s.abort(RequestId(1));
    s.submit(request(2, 7, 2)).unwrap();
    // The other owns two of the five blocks. Three are free: enough for the swap-in, but not for the next token.
    for tokens in [7, 1] {
        let plan = step(&mut s);
        assert_eq!((swaps(&plan), spans(&plan)), ((0, 0), vec![(2, tokens)]));
    }
    let plan = step(&mut s);
    assert_eq!((swaps(&plan), spans(&plan)), ((0, 3), vec![(0, 1)]));
    drain(&mut s);
}

#[test]
fn a_sequence_that_ended_while_swapped_out_takes_no_blocks_when_the_others_are_swapped_in() {
    let (mut s, _) = preempt_low(swapping(8), 2);
    s.abort(RequestId(1));
    assert!(s.finish_sequence(seq(0, 1)));
    let plan = s.plan();
    assert_eq!((swaps(&plan), spans(&plan)), ((0, 4), vec![(0, 1)]));
    // Two blocks of the prompt and one of sequence 0.
    assert_eq!(s.stats().blocks_in_use, 3);
    commit_all(&mut s, &plan, 7);
    drain(&mut s);
}
