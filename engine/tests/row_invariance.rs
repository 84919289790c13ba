//! Row-invariance in the cases that are hardest for attention: contexts of three partitions of 512 keys, three query heads per
//! key head, and windows that begin within a partition. Every bit of every log-probability is independent of the number of
//! threads, the chunks of a prompt, other requests (prompts and single tokens) in the same steps, the block size and the prefix
//! cache, and of whether a row was computed as part of a prompt or drawn; with weights and caches of every width.
//!
//! Weights are random, because only bits are compared. `reference.rs` compares tokens with a reference, on shorter contexts.

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::{checkpoint, prompt};
use engine::{
    EngineConfig, Event, GenerationParams, GenerationRequest, KvCacheDtype, Llm, ModelSource, Quantization,
    SamplingParams, TokenLogprobs,
};
use serde_json::json;
use tempfile::TempDir;
use testkit::model::Shape;

/// 9 query heads on 3 of keys, of 64 elements.
fn grouped() -> TempDir {
    let mut shape = Shape::named("m135").unwrap();
    (shape.ffn, shape.layers, shape.vocab) = (96, 2, 1024);
    checkpoint(&shape, &json!({}))
}

/// 4 query heads on 2, of 32 elements; layers with a window of 300 between one that sees everything.
fn windowed() -> TempDir {
    let mut shape = Shape::named("q05").unwrap();
    (shape.hidden, shape.heads, shape.ffn, shape.layers, shape.vocab) = (128, 4, 160, 3, 1024);
    checkpoint(&shape, &json!({ "use_sliding_window": true, "sliding_window": 300, "max_window_layers": 1 }))
}

/// Lengths of the prompts. Together with the drawn tokens, two of them cross the end of a partition.
const PROMPTS: [usize; 4] = [3, 130, 505, 1015];
const DRAWN: usize = 16;

/// One way to run the same prompts.
#[derive(Debug)]
struct Setting {
    threads: usize,
    /// Tokens of a step.
    budget: usize,
    together: bool,
    block_size: usize,
    enable_prefix_caching: bool,
}

const PLAINEST: Setting =
    Setting { threads: 1, budget: 2048, together: false, block_size: 16, enable_prefix_caching: false };

/// Odd chunks, so that rows fall into other tiles and units each time; together, the shorter prompts draw while the longer ones
/// are still computed.
const OTHERS: [Setting; 3] = [
    Setting { threads: 3, budget: 37, together: true, block_size: 8, enable_prefix_caching: false },
    Setting { threads: 2, budget: 519, together: true, block_size: 32, enable_prefix_caching: true },
    Setting { threads: 3, budget: 201, together: false, block_size: 16, enable_prefix_caching: false },
];

/// The weights' form, and that of keys and values.
type Forms = (Option<Quantization>, KvCacheDtype);

fn engine(model: &Path, (quantization, kv_cache_dtype): Forms, setting: &Setting) -> Llm {
    let config = EngineConfig {
        model: ModelSource::Folder(model.into()),
        quantization,
        kv_cache_dtype,
        max_model_len: Some(1100),
        max_num_seqs: PROMPTS.len(),
        kv_cache_memory_bytes: Some(32 << 20),
        threads: Some(setting.threads),
        max_num_batched_tokens: setting.budget,
        block_size: Some(setting.block_size),
        enable_prefix_caching: setting.enable_prefix_caching,
        ..Default::default()
    };
    Llm::new(config).unwrap()
}

/// Tokens of a text from the second on, each with its log-probability and those of the likeliest three.
type Scored = Vec<(u32, Vec<u32>)>;

fn bits(scores: &TokenLogprobs) -> Vec<u32> {
    std::iter::once(scores.logprob).chain(scores.top.iter().map(|top| top.1)).map(f32::to_bits).collect()
}

