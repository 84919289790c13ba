//! The reference cases, end to end: every greedy token of every case, through the paged cache, and bit for bit the same
//! log-probabilities whatever the block size, the chunks, the companions, the prefix cache or the kernels' threads, in every
//! type of cache. (Narrower types give different tokens; `kv_dtypes.rs` bounds their distance from the reference.)
//!
//! The same on the CUDA path, every launch run by `cuda-sim`: in float32 by the same demands, in halves within a bound. In halves a
//! greedy continuation may leave the reference where that hesitates, so the reference's own tokens are scored too, all of them.
//! Where `QUIRE_TEST_DEVICE` is `cuda` a GPU runs them, and all prompts to their ends.
//!
//! All pairs of settings run here, on `cuda-sim` for the shorter prompts and their first tokens; of the families after the first ones
//! those with caches or masks of their own run there in two settings that differ in everything, and the tests of the forward pass
//! compare the logits of all. `QUIRE_TEST_ALL=1` (`cargo xtask test-all`) runs the full product and everything.

use std::collections::BTreeMap;

use crate::common::cases::{Prompt, expected, folder, prompts};
use crate::common::{opened, shared};
use engine::{
    Completion, Dtype, EngineConfig, Event, GenerationParams, GenerationRequest, KvCacheDtype, Llm, ModelSource,
    SamplingParams,
};
use testkit::everything;
use testkit::kernels::host::device_for_tests;
use testkit::reference::{CASES, FIRST, block_size, context};

/// The case with recurrent layers, whose blocks must be larger.
const RECURRENT: &str = "qwen3-next";

/// Families after the first ones that keep or read their caches in a way of their own: with slopes, latents, windows in some layers,
/// sinks, and factors by length. An ordinary run on `cuda-sim` takes these.
const OWN_CACHES: [&str; 5] = ["bloom", "deepseek-v2-lite", "gemma3-text", "gpt-oss", "phi3-longrope"];

/// Tokens that an ordinary run draws on `cuda-sim`.
const FIRST_TOKENS: usize = 6;

/// Greatest difference of a log-probability from the reference, which is float32 (its README): there 2e-3; in halves what
/// transformers itself, with the same prompts and tokens, is off by in that type: at most 0.069 and 0.57 in the first cases, and
/// twice the noise that the reference states in the others.
fn tolerance(case: &str, sim: Option<Dtype>) -> f64 {
    match sim {
        None | Some(Dtype::F32) => 2e-3,
        Some(Dtype::F16) if FIRST.contains(&case) => 0.069,
        Some(Dtype::Bf16) if FIRST.contains(&case) => 0.57,
        _ => 2.0 * noise(case, sim).0,
    }
}

/// Greatest and mean difference of a logit that transformers itself has in a type, over all prompts and continuations of a case: what
/// the reference states as its noise.
fn noise(case: &str, dtype: Option<Dtype>) -> (f64, f64) {
    let key = match dtype {
        Some(Dtype::F16) => "float16_compute",
        Some(Dtype::Bf16) => "bfloat16_compute",
        None | Some(Dtype::F32) => return (2e-3, 2e-3),
    };
    let noise = &expected(case)["noise"][key];
    (noise["max_abs"].as_f64().unwrap(), noise["mean_abs"].as_f64().unwrap())
}

/// One way to run the same prompts.
#[derive(Clone, Copy, Debug)]
struct Setting {
    /// `None`: on the CPU; else on `cuda-sim`, computed in that type.
    sim: Option<Dtype>,
    /// Type of the computation on the CPU; `None`: float32.
    cpu: Option<Dtype>,
    block_size: usize,
    budget: usize,
    prefix_cache: bool,
    together: bool,
    reference_kernels: bool,
    threads: usize,
    kv: KvCacheDtype,
    /// Without CUDA graphs.
    eager: bool,
    /// The kernels that `auto` chooses without `--deterministic`.
    fast: bool,
    /// Greatest context that is served; `None`: the checkpoint's.
    context: Option<usize>,
}

impl Setting {
    /// Type of the computation; `None`: float32 on the CPU.
    fn computes(self) -> Option<Dtype> {
        self.sim.or(self.cpu)
    }

