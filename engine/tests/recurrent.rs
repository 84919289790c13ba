//! Models with recurrent states: prefix hits, forks, beams and preemption give the tokens of a sequence that runs alone.

use engine::{
    BeamSearch, EngineConfig, GenerationParams, GenerationRequest, Llm, ModelSource, PreemptionMode, SamplingParams,
};

use crate::common::cases::folder;
use crate::common::{alone_on, on_sim, shared, tokens};

/// Least number of tokens per block that holds a state of the model, which `auto` chooses.
const BLOCK_SIZE: usize = 64;
/// Keys and values of one head of 64, float32; a page has a place for one layer.
pub const BLOCK_BYTES: u64 = BLOCK_SIZE as u64 * 2 * 64 * 4;

pub fn config(blocks: u64) -> EngineConfig {
    EngineConfig {
        dtype: Some(engine::Dtype::F32),
        model: ModelSource::Folder(folder("qwen3-next")),
        kv_cache_memory_bytes: Some(blocks * BLOCK_BYTES),
        max_num_seqs: 16,
        max_num_batched_tokens: 48,
        max_model_len: Some(256),
        threads: Some(1),
        seed: Some(1),
        ..Default::default()
    }
}

/// Sequences with the same `which` begin with the same tokens.
pub fn request(which: u32, len: usize, max_tokens: usize, n: usize) -> GenerationRequest {
    let sampling = SamplingParams { seed: Some(u64::from(which)), ..Default::default() };
    let params = GenerationParams { sampling, max_tokens: Some(max_tokens), ignore_eos: true, n, ..Default::default() };
    let prompt = (0..len as u32).map(|i| 3 + (which * 131 + i * 17 + i * i * which) % 400).collect();
    GenerationRequest { prompt, params, ..Default::default() }
}

fn beams(which: u32, len: usize, width: usize) -> GenerationRequest {
    let mut request = request(which, len, 40, width.min(2));
    request.params.sampling.repetition_penalty = 1.3;
    request.params.beam = Some(BeamSearch::new(width));
    request
}

/// Forks in the middle of a block, right before a border and at it, and beams that cross a border.
fn forks() -> Vec<GenerationRequest> {
    vec![
        request(1, 30, 60, 4),
        request(2, 63, 20, 4),
        request(3, 64, 20, 4),
        request(4, 128, 20, 2),
        beams(5, 50, 3),
        beams(6, 64, 2),
    ]
}

#[test]
fn the_block_size_is_the_least_that_holds_a_state_and_a_smaller_one_is_refused() {
    let plan = engine::plan(&config(64)).unwrap();
    assert_eq!((plan.block_size, plan.groups), (BLOCK_SIZE, 4));
    // Four heads in each of three layers: a matrix of 32 by 32, and three inputs of 96 channels.
    assert_eq!(plan.state_bytes, 3 * 4 * (32 * 32 + 3 * 96) * 4);
    assert!(plan.to_string().contains("state per sequence"), "{plan}");
    let smaller = EngineConfig { block_size: Some(32), ..config(64) };
    let error = engine::plan(&smaller).unwrap_err().to_string();
    assert!(error.starts_with("--block-size: found 32, expected a power of two from 64"), "{error}");
}

#[test]
fn a_prefix_hit_at_a_border_continues_from_its_state() {
    // The last token of a prompt is always computed, so a prompt of two whole blocks reads one.
    let lens = [(129, 128), (128, 64), (127, 64), (65, 64), (64, 0), (150, 128)];
    let uncached = EngineConfig { enable_prefix_caching: false, ..config(64) };
    let requests: Vec<_> = lens.iter().map(|(len, _)| request(7, *len, 70, 1)).collect();
    let want = alone_on(uncached, &requests);
    let mut llm = Llm::new(config(64)).unwrap();
    tokens(&mut llm, vec![request(7, 140, 1, 1)]);
    for ((request, want), (len, hit)) in requests.into_iter().zip(want).zip(lens) {
        let before = llm.stats().scheduler.prefix_hits;
        assert_eq!(tokens(&mut llm, vec![request]), [want], "a prompt of {len} tokens");
        assert_eq!(llm.stats().scheduler.prefix_hits - before, hit, "a prompt of {len} tokens");
    }
}

#[test]
fn forks_and_beams_give_the_sequences_that_run_alone() {
    let want = alone_on(config(256), &forks());
    assert!(want[0][0] != want[0][1], "forks differ");
    let mut llm = Llm::new(config(256)).unwrap();
    assert_eq!(tokens(&mut llm, forks()), want, "together");
    assert_eq!(tokens(&mut llm, forks()), want, "from the cache");
}

#[test]
fn preemption_by_swap_and_by_recomputation_changes_no_token() {
    let want = alone_on(config(256), &forks());
    for preemption_mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
        for enable_prefix_caching in [true, false] {
            let swap_space_bytes = if preemption_mode == PreemptionMode::Swap { 128 * BLOCK_BYTES } else { 0 };
            let sizes = EngineConfig { preemption_mode, swap_space_bytes, enable_prefix_caching, ..config(40) };
            let mut llm = Llm::new(sizes).unwrap();
            assert_eq!(tokens(&mut llm, forks()), want, "{preemption_mode:?}, cache {enable_prefix_caching}");
            assert!(llm.stats().scheduler.preemptions > 0, "{preemption_mode:?}");
            assert_eq!(llm.stats().scheduler.kv_cache_usage(), 0.0, "blocks are left over");
        }
    }
}

#[test]
fn requests_that_share_prefixes_keep_their_tokens_whatever_the_chunks_and_evictions() {
    // Prompts that end at a border, before and behind it; some fork.
    let lens = [63, 64, 65, 127, 128, 129, 192, 193];
    let requests: Vec<_> = lens.into_iter().map(|len| request(9, len, 8, 1 + len % 2)).collect();
    let want = alone_on(EngineConfig { enable_prefix_caching: false, ..config(256) }, &requests);
    // Chunks within a block, of a block, and across borders; caches that keep all pages, and that evict some.
    for (chunk, blocks) in [(17, 256), (64, 40), (200, 256), (200, 40)] {
        let mut llm = Llm::new(EngineConfig { max_num_batched_tokens: chunk, ..config(blocks) }).unwrap();
        for round in 0..2 {
            assert_eq!(tokens(&mut llm, requests.clone()), want, "chunks of {chunk}, {blocks} blocks, round {round}");
        }
        assert!(llm.stats().scheduler.prefix_hits > 0, "chunks of {chunk}, {blocks} blocks");
    }
}

#[test]
fn steps_planned_while_others_run_keep_the_states() {
    let requests = vec![request(1, 60, 12, 2), request(2, 58, 14, 2), request(3, 64, 6, 2)];
    let Some(sim) = on_sim(config(256)) else { return };
    let want = alone_on(sim.clone(), &requests);
    let small = EngineConfig {
        kv_cache_memory_bytes: Some(18 * BLOCK_BYTES),
        swap_space_bytes: 64 * BLOCK_BYTES,
        preemption_mode: PreemptionMode::Swap,
        max_model_len: Some(128),
        ..sim
    };
    let mut llm = shared::llm(small).unwrap();
    assert_eq!(tokens(&mut llm, requests), want);
    assert!(llm.stats().scheduler.preemptions > 0);
}
