//! What a decode step costs the host: planning, building and launching it, taking and publishing its tokens, committing it,
//! with a device that does nothing in place of one that computes.
#![allow(clippy::unwrap_used, missing_docs)]

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};

#[path = "../tests/common/mod.rs"]
mod common;

use common::noop::{NoOp, decoding};

/// Steps of one engine; its requests are longer.
const STEPS: u64 = 380;

fn decode_step(c: &mut Criterion) {
    let mut group = c.benchmark_group("host work of a decode step");
    group.sample_size(20).measurement_time(Duration::from_secs(8));
    for sequences in [1, 64, 256] {
        let mut each: Vec<Duration> = Vec::new();
        group.bench_function(format!("{sequences} sequences"), |b| {
            b.iter_custom(|steps| {
                let mut spent = Duration::ZERO;
                let mut left = steps;
                while left > 0 {
                    let mut engine = decoding(&NoOp::new(), sequences);
                    for _ in 0..left.min(STEPS) {
                        let start = Instant::now();
                        engine.step(|_, event| drop(std::hint::black_box(event)));
                        let step = start.elapsed();
                        spent += step;
                        each.push(step);
                    }
                    left -= left.min(STEPS);
                }
                spent
            });
        });
        // Another was asked for.
        if each.is_empty() {
            continue;
        }
        each.sort_unstable();
        let at = |share: f64| each[((each.len() - 1) as f64 * share) as usize];
        let (median, worst) = (at(0.5), at(0.99));
        println!("{sequences} sequences: p50 {median:?}, p99 {worst:?} of {} steps", each.len());
    }
    group.finish();
}

criterion_group!(benches, decode_step);
criterion_main!(benches);
