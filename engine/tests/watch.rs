//! Snapshots of the block map, over a worker that computes nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use engine::watch::{BlockMap, Owner};
use engine::worker::{Draw, StepError, StepInput, StepOutput, Worker, WorkerInfo};
use engine::{Engine, EngineParts, GenerationParams, GenerationRequest, Sampled};
use sched::SchedConfig;

const TOKEN: u32 = 9;
const EOS: u32 = 1;

/// Draws [`TOKEN`] for each sequence, or [`EOS`] once `ends` is set.
struct Fixed {
    step: Option<Arc<StepInput>>,
    ends: Arc<AtomicBool>,
}

impl Worker for Fixed {
    fn submit(&mut self, input: Arc<StepInput>) {
        self.step = Some(input);
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        output.clear();
        let input = self.step.take().unwrap();
        let token = if self.ends.load(Relaxed) { EOS } else { TOKEN };
        let draws = input.plan.spans.iter().zip(&input.draws).filter(|(_, draw)| **draw != Draw::Nothing);
        output.drawn.extend(draws.map(|(span, _)| (span.seq, Sampled { token, logprob: None })));
        Ok(())
    }

    fn num_sequences(&self) -> usize {
        0
    }
}

fn engine(blocks: usize) -> (Engine, Arc<AtomicBool>) {
    let ends = Arc::new(AtomicBool::new(false));
    let worker = Box::new(Fixed { step: None, ends: ends.clone() });
    let info = WorkerInfo { vocab_size: 10_000, max_in_flight: 1, sampler: None, profile: None, host_block_bytes: 0 };
    let sched = SchedConfig {
        max_num_seqs: 256,
        max_num_batched_tokens: 1 << 20,
        max_model_len: 1 << 20,
        ..SchedConfig::new(blocks, 16)
    };
    (
        Engine::new(EngineParts {
            is_headless: false,
            worker,
            info,
            sched,
            eos_token_ids: vec![EOS],
            seed: 1,
            adapters: None,
            itl_target: None,
            speculation: None,
            kv_events: None,
            kv_transfer: None,
        })
        .unwrap(),
        ends,
    )
}

fn submit(engine: &mut Engine, prompt: Vec<u32>, max_tokens: usize) -> u64 {
    let params = GenerationParams { max_tokens: Some(max_tokens), ..Default::default() };
    engine.submit(GenerationRequest { prompt, params, ..Default::default() }).unwrap().0
}

/// The map, and the number of blocks of each request.
fn drawn(engine: &mut Engine) -> (BlockMap, Vec<usize>) {
    let snapshot = engine.snapshot();
    (snapshot.map, snapshot.requests.iter().map(|request| request.blocks).collect())
}

#[test]
fn the_map_shows_owners_shared_blocks_and_cached_blocks() {
    let (mut engine, ends) = engine(12);
    let prefix: Vec<u32> = (0..32).collect();
    let first = submit(&mut engine, [&prefix[..], &[50; 4]].concat(), 4);
    engine.step(|_, _| {});
    let own = Owner { requests: vec![first], references: 1 };
    let (map, _) = drawn(&mut engine);
    assert_eq!((map.runs, map.owners), (vec![(2, 3), (0, 9)], vec![own]));

    let second = submit(&mut engine, [&prefix[..], &[60; 4]].concat(), 4);
    engine.step(|_, _| {});
    let (map, counts) = drawn(&mut engine);
    let both = Owner { requests: vec![first, second], references: 2 };
    let shared = map.owners.iter().position(|owner| *owner == both).unwrap() as u32 + 2;
    assert_eq!(map.runs[0], (shared, 2), "both own the prefix");
    assert_eq!(map.runs[1..], [(2, 1), (3, 1), (0, 8)], "each owns the rest");
    assert_eq!(counts, [3, 3]);

    ends.store(true, Relaxed);
    engine.step(|_, _| {});
    let (map, counts) = drawn(&mut engine);
    assert_eq!(
        (map.runs, map.owners, counts),
        (vec![(1, 2), (0, 10)], vec![], vec![]),
        "full blocks stay in the prefix cache"
    );
    engine.audit().unwrap();
}

#[test]
fn a_snapshot_of_a_large_pool_is_cheap_and_bounded() {
    let (mut engine, _) = engine(100_000);
    let prefix: Vec<u32> = (0..1600).collect();
    for id in 0..256u32 {
        let own = (0..1600).map(|i| 5000 + id * 7 + i);
        submit(&mut engine, prefix.iter().copied().chain(own).collect(), 1000);
        engine.step(|_, _| {});
    }
    let start = Instant::now();
    let (map, counts) = drawn(&mut engine);
    println!("a snapshot of 100,000 blocks and {} requests: {:?}", counts.len(), start.elapsed());
    assert_eq!(map.blocks_per_cell, 7);
    assert_eq!(map.runs.iter().map(|run| run.1 as usize).sum::<usize>(), 100_000usize.div_ceil(7));
    assert!(map.owners.len() <= 1024 && map.owners.iter().all(|owner| owner.requests.len() <= 8));
}