    /// Keys and values are kept as they are computed.
    fn exact(self) -> bool {
        matches!(self.kv, KvCacheDtype::Auto | KvCacheDtype::Float32)
    }

    /// Key of runs with equal bits: the reference kernels sum in a different order from the vector kernels.
    fn family(self) -> (bool, &'static str) {
        (self.reference_kernels, if self.exact() { "exact" } else { self.kv.name() })
    }
}

impl Setting {
    fn config(self, case: &str) -> EngineConfig {
        let mut config = EngineConfig {
            model: ModelSource::Folder(folder(case)),
            block_size: Some(self.block_size),
            max_num_batched_tokens: self.budget,
            max_num_seqs: 8,
            kv_cache_memory_bytes: Some(4 << 20),
            enable_prefix_caching: self.prefix_cache,
            threads: Some(self.threads),
            kv_cache_dtype: self.kv,
            max_model_len: self.context,
            dtype: Some(self.cpu.unwrap_or_default()),
            ..Default::default()
        };
        if let Some(dtype) = self.sim {
            config.device = device_for_tests().into();
            config.kernels_dir = opened::kernels();
            config.dtype = Some(dtype);
            // A row has the same bits in every step, on any thread.
            config.deterministic = !self.fast;
            config.enforce_eager = self.eager;
        }
        if self.reference_kernels {
            for name in [&mut config.kernels.decode, &mut config.kernels.prefill, &mut config.kernels.linear] {
                *name = "cpu.reference".into();
            }
        }
        config
    }
}

fn request(prompt: &[u32], max_tokens: usize) -> GenerationRequest {
    let sampling = SamplingParams { temperature: 0.0, logprobs: Some(5), ..Default::default() };
    GenerationRequest {
        prompt: prompt.to_vec(),
        params: GenerationParams { sampling, max_tokens: Some(max_tokens), ignore_eos: true, ..Default::default() },
        ..Default::default()
    }
}

/// Bits of every log-probability of a run: chosen token and alternatives.
type Bits = Vec<Vec<u32>>;

fn run(case: &str, setting: Setting, prompts: &[Prompt]) -> Bits {
    let mut llm = shared::llm(setting.config(case)).unwrap();
    let mut requests: Vec<GenerationRequest> = prompts.iter().map(|p| request(&p.ids, p.greedy.len())).collect();
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
        let least = prompts.iter().map(|p| p.ids.len() as u64).sum::<u64>() / 3;
        assert!(llm.stats().scheduler.prefix_hits > least, "{case} {setting:?}: the prefix cache was not read");
    }
    assert_eq!(scored.len(), prompts.len(), "{case} {setting:?}: a prompt has no answer");
    let mut bits = Vec::new();
    for (prompt, (tokens, logprobs)) in prompts.iter().zip(scored) {
        assert_eq!((tokens.len(), logprobs.len()), (prompt.greedy.len(), prompt.greedy.len()), "{case} {setting:?}");
        if setting.exact() {
            let tolerance = tolerance(case, setting.computes());
            let same = tokens.iter().zip(&prompt.greedy).take_while(|(a, b)| a == b).count();
            // If two tokens are about equally likely in the reference, fewer bits may select the other one. The continuation is
            // compared by `check_teacher_forced`.
            let may_differ = prompt.margins.get(same).is_some_and(|margin| *margin < 2.0 * tolerance);
            let agrees = same == prompt.greedy.len() || may_differ;
            assert!(agrees, "{case} {setting:?}, prompt of {} tokens: {tokens:?}", prompt.ids.len());
            assert!(prompt.logprobs.len() >= tokens.len() && prompt.margins.len() >= tokens.len(), "{case}");
            for (found, want) in logprobs.iter().zip(&prompt.logprobs).take(same) {
                let error = (f64::from(found.logprob) - want).abs();
                assert!(error < tolerance, "{case} {setting:?}: {found:?}, want {want}");
            }
        }
        let of = |l: &engine::TokenLogprobs| {
            std::iter::once(l.logprob).chain(l.top.iter().map(|t| t.1)).map(f32::to_bits).collect::<Vec<_>>()
        };
        bits.push(logprobs.iter().flat_map(of).collect());
    }
    bits
}

