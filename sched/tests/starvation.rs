//! Under endless arrivals each request ends, within a number of plans that the test computes. The oldest request is not
//! preempted again after three preemptions.

use std::cell::Cell;
use std::collections::VecDeque;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use sched::{Request, RequestId, SchedConfig, Scheduler, StepPlan};

use crate::common::outcomes;

/// Shape of a request: prompt, sequences, output tokens.
type Shape = (usize, usize, usize);

/// Tokens that a request of this shape computes.
fn work((prompt, n, max_tokens): Shape) -> usize {
    prompt + n * (max_tokens - 1)
}

fn request(id: u64, (prompt, n, max_tokens): Shape) -> Request {
    Request { n, ..Request::new(RequestId(id), vec![id as u32; prompt], max_tokens) }
}

fn is_live(scheduler: &Scheduler, id: u64) -> bool {
    scheduler.requests().any(|request| request.id() == RequestId(id))
}

/// Plans until request `watched` has ended, with at least four others waiting at each plan and these prompt budgets in turn.
/// Returns how often it was preempted.
fn watch(
    config: &SchedConfig,
    watched: Shape,
    (others, before): (&[Shape], u64),
    budgets: &[usize],
) -> Result<usize, TestCaseError> {
    let mut s = Scheduler::new(config.clone()).unwrap();
    // A shape that can never run is refused and would leave the queue empty.
    let mut fitting: Vec<Shape> = others.to_vec();
    fitting.retain(|shape| Scheduler::new(config.clone()).unwrap().submit(request(0, *shape)).is_ok());
    fitting.push((4, 1, 8));
    let mut stream = fitting.iter().cycle();
    // Four plans per token of the watched request, of those before it, and of as many others as can run at once. The progress
    // theorem allows more, but plans compute many tokens, and few are computed again.
    let mut tokens = work(watched) + config.max_num_seqs * others.iter().copied().map(work).max().unwrap_or(0).max(11);
    for id in 0..before {
        let shape = *stream.next().unwrap();
        tokens += work(shape);
        s.submit(request(id, shape)).unwrap();
    }
    let bound = 4 * tokens;
    s.submit(request(before, watched)).unwrap();
    let mut next = before + 1;
    let mut in_flight: VecDeque<StepPlan> = VecDeque::new();
    let (mut plans, mut preempted) = (0, 0);
    while is_live(&s, before) {
        plans += 1;
        prop_assert!(plans <= bound, "not ended after {bound} plans");
        while s.stats().num_waiting < 4 {
            s.submit(request(next, *stream.next().unwrap())).unwrap();
            next += 1;
        }
        let is_oldest = !(0..before).any(|id| is_live(&s, id));
        s.set_prompt_budget(budgets[plans % budgets.len()]);
        let plan = s.plan();
        if plan.preempted.contains(&RequestId(before)) {
            prop_assert!(
                !is_oldest || preempted < 3,
                "preempted again, although it is the oldest and was preempted {preempted} times"
            );
            preempted += 1;
        }
        s.submitted(plan.step).unwrap();
        let is_idle = plan.spans.is_empty();
        if !is_idle {
            in_flight.push_back(plan);
        }
        while in_flight.len() >= config.max_in_flight || is_idle && !in_flight.is_empty() {
            let plan = in_flight.pop_front().unwrap();
            s.commit(plan.step, &outcomes(&plan, 1)).unwrap();
        }
    }
    Ok(preempted)
}

#[test]
fn every_request_ends_under_endless_arrivals() {
    let depth = prop_oneof![(1..3usize, Just(false)), (1..5usize, Just(true))];
    let pool = (12..24usize, 3..9usize, 1..30usize, prop_oneof![Just(0), 1..12usize], depth);
    let watched = (1..4usize, Just(1usize), 20..40usize);
    let others = prop::collection::vec((1..24usize, 1..3usize, 4..24usize), 1..12);
    let budgets = prop::collection::vec(prop_oneof![0..4usize, Just(usize::MAX)], 1..5);
    let config = ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() };
    let aged = Cell::new(0);
    let run = TestRunner::new(config).run(
        &(pool, watched, (others, 0..6u64), budgets),
        |(pool, watched, others, budgets)| {
            let (num_blocks, max_num_seqs, extra, host_blocks, (max_in_flight, pipeline)) = pool;
            let config = SchedConfig {
                max_num_seqs,
                max_num_batched_tokens: max_num_seqs + extra,
                enable_prefix_caching: false,
                host_blocks,
                max_in_flight,
                pipeline,
                ..SchedConfig::new(num_blocks, 4)
            };
            let preempted = watch(&config, watched, (&others.0, others.1), &budgets)?;
            aged.set(aged.get() + usize::from(preempted >= 3));
            Ok(())
        },
    );
    run.unwrap();
    println!("{} of 150 were preempted three times or more", aged.get());
    assert!(aged.get() > 0, "no request was preempted three times, so nothing was tested");
}
