//! What peers' suites test of a scheduler, restated (ids S1 to S14).
#![allow(clippy::unwrap_used)]

mod common;

use common::{commit_all, config, request, sampled, seq, spans};
use sched::{
    BlockId, CommitError, MemOp, Outcome, Policy, Refusal, Request, RequestId, SchedConfig, Scheduler, StepId,
};

fn scheduler(config: SchedConfig) -> Scheduler {
    Scheduler::new(config).unwrap()
}

/// Steps until nothing is left; every sequence goes on to its `max_tokens`.
fn drain(scheduler: &mut Scheduler) -> usize {
    let mut steps = 0;
    while scheduler.has_work() {
        let plan = scheduler.plan();
        commit_all(scheduler, &plan, 7);
        steps += 1;
        assert!(steps < 10_000, "no end in sight");
    }
    steps
}

#[test]
fn s1_nothing_is_left_of_requests_that_ended_in_any_state() {
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
fn s2_prompts_that_fit_the_budget_are_scheduled_whole_and_in_order() {
    let mut s = scheduler(config(100, 16));
    (0..10).rev().for_each(|id| s.submit(request(id, 50 + id as usize, 5)).unwrap());
    let plan = s.plan();
    assert_eq!(spans(&plan), (0..10).rev().map(|id| (id, 50 + id as usize)).collect::<Vec<_>>());
    assert!(plan.spans.iter().all(|span| span.sample == (0..1)));
}

#[test]
fn s3_prompts_share_the_budget_of_a_step_in_chunks() {
    let mut s = scheduler(config(200, 16));
    (0..3).for_each(|id| s.submit(request(id, 800, 5)).unwrap());
    let mut steps = Vec::new();
    for _ in 0..3 {
        let plan = s.plan();
        let whose: Vec<u64> = sampled(&plan).map(|q| q.request.0).collect();
        steps.push((spans(&plan), whose));
        commit_all(&mut s, &plan, 7);
    }
    assert_eq!(steps[0], (vec![(0, 800), (1, 224)], vec![0]));
    assert_eq!(steps[1], (vec![(0, 1), (1, 576), (2, 447)], vec![0, 1]));
    assert_eq!(steps[2], (vec![(0, 1), (1, 1), (2, 353)], vec![0, 1, 2]));
}

#[test]
fn s4_short_prompts_do_not_jump_the_queue() {
    for (chunked, admitted) in [(true, vec![(0, 800), (1, 224)]), (false, vec![(0, 800)])] {
        let mut s = scheduler(SchedConfig { enable_chunked_prefill: chunked, max_model_len: 1024, ..config(200, 16) });
        for (id, len) in [800, 800, 10, 10].into_iter().enumerate() {
            s.submit(request(id as u64, len, 5)).unwrap();
        }
        assert_eq!(spans(&s.plan()), admitted);
    }
}

#[test]
fn s7_a_sequence_ends_when_it_is_said_to_or_has_its_tokens() {
    let mut s = scheduler(config(20, 16));
    s.submit(request(0, 10, 3)).unwrap();
    s.submit(request(1, 10, 3)).unwrap();
    s.submit(request(2, 10, 3)).unwrap();
    let plan = s.plan();
    let outcome = |id, tokens: &[u32], finished| Outcome { seq: seq(id, 0), tokens: tokens.to_vec(), finished };
    s.commit(plan.step, &[outcome(0, &[1], true), outcome(1, &[], true), outcome(2, &[1], false)]).unwrap();
    let plan = s.plan();
    assert_eq!((spans(&plan), plan.released.clone()), (vec![(2, 1)], vec![seq(0, 0), seq(1, 0)]));
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    assert!(!s.has_work(), "three tokens are all that request 2 may have");
    assert_eq!(s.stats().blocks_in_use, 0);
}

#[test]
fn s7_a_stop_string_found_later_ends_one_sequence_of_the_group() {
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
fn s8_prefix_statistics_count_an_admission_once() {
    let caching = SchedConfig { enable_prefix_caching: true, ..config(5, 16) };
    let mut s = scheduler(caching.clone());
    let prompt: Vec<u32> = (0..40).collect();
    let same = |id| Request { prompt: prompt.clone(), ..request(id, 40, 20) };
    s.submit(same(0)).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    assert_eq!((s.stats().prefix_queries, s.stats().prefix_hits, s.stats().prompt_tokens), (40, 0, 40));

    // Too long to be admitted beside the first: its lookup is repeated, and not counted.
    let longer = Request { prompt: [&prompt[..], &[9; 30]].concat(), ..request(1, 0, 10) };
    s.submit(longer).unwrap();
    for _ in 0..3 {
        let plan = s.plan();
        assert_eq!(spans(&plan), [(0, 1)]);
        commit_all(&mut s, &plan, 7);
    }
    assert_eq!((s.stats().prefix_queries, s.stats().num_waiting), (40, 1));
    s.abort(RequestId(0));
    let plan = s.plan();
    assert_eq!((plan.spans[0].start, plan.spans[0].cached, plan.spans[0].tokens.len()), (32, 32, 38));
    assert_eq!((s.stats().prefix_queries, s.stats().prefix_hits, s.stats().prompt_tokens_computed), (110, 32, 78));

    // Off: nothing is counted.
    let mut s = scheduler(SchedConfig { enable_prefix_caching: false, ..caching });
    s.submit(same(0)).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    assert_eq!((s.stats().prefix_queries, s.stats().prompt_tokens), (0, 40));
}

#[test]
fn s8_a_resumption_is_counted_apart() {
    let mut s = scheduler(SchedConfig { enable_prefix_caching: true, ..config(5, 16) });
    s.submit(request(0, 30, 30)).unwrap();
    s.submit(request(1, 30, 20)).unwrap();
    drain(&mut s);
    let stats = s.stats();
    assert!(stats.preemptions > 0 && stats.tokens_lost > 0);
    assert_eq!((stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens), (60, 0, 60));
    assert!(stats.resumed_prefix_queries > 30 && stats.resumed_prefix_hits >= 16, "{stats:?}");
}

#[test]
fn s10_the_lower_priority_is_preempted_though_it_came_first() {
    let mut s = scheduler(SchedConfig { policy: Policy::Priority, ..config(4, 16) });
    s.submit(Request { priority: 1, ..request(0, 30, 20) }).unwrap();
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 30)]);
    commit_all(&mut s, &plan, 100);

    s.submit(Request { priority: 0, ..request(1, 32, 3) }).unwrap();
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 1), (1, 32)]);
    assert_eq!((s.stats().num_running, s.stats().blocks_free), (2, 0));
    commit_all(&mut s, &plan, 100);

    let plan = s.plan();
    assert_eq!((spans(&plan), plan.preempted.clone()), (vec![(1, 1)], vec![RequestId(0)]));
    assert_eq!(plan.released, [seq(0, 0)]);
    assert_eq!((s.stats().preemptions, s.stats().tokens_lost), (1, 31));
    commit_all(&mut s, &plan, 100);
    let plan = s.plan();
    assert_eq!((spans(&plan), s.stats().num_waiting), (vec![(1, 1)], 1));
    commit_all(&mut s, &plan, 100); // its third token: High has finished

    let plan = s.plan();
    assert_eq!((spans(&plan), plan.spans[0].start), (vec![(0, 32)], 0));
    assert_eq!((plan.spans[0].tokens[29..].to_vec(), plan.spans[0].sample.clone()), (vec![1029, 100, 100], 0..1));
}

