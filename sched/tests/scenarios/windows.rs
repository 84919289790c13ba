//! Sliding groups: the blocks that a request owns in them do not depend on its length.
use std::collections::VecDeque;

use sched::{CacheGroup, RequestId, SchedConfig, Scheduler};

use super::{scheduler, step, submit_next};
use crate::common::{commit_all, config, request, seq, spans};

#[test]
fn a_prompt_of_32k_tokens_owns_only_window_and_chunk_in_sliding_groups() {
    // One layer in six reads all positions, as in Gemma 3.
    let mut groups = vec![CacheGroup::Sliding { window: 1024 }; 5];
    groups.push(CacheGroup::Full);
    let sizes = SchedConfig { max_model_len: 40_000, max_num_batched_tokens: 2048, groups, ..config(16_384, 16) };
    let all = 32_768 / 16;
    let windowed = (1024 + 2048) / 16 + 1;
    let mut s = scheduler(SchedConfig { num_blocks: all + 1 + 5 * windowed, ..sizes.clone() });
    s.submit(request(0, 32_768, 2)).unwrap();
    let mut chunks = 0;
    while s.has_work() {
        let plan = step(&mut s);
        chunks += usize::from(spans(&plan)[0].1 == 2048);
    }
    assert_eq!((chunks, s.stats().preemptions), (16, 0), "no chunk was cut for lack of blocks");
    let peak = s.stats().blocks_peak;
    assert!(
        (all..=all + 1 + 5 * windowed).contains(&peak),
        "{peak} blocks, 12,288 would be the whole prompt in each group"
    );
}

#[test]
fn in_a_pipeline_a_prompt_owns_the_window_and_the_chunks_of_all_stages_in_sliding_groups() {
    /// Computes prompts of 20,000 tokens. Returns the greatest number that was partly computed at once, and the scheduler.
    fn compute(prompts: u64, config: SchedConfig) -> (usize, Scheduler) {
        let (mut s, mut in_flight, mut most) = (scheduler(config), VecDeque::new(), 0);
        (0..prompts).for_each(|id| s.submit(request(id, 20_000, 1)).unwrap());
        while s.has_work() {
            let plan = s.plan();
            if plan.spans.is_empty() {
                commit_all(&mut s, &in_flight.pop_front().unwrap(), 7);
            } else {
                s.submitted(plan.step).unwrap();
                in_flight.push_back(plan);
            }
            most = most.max(s.requests().filter(|r| (1..19_000).contains(&r.computed_tokens())).count());
        }
        (most, s)
    }
    for stages in [1, 2, 3, 8] {
        let groups = vec![CacheGroup::Sliding { window: 1024 }];
        let sizes = SchedConfig { max_model_len: 40_000, max_num_batched_tokens: 256, ..config(1000, 16) };
        let sizes = SchedConfig { max_in_flight: stages, pipeline: true, groups, ..sizes };
        let owned = (1024 + 256 * stages) / 16 + 1;
        assert_eq!(sizes.most_blocks(20_000), owned);
        let (_, one) = compute(1, sizes.clone());
        let peak = one.stats().blocks_peak;
        assert!((owned - 1..=owned).contains(&peak), "{stages} stages: {peak} blocks, expected {owned}");
        // The blocks of all stages are reserved: a second prompt is admitted only if its blocks are left too.
        for (num_blocks, at_once) in [(2 * owned + 4, 2), (2 * owned - 4, 1)] {
            let (most, s) = compute(2, SchedConfig { num_blocks, ..sizes.clone() });
            let stats = s.stats();
            assert_eq!((most, stats.preemptions, stats.deferrals), (at_once, 0, 0), "{stages} stages, {num_blocks}");
        }
    }
}

#[test]
fn a_request_in_sliding_groups_can_be_longer_than_the_pool() {
    // With chunks of 24, spans end within blocks.
    let depths = [(1, false), (2, false), (2, true), (3, true), (5, true)];
    for ((max_in_flight, pipeline), max_num_batched_tokens) in depths.into_iter().flat_map(|d| [(d, 1024), (d, 24)]) {
        let groups = vec![CacheGroup::Sliding { window: 64 }];
        let max_model_len = 20_000;
        let sizes = SchedConfig { max_model_len, groups, max_num_batched_tokens, ..config(6, 16) };
        let sizes = SchedConfig { max_in_flight, pipeline, ..sizes };
        assert!(sizes.longest_sequence() > 20_000);
        let mut s = scheduler(sizes);
        s.submit(request(0, 10_000, 100)).unwrap();
        let (mut steps, mut in_flight) = (0, VecDeque::new());
        while s.has_work() {
            let plan = s.plan();
            let computes = !plan.spans.is_empty();
            if computes {
                s.submitted(plan.step).unwrap();
                in_flight.push_back(plan);
                steps += 1;
            }
            if !computes || in_flight.len() == max_in_flight {
                commit_all(&mut s, &in_flight.pop_front().unwrap(), 7);
            }
            assert!(steps < 20_000, "no progress");
        }
        assert_eq!((s.stats().prompt_tokens_computed, s.stats().preemptions), (10_000, 0));
        assert!(steps <= 10_000 / 16 + 1 + 100, "{steps} steps: a span ends with its block, where no more fits");
    }
}

#[test]
fn no_request_is_admitted_into_blocks_reserved_for_a_partly_computed_prompt() {
    let sizes = SchedConfig { max_num_seqs: 4, max_num_batched_tokens: 8, ..config(20, 4) };
    let mut s = scheduler(sizes);
    s.submit(request(0, 64, 2)).unwrap();
    s.submit(request(1, 32, 2)).unwrap();
    for chunk in 0..8 {
        assert_eq!(spans(&step(&mut s)), [(0, 8)], "chunk {chunk}");
    }
    assert_eq!(s.stats().blocks_in_use, 16);
    while s.has_work() {
        step(&mut s);
    }
    assert_eq!(s.stats().preemptions, 0);
}

#[test]
fn no_plan_waits_for_a_block_that_only_right_drafts_would_free() {
    let groups = vec![CacheGroup::Sliding { window: 4 }];
    let mut s = scheduler(SchedConfig { max_in_flight: 2, groups, ..config(3, 4) });
    s.submit(request(0, 7, 9)).unwrap();
    s.submit(request(1, 4, 9)).unwrap();
    step(&mut s);
    assert!(s.propose(seq(1, 0), vec![1; 3]));
    let drafting = submit_next(&mut s);
    assert_eq!((spans(&drafting), s.stats().blocks_free), (vec![(0, 1), (1, 4)], 0));
    // Request 0 needs a block. The first of request 1 falls behind its window with eight tokens, but only five are certain.
    let next = submit_next(&mut s);
    assert_eq!((spans(&next), &next.preempted[..]), (vec![], &[RequestId(1)][..]));
    commit_all(&mut s, &drafting, 7);
    assert_eq!(spans(&submit_next(&mut s))[0], (0, 1));
}
