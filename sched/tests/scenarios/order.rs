//! Who runs in which step, and who gives way.

use sched::{Policy, Request, RequestId, SchedConfig};

use crate::common::{commit_all, config, request, sampled, seq, spans};
use crate::scheduler;

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
    let mut s = scheduler(SchedConfig { long_prefill_token_threshold: 400, ..config(200, 16) });
    (0..3).for_each(|id| s.submit(request(id, 800, 5)).unwrap());
    let mut steps = Vec::new();
    for _ in 0..3 {
        let plan = s.plan();
        let whose: Vec<u64> = sampled(&plan).map(|q| q.request.0).collect();
        steps.push((spans(&plan), whose));
        commit_all(&mut s, &plan, 7);
    }
    assert_eq!(steps[0], (vec![(0, 400), (1, 400), (2, 224)], vec![]));
    assert_eq!(steps[1], (vec![(0, 400), (1, 400), (2, 224)], vec![0, 1]));
    assert_eq!(steps[2], (vec![(0, 1), (1, 1), (2, 352)], vec![0, 1, 2]));
}

#[test]
fn s3_without_a_limit_per_request_the_first_prompt_takes_what_it_needs() {
    let mut s = scheduler(config(200, 16));
    (0..3).for_each(|id| s.submit(request(id, 800, 5)).unwrap());
    let mut steps = Vec::new();
    for _ in 0..3 {
        let plan = s.plan();
        steps.push(spans(&plan));
        commit_all(&mut s, &plan, 7);
    }
    assert_eq!(steps, [vec![(0, 800), (1, 224)], vec![(0, 1), (1, 576), (2, 447)], vec![(0, 1), (1, 1), (2, 353)]]);
}

#[test]
fn a_long_prompt_leaves_room_for_short_ones_behind_it() {
    let limits = SchedConfig { long_prefill_token_threshold: 100, max_num_batched_tokens: 128, ..config(200, 16) };
    let mut s = scheduler(limits);
    s.submit(request(0, 1000, 5)).unwrap();
    s.submit(request(1, 10, 5)).unwrap();
    s.submit(request(2, 10, 5)).unwrap();
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 100), (1, 10), (2, 10)]);
    commit_all(&mut s, &plan, 7);
    assert_eq!(spans(&s.plan()), [(1, 1), (2, 1), (0, 100)]);
}

#[test]
fn no_more_prompts_than_the_limit_are_computed_in_part() {
    for (max_num_partial_prefills, first) in [(1, vec![(0, 400)]), (2, vec![(0, 400), (1, 400)])] {
        let limits = SchedConfig { long_prefill_token_threshold: 400, max_num_partial_prefills, ..config(200, 16) };
        let mut s = scheduler(limits);
        (0..3).for_each(|id| s.submit(request(id, 700, 5)).unwrap());
        let plan = s.plan();
        assert_eq!(spans(&plan), first);
        commit_all(&mut s, &plan, 7);
        // With the last chunk of one planned, the next begins in the same step.
        assert_eq!(spans(&s.plan())[first.len()..], [(first.len() as u64, 400)]);
    }
}

#[test]
fn who_was_preempted_three_times_is_not_preempted_by_newcomers_again() {
    // Prompts of one token with eight sequences do eight tokens of work in each step, the old one only two; so by
    // work alone it would lose to every newcomer, for ever.
    let mut s = scheduler(SchedConfig { long_prefill_token_threshold: 2, ..config(30, 4) });
    s.submit(request(0, 32, 20)).unwrap();
    let (mut newest, mut preempted, mut said) = (0, 0, 0);
    for _ in 0..200 {
        if s.stats().num_waiting < 2 {
            newest += 1;
            s.submit(Request { n: 8, ..request(newest, 1, 12) }).unwrap();
        }
        let plan = s.plan();
        preempted += plan.preempted.iter().filter(|id| id.0 == 0).count();
        said += sampled(&plan).filter(|q| q.request.0 == 0).count();
        commit_all(&mut s, &plan, 7);
    }
    assert_eq!((preempted, said), (3, 20));
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
fn s10_a_preempted_request_returns_before_later_equals() {
    let mut s = scheduler(config(4, 16));
    s.submit(request(0, 32, 10)).unwrap();
    s.submit(request(1, 31, 10)).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    s.submit(request(2, 10, 10)).unwrap();
    let plan = s.plan();
    assert_eq!(plan.preempted, [RequestId(1)], "least work to lose");
    assert_eq!((s.stats().preemptions, s.stats().preemptions_by_priority), (1, 0));
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 1)], "request 2 would fit, but request 1 is before it");
    commit_all(&mut s, &plan, 7);
    s.abort(RequestId(0));
    assert_eq!(spans(&s.plan()), [(1, 32), (2, 10)]);
}

#[test]
fn of_two_prefills_under_way_the_one_with_more_work_done_goes_first() {
    let priority = SchedConfig { policy: Policy::Priority, max_num_batched_tokens: 20, ..config(16, 4) };
    let mut s = scheduler(priority);
    s.submit(Request { n: 2, priority: 1, ..request(0, 2, 12) }).unwrap();
    s.submit(Request { n: 2, priority: 1, ..request(1, 3, 12) }).unwrap();
    for _ in 0..9 {
        let plan = s.plan();
        commit_all(&mut s, &plan, 7);
    }
    // Eight sequences fork from four full blocks and want a block each: both groups have to go.
    s.submit(Request { n: 8, ..request(2, 16, 2) }).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    let plan = s.plan();
    assert_eq!(plan.preempted, [RequestId(0), RequestId(1)], "the one with less work to lose first");
    commit_all(&mut s, &plan, 7);

    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 2), (1, 3)], "they come back in order of arrival");
    commit_all(&mut s, &plan, 7);
    assert_eq!(spans(&s.plan()), [(1, 10), (1, 10)], "but the second has one token more to lose");
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