#[test]
fn s10_a_preempted_request_returns_before_later_equals() {
    let mut s = scheduler(config(4, 16));
    s.submit(request(0, 32, 10)).unwrap();
    s.submit(request(1, 31, 10)).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    s.submit(request(2, 10, 10)).unwrap();
    let plan = s.plan();
    assert_eq!(plan.preempted, [RequestId(1)], "least work to lose");
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 1)], "request 2 would fit, but request 1 is before it");
    commit_all(&mut s, &plan, 7);
    s.abort(RequestId(0));
    assert_eq!(spans(&s.plan()), [(1, 32), (2, 10)]);
}

#[test]
fn s11_what_can_never_fit_is_refused_with_the_numbers_and_the_next_runs() {
    let mut s = scheduler(config(49, 16));
    let refusal = s.submit(request(0, 1000, 1)).unwrap_err();
    assert_eq!(refusal, Refusal::NeverFits { needed: 63, pool: 49, longest_prompt: 784 });
    assert_eq!(
        refusal.to_string(),
        "needs 63 blocks, the pool holds 49; the longest prompt that fits is 784 tokens"
    );
    s.submit(request(1, 784, 1)).unwrap();
    assert_eq!(spans(&s.plan()), [(1, 784)]);
}

#[test]
fn s11_each_refusal_says_what_is_wrong() {
    let mut s = scheduler(config(49, 16));
    let mut message = |request| s.submit(request).unwrap_err().to_string();
    assert_eq!(message(request(0, 0, 1)), "the prompt is empty: at least one token is needed");
    assert_eq!(message(request(0, 1, 0)), "max_tokens is 0: at least one token is needed");
    assert_eq!(message(Request { n: 0, ..request(0, 1, 1) }), "n is 0: at least one sequence is needed");
    assert_eq!(
        message(Request { n: 17, ..request(0, 1, 1) }),
        "n is 17, but at most 16 sequences run at once (--max-num-seqs)"
    );
    assert_eq!(
        message(request(0, 2000, 49)),
        "the prompt has 2000 tokens and max_tokens is 49: together more than the context of 2048 (--max-model-len)"
    );
    s.submit(request(3, 1, 1)).unwrap();
    assert_eq!(s.submit(request(3, 1, 1)).unwrap_err().to_string(), "request 3 is live already");
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
fn s14_abort_in_the_midst_of_a_prefill_and_while_running() {
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
fn s14_abort_in_flight_frees_blocks_that_nobody_gets_before_the_commit() {
    let mut s = scheduler(config(4, 16));
    s.submit(request(0, 60, 4)).unwrap();
    let plan = s.plan();
    assert!(s.abort(RequestId(0)));
    assert!(!s.has_work());
    // A new request of the same id is not given those blocks before the commit, nor the late token.
    s.submit(request(0, 20, 4)).unwrap();
    assert!(s.plan().is_empty(), "the first step is not committed yet");
    commit_all(&mut s, &plan, 42);
    assert_eq!((s.stats().blocks_in_use, s.stats().num_waiting), (0, 1));
    let plan = s.plan();
    assert_eq!((plan.released.clone(), spans(&plan)), (vec![seq(0, 0)], vec![(0, 20)]));
    commit_all(&mut s, &plan, 7);
}

#[test]
fn a_group_computes_its_prompt_once_and_forks_copy_on_write() {
    let mut s = scheduler(config(10, 16));
    s.submit(Request { n: 3, ..request(0, 20, 5) }).unwrap();
    let plan = s.plan();
    assert_eq!((spans(&plan), plan.spans[0].sample.clone()), (vec![(0, 20)], 0..3));
    commit_all(&mut s, &plan, 7);
    assert_eq!(s.stats().blocks_in_use, 2);

    let plan = s.plan();
    let copies: Vec<MemOp> = plan.memory.iter().copied().filter(|op| matches!(op, MemOp::Copy { .. })).collect();
    let copy = |dst| MemOp::Copy { src: BlockId(1), dst: BlockId(dst) };
    assert_eq!(copies, [copy(2), copy(3)], "the last of three writes in place");
    let tables: Vec<(usize, Vec<u32>)> =
        plan.spans.iter().map(|q| (q.table.keep, q.table.append.iter().map(|b| b.0).collect())).collect();
    assert_eq!(tables, [(1, vec![2]), (0, vec![0, 3]), (0, vec![0, 1])]);
    assert_eq!(plan.spans.iter().map(|q| q.slots[0]).collect::<Vec<_>>(), [36, 52, 20]);
    assert_eq!(plan.spans.iter().map(|q| q.sample.clone()).collect::<Vec<_>>(), [0..1, 1..2, 2..3]);
}

#[test]
fn a_group_comes_back_from_preemption_as_one_prompt_and_its_live_sequences() {
    // Alone it needs 1 + 2 * 2 blocks of the five; the other request of higher priority pushes it out.
    let mut s = scheduler(SchedConfig { policy: Policy::Priority, ..config(5, 4) });
    s.submit(Request { n: 2, priority: 1, ..request(0, 5, 8) }).unwrap();
    for _ in 0..2 {
        let plan = s.plan();
        commit_all(&mut s, &plan, 7);
    }
    s.submit(request(1, 4, 6)).unwrap();
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 1), (0, 1), (1, 4)]);
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    assert_eq!((spans(&plan), plan.preempted.clone()), (vec![(0, 1), (0, 1), (1, 1)], vec![]));
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    assert_eq!((spans(&plan), plan.preempted.clone()), (vec![(1, 1)], vec![RequestId(0)]));
    commit_all(&mut s, &plan, 7);
    assert!(s.finish_sequence(seq(0, 0)), "a preempted sequence may end too");
    s.abort(RequestId(1));

    // The prompt is computed as sequence 0, though that has ended; nothing is sampled from it again.
    let plan = s.plan();
    assert_eq!((plan.spans[0].seq, spans(&plan), plan.spans[0].sample.clone()), (seq(0, 0), vec![(0, 5)], 0..0));
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    assert_eq!((plan.spans[0].seq, plan.spans[0].start, spans(&plan)), (seq(0, 1), 5, vec![(0, 4)]));
    assert_eq!((plan.released.clone(), plan.spans[0].sample.clone()), (vec![seq(0, 0)], 1..2));
    commit_all(&mut s, &plan, 7);
    drain(&mut s);
    assert_eq!(s.stats().blocks_free, 5);
}

