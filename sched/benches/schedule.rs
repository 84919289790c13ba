//! Benchmarks of planning: `plan()` and whole steps, with many running and many waiting requests.
#![allow(clippy::unwrap_used, missing_docs)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use sched::{Outcome, Request, RequestId, SchedConfig, Scheduler, StepPlan};

/// Number of steps before the scheduler is rebuilt, so that its sequences stay between 100 and 600 tokens.
const STEPS: usize = 500;
const PROMPT: usize = 100;

fn request(id: u64, prompt: u32, max_tokens: usize) -> Request {
    Request::new(RequestId(id), (0..prompt).map(|i| (id as u32).wrapping_mul(1_000_000) + i).collect(), max_tokens)
}

/// A scheduler in which `running` sequences decode and `waiting` requests wait.
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
        scheduler.submit(request(id, PROMPT as u32, 2 * STEPS)).unwrap();
    }
    step(&mut scheduler);
    let stats = scheduler.stats();
    assert_eq!((stats.num_running, stats.num_waiting), (running, waiting));
    scheduler
}

fn outcomes(plan: &StepPlan) -> Vec<Outcome> {
    plan.spans.iter().map(|s| Outcome::token(s.seq, 7, false)).collect()
}

/// Runs a step. Returns the durations of plan and commit.
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

/// The commit of a step in which every running sequence ends.
fn end(c: &mut Criterion) {
    let mut group = c.benchmark_group("schedule");
    for running in [256, 4096] {
        group.bench_function(BenchmarkId::new("commit, all end", format!("{running} running, 1000 waiting")), |b| {
            b.iter_custom(|iterations| {
                let mut spent = Duration::ZERO;
                for _ in 0..iterations {
                    let mut scheduler = decoding(running, 1000);
                    let plan = scheduler.plan();
                    let outcomes: Vec<Outcome> = plan.spans.iter().map(|s| Outcome::token(s.seq, 7, true)).collect();
                    let start = Instant::now();
                    scheduler.commit(plan.step, &outcomes).unwrap();
                    spent += start.elapsed();
                }
                spent
            });
        });
    }
    group.finish();
}

/// Iterations per scheduler: fewer than the tokens that its running request computes.
const BLOCKED_FOR: u64 = 50_000;

/// A scheduler with one long-running request and a head of the queue with 128k tokens that does not fit.
fn with_blocked_head() -> Scheduler {
    let config = SchedConfig { max_num_seqs: 8, max_num_batched_tokens: 1 << 17, ..SchedConfig::new(9000, 16) };
    let mut scheduler = Scheduler::new(SchedConfig { hash_seed: Some(1), ..config }).unwrap();
    scheduler.submit(request(0, 30_000, 100_000)).unwrap();
    step(&mut scheduler);
    scheduler.submit(request(1, 1 << 17, 1)).unwrap();
    step(&mut scheduler);
    scheduler
}

/// A plan that looks up the head of the queue again and cannot admit its 128k tokens.
fn blocked(c: &mut Criterion) {
    let mut group = c.benchmark_group("schedule");
    group.bench_function("plan, a head of 128k tokens stays blocked", |b| {
        b.iter_custom(|iterations| {
            let (mut scheduler, mut spent) = (with_blocked_head(), Duration::ZERO);
            for i in 0..iterations {
                if i % BLOCKED_FOR == BLOCKED_FOR - 1 {
                    scheduler = with_blocked_head();
                }
                // Any ended request wakes the head of the queue.
                let id = i + 2;
                scheduler.submit(request(id, 1, 1)).unwrap();
                scheduler.abort(RequestId(id));
                spent += step(&mut scheduler)[0];
            }
            assert_eq!(scheduler.stats().num_waiting, 1);
            spent
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(3));
    targets = schedule, end, blocked
}
criterion_main!(benches);