/// Scores of `tokens` after each prompt, computed as parts of prompts: of the token itself, and of the likeliest one.
fn scored(llm: &mut Llm, prompts: &[Prompt], tokens: &[Vec<u32>]) -> Vec<Vec<(f32, (u32, f32))>> {
    let request = |(prompt, tokens): (&Prompt, &Vec<u32>)| GenerationRequest {
        prompt: [&prompt.ids[..], tokens].concat(),
        params: GenerationParams { prompt_logprobs: Some(1), max_tokens: Some(0), ..Default::default() },
        ..Default::default()
    };
    let done = llm.run_with_events(prompts.iter().zip(tokens).map(request).collect()).unwrap();
    assert_eq!(done.len(), prompts.len());
    let scores = |(events, prompt): (Vec<Event>, &Prompt)| {
        let found = events.into_iter().find_map(|e| if let Event::PromptLogprobs(s) = e { Some(s) } else { None });
        let found = found.unwrap();
        let scores = found[prompt.ids.len()..].iter().map(|s| s.as_ref().unwrap());
        scores.map(|s| (s.logprob, (s.top[0].0, s.top[0].1))).collect()
    };
    done.into_iter().map(|(_, events)| events).zip(prompts).map(scores).collect()
}

/// Scores every prompt with every token of its reference, whatever a greedy run would draw: each log-probability is within the
/// reference's noise, and so is the mean of their errors; the first tokens are within the tighter bound of a greedy run; the
/// likeliest token is the reference's, unless two are about equally likely. Then the tokens of a greedy run are scored in the same
/// way: its steps of one token compute the same as a prompt, with equal bits where these are promised, so the bound holds too.
fn check_teacher_forced(case: &str, setting: Setting) {
    let mut prompts = prompts(case);
    if !everything() && device_for_tests() == "cuda-sim" {
        prompts.retain(|prompt| prompt.ids.len() < 100);
    }
    assert!(prompts.len() > 1, "{case}");
    by_context(prompts, case).into_iter().for_each(|(context, prompts)| {
        check_teacher_forced_in(case, Setting { context, ..setting }, prompts);
    });
}

/// The prompts by the context that their results hold for.
fn by_context(prompts: Vec<Prompt>, case: &str) -> BTreeMap<Option<usize>, Vec<Prompt>> {
    let mut groups = BTreeMap::<_, Vec<Prompt>>::new();
    for prompt in prompts {
        groups.entry(context(case, prompt.ids.len())).or_default().push(prompt);
    }
    groups
}

