//! `--deterministic` on the CUDA path, with every launch run by `cuda-sim`: the bits of a request do not depend on other requests.

use crate::common::{config, opened, request, shared};
use engine::{AsyncEngine, Dtype, EngineConfig, Event, GenerationRequest, KvCacheDtype, Llm, PreemptionMode};

/// In halves, which have two families of attention kernels. `None`, reported, where there is no compiler.
fn on_sim(blocks: u64) -> Option<EngineConfig> {
    let kernels_dir = Some(opened::kernels()?);
    // `config` counts blocks of float32.
    let config =
        EngineConfig { kv_cache_memory_bytes: config(blocks).kv_cache_memory_bytes.map(|b| b / 2), ..config(blocks) };
    Some(EngineConfig {
        device: testkit::kernels::host::device_for_tests().into(),
        dtype: Some(Dtype::F16),
        kernels_dir,
        deterministic: true,
        ..config
    })
}

/// Tokens and bits of log-probabilities of each request.
type Bits = Vec<Vec<(u32, u32)>>;

fn run(llm: &mut Llm, requests: &[GenerationRequest]) -> Bits {
    let of = |events: Vec<Event>| {
        let deltas = events.into_iter().filter_map(|e| if let Event::Delta(delta) = e { Some(delta) } else { None });
        let tokens = deltas.flat_map(|delta| delta.tokens);
        tokens.map(|token| (token.id, token.logprobs.unwrap().logprob.to_bits())).collect()
    };
    llm.run_with_events(requests.to_vec()).unwrap().into_iter().map(|(_, events)| of(events)).collect()
}

fn requests() -> Vec<GenerationRequest> {
    (0..5).map(|i| request(i, 5 + 9 * i as usize, 8, 1)).collect()
}

#[test]
fn a_request_has_its_bits_in_every_batch_chunk_cache_hit_and_preemption() {
    let Some(plain) = on_sim(64) else { return };
    let requests = requests();
    let mut alone = shared::llm(plain.clone()).unwrap();
    let want: Bits = requests.iter().flat_map(|request| run(&mut alone, std::slice::from_ref(request))).collect();
    assert_eq!(run(&mut alone, &requests), want, "together, and with the prefix cache");
    assert!(alone.stats().scheduler.prefix_hits > 0, "nothing was found in the prefix cache: the test shows nothing");
    // Chunks of a few rows, some of them of one, which the decode kernel computes.
    let chunks = EngineConfig { max_num_batched_tokens: 5, max_num_seqs: 4, ..plain.clone() };
    assert_eq!(run(&mut shared::llm(chunks).unwrap(), &requests), want, "chunks");
    let blocks = EngineConfig { block_size: Some(16), enable_prefix_caching: false, ..plain };
    assert_eq!(run(&mut shared::llm(blocks).unwrap(), &requests), want, "block size");
    let mut small =
        shared::llm(EngineConfig { preemption_mode: PreemptionMode::Recompute, ..on_sim(12).unwrap() }).unwrap();
    assert_eq!(run(&mut small, &requests), want, "preemption");
    assert!(small.stats().scheduler.preemptions > 0, "nothing was preempted: the test shows nothing");
}

#[test]
fn an_int8_cache_keeps_its_bits_too() {
    let Some(plain) = on_sim(64) else { return };
    let plain = EngineConfig { kv_cache_dtype: KvCacheDtype::Int8, ..plain };
    let requests = requests();
    let mut alone = shared::llm(plain.clone()).unwrap();
    let want: Bits = requests.iter().flat_map(|request| run(&mut alone, std::slice::from_ref(request))).collect();
    let chunks = EngineConfig { max_num_batched_tokens: 5, max_num_seqs: 4, enable_prefix_caching: false, ..plain };
    assert_eq!(run(&mut shared::llm(chunks).unwrap(), &requests), want);
}

fn notes(config: EngineConfig) -> String {
    AsyncEngine::start(config, &|_, _| {}).unwrap().info().notes.join("\n")
}

#[test]
fn the_flag_selects_and_reports_one_family_of_kernels() {
    let line = "deterministic: attention of the family cuda.tiles, products with one order of summation";
    let Some(config) = on_sim(64) else { return };
    let said = notes(config.clone());
    assert!(said.contains(line) && said.contains("decode cuda.paged_gqa, prefill cuda.paged_prefill"), "{said}");
    let said = notes(EngineConfig { deterministic: false, ..config.clone() });
    assert!(!said.contains("deterministic") && !said.contains("slower"), "{said}");
    let (quantization, dtype) = (Some(engine::Quantization::Q8), Some(engine::Dtype::Bf16));
    let small = EngineConfig { max_num_batched_tokens: 4, max_num_seqs: 1, max_model_len: Some(32), ..config };
    let said = notes(EngineConfig { deterministic: false, quantization, dtype, ..small });
    assert!(said.contains("\nquantised weights: on a GPU, steps of 64 tokens and more are slower"), "{said}");
    let on_cpu = EngineConfig { deterministic: true, ..crate::common::config(64) };
    assert!(notes(on_cpu).contains("deterministic: attention of the family cpu."));
}

#[test]
fn where_no_set_agrees_there_is_one_line_about_it() {
    let Some(mut config) = on_sim(64) else { return };
    config.kernels.decode = "cuda.paged_v2".into();
    let said = engine::plan(&config).unwrap_err().to_string();
    assert!(said.contains("one family of row-invariant attention") && said.contains("cuda.paged_v2"), "{said}");
    assert!(!said.contains('\n'), "{said}");
}
