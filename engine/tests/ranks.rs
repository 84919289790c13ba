//! Replicas of several ranks answer as one rank does, to the bit.

use engine::{Engine, EngineConfig, EngineError, ParallelConfig, PreemptionMode};
use testkit::reference;

use crate::common::{config, on_sim};
use crate::overlap::{answers, option_requests};
use crate::speculate::loads;

/// The configuration on ranks that each hold 1 / `tensor_parallel_size` of the cache.
fn ranked(config: &EngineConfig, tensor_parallel_size: usize) -> EngineConfig {
    let share = config.kv_cache_memory_bytes.map(|bytes| bytes / tensor_parallel_size.min(2) as u64);
    let swap_space_bytes = config.swap_space_bytes / tensor_parallel_size.min(2) as u64;
    let parallel = ParallelConfig { tensor_parallel_size, ..Default::default() };
    EngineConfig { kv_cache_memory_bytes: share, swap_space_bytes, parallel, ..config.clone() }
}

fn load(config: &EngineConfig) -> Engine {
    Engine::load(config, &|_, _| {}).unwrap()
}

#[test]
fn ranks_give_the_tokens_and_log_probabilities_of_one_with_every_sampling_option() {
    let loads = loads(1, 0, 40);
    for (blocks, swaps) in [(200, false), (16, false), (16, true)] {
        let swap_space_bytes = if swaps { config(64).kv_cache_memory_bytes.unwrap() } else { 0 };
        let preemption_mode = if swaps { PreemptionMode::Swap } else { PreemptionMode::Recompute };
        let one = EngineConfig { swap_space_bytes, preemption_mode, ..config(blocks) };
        let want = answers(&mut load(&one), &loads);
        for ranks in [2, 4] {
            let mut engine = load(&ranked(&one, ranks));
            assert!(answers(&mut engine, &loads) == want, "{ranks} ranks, {blocks} blocks, swaps {swaps}");
            let preemptions = engine.stats().num_preemptions;
            assert!((preemptions > 0) == (blocks < 100), "{ranks} ranks, {blocks} blocks: {preemptions} preemptions");
        }
    }
}

#[test]
fn ranks_on_cuda_sim_give_the_tokens_of_one() {
    let Some(one) = on_sim(config(40)) else { return };
    let loads = option_requests();
    let want = answers(&mut load(&one), &loads);
    assert!(answers(&mut load(&ranked(&one, 2)), &loads) == want);
}

#[test]
fn all_ranks_have_the_blocks_of_the_one_with_the_fewest() {
    // Three heads that share keys and values: each rank has all of them, so its blocks are as large as those of one rank.
    let model = engine::ModelSource::Folder(reference::folder("qwen2"));
    let one = EngineConfig { model, kv_cache_memory_bytes: Some(1 << 20), ..config(0) };
    let parallel = ParallelConfig { tensor_parallel_size: 2, ..Default::default() };
    let two = EngineConfig { parallel, ..one.clone() };
    let blocks = |config: &EngineConfig| load(config).stats().blocks_total;
    assert_eq!(blocks(&two), blocks(&one));
}

#[test]
fn settings_that_ranks_cannot_share_are_one_line() {
    let refused = |change: &dyn Fn(&mut EngineConfig)| {
        let mut config = config(20);
        change(&mut config);
        let error = Engine::load(&config, &|_, _| {}).err().map(|error: EngineError| error.to_string());
        error.unwrap()
    };
    let tensor = |config: &mut EngineConfig, ranks| config.parallel.tensor_parallel_size = ranks;
    assert_eq!(
        refused(&|config| tensor(config, 5)),
        "--tensor-parallel-size: found 5, expected at most 4: each rank needs a query head"
    );
    assert_eq!(
        refused(&|config| tensor(config, 0)),
        "--tensor-parallel-size: found 0, expected 1 or more, and at most 256 ranks in all"
    );
    let many = refused(&|config| tensor(config, 1 << 40));
    assert!(many.starts_with("--tensor-parallel-size: found 1099511627776, expected"), "{many}");
    // An error of every rank is that of rank 0; one of a single rank has its number.
    let no_model = refused(&|config| {
        tensor(config, 2);
        config.max_model_len = Some(1 << 30);
    });
    assert!(no_model.starts_with("--max-model-len: found"), "{no_model}");
}
