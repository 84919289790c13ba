//! Which requests run in which step, and which are preempted.

use sched::{BACKGROUND, CacheGroup, Outcome, Policy, PreemptionMode, Request, RequestId, SchedConfig, Scheduler};

use super::{scheduler, step};
use crate::common::{commit_all, config, request, sampled, seq, spans};

#[test]
fn s2_prompts_that_fit_the_budget_are_scheduled_completely_and_in_order() {
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
    // The admission of the third gets half of the 1,023 tokens that the decode leaves.
    assert_eq!(steps[1], (vec![(0, 1), (1, 512), (2, 511)], vec![0]));
    assert_eq!(steps[2], (vec![(0, 1), (1, 64), (2, 289)], vec![0, 1, 2]));
}

#[test]
fn prompts_beside_decodes_share_the_prompt_budget_and_decodes_and_drafts_take_none_of_it() {
    let mut s = scheduler(config(200, 16));
    s.set_prompt_budget(100);
    s.submit(request(0, 800, 9)).unwrap();
    // Nobody decodes.
    assert_eq!((s.num_decode_rows(), spans(&step(&mut s))), (0, vec![(0, 800)]));
    s.submit(request(1, 150, 5)).unwrap();
    s.submit(request(2, 150, 5)).unwrap();
    assert!(s.propose(seq(0, 0), vec![7; 4]));
    assert_eq!(s.num_sequences_in_reach(), 3);
    assert_eq!((s.num_decode_rows(), spans(&step(&mut s))), (5, vec![(0, 5), (1, 100)]));
    assert_eq!(spans(&step(&mut s)), [(0, 1), (1, 50), (2, 50)]);
    s.set_prompt_budget(0);
    assert_eq!(spans(&step(&mut s)), [(0, 1), (1, 1), (2, 1)], "one prompt token is computed at least");
    s.set_prompt_budget(usize::MAX);
    assert_eq!(spans(&step(&mut s)), [(0, 1), (1, 1), (2, 99)]);
}

#[test]
fn without_chunked_prefill_a_prompt_that_exceeds_the_prompt_budget_is_computed_in_one_step() {
    let mut s = scheduler(SchedConfig { enable_chunked_prefill: false, max_model_len: 1000, ..config(200, 16) });
    s.set_prompt_budget(100);
    s.submit(request(0, 10, 5)).unwrap();
    step(&mut s);
    s.submit(request(1, 500, 5)).unwrap();
    assert_eq!(spans(&s.plan()), [(0, 1), (1, 500)]);
}

/// Plans until no request is left. Returns the requests in the order in which they ended, with the number of their last plan.
fn order_of_ends(s: &mut Scheduler) -> Vec<(u64, usize)> {
    let mut ends = Vec::new();
    for plan in 1.. {
        let before: Vec<u64> = s.requests().map(|request| request.id().0).collect();
        if before.is_empty() {
            break;
        }
        step(s);
        let is_live = |id: &u64| s.requests().any(|request| request.id().0 == *id);
        ends.extend(before.into_iter().filter(|id| !is_live(id)).map(|id| (id, plan)));
    }
    ends
}