fn check_teacher_forced_in(case: &str, setting: Setting, prompts: Vec<Prompt>) {
    let bound = tolerance(case, setting.computes());
    let (greatest, mean) = noise(case, setting.computes());
    let (greatest, mean) = if FIRST.contains(&case) { (greatest, mean) } else { (2.0 * greatest, 2.0 * mean) };
    let mut errors = Vec::new();
    let mut llm = shared::llm(setting.config(case)).unwrap();
    let greedy: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.greedy.clone()).collect();
    for (prompt, scores) in prompts.iter().zip(scored(&mut llm, &prompts, &greedy)) {
        assert_eq!([scores.len(), prompt.logprobs.len(), prompt.margins.len()], [prompt.greedy.len(); 3], "{case}");
        for (at, (found, (likeliest, _))) in scores.into_iter().enumerate() {
            let error = (f64::from(found) - prompt.logprobs[at]).abs();
            let most = if at < FIRST_TOKENS { bound } else { greatest };
            assert!(error < most, "{case} {setting:?}, prompt of {}, token {at}: off by {error}", prompt.ids.len());
            errors.push(error);
            let is_same = likeliest == prompt.greedy[at] || prompt.margins[at] < 2.0 * bound;
            assert!(is_same, "{case} {setting:?}, prompt of {}, token {at}: {likeliest}", prompt.ids.len());
        }
    }
    assert_eq!(errors.len(), prompts.iter().map(|prompt| prompt.greedy.len()).sum::<usize>(), "{case}");
    let found = errors.iter().sum::<f64>() / errors.len() as f64;
    println!("{case} {:?}: off by {found} in the mean of {} tokens", setting.computes(), errors.len());
    assert!(found < mean, "{case} {setting:?}: off by {found} in the mean");
    // Some steps are enough to compare steps with prompts.
    let drawn = llm.run_with_events(prompts.iter().map(|prompt| request(&prompt.ids, FIRST_TOKENS)).collect()).unwrap();
    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    for (completion, events) in drawn {
        tokens.push(completion.outputs[0].token_ids.clone());
        let deltas =
            events.into_iter().filter_map(|e| if let Event::Delta(delta) = e { Some(delta.tokens) } else { None });
        logprobs.push(deltas.flatten().map(|token| token.logprobs.unwrap().logprob).collect::<Vec<f32>>());
    }
    for (drawn, scores) in logprobs.into_iter().zip(scored(&mut llm, &prompts, &tokens)) {
        assert_eq!([drawn.len(), scores.len()], [FIRST_TOKENS; 2], "{case} {setting:?}");
        for (at, (drawn, (scored, _))) in drawn.into_iter().zip(scores).enumerate() {
            let agrees = match setting.fast {
                false => drawn.to_bits() == scored.to_bits(),
                true => f64::from((drawn - scored).abs()) < bound,
            };
            assert!(agrees, "{case} {setting:?}, token {at}: {drawn} in a step, {scored} in a prompt");
        }
    }
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
                                    sim: None,
                                    cpu: None,
                                    block_size,
                                    budget,
                                    prefix_cache,
                                    together,
                                    reference_kernels,
                                    threads,
                                    kv,
                                    eager: false,
                                    fast: false,
                                    context: None,
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
    // The differences between families do not interact with the cache's type.
    let (kinds, families) = if everything() || case == CASES[0] {
        (&KvCacheDtype::ALL[..], KvCacheDtype::ALL.len() - 1) // float32 is auto
    } else {
        (&KvCacheDtype::ALL[..1], 1)
    };
    let sizes = if everything() || FIRST.contains(&case) { &[8, 16, 32][..] } else { &[8, 16] };
    let runs = |setting: &Setting| kinds.contains(&setting.kv) && sizes.contains(&setting.block_size);
    let all: Vec<Setting> = product().into_iter().filter(runs).collect();
    let settings = if everything() { all } else { pairwise(&all) };
    for (context, prompts) in by_context(prompts(case), case) {
        let settings = settings.iter().map(|setting| Setting { context, ..*setting }).collect();
        // Two kinds of kernels.
        compare(case, settings, &prompts, 2 * families);
    }
}

/// Every n-th of the other cases: the threads of the test runner share them.
fn others(part: usize) -> impl Iterator<Item = &'static str> {
    let others = CASES.split_at(FIRST.len()).1.iter().copied();
    others.filter(|case| *case != RECURRENT).skip(part).step_by(2)
}

#[test]
fn other_families_give_the_reference_tokens_in_every_setting() {
    others(0).for_each(check);
}

#[test]
fn the_rest_of_the_families_give_the_reference_tokens_in_every_setting() {
    others(1).for_each(check);
}

