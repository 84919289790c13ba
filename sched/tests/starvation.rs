//! Others never stop coming, and each request ends all the same: within a number of plans that the test computes.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use proptest::prelude::*;
use sched::{Outcome, Request, RequestId, SchedConfig, Scheduler, StepPlan};

/// Shape of a request: prompt, sequences, output tokens.
type Shape = (usize, usize, usize);

/// Everybody who came before the watched request and itself are, one after the other, the oldest. The oldest runs, or is
/// at the head of the line while those who run or are swapped out end by the progress theorem; each preemption of it is
/// one such round, and after the third nobody stands before it.
fn bound(config: &SchedConfig, before: usize, most: Shape) -> usize {
    let (requests, (prompt, n, max_tokens)) = (config.max_num_seqs + config.host_blocks, most);
    let work = prompt + n * (max_tokens - 1);
    let round = (2 * config.max_in_flight - 1) * config.max_num_seqs * ((requests + 1) * work + 1);
    (before + 1) * 4 * round
}

fn outcomes(plan: &StepPlan) -> Vec<Outcome> {
    let sampled = plan.spans.iter().flat_map(|s| s.sample.clone().map(|index| sched::SeqId { index, ..s.seq }));
    sampled.map(|seq| Outcome::token(seq, 1, false)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_request_ends_though_others_never_stop_coming(
        (num_blocks, max_num_seqs, extra, host_blocks, max_in_flight) in (12..24usize, 3..9usize, 1..30usize, prop_oneof![Just(0), 1..12usize], 1..3usize),
        watched in (1..4usize, Just(1usize), 20..40usize),
        others in prop::collection::vec((1..24usize, 1..3usize, 4..24usize), 1..12),
        before in 0..6usize,
    ) {
        let config = SchedConfig {
            max_num_seqs,
            max_num_batched_tokens: max_num_seqs + extra,
            enable_prefix_caching: false,
            host_blocks,
            max_in_flight,
            ..SchedConfig::new(num_blocks, 4)
        };
        let mut s = Scheduler::new(config.clone()).unwrap();
        let mut next = 0u64;
        let mut submit = |s: &mut Scheduler, (prompt, n, max_tokens): Shape| {
            let (id, prompt) = (RequestId(next), vec![next as u32; prompt]);
            next += 1;
            let (beam_search, priority, cache_salt, read_prefix_cache) = (false, 0, None, true);
            let taken = s.submit(Request { id, prompt, n, beam_search, max_tokens, priority, cache_salt, read_prefix_cache });
            taken.is_ok().then_some(id)
        };
        let mut stream = others.iter().copied().cycle();
        for _ in 0..before {
            submit(&mut s, stream.next().unwrap());
        }
        let watched = submit(&mut s, watched);
        prop_assume!(watched.is_some(), "it can never fit");
        let watched = watched.unwrap();
        let most = others.iter().fold((4, 2, 40), |m: Shape, o| (m.0.max(o.0), m.1.max(o.1), m.2.max(o.2)));
        let bound = bound(&config, before, most);
        let mut flying: VecDeque<StepPlan> = VecDeque::new();
        let (mut plans, mut wanted) = (0, 0);
        // It is live as long as its id is taken.
        let is_live = |s: &mut Scheduler| {
            let again = Request {
                id: watched, prompt: vec![0], n: 1, beam_search: false, max_tokens: 1, priority: 0, cache_salt: None, read_prefix_cache: true,
            };
            let taken = s.submit(again).is_ok();
            if taken {
                s.abort(watched);
            }
            !taken
        };
        while is_live(&mut s) {
            plans += 1;
            prop_assert!(plans <= bound, "not ended after {bound} plans");
            // The line is never empty, however many shapes fit.
            while s.stats().num_waiting < 4 && wanted < 40 * plans {
                wanted += 1;
                submit(&mut s, stream.next().unwrap());
            }
            let plan = s.plan();
            s.submitted(plan.step).unwrap();
            let is_idle = plan.spans.is_empty();
            if !is_idle {
                flying.push_back(plan);
            }
            while flying.len() >= max_in_flight || is_idle && !flying.is_empty() {
                let plan = flying.pop_front().unwrap();
                s.commit(plan.step, &outcomes(&plan)).unwrap();
            }
        }
    }
}