#[test]
fn a_short_prompt_ends_before_long_ones_that_came_before_it() {
    let mut s = scheduler(SchedConfig { max_num_batched_tokens: 64, ..config(1000, 16) });
    (0..6).for_each(|id| s.submit(request(id, 900, 1)).unwrap());
    step(&mut s);
    s.submit(request(6, 8, 1)).unwrap();
    s.submit(request(7, 100, 1)).unwrap();
    // Five long prompts are admitted, one in each plan, with half of its tokens. In the sixth plan the short one is computed,
    // and the next gets the other 24. Of its other 76 each plan computes half of a budget.
    let ends = order_of_ends(&mut s);
    assert_eq!(ends[..2], [(6, 6), (7, 9)], "{ends:?}");
    assert_eq!(ends[2..].iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(ends[7].1, (6 * 900 + 8 + 100 - 64_usize).div_ceil(64), "no token of a budget is left out");
}

#[test]
fn a_long_prompt_ends_although_short_ones_arrive_without_end() {
    let mut s = scheduler(SchedConfig { max_num_batched_tokens: 64, ..config(1000, 16) });
    s.submit(request(0, 900, 1)).unwrap();
    let mut plans = 0;
    while s.requests().any(|request| request.id() == RequestId(0)) {
        // More than a plan can compute.
        (1..=3).for_each(|k| s.submit(request(3 * plans + k, 40, 1)).unwrap());
        plans += 1;
        step(&mut s);
    }
    assert_eq!(plans, 1 + (900 - 64_u64).div_ceil(32), "half of each plan after the first");
}

#[test]
fn an_admission_takes_no_tokens_from_a_prompt_of_higher_priority() {
    let mut s = scheduler(SchedConfig { max_num_batched_tokens: 64, policy: Policy::Priority, ..config(1000, 16) });
    s.submit(Request { priority: 1, ..request(0, 900, 1) }).unwrap();
    step(&mut s);
    s.submit(Request { priority: 2, ..request(1, 900, 1) }).unwrap();
    assert_eq!(spans(&step(&mut s)), [(0, 64)]);
    s.submit(Request { priority: 0, ..request(2, 900, 1) }).unwrap();
    assert_eq!(spans(&step(&mut s)), [(0, 32), (2, 32)]);
    assert_eq!(spans(&step(&mut s)), [(2, 64)], "it goes first now, and is not interrupted");
}

#[test]
fn background_work_yields_tokens_and_blocks_under_every_policy() {
    for policy in [Policy::Fcfs, Policy::Priority] {
        let mut s = scheduler(SchedConfig { max_num_batched_tokens: 64, policy, ..config(1000, 16) });
        (0..2).for_each(|id| s.submit(Request { priority: BACKGROUND, ..request(id, 900, 1) }).unwrap());
        assert_eq!(spans(&step(&mut s)), [(0, 64)]);
        s.submit(Request { priority: i32::MAX - 1, ..request(2, 900, 1) }).unwrap();
        assert_eq!(spans(&step(&mut s)), [(0, 32), (2, 32)]);
        assert_eq!(spans(&step(&mut s)), [(2, 64)]);

        let mut s = scheduler(SchedConfig { policy, ..config(4, 16) });
        s.submit(Request { priority: BACKGROUND, ..request(0, 30, 20) }).unwrap();
        step(&mut s);
        s.submit(request(1, 32, 3)).unwrap();
        assert_eq!(spans(&step(&mut s)), [(0, 1), (1, 32)]);
        assert_eq!(step(&mut s).preempted, [RequestId(0)]);
    }
}

#[test]
fn a_request_preempted_three_times_is_not_preempted_for_newcomers_again() {
    // Newcomers with eight sequences compute eight tokens in each step, the old request only two. By work alone it
    // would lose to every newcomer forever.
    let mut s = scheduler(SchedConfig { max_num_seqs: 9, max_num_batched_tokens: 10, ..config(30, 4) });
    s.submit(request(0, 32, 20)).unwrap();
    let (mut newest, mut preempted, mut outputs) = (0, 0, 0);
    for _ in 0..200 {
        if s.stats().num_waiting < 2 {
            newest += 1;
            s.submit(Request { n: 8, ..request(newest, 1, 12) }).unwrap();
        }
        let plan = s.plan();
        preempted += plan.preempted.iter().filter(|id| id.0 == 0).count();
        outputs += sampled(&plan).filter(|q| q.request.0 == 0).count();
        commit_all(&mut s, &plan, 7);
    }
    assert_eq!((preempted, outputs), (3, 20));
}

#[test]
fn s4_short_prompts_do_not_overtake_the_head_of_the_queue() {
    for (chunked, admitted) in [(true, vec![(0, 800), (1, 224)]), (false, vec![(0, 800)])] {
        let mut s = scheduler(SchedConfig { enable_chunked_prefill: chunked, max_model_len: 1024, ..config(200, 16) });
        for (id, len) in [800, 800, 10, 10].into_iter().enumerate() {
            s.submit(request(id as u64, len, 5)).unwrap();
        }
        assert_eq!(spans(&s.plan()), admitted);
    }
}

#[test]
fn s10_the_lower_priority_is_preempted_although_it_came_first() {
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
    assert_eq!((s.stats().preemptions, s.stats().preemptions_by_priority, s.stats().tokens_lost), (1, 1, 31));
    commit_all(&mut s, &plan, 100);
    let plan = s.plan();
    assert_eq!((spans(&plan), s.stats().num_waiting), (vec![(1, 1)], 1));
    commit_all(&mut s, &plan, 100); // its third token: High has finished

    let plan = s.plan();
    assert_eq!((spans(&plan), plan.spans[0].start), (vec![(0, 32)], 0));
    assert_eq!((plan.spans[0].tokens[29..].to_vec(), plan.spans[0].sample.clone()), (vec![1029, 100, 100], 0..1));
}

#[test]
fn s10_a_preempted_request_is_admitted_before_later_ones_of_equal_priority() {
    let mut s = scheduler(config(4, 16));
    s.submit(request(0, 32, 10)).unwrap();
    s.submit(request(1, 31, 10)).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    s.submit(request(2, 10, 10)).unwrap();
    let plan = s.plan();
    assert_eq!(plan.preempted, [RequestId(1)], "the least work to lose");
    assert_eq!((s.stats().preemptions, s.stats().preemptions_by_priority), (1, 0));
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 1)], "request 2 would fit, but request 1 comes first");
    commit_all(&mut s, &plan, 7);
    s.abort(RequestId(0));
    assert_eq!(spans(&s.plan()), [(1, 32), (2, 10)]);
}