#[test]
fn a_long_prompt_does_not_stop_those_who_decode() {
    let mut s = scheduler(SchedConfig { max_num_batched_tokens: 32, ..config(100, 16) });
    (0..4).for_each(|id| s.submit(request(id, 5, 50)).unwrap());
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    s.submit(request(9, 1000, 5)).unwrap();
    for _ in 0..30 {
        let plan = s.plan();
        assert_eq!(spans(&plan), [(0, 1), (1, 1), (2, 1), (3, 1), (9, 28)]);
        commit_all(&mut s, &plan, 7);
    }
}

#[test]
fn an_admission_leaves_the_watermark_alone_unless_nothing_runs() {
    let mut s = scheduler(SchedConfig { max_model_len: 4096, max_num_batched_tokens: 4096, ..config(200, 16) });
    s.submit(request(0, 16 * 199, 5)).unwrap();
    assert_eq!(spans(&s.plan()), [(0, 16 * 199)], "alone it may take all");

    let mut s = scheduler(SchedConfig { max_model_len: 4096, max_num_batched_tokens: 4096, ..config(200, 16) });
    s.submit(request(0, 16 * 100, 5)).unwrap();
    s.submit(request(1, 16 * 99, 5)).unwrap();
    s.submit(request(2, 16 * 97, 5)).unwrap();
    assert_eq!(spans(&s.plan()), [(0, 16 * 100)], "1 would leave one block of 200, and 2 may not pass it");
}

