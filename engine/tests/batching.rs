//! Continuous batching and preemption: the result of a request depends neither on other requests nor on the pool.

use crate::common::{alone, alone_on, config, on_sim, prompt, request, shared, tokens};
use engine::{BeamSearch, EngineConfig, GenerationParams, GenerationRequest, Llm};
use proptest::prelude::*;

#[test]
fn a_pool_too_small_for_the_load_gives_every_request_the_tokens_it_gives_alone() {
    let requests: Vec<GenerationRequest> = (0..12).map(|i| request(i, 5 + 7 * (i as usize % 5), 40, 1)).collect();
    let want = alone(&requests);
    for prefix_caching in [true, false] {
        // 12 requests need up to 10 blocks each; the pool holds 20.
        let mut llm = Llm::new(EngineConfig { enable_prefix_caching: prefix_caching, ..config(20) }).unwrap();
        let got = tokens(&mut llm, requests.clone());
        assert_eq!(got, want, "prefix caching {prefix_caching}");
        assert!(llm.stats().scheduler.preemptions > 0, "the pool was not too small: the test shows nothing");
        assert_eq!(llm.stats().scheduler.kv_cache_usage(), 0.0, "blocks are left over");
    }
}

#[test]
fn samples_of_one_prompt_share_its_blocks_and_survive_preemption() {
    let requests: Vec<GenerationRequest> = (0..5).map(|i| request(i, 30, 24, 3)).collect();
    let want = alone(&requests);
    assert!(
        want.iter().all(|samples| samples[0] != samples[1] && samples[1] != samples[2]),
        "samples are draws of their own"
    );
    let mut llm = Llm::new(config(26)).unwrap();
    assert_eq!(tokens(&mut llm, requests), want);
    assert!(llm.stats().scheduler.preemptions > 0);
    // Shared: 3 full blocks of the prompt, and 4 of each sample. Unshared it would need 21 and be refused.
    let mut llm = Llm::new(config(15)).unwrap();
    assert_eq!(tokens(&mut llm, vec![request(0, 30, 24, 3)]), want[..1]);
}

#[test]
fn a_seed_gives_the_same_tokens_whatever_the_batch() {
    let request = |seed| request(seed, 12, 20, 2);
    let want = alone(&[request(7)]);
    let mut llm = Llm::new(config(256)).unwrap();
    let all: Vec<GenerationRequest> = (0..8).map(request).collect();
    assert_eq!(tokens(&mut llm, all.clone())[7], want[0]);
    assert_eq!(tokens(&mut llm, all.into_iter().rev().collect())[0], want[0]);
}

#[test]
fn draws_on_the_host_have_the_same_bits_with_any_number_of_threads() {
    // A vocabulary of 560 tokens is worth a thread for each dozen rows.
    let requests: Vec<GenerationRequest> = (0..90)
        .map(|i| {
            let mut request = request(i, 5 + i as usize % 9, 6, 1 + i as usize % 2);
            let sampling = &mut request.params.sampling;
            sampling.top_p = if i % 3 == 0 { 0.9 } else { 1.0 };
            sampling.frequency_penalty = if i % 4 == 0 { 0.5 } else { 0.0 };
            sampling.logit_bias = if i % 5 == 0 { vec![(i, 3.0)] } else { vec![] };
            request.params.prompt_logprobs = (i % 7 == 0).then_some(3);
            if i % 11 == 0 {
                request.params = GenerationParams { n: 2, beam: Some(BeamSearch::new(3)), ..request.params };
            }
            request
        })
        .collect();
    let run = |threads| {
        let sizes = EngineConfig { max_num_seqs: 200, max_num_batched_tokens: 1024, ..config(600) };
        let mut llm = Llm::new(EngineConfig { threads: Some(threads), ..sizes }).unwrap();
        llm.run_with_events(requests.clone()).unwrap()
    };
    let want = run(1);
    for threads in [2, 3, 5] {
        assert!(run(threads) == want, "{threads} threads give other answers than one");
    }
}

#[test]
fn requests_without_a_seed_differ_and_repeat_under_the_same_engine_seed() {
    let mut request = request(1, 12, 20, 1);
    request.params.sampling.seed = None;
    let run = |seed| {
        let mut llm = Llm::new(EngineConfig { seed, ..config(64) }).unwrap();
        tokens(&mut llm, vec![request.clone(), request.clone()])
    };
    let first = run(Some(5));
    assert_ne!(first[0], first[1]);
    assert_eq!(run(Some(5)), first);
    assert_ne!(run(None), run(None));
}

#[test]
fn s11_a_request_that_can_never_fit_is_refused_at_once_and_stops_no_other() {
    let mut llm = Llm::new(config(20)).unwrap();
    // 8 samples of 100 tokens: 1 + 8 * 13 blocks.
    let error = llm.run(vec![request(0, 12, 100, 8)]).unwrap_err().to_string();
    assert_eq!(error, "needs 105 blocks, the pool holds 20; the longest prompt that fits is 0 tokens");
    let error = llm.run(vec![request(0, 170, 4, 1)]).unwrap_err().to_string();
    assert_eq!(
        error,
        "the prompt has 170 tokens, the context holds 160 (--max-model-len) and needs room for one more: shorten the prompt"
    );
    let error = llm.run(vec![request(0, 12, 4, usize::MAX)]).unwrap_err().to_string();
    assert!(error.contains("expected at most 16384"), "{error}");
    assert_eq!(tokens(&mut llm, vec![request(1, 10, 5, 1)])[0][0].len(), 5);
}

