//! The reference cases, end to end: every greedy token of every case, through the paged cache, and bit for bit the same
//! log-probabilities whatever the block size, the chunks, the companions, the prefix cache or the kernels' threads, in every
//! type of cache. (Narrower ones give tokens of their own; how far they are from the reference is in `kv_dtypes.rs`.)
//!
//! All pairs of settings run here; `QUIRE_TEST_ALL=1` (`cargo xtask test-all`) runs the full product.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use engine::{
    Completion, EngineConfig, Event, GenerationParams, GenerationRequest, KvCacheDtype, Llm, ModelSource,
    SamplingParams,
};
use serde_json::Value;

const CASES: [&str; 5] = ["llama", "llama31-rope", "mistral-sliding", "qwen2", "qwen3"];

/// Greatest difference of a float32 log-probability from the reference (its README).
const TOLERANCE: f64 = 2e-3;

fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tests/reference").join(case)
}

struct Prompt {
    ids: Vec<u32>,
    greedy: Vec<u32>,
    logprobs: Vec<f64>,
}

fn prompts(case: &str) -> Vec<Prompt> {
    let expected: Value = serde_json::from_slice(&std::fs::read(folder(case).join("expected.json")).unwrap()).unwrap();
    let ids = |v: &Value| -> Vec<u32> { v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect() };
    let read = |p: &Value| Prompt {
        ids: ids(&p["ids"]),
        greedy: ids(&p["greedy"]["ids"]),
        logprobs: p["greedy"]["logprobs"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect(),
    };
    expected["prompts"].as_array().unwrap().iter().map(read).collect()
}

/// One way to run the same prompts.
#[derive(Clone, Copy, Debug)]
struct Setting {
    block_size: usize,
    budget: usize,
    prefix_cache: bool,
    together: bool,
    reference_kernels: bool,
    threads: usize,
    kv: KvCacheDtype,
}

impl Setting {
    /// Keys and values are kept as they are computed.
    fn exact(self) -> bool {
        matches!(self.kv, KvCacheDtype::Auto | KvCacheDtype::Float32)
    }

    /// What runs with equal bits have in common: the reference kernels sum in another order than the vectors.
    fn family(self) -> (bool, &'static str) {
        (self.reference_kernels, if self.exact() { "exact" } else { self.kv.name() })
    }
}

impl Setting {
    fn config(self, case: &str) -> EngineConfig {
        let mut config = EngineConfig {
            model: ModelSource::Folder(folder(case)),
            block_size: self.block_size,
            max_num_batched_tokens: self.budget,
            max_num_seqs: 8,
            kv_cache_memory_bytes: Some(16 << 20),
            enable_prefix_caching: self.prefix_cache,
            threads: Some(self.threads),
            kv_cache_dtype: self.kv,
            ..Default::default()
        };
        if self.reference_kernels {
            for name in [&mut config.kernels.decode, &mut config.kernels.prefill, &mut config.kernels.linear] {
                *name = "cpu.reference".into();
            }
        }
        config
    }
}

fn request(prompt: &[u32]) -> GenerationRequest {
    let sampling = SamplingParams { temperature: 0.0, logprobs: Some(5), ..Default::default() };
    GenerationRequest {
        prompt: prompt.to_vec(),
        params: GenerationParams { sampling, max_tokens: Some(48), ignore_eos: true, ..Default::default() },
        ..Default::default()
    }
}

/// Bits of every log-probability of a run: chosen token and alternatives.
type Bits = Vec<Vec<u32>>;

fn run(case: &str, setting: Setting, prompts: &[Prompt]) -> Bits {
    let mut llm = Llm::new(setting.config(case)).unwrap();
    let mut requests: Vec<GenerationRequest> = prompts.iter().map(|p| request(&p.ids)).collect();
    if setting.prefix_cache {
        // A first run fills the prefix cache, so that the second one reads it.
        llm.run(requests.clone()).unwrap();
    }
    let mut scored = Vec::new();
    let mut take = |completions: Vec<(Completion, Vec<Event>)>| {
        for (completion, events) in completions {
            let tokens = events
                .into_iter()
                .filter_map(|e| if let Event::Delta(delta) = e { Some(delta.tokens) } else { None })
                .flatten();
            scored.push((
                completion.outputs[0].token_ids.clone(),
                tokens.map(|t| t.logprobs.unwrap()).collect::<Vec<_>>(),
            ));
        }
    };
    if setting.together {
        take(llm.run_with_events(std::mem::take(&mut requests)).unwrap());
    } else {
        for request in requests {
            take(llm.run_with_events(vec![request]).unwrap());
        }
    }
    if setting.prefix_cache {
        assert!(llm.stats().prefix_cache_hits > 100, "{case} {setting:?}: the prefix cache was not read");
    }
    let mut bits = Vec::new();
    for (prompt, (tokens, logprobs)) in prompts.iter().zip(scored) {
        if setting.exact() {
            assert_eq!(tokens, prompt.greedy, "{case} {setting:?}, prompt of {} tokens", prompt.ids.len());
        }
        for (found, want) in logprobs.iter().zip(&prompt.logprobs).filter(|_| setting.exact()) {
            assert!((f64::from(found.logprob) - want).abs() < TOLERANCE, "{case} {setting:?}: {found:?}, want {want}");
        }
        let of = |l: &engine::TokenLogprobs| {
            std::iter::once(l.logprob).chain(l.top.iter().map(|t| t.1)).map(f32::to_bits).collect::<Vec<_>>()
        };
        bits.push(logprobs.iter().flat_map(of).collect());
    }
    bits
}

/// Every setting; the first is the plainest.
fn product() -> Vec<Setting> {
    let mut all = Vec::new();
    for together in [false, true] {
        for prefix_cache in [false, true] {
            for budget in [2048, 16] {
                for block_size in [16, 8, 32] {
                    for threads in [1, 2] {
                        for reference_kernels in [false, true] {
                            for kv in KvCacheDtype::ALL {
                                all.push(Setting {
                                    block_size,
                                    budget,
                                    prefix_cache,
                                    together,
                                    reference_kernels,
                                    threads,
                                    kv,
                                });
                            }
                        }
                    }
                }
            }
        }
    }
    all
}

/// Settings until every pair of values of two axes has been seen together (greedy cover of the product).
fn pairwise(all: &[Setting]) -> Vec<Setting> {
    let axes = |s: &Setting| {
        [
            s.block_size,
            s.budget,
            usize::from(s.prefix_cache),
            usize::from(s.together),
            usize::from(s.reference_kernels),
            s.threads,
            s.kv as usize,
        ]
    };
    let pairs = |s: &Setting| {
        let v = axes(s);
        (0..v.len()).flat_map(move |i| (i + 1..v.len()).map(move |j| (i, v[i], j, v[j]))).collect::<Vec<_>>()
    };
    let mut missing: std::collections::BTreeSet<_> = all.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let best = all.iter().max_by_key(|s| pairs(s).iter().filter(|p| missing.contains(p)).count()).unwrap();
        for pair in pairs(best) {
            missing.remove(&pair);
        }
        chosen.push(*best);
    }
    chosen
}