#[test]
fn a_long_prompt_does_not_block_decodes() {
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
fn an_admission_keeps_the_watermark_free_unless_nothing_runs() {
    let mut s = scheduler(SchedConfig { max_model_len: 4096, max_num_batched_tokens: 4096, ..config(200, 16) });
    s.submit(request(0, 16 * 199, 5)).unwrap();
    assert_eq!(spans(&s.plan()), [(0, 16 * 199)], "alone it can use all blocks");

    let mut s = scheduler(SchedConfig { max_model_len: 4096, max_num_batched_tokens: 4096, ..config(200, 16) });
    s.submit(request(0, 16 * 100, 5)).unwrap();
    s.submit(request(1, 16 * 99, 5)).unwrap();
    s.submit(request(2, 16 * 97, 5)).unwrap();
    assert_eq!(
        spans(&s.plan()),
        [(0, 16 * 100)],
        "request 1 would leave one block of 200, and request 2 cannot overtake it"
    );
}

#[test]
fn blocks_freed_behind_a_window_wake_the_head_of_the_queue() {
    let sliding = vec![CacheGroup::Sliding { window: 4 }];
    // Prompts of 16 blocks in a pool of 6. Each owns at most four: its window, its chunk and one block.
    let mut s = scheduler(SchedConfig { max_num_seqs: 4, max_num_batched_tokens: 8, groups: sliding, ..config(6, 4) });
    s.submit(request(0, 64, 2)).unwrap();
    s.submit(request(1, 32, 2)).unwrap();
    let mut admitted = 1;
    while !spans(&step(&mut s)).iter().any(|(id, _)| *id == 1) {
        assert!(s.stats().blocks_in_use <= 4, "{:?}", s.stats());
        admitted += 1;
    }
    // The last chunk of the first request leaves three blocks free, its first decode four.
    assert_eq!(admitted, 9, "the plan that admits the second request");
}

#[test]
fn blocks_of_rejected_drafts_wake_the_head_of_the_queue() {
    let mut s = scheduler(SchedConfig { max_in_flight: 2, ..config(8, 4) });
    s.submit(request(0, 10, 20)).unwrap();
    step(&mut s);
    assert!(s.propose(seq(0, 0), vec![1; 13]));
    let drafting = s.plan();
    s.submitted(drafting.step).unwrap();
    assert_eq!((spans(&drafting), s.stats().blocks_free), (vec![(0, 14)], 2));
    s.submit(request(1, 16, 1)).unwrap();
    assert!(s.plan().is_empty(), "the head needs four blocks");
    s.commit(drafting.step, &[Outcome::token(seq(0, 0), 9, false)]).unwrap();
    assert_eq!(spans(&s.plan()), [(0, 1), (1, 16)], "three blocks were freed");
}

#[test]
fn a_partly_computed_prompt_wakes_a_head_that_shares_it() {
    let caching = SchedConfig { enable_prefix_caching: true, ..config(10, 4) };
    let mut s = scheduler(SchedConfig { max_num_seqs: 4, max_num_batched_tokens: 8, ..caching });
    s.submit(request(0, 28, 2)).unwrap();
    let shared = Request { id: RequestId(1), ..request(0, 28, 2) };
    s.submit(shared).unwrap();
    // The first request reserves seven of ten blocks. The second needs seven minus those that are cached: three suffice
    // after the second chunk.
    let mut plans = 1;
    let cached = loop {
        let plan = step(&mut s);
        if let Some(span) = plan.spans.iter().find(|span| span.seq.request == RequestId(1)) {
            break span.cached;
        }
        plans += 1;
    };
    assert_eq!((plans, cached), (3, 16));
}

#[test]
fn many_requests_that_end_in_one_step_leave_the_others_in_order() {
    let config = SchedConfig { max_num_seqs: 64, ..config(400, 4) };
    let mut s = scheduler(config);
    (0..64).for_each(|id| s.submit(request(id, 4, if id % 3 == 0 { 9 } else { 2 })).unwrap());
    step(&mut s);
    step(&mut s);
    let left: Vec<u64> = (0..64).filter(|id| id % 3 == 0).collect();
    assert_eq!(s.requests().map(|r| r.id().0).collect::<Vec<_>>(), left);
    s.submit(request(64, 4, 2)).unwrap();
    let plan = step(&mut s);
    assert_eq!(spans(&plan).iter().map(|(id, _)| *id).collect::<Vec<_>>(), [&left[..], &[64]].concat());
}

/// As [`step`], without the audit, which hashes all blocks.
fn unaudited_step(s: &mut Scheduler) {
    let plan = s.plan();
    let outcomes: Vec<Outcome> = sampled(&plan).map(|seq| Outcome::token(seq, 7, false)).collect();
    s.commit(plan.step, &outcomes).unwrap();
}

#[test]
fn a_blocked_head_is_hashed_once_however_often_it_is_looked_up() {
    let caching = SchedConfig { enable_prefix_caching: true, ..config(40, 4) };
    let mut s = scheduler(caching);
    for id in 0..4 {
        s.submit(request(id, 4, 3 + id as usize)).unwrap();
    }
    s.submit(request(4, 156, 2)).unwrap();
    // The four requests end one after the other. Each end wakes the head, which fits after the last.
    while s.stats().num_waiting > 0 {
        unaudited_step(&mut s);
    }
    // 38 hashes for all lookups of the head, 39 when it is computed, and at most two blocks of each of the others.
    let hashed = s.pool().counters().hashed;
    assert!((38 + 39..=38 + 39 + 8).contains(&hashed), "{hashed}");
}

#[test]
fn a_request_that_is_swapped_in_is_not_hashed_again() {
    let swapping = SchedConfig {
        enable_prefix_caching: true,
        host_blocks: 20,
        preemption_mode: PreemptionMode::Swap,
        ..config(10, 4)
    };
    let mut s = scheduler(swapping);
    s.submit(request(0, 16, 12)).unwrap();
    s.submit(request(1, 16, 12)).unwrap();
    while s.stats().num_swapped == 0 {
        unaudited_step(&mut s);
    }
    while s.stats().num_swapped > 0 {
        unaudited_step(&mut s);
    }
    while s.has_work() {
        unaudited_step(&mut s);
    }
    // Each prompt is hashed for its lookup (3 blocks) and its commit (4), and each further full block once (2).
    assert_eq!(s.pool().counters().hashed, 2 * (3 + 4 + 2));
}

#[test]
fn a_held_sequence_draws_nothing_and_delays_no_other() {
    let mut s = Scheduler::new(SchedConfig { max_num_batched_tokens: 8, max_num_seqs: 4, ..config(40, 4) }).unwrap();
    s.submit(Request { n: 2, ..request(0, 12, 6) }).unwrap();
    s.submit(request(1, 2, 20)).unwrap();
    // A prompt is computed in chunks, up to its last token.
    let mut drawn = [0; 2];
    let mut advance = |s: &mut Scheduler| {
        let plan = s.plan();
        sampled(&plan).for_each(|seq| drawn[seq.request.0 as usize] += 1);
        if !plan.spans.is_empty() {
            commit_all(s, &plan, 7);
        }
        (spans(&plan), drawn)
    };
    advance(&mut s);
    assert!(s.hold(seq(0, 0), true));
    for _ in 0..4 {
        advance(&mut s);
    }
    assert_eq!(advance(&mut s), (vec![(1, 1)], [0, 5]));
    s.hold(seq(0, 0), false);
    assert_eq!(advance(&mut s), (vec![(0, 1), (1, 1)], [2, 6]));
    // The other sequence of the request goes on.
    s.hold(seq(0, 1), true);
    assert_eq!(advance(&mut s), (vec![(0, 1), (1, 1)], [3, 7]));
    s.hold(seq(0, 1), false);
    assert_eq!(advance(&mut s), (vec![(0, 1), (0, 1), (1, 1)], [5, 8]));
    // With nothing else to compute the plan is empty, and nothing is lost.
    s.abort(RequestId(1));
    assert!(s.hold(seq(0, 0), true) && s.hold(seq(0, 1), true));
    assert_eq!(advance(&mut s), (vec![], [5, 8]));
    assert!(!s.hold(seq(0, 2), true) && !s.hold(seq(1, 0), true));
    s.hold(seq(0, 0), false);
    assert_eq!(advance(&mut s), (vec![(0, 1)], [6, 8]));
}