/// Every prompt with its continuation. The prompts' own tokens are scored too if no prefix is cached.
fn run(llm: &mut Llm, setting: &Setting) -> Vec<Scored> {
    let request = |(which, len): (u32, usize)| GenerationRequest {
        prompt: prompt(which, len),
        params: GenerationParams {
            sampling: SamplingParams { temperature: 0.0, logprobs: Some(3), ..Default::default() },
            prompt_logprobs: (!setting.enable_prefix_caching).then_some(3),
            max_tokens: Some(DRAWN),
            ignore_eos: true,
            ..Default::default()
        },
        ..Default::default()
    };
    let requests: Vec<GenerationRequest> = (0..).zip(PROMPTS).map(request).collect();
    if setting.enable_prefix_caching {
        llm.run(requests.clone()).unwrap();
    }
    let done = match setting.together {
        true => llm.run_with_events(requests).unwrap(),
        false => requests.into_iter().flat_map(|request| llm.run_with_events(vec![request]).unwrap()).collect(),
    };
    done.into_iter().map(|(completion, events)| scored(&completion.prompt_token_ids, events)).collect()
}

fn scored(prompt: &[u32], events: Vec<Event>) -> Scored {
    let mut scored = Scored::new();
    for event in events {
        match event {
            Event::PromptLogprobs(scores) => {
                let scores = prompt.iter().zip(&scores).skip(1);
                scored.extend(scores.map(|(token, scores)| (*token, bits(scores.as_ref().unwrap()))));
            }
            Event::Delta(delta) => {
                scored.extend(delta.tokens.iter().map(|token| (token.id, bits(token.logprobs.as_ref().unwrap()))));
            }
            _ => {}
        }
    }
    scored
}

/// The same tokens, all of them as one prompt.
fn whole(llm: &mut Llm, scored: &[Scored]) -> Vec<Scored> {
    let whole = |(which, scored): (u32, &Scored)| {
        let text: Vec<u32> = std::iter::once(prompt(which, 1)[0]).chain(scored.iter().map(|token| token.0)).collect();
        let params = GenerationParams { prompt_logprobs: Some(3), max_tokens: Some(0), ..Default::default() };
        let request = GenerationRequest { prompt: text.clone(), params, ..Default::default() };
        let (_, events) = llm.run_with_events(vec![request]).unwrap().remove(0);
        self::scored(&text, events)
    };
    (0..).zip(scored).map(whole).collect()
}

/// The forms of weights and of caches that are asked for, each beside one of the other settings in turn.
fn check(model: &Path, is_asked_for: impl Fn(usize, usize) -> bool) {
    let mut different = BTreeSet::new();
    let weights = [None, Some(Quantization::Q8), Some(Quantization::Q4)];
    let caches = [KvCacheDtype::Float32, KvCacheDtype::Bfloat16, KvCacheDtype::Float16, KvCacheDtype::Int8];
    let all = (0..weights.len()).flat_map(|q| (0..caches.len()).map(move |kv| (q, kv)));
    let chosen: Vec<(usize, usize)> = all.filter(|(q, kv)| is_asked_for(*q, *kv)).collect();
    for &(q, kv) in &chosen {
        let (forms, setting) = ((weights[q], caches[kv]), &OTHERS[(q + kv) % OTHERS.len()]);
        let mut llm = engine(model, forms, &PLAINEST);
        let want = run(&mut llm, &PLAINEST);
        assert!(want.iter().zip(PROMPTS).all(|(scored, len)| scored.len() == len - 1 + DRAWN));
        assert!(whole(&mut llm, &want) == want, "{forms:?}: what was drawn has other bits as part of a prompt");
        let found = run(&mut engine(model, forms, setting), setting);
        let same = found.iter().zip(&want).all(|(found, want)| want.ends_with(found) && found.len() >= DRAWN);
        assert!(same && found.len() == want.len(), "{forms:?}: {setting:?} differs in some bit");
        different.insert(want);
    }
    assert_eq!(different.len(), chosen.len(), "every form of weights and cache has bits of its own");
}

#[test]
fn bits_are_the_same_in_every_step_of_long_contexts() {
    // An ordinary run takes every form of weights with half of the caches, and every cache with half of the weights.
    check(grouped().path(), |q, kv| testkit::everything() || (q + kv) % 2 == 0);
    // A window changes which keys are read, independently of their type: every type of cache once.
    check(windowed().path(), |q, kv| testkit::everything() || q == kv % 3);
}
