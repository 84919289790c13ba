//! Speculation of a model with recurrent layers changes neither a token nor a log-probability, and no state that others read.

use std::sync::Mutex;

use engine::{EngineConfig, GenerationRequest, TokenEvent};
use proptest::prelude::*;
use testkit::everything;

use crate::common::{on_sim, shared, tokens};
use crate::overlap::{Classes, Load, answers};
use crate::recurrent::{BLOCK_BYTES, config, request};
use crate::speculate::{Case, Oracle, case, compare, loads, speculating};

/// Tokens of the model.
const VOCABULARY: usize = 424;

/// The loads of other models behind a prefix that they share, so that most texts cross the border of a block.
fn long_loads(case: &Case) -> Vec<Load> {
    let mut all = loads(case.seed, case.first, case.count);
    for (request, constraint) in &mut all {
        let prompt = request.prompt.iter().map(|token| 3 + token % 400);
        request.prompt = (0..50).map(|i| 5 + i * i % 300).chain(prompt).collect();
        *constraint = constraint.take().map(|classes| Classes { vocabulary: VOCABULARY, ..classes });
    }
    all
}

fn check(case: &Case, on: impl Fn(EngineConfig) -> EngineConfig) -> Result<(u64, u64), TestCaseError> {
    let [large, small] = [256, case.blocks].map(|blocks| EngineConfig { max_model_len: Some(128), ..config(blocks) });
    compare(case, &long_loads(case), &on(large), small, &on)
}

#[test]
fn speculation_of_a_recurrent_model_changes_no_token_and_no_log_probability() {
    let config = ProptestConfig { cases: 40, ..ProptestConfig::default() };
    let sums = Mutex::new((0, 0));
    let mut runner = proptest::test_runner::TestRunner::new(config);
    // The greatest request takes 24 blocks.
    let cases = (case(), 24u64..36).prop_map(|(case, blocks)| Case { blocks, ..case });
    runner
        .run(&cases, |case| {
            let (accepted, preemptions) = check(&case, |config| config)?;
            let mut sums = sums.lock().unwrap();
            *sums = (sums.0 + accepted, sums.1 + preemptions);
            Ok(())
        })
        .unwrap();
    let (accepted, preemptions) = *sums.lock().unwrap();
    println!("{accepted} accepted, {preemptions} preemptions");
    assert!(accepted > 100 && preemptions > 0, "{accepted} accepted, {preemptions} preemptions");
}

#[test]
fn speculation_of_a_recurrent_model_changes_nothing_on_cuda_sim_either() {
    if on_sim(config(256)).is_none() {
        return;
    }
    let on = |config| on_sim(config).unwrap();
    let base = Case {
        seed: 3,
        first: 0,
        count: 5,
        method: 2,
        most: 3,
        wrong: 4,
        blocks: 24,
        budget: 30,
        swaps: true,
        caches: true,
    };
    let (accepted, preemptions) = check(&base, on).unwrap();
    assert!(accepted > 20 && preemptions > 0, "{accepted} accepted, {preemptions} preemptions");
    if everything() {
        check(&Case { first: 4, count: 3, swaps: false, ..base }, on).unwrap();
    }
}

#[test]
fn a_block_that_drafts_have_reached_is_cached_with_the_state_of_its_last_token() {
    let large = config(256);
    let mut without = shared::engine(&large).unwrap();
    let first: Vec<Load> = (0..3).map(|i| (request(i, 30 + i as usize, 80, 1), None)).collect();
    let want = answers(&mut without, &first);
    let mut engine = speculating(&large, Oracle::new(&want, 11), 8);
    let before = answers(&mut engine, &first);
    assert!(engine.stats().spec_decode.num_accepted_tokens > 80);
    // The second request of a conversation: the first one, its answer, and more.
    let second = || -> Vec<Load> {
        let turn = |(events, (request, _)): (&Vec<TokenEvent>, &Load)| {
            let drawn = events.iter().filter_map(|event| match event {
                TokenEvent::Token { token: Some(token), .. } => Some(token.token),
                _ => None,
            });
            let prompt = request.prompt.iter().copied().chain(drawn).chain([9, 8, 7]).collect();
            (GenerationRequest { prompt, ..request.clone() }, None)
        };
        before.iter().zip(&first).map(turn).collect()
    };
    let uncached = EngineConfig { enable_prefix_caching: false, ..config(256) };
    let alone = answers(&mut shared::engine(&uncached).unwrap(), &second());
    let hits = engine.stats().scheduler.prefix_hits;
    // The source of drafts knows no more requests.
    let again: Vec<Load> = second().into_iter().map(|(request, constraint)| (undrafted(request), constraint)).collect();
    assert_eq!(answers(&mut engine, &again), alone);
    assert_eq!(engine.stats().scheduler.prefix_hits - hits, 3 * 64);
}

fn undrafted(mut request: GenerationRequest) -> GenerationRequest {
    request.params.speculative = false;
    request
}

#[test]
fn a_model_with_recurrent_layers_takes_the_flag_and_gives_the_same_tokens() {
    let speculative = r#"{"method": "suffix"}"#.parse().ok();
    let small = EngineConfig { kv_cache_memory_bytes: Some(60 * BLOCK_BYTES), ..config(256) };
    let requests = || (1..4).map(|i| request(i, 40, 90, 2)).collect::<Vec<_>>();
    let want = tokens(&mut shared::llm(small.clone()).unwrap(), requests());
    let mut llm = shared::llm(EngineConfig { speculative, ..small }).unwrap();
    assert_eq!(tokens(&mut llm, requests()), want);
    assert_eq!(tokens(&mut llm, requests()), want, "with drafts from the first round");
    // How many there are depends on the times of steps.
    assert!(llm.stats().spec_decode.num_drafts > 0);
}