#[test]
fn scoring_a_prompt_takes_no_token_and_equals_the_scores_of_generation() {
    let mut llm = Llm::new(config(64)).unwrap();
    let made = llm.run_with_events(vec![request(3, 20, 12, 1)]).unwrap().remove(0);
    let whole: Vec<u32> = made.0.prompt_token_ids.iter().chain(&made.0.outputs[0].token_ids).copied().collect();
    let params = GenerationParams { prompt_logprobs: Some(2), max_tokens: Some(0), ..Default::default() };
    let score = GenerationRequest { prompt: whole, params, ..Default::default() };
    let (completion, events) = llm.run_with_events(vec![score]).unwrap().remove(0);
    assert!(completion.outputs[0].token_ids.is_empty());
    let engine::Event::PromptLogprobs(scores) = &events[0] else { panic!("{events:?}") };
    assert_eq!(scores.len(), 32);
    assert!(scores[0].is_none());
    let generated = made.1.iter().filter_map(|e| if let engine::Event::Delta(d) = e { d.tokens.first() } else { None });
    let generated: Vec<_> = generated.collect();
    assert_eq!(generated.len(), 12);
    for (score, token) in scores[20..].iter().zip(generated) {
        assert_eq!(score.as_ref(), token.logprobs.as_ref(), "prefill and decode agree bit for bit");
    }
}

#[test]
fn a_prompt_of_one_token_and_one_that_fills_the_context_both_run() {
    let mut llm = Llm::new(config(64)).unwrap();
    for (len, max_tokens) in [(1, 3), (511, 1), (500, 12)] {
        let got = tokens(&mut llm, vec![GenerationRequest { prompt: prompt(9, len), ..request(9, 1, max_tokens, 1) }]);
        assert_eq!(got[0][0].len(), max_tokens, "prompt of {len}");
    }
    let open_end = GenerationRequest { prompt: prompt(9, 500), ..request(9, 1, 1, 1) };
    let open_end = GenerationRequest { params: GenerationParams { max_tokens: None, ..open_end.params }, ..open_end };
    assert_eq!(tokens(&mut llm, vec![open_end])[0][0].len(), 12, "no limit fills the context");
}

/// Prompt tokens, tokens to draw and samples of each request.
type Shapes = Vec<(usize, usize, usize)>;

/// Every request of a load gives the tokens that it gives alone, in a pool with `spare` blocks more than the largest request needs,
/// in steps of `budget` tokens. `on` changes the configuration for a device.
fn any_load(
    on: impl Fn(EngineConfig) -> EngineConfig,
    shapes: Shapes,
    spare: u64,
    budget: usize,
    prefix_caching: bool,
) -> Result<(), TestCaseError> {
    // Some prompts are equal, so that the prefix cache is hit while others are evicted.
    let requests: Vec<GenerationRequest> =
        shapes.iter().zip(0..).map(|(&(len, out, n), i)| request(i % 3, len, out, n)).collect();
    let blocks = |r: &GenerationRequest| {
        let (p, out) = (r.prompt.len() as u64, r.params.max_tokens.unwrap_or(0) as u64);
        p / 8 + r.params.n as u64 * ((p + out - 1).div_ceil(8) - p / 8)
    };
    let pool = requests.iter().map(blocks).max().unwrap_or(1) + spare;
    let longest = requests.iter().map(|r| r.prompt.len() + r.params.max_tokens.unwrap_or(0)).max().unwrap_or(0);
    prop_assume!(longest as u64 <= pool * 8);
    let small =
        EngineConfig { max_num_batched_tokens: budget, enable_prefix_caching: prefix_caching, ..config(pool.max(2)) };
    let mut llm = shared::llm(on(small)).unwrap();
    prop_assert_eq!(tokens(&mut llm, requests.clone()), alone_on(on(config(256)), &requests));
    prop_assert_eq!(llm.stats().scheduler.kv_cache_usage(), 0.0);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn any_load_on_any_pool_gives_the_tokens_of_each_alone(
        shapes in prop::collection::vec((1usize..60, 1usize..30, 1usize..4), 1..10),
        spare in 0u64..12,
        budget in 17usize..80,
        prefix_caching: bool,
    ) {
        any_load(|config| config, shapes, spare, budget, prefix_caching)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]
    #[test]
    fn on_cuda_sim_any_load_gives_the_tokens_of_each_alone_too(
        shapes in prop::collection::vec((1usize..24, 1usize..8, 1usize..3), 2..6),
        spare in 0u64..4,
        budget in 17usize..30,
        prefix_caching: bool,
    ) {
        // Without a compiler nothing was built, and that is reported.
        if let Some(sim) = on_sim(config(256)) {
            let on = |config| EngineConfig {
                device: sim.device.clone(),
                kernels_dir: sim.kernels_dir.clone(),
                deterministic: sim.deterministic,
                ..config
            };
            any_load(on, shapes, spare, budget, prefix_caching)?;
        }
    }
}
