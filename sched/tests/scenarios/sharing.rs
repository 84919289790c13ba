//! Plans with prefix cache hits and with several sequences per request.

use sched::{BlockId, MemOp, Policy, Request, RequestId, SchedConfig};

use super::{drain, scheduler};
use crate::common::{commit_all, config, request, seq, spans};

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

    // Too long to be admitted together with the first. Its repeated lookups are not counted.
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

    // Without prefix caching nothing is counted.
    let mut s = scheduler(SchedConfig { enable_prefix_caching: false, ..caching });
    s.submit(same(0)).unwrap();
    let plan = s.plan();
    commit_all(&mut s, &plan, 7);
    assert_eq!((s.stats().prefix_queries, s.stats().prompt_tokens), (0, 40));
}

#[test]
fn s8_lookups_of_resumed_requests_are_counted_separately() {
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
fn a_request_computes_its_prompt_once_and_forks_copy_on_write() {
    let mut s = scheduler(config(10, 16));
    s.submit(Request { n: 3, ..request(0, 20, 5) }).unwrap();
    let plan = s.plan();
    assert_eq!((spans(&plan), plan.spans[0].sample.clone()), (vec![(0, 20)], 0..3));
    commit_all(&mut s, &plan, 7);
    assert_eq!(s.stats().blocks_in_use, 2);

    let plan = s.plan();
    let copies: Vec<MemOp> = plan.memory.iter().copied().filter(|op| matches!(op, MemOp::Copy { .. })).collect();
    let copy = |dst| MemOp::Copy { src: BlockId(1), dst: BlockId(dst) };
    assert_eq!(copies, [copy(2), copy(3)], "the last of three owners writes in place");
    let tables: Vec<(usize, Vec<u32>)> = plan
        .spans
        .iter()
        .map(|q| (q.groups[0].table.keep, q.groups[0].table.append.iter().map(|b| b.0).collect()))
        .collect();
    assert_eq!(tables, [(1, vec![2]), (0, vec![0, 3]), (0, vec![0, 1])]);
    assert_eq!(plan.spans.iter().map(|q| q.groups[0].slots[0]).collect::<Vec<_>>(), [36, 52, 20]);
    assert_eq!(plan.spans.iter().map(|q| q.sample.clone()).collect::<Vec<_>>(), [0..1, 1..2, 2..3]);
}

#[test]
fn a_request_resumes_after_preemption_with_one_prompt_and_its_live_sequences() {
    // Alone it needs 1 + 2 * 2 of the five blocks. A request of higher priority preempts it.
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
    assert!(s.finish_sequence(seq(0, 0)), "a preempted sequence can end too");
    s.abort(RequestId(1));

    // The prompt is computed as sequence 0, although that has ended. Nothing is sampled from it again.
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
fn a_request_that_does_not_read_the_cache_computes_every_row() {
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
    assert!(s.reset_prefix_cache(false));
    assert_eq!(s.stats().blocks_free, 20);
}
