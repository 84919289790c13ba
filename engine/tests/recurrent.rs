//! Models with recurrent states: prefix hits, forks, beams and preemption give the tokens of a sequence that runs alone.

use engine::{
    BeamSearch, EngineConfig, GenerationParams, GenerationRequest, Llm, ModelSource, PreemptionMode, SamplingParams,
};

use crate::common::cases::folder;
use crate::common::{alone_on, on_sim, shared, tokens};

/// A reference model with states.
#[derive(Clone, Copy, Debug)]
struct Model {
    case: &'static str,
    /// The block size that `auto` chooses: the least one that holds a state, or the usual one.
    block_size: usize,
    /// Elements of the keys of a token in a page.
    width: usize,
    /// Blocks of a pool in which not all requests of these tests run at once.
    few: u64,
}

/// A gated delta net. A page has a place for one layer.
const DELTA: Model = Model { case: "qwen3-next", block_size: 64, width: 64, few: 40 };
/// Short convolutions, of which two layers share a page, and Mamba-2.
const OTHERS: [Model; 2] = [
    Model { case: "lfm2-moe", block_size: 16, width: 2 * 32, few: 50 },
    Model { case: "granite4-hybrid", block_size: 64, width: 32, few: 40 },
];

impl Model {
    fn block_bytes(self) -> u64 {
        (self.block_size * 2 * self.width * 4) as u64
    }

    fn config(self, blocks: u64) -> EngineConfig {
        let (model, memory) = (ModelSource::Folder(folder(self.case)), blocks * self.block_bytes());
        EngineConfig { model, kv_cache_memory_bytes: Some(memory), ..config(1) }
    }
}

const BLOCK_SIZE: usize = DELTA.block_size;
/// Keys and values of one head of 64, float32.
pub const BLOCK_BYTES: u64 = BLOCK_SIZE as u64 * 2 * DELTA.width as u64 * 4;

pub fn config(blocks: u64) -> EngineConfig {
    EngineConfig {
        dtype: Some(engine::Dtype::F32),
        model: ModelSource::Folder(folder(DELTA.case)),
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
    for model in [DELTA].into_iter().chain(OTHERS) {
        let (size, case) = (model.block_size, model.case);
        // The last token of a prompt is always computed, so a prompt of two whole blocks reads one.
        let hit = |len: usize| ((len - 1) / size * size).min(140 / size * size) as u64;
        let lens = [129, 128, 127, 65, 64, 150];
        let uncached = EngineConfig { enable_prefix_caching: false, ..model.config(256) };
        let requests: Vec<_> = lens.iter().map(|len| request(7, *len, 70, 1)).collect();
        let want = alone_on(uncached, &requests);
        let mut llm = Llm::new(model.config(256)).unwrap();
        tokens(&mut llm, vec![request(7, 140, 1, 1)]);
        for ((request, want), len) in requests.into_iter().zip(want).zip(lens) {
            let before = llm.stats().scheduler.prefix_hits;
            assert_eq!(tokens(&mut llm, vec![request]), [want], "{case}: a prompt of {len} tokens");
            let found = llm.stats().scheduler.prefix_hits - before;
            assert_eq!(found, hit(len), "{case}: a prompt of {len} tokens");
        }
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
    // The others take turns with the two modes.
    let turns = [PreemptionMode::Recompute, PreemptionMode::Swap];
    let others = OTHERS.into_iter().zip(turns.into_iter().rev()).map(|(model, mode)| (model, vec![mode]));
    for (model, modes) in std::iter::once((DELTA, turns.to_vec())).chain(others) {
        let want = alone_on(model.config(256 * (64 / model.block_size) as u64), &forks());
        for (preemption_mode, enable_prefix_caching) in modes.into_iter().flat_map(|mode| [(mode, true), (mode, false)])
        {
            let what = format!("{}, {preemption_mode:?}, cache {enable_prefix_caching}", model.case);
            let swaps = preemption_mode == PreemptionMode::Swap;
            let swap_space_bytes = if swaps { 4 * model.few * model.block_bytes() } else { 0 };
            let sizes =
                EngineConfig { preemption_mode, swap_space_bytes, enable_prefix_caching, ..model.config(model.few) };
            let mut llm = Llm::new(sizes).unwrap();
            assert_eq!(tokens(&mut llm, forks()), want, "{what}");
            assert!(llm.stats().scheduler.preemptions > 0, "{what}");
            assert_eq!(llm.stats().scheduler.kv_cache_usage(), 0.0, "{what}: blocks are left over");
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