#[test]
fn a_request_that_reads_no_cache_computes_every_row() {
    let mut s = scheduler(SchedConfig { enable_prefix_caching: true, ..config(20, 16) });
    let prompt: Vec<u32> = (0..40).collect();
    let mut starts = Vec::new();
    for (id, read_prefix_cache) in [(0, true), (1, false), (2, true)] {
        s.submit(Request { prompt: prompt.clone(), read_prefix_cache, ..request(id, 0, 1) }).unwrap();
        let plan = s.plan();
        starts.push(plan.spans[0].start);
        commit_all(&mut s, &plan, 7);
    }
    assert_eq!(starts, [0, 0, 32]);
    assert!(s.reset_prefix_cache());
    assert_eq!(s.stats().blocks_free, 20);
}

#[test]
fn a_wrong_commit_says_so_and_changes_nothing() {
    let mut s = scheduler(SchedConfig { max_num_batched_tokens: 17, ..config(20, 16) });
    s.submit(request(0, 10, 5)).unwrap();
    s.submit(request(1, 10, 5)).unwrap();
    let plan = s.plan();
    let (a, b) = (seq(0, 0), seq(1, 0));
    let outcome = |seq, tokens: &[u32]| Outcome { seq, tokens: tokens.to_vec(), finished: false };
    let mut error = |step, outcomes: &[Outcome]| s.commit(step, outcomes).unwrap_err();
    assert_eq!(
        error(StepId(7), &[]).to_string(),
        "step 7 is not in flight (step 1 is): commit each plan that has spans once, before the next"
    );
    assert_eq!(error(plan.step, &[]), CommitError::MissingToken { seq: a });
    assert_eq!(error(plan.step, &[outcome(a, &[])]), CommitError::MissingToken { seq: a });
    assert_eq!(error(plan.step, &[outcome(a, &[1]), outcome(a, &[1])]), CommitError::Duplicate { seq: a });
    assert_eq!(error(plan.step, &[outcome(seq(5, 0), &[1])]), CommitError::Unplanned { seq: seq(5, 0) });
    let expected = CommitError::TooManyTokens { seq: b, found: 1, expected: 0 };
    assert_eq!(error(plan.step, &[outcome(a, &[1]), outcome(b, &[1])]), expected);
    s.commit(plan.step, &[outcome(a, &[1])]).unwrap();
    assert!(matches!(s.commit(plan.step, &[outcome(a, &[1])]), Err(CommitError::NotInFlight { in_flight: None, .. })));
    assert_eq!(spans(&s.plan()), [(0, 1), (1, 3)]);
}

#[test]
fn a_configuration_under_which_something_could_starve_is_refused() {
    let message = |config| Scheduler::new(config).err().map(|e| e.to_string()).unwrap_or_default();
    let text = message(SchedConfig { max_num_batched_tokens: 16, ..config(10, 16) });
    assert_eq!(
        text,
        "--max-num-batched-tokens 16 must be greater than --max-num-seqs 16, or running sequences leave no token for \
         prompts: raise the former or lower the latter"
    );
    let text = message(SchedConfig { enable_chunked_prefill: false, ..config(10, 16) });
    assert!(text.starts_with("--max-num-batched-tokens 1024 is less than --max-model-len 2048: without --enable-chunked"));
    assert_eq!(message(SchedConfig { max_num_seqs: 0, ..config(10, 16) }), "--max-num-seqs: found 0, expected at least 1");
    assert_eq!(message(config(0, 16)), "num_blocks: found 0, expected 1 to 4294967294");
}