fn check(case: &str) {
    let all = product();
    let settings = if std::env::var_os("QUIRE_TEST_ALL").is_some() { all } else { pairwise(&all) };
    assert!(settings.len() >= 6);
    let prompts = prompts(case);
    let mut first: BTreeMap<_, (Setting, Bits)> = BTreeMap::new();
    let mut compared = 0;
    for setting in settings {
        let bits = run(case, setting, &prompts);
        match first.get(&setting.family()) {
            None => drop(first.insert(setting.family(), (setting, bits))),
            Some((before, want)) => {
                assert!(bits == *want, "{case}: {setting:?} and {before:?} differ in some bit");
                compared += 1;
            }
        }
    }
    // Two kinds of kernels, and six types: float32 is auto.
    assert!(first.len() == 2 * 6 && compared >= 6, "{} families, {compared} comparisons", first.len());
}

#[test]
fn llama_gives_the_reference_tokens_in_every_setting() {
    check(CASES[0]);
}

#[test]
fn llama31_rope_gives_the_reference_tokens_in_every_setting() {
    check(CASES[1]);
}

#[test]
fn mistral_sliding_gives_the_reference_tokens_in_every_setting() {
    check(CASES[2]);
}

#[test]
fn qwen2_gives_the_reference_tokens_in_every_setting() {
    check(CASES[3]);
}

#[test]
fn qwen3_gives_the_reference_tokens_in_every_setting() {
    check(CASES[4]);
}