/// Runs all settings; those of one family must have the same bits, and there are `families` families.
fn compare(case: &str, settings: Vec<Setting>, prompts: &[Prompt], families: usize) {
    let mut first: BTreeMap<_, (Setting, Bits)> = BTreeMap::new();
    let mut compared = 0;
    for setting in settings {
        let bits = run(case, setting, prompts);
        match first.get(&setting.family()) {
            None => drop(first.insert(setting.family(), (setting, bits))),
            Some((before, want)) => {
                assert!(bits == *want, "{case}: {setting:?} and {before:?} differ in some bit");
                compared += 1;
            }
        }
    }
    assert!(first.len() == families && compared >= 3, "{} families, {compared} comparisons", first.len());
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

/// Settings with blocks that hold the states of recurrent layers.
fn with_larger_blocks(settings: Vec<Setting>) -> Vec<Setting> {
    let larger = |s: Setting| Setting { block_size: (4 * s.block_size).max(64), ..s };
    settings.into_iter().filter(|s| s.kv == KvCacheDtype::Auto).map(larger).collect()
}

#[test]
fn qwen3_next_gives_the_reference_tokens_in_every_setting() {
    let all = with_larger_blocks(product());
    compare(RECURRENT, if everything() { all } else { pairwise(&all) }, &prompts(RECURRENT), 2);
}

#[test]
fn qwen3_next_gives_the_reference_tokens_on_cuda_sim() {
    if opened::kernels().is_none() {
        return;
    }
    let all = with_larger_blocks(product()).into_iter().filter(|s| s.threads == 1 && !s.reference_kernels);
    let all: Vec<Setting> = all.map(|s| Setting { sim: Some(Dtype::F32), budget: s.budget.min(128), ..s }).collect();
    let prompts = prompts_on_sim(RECURRENT);
    // Shorter prompts than a block are never read from the cache.
    let all: Vec<Setting> = all.into_iter().filter(|s| !s.prefix_cache || everything()).collect();
    compare(RECURRENT, if everything() { all } else { pairwise(&all) }, &prompts, 1);
}

/// The prompts, or the shorter ones with their first tokens.
fn prompts_on_sim(case: &str) -> Vec<Prompt> {
    let mut prompts = prompts(case);
    if !everything() && device_for_tests() == "cuda-sim" {
        prompts.retain(|prompt| prompt.ids.len() < 100);
        prompts.iter_mut().for_each(|prompt| prompt.greedy.truncate(FIRST_TOKENS));
    }
    prompts
}

/// The types of a cache that the CUDA kernels have beside f32.
const ON_GPU: [KvCacheDtype; 4] =
    [KvCacheDtype::Auto, KvCacheDtype::Fp8E4m3, KvCacheDtype::Fp8E5m2, KvCacheDtype::Int8];

fn check_on_sim(case: &str) {
    if opened::kernels().is_none() {
        return;
    }
    let on_sim = |s: &Setting| Setting { sim: Some(Dtype::F32), budget: s.budget.min(128), ..*s };
    let kinds = if everything() || case == CASES[0] { &ON_GPU[..] } else { &ON_GPU[..1] };
    let sizes = if everything() { &[8, 16, 32][..] } else { &[8, 16] };
    let runs =
        |s: &&Setting| s.threads == 1 && !s.reference_kernels && kinds.contains(&s.kv) && sizes.contains(&s.block_size);
    let all: Vec<Setting> = product().iter().filter(runs).map(on_sim).collect();
    let settings = if everything() { all } else { pairwise(&all) };
    for (context, prompts) in by_context(prompts_on_sim(case), case) {
        if !everything() && !FIRST.contains(&case) {
            compare_two(case, Setting { context, ..all_at_once(Dtype::F32) }, &prompts);
            continue;
        }
        let settings = settings.iter().map(|setting| Setting { context, ..*setting }).collect();
        compare(case, settings, &prompts, kinds.len());
    }
}

/// Every n-th of the other cases that run on the device.
fn others_on_sim(part: usize) -> impl Iterator<Item = &'static str> {
    let all = everything() || device_for_tests() == "cuda";
    others(part).filter(move |case| all || OWN_CACHES.contains(case))
}

#[test]
fn other_families_give_the_reference_tokens_on_cuda_sim() {
    others_on_sim(0).for_each(check_on_sim);
}

#[test]
fn the_rest_of_the_families_give_the_reference_tokens_on_cuda_sim() {
    others_on_sim(1).for_each(check_on_sim);
}

#[test]
fn llama_gives_the_reference_tokens_on_cuda_sim() {
    check_on_sim(CASES[0]);
}

#[test]
fn llama31_rope_gives_the_reference_tokens_on_cuda_sim() {
    check_on_sim(CASES[1]);
}

#[test]
fn mistral_sliding_gives_the_reference_tokens_on_cuda_sim() {
    check_on_sim(CASES[2]);
}

#[test]
fn qwen2_gives_the_reference_tokens_on_cuda_sim() {
    check_on_sim(CASES[3]);
}

#[test]
fn qwen3_gives_the_reference_tokens_on_cuda_sim() {
    check_on_sim(CASES[4]);
}

/// Every prompt in the same steps, on the device that launches kernels.
fn all_at_once(dtype: Dtype) -> Setting {
    Setting {
        sim: Some(dtype),
        cpu: None,
        block_size: 16,
        budget: 128,
        prefix_cache: false,
        together: true,
        reference_kernels: false,
        threads: 1,
        kv: KvCacheDtype::Auto,
        eager: false,
        fast: false,
        context: None,
    }
}

