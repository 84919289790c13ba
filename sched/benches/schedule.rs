//! What planning costs: one `plan()` and one whole step, with many running and many waiting.
#![allow(clippy::unwrap_used, missing_docs)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use sched::{Outcome, Request, RequestId, SchedConfig, Scheduler, StepPlan};

/// Steps before a scheduler is built anew, so that its sequences stay between 100 and 600 tokens.
const STEPS: usize = 500;
const PROMPT: usize = 100;

/// A scheduler in which `running` sequences decode and `waiting` requests wait for a place.
fn decoding(running: usize, waiting: usize) -> Scheduler {
    let mut scheduler = Scheduler::new(SchedConfig {
        max_num_seqs: running,
        max_num_batched_tokens: running * (PROMPT + 1),
        max_model_len: 4096,
        hash_seed: Some(1),
        ..SchedConfig::new(running * 64, 16)
    })
    .unwrap();
    for id in 0..(running + waiting) as u64 {
        let prompt = (0..PROMPT as u32).map(|i| id as u32 * 1000 + i).collect();
        let request = Request::new(RequestId(id), prompt, 2 * STEPS);
        scheduler.submit(request).unwrap();
    }
    step(&mut scheduler);
    let stats = scheduler.stats();
    assert_eq!((stats.num_running, stats.num_waiting), (running, waiting));
    scheduler
}

fn outcomes(plan: &StepPlan) -> Vec<Outcome> {
    plan.spans.iter().map(|s| Outcome::token(s.seq, 7, false)).collect()
}

/// One step; how long its plan and its commit took.
fn step(scheduler: &mut Scheduler) -> [Duration; 2] {
    let start = Instant::now();
    let plan = black_box(scheduler.plan());
    let planned = start.elapsed();
    let outcomes = outcomes(&plan);
    let start = Instant::now();
    scheduler.commit(plan.step, &outcomes).unwrap();
    [planned, start.elapsed()]
}

fn schedule(c: &mut Criterion) {
    let mut group = c.benchmark_group("schedule");
    for running in [256, 4096] {
        for (which, name) in ["plan", "commit"].into_iter().enumerate() {
            group.bench_function(BenchmarkId::new(name, format!("{running} running, 1000 waiting")), |b| {
                b.iter_custom(|iterations| {
                    let mut spent = Duration::ZERO;
                    let mut left = iterations as usize;
                    while left > 0 {
                        let mut scheduler = decoding(running, 1000);
                        let steps = left.min(STEPS);
                        spent += (0..steps).map(|_| step(&mut scheduler)[which]).sum::<Duration>();
                        left -= steps;
                    }
                    spent
                });
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(3));
    targets = schedule
}
criterion_main!(benches);
