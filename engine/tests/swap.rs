//! Preemption by swap: keys and values leave for host memory and come back, and no token changes.

use crate::common::{TOKEN_BYTES, alone, config, request, tokens};
use engine::{EngineConfig, GenerationRequest, Llm, PreemptionMode};

/// Host blocks of 8 tokens that a test allows.
fn swap_space(blocks: u64) -> u64 {
    blocks * 8 * TOKEN_BYTES
}

#[test]
fn a_swapped_request_gives_the_tokens_of_one_that_was_never_preempted() {
    let requests: Vec<GenerationRequest> = (0..10).map(|i| request(i, 5 + 7 * (i as usize % 5), 40, 1)).collect();
    let want = alone(&requests);
    for prefix_caching in [true, false] {
        // 10 requests need up to 10 blocks each; the pool holds 20.
        let swapping = EngineConfig {
            enable_prefix_caching: prefix_caching,
            swap_space_bytes: swap_space(60),
            preemption_mode: PreemptionMode::Swap,
            ..config(20)
        };
        let mut llm = Llm::new(swapping).unwrap();
        assert_eq!(tokens(&mut llm, requests.clone()), want, "prefix caching {prefix_caching}");
        let stats = llm.stats();
        assert!(stats.scheduler.swap_preemptions > 0, "nothing was swapped: the test shows nothing");
        assert_eq!(stats.scheduler.swap_preemptions, stats.scheduler.preemptions, "there was room for all");
        assert_eq!(
            (stats.scheduler.kv_cache_usage(), stats.scheduler.host_cache_usage()),
            (0.0, 0.0),
            "blocks are left over"
        );
    }
}

#[test]
fn samples_that_share_a_prompt_share_it_again_after_a_swap() {
    let requests: Vec<GenerationRequest> = (0..5).map(|i| request(i, 30, 24, 3)).collect();
    let want = alone(&requests);
    // Shared: 3 full blocks of the prompt, and 4 of each sample.
    let mut llm = Llm::new(EngineConfig { swap_space_bytes: swap_space(40), ..config(26) }).unwrap();
    assert_eq!(tokens(&mut llm, requests), want);
    assert!(llm.stats().scheduler.swap_preemptions > 0);
}

#[test]
fn a_swap_space_too_small_for_all_swaps_some_and_recomputes_others() {
    let requests: Vec<GenerationRequest> = (0..12).map(|i| request(i, 20, 40, 1)).collect();
    let want = alone(&requests);
    let mut llm = Llm::new(EngineConfig { swap_space_bytes: swap_space(9), ..config(20) }).unwrap();
    assert_eq!(tokens(&mut llm, requests), want);
    let stats = llm.stats();
    assert!(
        0 < stats.scheduler.swap_preemptions && stats.scheduler.swap_preemptions < stats.scheduler.preemptions,
        "{stats:?}"
    );
}

#[test]
fn a_swap_space_beyond_the_memory_of_the_machine_is_refused() {
    let config = EngineConfig { swap_space_bytes: 1 << 60, ..config(20) };
    let error = Llm::new(config).err().unwrap().to_string();
    assert!(error.contains("--swap-space") && !error.contains('\n'), "{error}");
}
