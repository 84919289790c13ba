//! Prefixes that leave the cache for host memory and come back on a hit: no bit changes, and nothing is computed twice.

use engine::{Engine, EngineConfig, Event, GenerationRequest, Llm, PreemptionMode};

use crate::common::{TOKEN_BYTES, alone_on, config, overlapping, prompt, request, shared, tokens};
use crate::lora::{LORA, adapters, with_lora};

/// `blocks` blocks of 8 tokens on the device and `host` in host memory.
fn tiers(base: EngineConfig, blocks: u64, host: u64) -> EngineConfig {
    let bytes = |blocks| blocks * 8 * TOKEN_BYTES;
    EngineConfig { kv_cache_memory_bytes: Some(bytes(blocks)), kv_offloading_bytes: bytes(host), ..base }
}

/// A conversation: each turn's prompt is everything so far and a new message.
#[derive(Clone)]
struct Conversation {
    so_far: Vec<u32>,
    salt: Option<&'static str>,
    adapter: Option<&'static str>,
}

/// Conversations of which some have equal texts, but never the same keys and values.
fn conversations(with_adapters: bool) -> Vec<Conversation> {
    let text = |which, salt, adapter| Conversation { so_far: prompt(which, 30), salt, adapter };
    let plain = vec![text(1, None, None), text(1, Some("a"), None), text(1, Some("b"), None), text(2, None, None)];
    let adapted = vec![text(1, None, Some("a")), text(1, None, Some("b")), text(1, Some("a"), Some("a"))];
    if with_adapters { [plain, adapted].concat() } else { plain }
}

/// Runs turns of all conversations in order, one at a time or all at once. Returns the tokens with their log-probabilities,
/// and how many prompt tokens were cached.
fn converse(llm: &mut Llm, mut all: Vec<Conversation>, turns: u32, at_once: bool) -> (Vec<String>, usize) {
    let (mut answers, mut num_cached) = (Vec::new(), 0);
    for turn in 0..turns {
        let of = |(which, talk): (usize, &Conversation)| GenerationRequest {
            prompt: talk.so_far.clone(),
            cache_salt: talk.salt.map(str::to_string),
            adapter: talk.adapter.map(str::to_string),
            ..request(10 * turn + which as u32, 1, 8, 1)
        };
        let requests: Vec<GenerationRequest> = all.iter().enumerate().map(of).collect();
        let requests = requests.chunks(if at_once { requests.len() } else { 1 });
        let results = requests.flat_map(|some| llm.run_with_events(some.to_vec()).unwrap()).collect::<Vec<_>>();
        for ((completion, events), talk) in results.into_iter().zip(&mut all) {
            talk.so_far.extend(&completion.outputs[0].token_ids);
            talk.so_far.extend(prompt(100 + turn, 10));
            for event in events {
                match event {
                    Event::Started { cached_tokens } => num_cached += cached_tokens,
                    Event::Delta(delta) => answers.extend(delta.tokens.iter().map(|token| format!("{token:?}"))),
                    _ => {}
                }
            }
        }
    }
    (answers, num_cached)
}

fn with_adapters(base: EngineConfig) -> Llm {
    let (folder, mut llm) = (adapters(), Llm::new(base).unwrap());
    ["a", "b"].iter().for_each(|name| llm.load_adapter(name, &folder.path().join(name), false).unwrap());
    llm
}

#[test]
fn conversations_that_exceed_the_pool_have_the_same_bits_with_and_without_the_host_tier() {
    let base = with_lora(1, LORA);
    // Seven conversations of up to ten blocks.
    let (want, most) = converse(&mut with_adapters(tiers(base.clone(), 200, 0)), conversations(true), 3, false);
    assert_eq!(want.len(), 7 * 3 * 8);
    let (same, few) = converse(&mut with_adapters(tiers(base.clone(), 14, 0)), conversations(true), 3, false);
    assert_eq!((same == want, few < most / 2), (true, true), "{few} of {most} tokens were cached without the tier");

    let mut tiered = with_adapters(tiers(base.clone(), 14, 80));
    assert_eq!(converse(&mut tiered, conversations(true), 3, false), (want.clone(), most), "as in one large pool");
    let stats = tiered.stats();
    assert!(stats.scheduler.host_prefix_hits > 200 && stats.scheduler.blocks_loaded > 25, "{stats:?}");
    assert!(stats.scheduler.host_prefix_hits <= stats.scheduler.prefix_hits && stats.host_prefix_queries > 0);
    assert_eq!((stats.scheduler.host_blocks_in_use, stats.scheduler.host_blocks_total), (0, 80));

    // A tier that evicts too, steps of several conversations, and preemptions that take its blocks.
    for (host, at_once) in [(9, false), (80, true), (30, true)] {
        let sizes = EngineConfig { preemption_mode: PreemptionMode::Swap, ..tiers(base.clone(), 20, host) };
        let mut tiered = with_adapters(sizes);
        assert_eq!(converse(&mut tiered, conversations(true), 3, at_once).0, want, "{host} host blocks");
        let stats = tiered.stats();
        assert!(stats.scheduler.blocks_offloaded > 0, "{stats:?}");
        assert_eq!(at_once, stats.scheduler.preemptions > 0, "{stats:?}");
    }
}

