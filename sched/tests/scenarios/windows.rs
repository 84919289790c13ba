//! Sliding groups: the blocks that a request owns in them do not depend on its length.
use std::collections::VecDeque;

use sched::{CacheGroup, SchedConfig};

use super::{scheduler, step};
use crate::common::{commit_all, config, request, spans};

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
fn a_request_in_sliding_groups_can_be_longer_than_the_pool() {
    // With chunks of 24, spans end within blocks.
    for (max_in_flight, long_prefill_token_threshold) in [(1, 0), (2, 0), (1, 24), (2, 24)] {
        let groups = vec![CacheGroup::Sliding { window: 64 }];
        let max_model_len = 20_000;
        let sizes = SchedConfig { max_model_len, groups, max_in_flight, long_prefill_token_threshold, ..config(6, 16) };
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
    let sizes = SchedConfig { max_num_batched_tokens: 64, long_prefill_token_threshold: 8, ..config(20, 4) };
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
