//! Replicas of several ranks answer as one rank does, to the bit.

use engine::{
    Engine, EngineConfig, EngineError, GenerationParams, GenerationRequest, Llm, LoadOn, ModelSource, ParallelConfig,
    PreemptionMode, Reduce, SamplingParams, TokenEvent,
};
use testkit::reference;

use crate::common::workers::counted_parts;
use crate::common::{config, on_sim};
use crate::overlap::{answers, option_requests};
use crate::speculate::loads;

/// The configuration on ranks that hold as many blocks, of two heads of keys and values in three layers: of half of them a block is half
/// as large.
fn ranked(config: &EngineConfig, tensor_parallel_size: usize, pipeline_parallel_size: usize) -> EngineConfig {
    let part = |bytes: u64| {
        let layers = 3u64.div_ceil(pipeline_parallel_size as u64);
        bytes / tensor_parallel_size.min(2) as u64 * layers / 3
    };
    let share = config.kv_cache_memory_bytes.map(part);
    let swap_space_bytes = part(config.swap_space_bytes);
    let parallel = ParallelConfig { tensor_parallel_size, pipeline_parallel_size, ..Default::default() };
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
        for (tensor, stages) in [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)] {
            let mut engine = load(&ranked(&one, tensor, stages));
            let what = format!("{tensor} x {stages} ranks, {blocks} blocks, swaps {swaps}");
            let found = answers(&mut engine, &loads);
            assert!(found == want, "{what}");
            let preemptions = engine.stats().scheduler.preemptions;
            assert!((preemptions > 0) == (blocks < 100), "{what}: {preemptions} preemptions");
        }
    }
}

#[test]
fn many_prompts_of_one_call_with_long_lists_do_not_end_the_group() {
    // More than a broadcast holds if each prompt brought the lists of its own.
    let bad_words = (0..1024).map(|word| vec![200 + word % 300; 540]).collect();
    let sampling = SamplingParams { bad_words, ..Default::default() };
    let params = GenerationParams { sampling, max_tokens: Some(1), ..Default::default() };
    let one = EngineConfig { max_num_seqs: 64, max_num_batched_tokens: 128, ..config(200) };
    let mut engine = load(&ranked(&one, 2, 1));
    for _ in 0..64 {
        let request = GenerationRequest { prompt: vec![5], params: params.clone(), ..Default::default() };
        engine.submit(request).unwrap();
    }
    let mut tokens = 0;
    while engine.has_work() {
        engine.step(|_, event| tokens += usize::from(matches!(event, TokenEvent::Token { token: Some(_), .. })));
    }
    assert_eq!((tokens, engine.stats().failed_steps), (64, 0));
    // One request alone has a limit, which is known when it is submitted.
    let bad_words = vec![vec![5; 7 << 20]].into();
    let sampling = SamplingParams { bad_words, ..Default::default() };
    let params = GenerationParams { sampling, ..Default::default() };
    let refused = engine.submit(GenerationRequest { prompt: vec![5], params, ..Default::default() }).unwrap_err();
    assert!(refused.to_string().contains("take up to 36700170 bytes, expected at most 33554432"), "{refused}");
}

#[test]
fn ranks_on_cuda_sim_give_the_tokens_of_one() {
    let Some(one) = on_sim(config(40)) else { return };
    let loads = option_requests();
    let want = answers(&mut load(&one), &loads);
    for (tensor, stages) in [(2, 1), (1, 2)] {
        assert!(answers(&mut load(&ranked(&one, tensor, stages)), &loads) == want, "{tensor} x {stages}");
    }
}