#[test]
fn on_cuda_sim_a_step_waits_for_the_prefixes_that_it_reads_from_the_host() {
    let Some(base) = overlapping(1) else { return };
    let base = EngineConfig { swap_space_bytes: 0, max_model_len: Some(64), ..base };
    let (want, most) = converse(&mut shared::llm(tiers(base.clone(), 100, 0)).unwrap(), conversations(false), 2, false);
    for at_once in [false, true] {
        let mut tiered = shared::llm(tiers(base.clone(), 10, 40)).unwrap();
        let (same, cached) = converse(&mut tiered, conversations(false), 2, at_once);
        assert_eq!(same, want);
        assert!(cached == most || at_once, "{cached} of {most} tokens were cached");
        assert!(tiered.stats().scheduler.blocks_loaded > 0);
    }
}

#[test]
fn windows_and_recurrent_states_come_back_from_the_host() {
    let folder = crate::windows::mixed();
    let base = crate::windows::config(folder.path(), 1);
    let block = 2 * 32 * 4 * 8;
    let requests: Vec<_> = (0..4).map(|which| request(which, 70, 10, 1)).collect();
    check(base, [600 * block, 36 * block, 300 * block], &requests);

    let block = crate::recurrent::BLOCK_BYTES;
    let requests: Vec<_> = (0..4).map(|which| crate::recurrent::request(which, 150, 10, 1)).collect();
    check(crate::recurrent::config(1), [256 * block, 18 * block, 64 * block], &requests);

    /// Runs the requests one after the other, twice, in a large pool and in a small one with a host tier.
    fn check(base: EngineConfig, [large, small, host]: [u64; 3], requests: &[GenerationRequest]) {
        let of = |bytes| EngineConfig { kv_cache_memory_bytes: Some(bytes), ..base.clone() };
        let want = alone_on(of(large), requests);
        let mut llm = Llm::new(EngineConfig { kv_offloading_bytes: host, ..of(small) }).unwrap();
        for round in 0..3 {
            let got: Vec<_> =
                requests.iter().map(|request| tokens(&mut llm, vec![request.clone()]).remove(0)).collect();
            assert_eq!(got, want, "round {round}");
        }
        let stats = llm.stats();
        assert!(stats.scheduler.blocks_loaded > 0 && stats.scheduler.host_prefix_hits >= 64, "{stats:?}");
    }
}

#[test]
fn a_reset_of_the_cache_empties_the_host_tier() {
    let mut engine = Engine::load(&tiers(config(1), 14, 80), &|_, _| {}).unwrap();
    let run = |engine: &mut Engine| {
        for which in 0..4 {
            engine.submit(request(which, 40, 2, 1)).unwrap();
            while engine.has_work() {
                engine.step(|_, _| {});
            }
        }
    };
    run(&mut engine);
    assert!(engine.stats().scheduler.host_blocks_cached > 0);
    assert!(engine.reset_prefix_cache(false));
    let before = engine.stats();
    assert_eq!((before.scheduler.host_blocks_cached, before.scheduler.blocks_cached), (0, 0));
    run(&mut engine);
    assert_eq!(engine.stats().scheduler.prefix_hits, before.scheduler.prefix_hits);
}

#[test]
fn a_host_tier_that_can_not_be_is_one_line() {
    let of = |kv_offloading_bytes, base| EngineConfig { kv_offloading_bytes, ..base };
    let without_caching = EngineConfig { enable_prefix_caching: false, ..config(20) };
    for (config, expected) in [
        (of(1 << 60, config(20)), "at most"),
        (of(1 << 20, without_caching), "0 without prefix caching"),
        (of(100, config(20)), "0, or at least 12288 bytes, one block of 8 tokens"),
    ] {
        let error = Llm::new(config).err().unwrap().to_string();
        assert!(error.starts_with("--kv-offloading-size: found ") && error.contains(expected), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
    let plan = engine::plan(&tiers(config(1), 20, 30)).unwrap().to_string();
    assert!(plan.contains("host tier          30 blocks, 360.0 KiB, shared with the swap space"), "{plan}");
}