/// Runs two settings that differ in everything, which must have the same bits.
fn compare_two(case: &str, whole: Setting, prompts: &[Prompt]) {
    let want = run(case, whole, prompts);
    let other = Setting { block_size: 8, budget: 16, prefix_cache: true, together: false, eager: true, ..whole };
    let found = run(case, other, prompts);
    assert!(found == want, "{case}: {whole:?} and {other:?} differ in some bit");
}

#[test]
fn halves_stay_within_their_bound_of_the_reference_and_keep_their_bits() {
    if opened::kernels().is_none() {
        return;
    }
    for dtype in [Dtype::F16, Dtype::Bf16] {
        // Where launches are simulated, families alternate between the two types, and the first has both. The others alternate with
        // the tests of the forward pass, which compare logits.
        let all = everything() || device_for_tests() == "cuda";
        let has_turn = |at: usize| {
            let is_first = at == 0 || at < FIRST.len() && at % 2 == usize::from(dtype == Dtype::Bf16);
            all || is_first || at >= FIRST.len() && at % 4 == if dtype == Dtype::F16 { 1 } else { 2 }
        };
        let cases = CASES.into_iter().filter(|case| *case != RECURRENT);
        for (_, case) in cases.enumerate().filter(|(at, _)| has_turn(*at)) {
            let whole = all_at_once(dtype);
            check_teacher_forced(case, whole);
            // The differences between the other families do not interact with the type of the settings that keep bits.
            if all || FIRST.contains(&case) {
                for (context, prompts) in by_context(prompts_on_sim(case), case) {
                    compare_two(case, Setting { context, ..whole }, &prompts);
                }
            }
        }
    }
}

/// Products and attention that round to bfloat16 have errors like those of an implementation that computes in it throughout.
#[test]
fn bfloat16_on_the_cpu_stays_within_its_bound_of_the_reference_and_keeps_its_bits() {
    for (at, case) in CASES.into_iter().enumerate() {
        let block_size = if case == RECURRENT { 128 } else { 16 };
        let whole = Setting { sim: None, cpu: Some(Dtype::Bf16), block_size, ..all_at_once(Dtype::Bf16) };
        check_teacher_forced(case, whole);
        if case != RECURRENT && (everything() || at % 3 == 0) {
            for (context, prompts) in by_context(prompts(case), case) {
                let other = Setting { threads: 2, context, ..whole };
                compare_two(case, other, &prompts);
            }
        }
    }
}

#[test]
fn auto_is_bfloat16_for_a_checkpoint_in_it_on_a_cpu_that_is_fast_in_it() {
    let bytes = |dtype| engine::plan(&EngineConfig { dtype, ..Default::default() }).unwrap().kv_bytes_per_token;
    let fast = simd::Isa::Amx.is_available() || simd::pairs::are_fast();
    assert_eq!(bytes(None), bytes(Some(if fast { Dtype::Bf16 } else { Dtype::F32 })));
    assert_eq!(bytes(Some(Dtype::F32)), 2 * bytes(Some(Dtype::Bf16)));
}

#[test]
fn what_runs_where_no_bits_are_promised_gives_the_reference_tokens_with_graphs_and_without() {
    if opened::kernels().is_none() {
        return;
    }
    // On a GPU that is the fastest of each kind; on `cuda-sim` only which kernels are chosen differs.
    let cases = if everything() || device_for_tests() == "cuda" { &CASES[..] } else { &CASES[..1] };
    for (case, dtype) in cases.iter().flat_map(|case| [Dtype::F32, Dtype::F16, Dtype::Bf16].map(|dtype| (case, dtype)))
    {
        let block_size = block_size(case, 8).max(16);
        let whole = Setting { fast: true, block_size, ..all_at_once(dtype) };
        // Whether there are graphs does not meet the type.
        for eager in if everything() || dtype == Dtype::F16 { &[false, true][..] } else { &[false] } {
            for (context, prompts) in by_context(prompts_on_sim(case), case) {
                run(case, Setting { eager: *eager, context, ..whole }, &prompts);
            }
        }
        check_teacher_forced(case, whole);
    }
}