/// Greedy tokens of prompts together, and of each alone.
fn greedy(config: &EngineConfig) -> [Vec<Vec<u32>>; 2] {
    const PROMPTS: [&str; 3] = ["The capital of France is", "A quire is", "The cache of a request holds"];
    let sampling = SamplingParams { temperature: 0.0, ..Default::default() };
    let params = GenerationParams { sampling, max_tokens: Some(24), ignore_eos: true, ..Default::default() };
    let mut llm = Llm::new(config.clone()).unwrap();
    let mut tokens = |prompts: &[&str]| {
        let completions = llm.generate(prompts, &params).unwrap();
        completions.into_iter().map(|it| it.outputs[0].token_ids.clone()).collect::<Vec<_>>()
    };
    [tokens(&PROMPTS), PROMPTS.into_iter().flat_map(|prompt| tokens(&[prompt])).collect()]
}

fn summing(config: &EngineConfig, tensor: usize, stages: usize) -> EngineConfig {
    let mut config = ranked(config, tensor, stages);
    config.parallel.tp_reduce = Reduce::Sum;
    config
}

#[test]
fn ranks_that_sum_give_the_greedy_tokens_of_one() {
    let one = config(200);
    let want = greedy(&one);
    assert_eq!(want[0], want[1]);
    for (tensor, stages) in [(2, 1), (3, 1), (4, 1), (2, 2)] {
        assert_eq!(greedy(&summing(&one, tensor, stages)), want, "{tensor} x {stages}");
    }
}

#[test]
fn all_ranks_have_the_blocks_of_the_one_with_the_fewest() {
    // Three heads that share keys and values: each rank has all of them, so its blocks are as large as those of one rank.
    let model = ModelSource::Folder(reference::folder("qwen2"));
    let one = EngineConfig { model, kv_cache_memory_bytes: Some(1 << 20), ..config(0) };
    let parallel = ParallelConfig { tensor_parallel_size: 2, ..Default::default() };
    let two = EngineConfig { parallel, ..one.clone() };
    let blocks = |config: &EngineConfig| load(config).stats().scheduler.blocks_total;
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
    let recorded = refused(&|config| {
        *config = EngineConfig { record: Some("recording".into()), ..summing(config, 2, 1) };
    });
    assert!(recorded.starts_with("--tp-reduce: found sum with --record, expected gather"), "{recorded}");
    let stages = |config: &mut EngineConfig, stages| config.parallel.pipeline_parallel_size = stages;
    assert_eq!(
        refused(&|config| stages(config, 4)),
        "--pipeline-parallel-size: found 4, expected 1 to 3, the number of layers"
    );
    let partition = refused(&|config| {
        stages(config, 2);
        config.parallel.pipeline_partition = Some(vec![3, 1]);
    });
    assert!(partition.starts_with("--pipeline-partition: found 3,1, expected 2 numbers above 0"), "{partition}");
    let many = refused(&|config| tensor(config, 1 << 40));
    assert!(many.starts_with("--tensor-parallel-size: found 1099511627776, expected"), "{many}");
    // An error of every rank is that of rank 0; one of a single rank has its number.
    let no_model = refused(&|config| {
        tensor(config, 2);
        config.max_model_len = Some(1 << 30);
    });
    assert!(no_model.starts_with("--max-model-len: found"), "{no_model}");
}

#[test]
fn every_stage_of_a_pipeline_has_a_step_in_flight_while_there_are_enough_requests() {
    let parts = engine::load(&ranked(&config(200), 1, 3), LoadOn::Configured, &|_, _| {}).unwrap().parts;
    assert_eq!(parts.info.max_in_flight, 3);
    let (mut engine, steps) = counted_parts(parts);
    for first in 0..6 {
        let params = GenerationParams { max_tokens: Some(20), ignore_eos: true, ..Default::default() };
        engine.submit(GenerationRequest { prompt: vec![first, 7, 8], params, ..Default::default() }).unwrap();
    }
    let mut most = Vec::new();
    while engine.has_work() {
        engine.step(|_, _| {});
        most.push(steps.now().0);
    }
    // After a collected step, the two behind it are in flight.
    let full = most.iter().filter(|in_flight| **in_flight == 2).count();
    assert!(full * 10 > most.len() * 8, "{most:?}");
}
