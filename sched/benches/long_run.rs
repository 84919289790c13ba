//! 100,000 requests through one scheduler. Prints the cost of a step in each tenth of the run; it must not grow.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::time::{Duration, Instant};

use sched::{Outcome, Request, RequestId, SchedConfig, Scheduler};

const REQUESTS: u64 = 100_000;
const WAITING: usize = 1000;

fn main() {
    let config =
        SchedConfig { max_num_seqs: 256, max_model_len: 512, hash_seed: Some(1), ..SchedConfig::new(4096, 16) };
    let mut scheduler = Scheduler::new(config).unwrap();
    let (mut submitted, mut ended) = (0, 0);
    let mut tenth = (0u32, Duration::ZERO, 0u64);
    println!("| requests ended | steps | µs per step | ns per span |\n|---:|---:|---:|---:|");
    while ended < REQUESTS {
        while submitted < REQUESTS && scheduler.stats().num_waiting < WAITING {
            scheduler.submit(request(submitted)).unwrap();
            submitted += 1;
        }
        let start = Instant::now();
        let plan = scheduler.plan();
        let planned = start.elapsed();
        let sampled = plan.spans.iter().filter(|s| !s.sample.is_empty());
        let outcomes: Vec<Outcome> = sampled
            .map(|s| {
                let finished = s.start + s.tokens.len() >= length(s.seq.request.0);
                Outcome::token(s.seq, s.start as u32 % 7, finished)
            })
            .collect();
        let before = ended / (REQUESTS / 10);
        ended += outcomes.iter().filter(|o| o.finished).count() as u64;
        let start = Instant::now();
        scheduler.commit(plan.step, &outcomes).unwrap();
        tenth = (tenth.0 + 1, tenth.1 + planned + start.elapsed(), tenth.2 + plan.spans.len() as u64);
        if ended / (REQUESTS / 10) > before {
            let (steps, spent, spans) = std::mem::take(&mut tenth);
            let (per_step, per_span) = (spent.as_secs_f64() * 1e6 / f64::from(steps), spent.as_nanos() as u64 / spans);
            println!("| {ended} | {steps} | {per_step:.1} | {per_span} |");
        }
    }
    let stats = scheduler.stats();
    assert!(!scheduler.has_work() && stats.blocks_in_use == 0);
    println!("\n{} steps, {} preemptions, {} prompt tokens found", stats.steps, stats.preemptions, stats.prefix_hits);
}

/// One in four prompts shares a prefix with others of its kind.
fn request(id: u64) -> Request {
    let kind = if id.is_multiple_of(4) { id % 64 } else { id };
    let tokens = (0..32 + id as u32 % 128).map(|i| (kind as u32).wrapping_mul(0x9e37) ^ i);
    Request::new(RequestId(id), tokens.collect(), 200)
}

/// Number of tokens at which a request ends.
fn length(id: u64) -> usize {
    32 + id as usize % 128 + id as usize * 31 % 150
}
