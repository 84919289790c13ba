//! Time of a decode step on the host: planning, building and launching it, collecting and publishing its tokens, and committing
//! it, with a device that does nothing. Also the time if the host draws, by number of threads.
#![allow(clippy::unwrap_used, missing_docs)]

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};

#[path = "../tests/common/mod.rs"]
mod common;

use common::noop::{NoOp, decoding, decoding_with};
use engine::{EngineConfig, ModelSource, SamplingParams};
use testkit::model::Shape;

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

/// Steps of 64 sequences with more alternatives than the device's sampler supports, over 32,768 tokens.
fn host_draws(c: &mut Criterion) {
    let mut shape = Shape::named("m135").unwrap();
    (shape.hidden, shape.ffn, shape.layers, shape.vocab) = (64, 64, 1, 1 << 15);
    (shape.heads, shape.kv_heads) = (1, 1);
    let folder = common::checkpoint(&shape, &serde_json::json!({}));
    let mut group = c.benchmark_group("64 draws on the host");
    group.sample_size(10).warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3));
    for threads in [1, 2] {
        group.bench_function(format!("{threads} threads"), |b| {
            let model = ModelSource::Folder(folder.path().to_path_buf());
            let config = EngineConfig { model, kv_cache_memory_bytes: Some(64 << 20), ..Default::default() };
            let sampling = SamplingParams { temperature: 0.7, top_p: 0.95, logprobs: Some(21), ..Default::default() };
            let mut engine = decoding_with(&NoOp::with_threads(threads), 64, config, sampling);
            b.iter(|| engine.step(|_, event| drop(std::hint::black_box(event))));
        });
    }
    group.finish();
}

criterion_group!(benches, decode_step, host_draws);
criterion_main!(benches);
