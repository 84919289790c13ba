//! Every bit of the results of the reference checkpoints, as hashes: for each family, form of the weights, type of the cache,
//! device and kind of kernels, over prompts and the tokens drawn after them. `golden.txt` contains the expected hashes.
//!
//! Any change of a bit fails here. If it is intended, the commit says so and why, and replaces the lines that the failure prints.
//!
//! Sines and cosines of the rotary embedding come from libm, so the hashes hold for a libm that rounds like glibc's.

use std::collections::BTreeMap;

use engine::{
    Dtype, EngineConfig, Event, GenerationParams, GenerationRequest, KvCacheDtype, Llm, ModelSource, Quantization,
    SamplingParams,
};
use simd::Isa;
use testkit::capability::Capability;
use testkit::everything;
use testkit::kernels::host;
use testkit::reference::{CASES, FIRST, block_size};

use crate::common::cases::{folder, prompts};

/// Scores of each position that count: a fifth of the vocabulary.
const SCORES: usize = 100;

/// One way to compute the same prompts.
#[derive(Clone, Copy)]
struct Setting {
    case: &'static str,
    /// `None`: on the CPU; else on `cuda-sim`, computed in that type.
    sim: Option<Dtype>,
    form: Option<Quantization>,
    kv: KvCacheDtype,
    /// On the CPU the plain loops, on `cuda-sim` the kernels that `auto` chooses without `--deterministic`.
    other_kernels: bool,
    /// On the CPU, products and attention of this variant, in bfloat16.
    tiles: Option<&'static str>,
}

/// Variants of the family `tiles`, whose bits are equal. The slow definition is the last.
const TILES: [(&str, Isa); 4] = [
    ("cpu.amx_bf16", Isa::Amx),
    ("cpu.avx512_tiles", Isa::Avx512),
    ("cpu.avx2_tiles", Isa::Avx2),
    ("cpu.portable_tiles", Isa::Portable),
];

impl Setting {
    /// Its key in the file.
    fn name(&self) -> String {
        let device = self.sim.map_or("cpu".to_string(), |dtype| format!("sim.{dtype}"));
        let kernels = match (self.sim, self.other_kernels) {
            _ if self.tiles.is_some() => "tiles",
            (None, true) => "reference",
            (Some(_), true) => "fast",
            (_, false) => "exact",
        };
        let form = self.form.map_or("dense".to_string(), |form| form.to_string());
        format!("{} {device} {kernels} {form} {}", self.case, self.kv.name())
    }

    fn config(&self) -> EngineConfig {
        let mut config = EngineConfig {
            dtype: Some(engine::Dtype::F32),
            model: ModelSource::Folder(folder(self.case)),
            block_size: Some(block_size(self.case, 8)),
            max_num_batched_tokens: 48,
            max_num_seqs: 8,
            kv_cache_memory_bytes: Some(4 << 20),
            threads: Some(1),
            quantization: self.form,
            kv_cache_dtype: self.kv,
            ..Default::default()
        };
        if let Some(variant) = self.tiles {
            config.dtype = Some(Dtype::Bf16);
            for name in [&mut config.kernels.linear, &mut config.kernels.decode, &mut config.kernels.prefill] {
                *name = variant.into();
            }
        } else if let Some(dtype) = self.sim {
            config.device = "cuda-sim".into();
            config.kernels_dir = host::folder_for_tests();
            config.dtype = Some(dtype);
            config.deterministic = !self.other_kernels;
        } else if self.other_kernels {
            for name in [&mut config.kernels.decode, &mut config.kernels.prefill, &mut config.kernels.linear] {
                *name = "cpu.reference".into();
            }
        }
        config
    }

    /// Whether an ordinary run computes it: everything on the CPU; on `cuda-sim` each family, type and cache at least once.
    fn is_ordinary(&self, number: usize) -> bool {
        self.sim.is_none() || number.is_multiple_of(4)
    }

    /// Hash of the bits of all scores and tokens.
    fn hash(&self) -> u64 {
        let mut hash = Fnv::default();
        let most = if self.sim.is_some() { 60 } else { usize::MAX };
        let mut llm = Llm::new(self.config()).unwrap();
        let sampling =
            |temperature: f32| SamplingParams { temperature, seed: Some(11), logprobs: Some(5), ..Default::default() };
        let request = |(i, ids): (usize, Vec<u32>)| GenerationRequest {
            prompt: ids,
            params: GenerationParams {
                sampling: sampling(if i % 2 == 0 { 0.0 } else { 0.9 }),
                prompt_logprobs: Some(SCORES),
                max_tokens: Some(4),
                ignore_eos: true,
                ..Default::default()
            },
            ..Default::default()
        };
        let ids = prompts(self.case).into_iter().map(|prompt| prompt.ids).filter(|ids| ids.len() <= most);
        let requests: Vec<GenerationRequest> = ids.enumerate().map(request).collect();
        assert!(requests.len() > 1, "{}: {} prompts", self.name(), requests.len());
        for (completion, events) in llm.run_with_events(requests).unwrap() {
            completion.outputs[0].token_ids.iter().for_each(|token| hash.write(*token));
            for event in events {
                match event {
                    Event::PromptLogprobs(scores) => scores.into_iter().flatten().for_each(|score| {
                        hash.write(score.logprob.to_bits());
                        score.top.iter().for_each(|(token, score, ..)| {
                            hash.write(*token);
                            hash.write(score.to_bits());
                        });
                    }),
                    Event::Delta(delta) => {
                        delta.tokens.into_iter().filter_map(|token| token.logprobs).for_each(|score| {
                            hash.write(score.logprob.to_bits());
                            score.top.iter().for_each(|(_, score, ..)| hash.write(score.to_bits()));
                        })
                    }
                    _ => {}
                }
            }
        }
        hash.0
    }
}

/// FNV-1a (Fowler, Noll & Vo); any hash with a fixed definition would do.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn write(&mut self, word: u32) {
        for byte in word.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// Every setting that is pinned.
fn settings() -> Vec<Setting> {
    let mut all = Vec::new();
    for case in CASES {
        let plain = Setting { case, sim: None, form: None, kv: KvCacheDtype::Auto, other_kernels: false, tiles: None };
        for form in [None, Some(Quantization::Q8), Some(Quantization::Q4)] {
            // The types of a cache and the plain loops do not meet what families differ in.
            let kinds = if FIRST.contains(&case) { &KvCacheDtype::ALL[..] } else { &[KvCacheDtype::Auto] };
            all.extend(kinds.iter().map(|kv| Setting { form, kv: *kv, ..plain }));
            if FIRST.contains(&case) {
                all.push(Setting { form, other_kernels: true, ..plain });
            }
        }
        if FIRST.contains(&case) {
            all.push(Setting { tiles: TILES.into_iter().find(|(_, isa)| isa.is_available()).map(|it| it.0), ..plain });
        }
        if !FIRST.contains(&case) {
            all.extend([Dtype::F32, Dtype::Bf16].map(|dtype| Setting { sim: Some(dtype), ..plain }));
            continue;
        }
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let on_sim = Setting { sim: Some(dtype), ..plain };
            let kinds = [KvCacheDtype::Auto, KvCacheDtype::Fp8E4m3, KvCacheDtype::Fp8E5m2, KvCacheDtype::Int8];
            all.extend(kinds.map(|kv| Setting { kv, ..on_sim }));
            all.push(Setting { other_kernels: true, ..on_sim });
        }
    }
    all
}

#[test]
fn every_variant_of_tiles_gives_a_model_the_same_bits() {
    let of = |variant| Setting {
        case: FIRST[0],
        sim: None,
        form: None,
        kv: KvCacheDtype::Auto,
        other_kernels: false,
        tiles: Some(variant),
    };
    let found: Vec<_> =
        TILES.into_iter().filter(|it| it.1.is_available()).map(|(variant, _)| (variant, of(variant).hash())).collect();
    assert!(found.iter().all(|(_, hash)| *hash == found[0].1), "{found:x?}");
}

#[test]
fn no_bit_of_a_result_has_moved() {
    let golden: BTreeMap<&str, &str> =
        include_str!("golden.txt").lines().filter_map(|line| line.rsplit_once(' ')).collect();
    if !Capability::Libm.is_present() {
        testkit::not_run::report(Capability::Libm, "the hashes are of other sines and cosines");
        return;
    }
    let has_sim = host::simulator_for_tests("hashes of its bits") && host::folder_for_tests().is_some();
    let all = settings();
    let runs = |(number, setting): &(usize, &Setting)| {
        (everything() || setting.is_ordinary(*number)) && (setting.sim.is_none() || has_sim)
    };
    let (mut moved, mut compared) = (Vec::new(), 0);
    for (_, setting) in all.iter().enumerate().filter(runs) {
        let (name, found) = (setting.name(), format!("{:016x}", setting.hash()));
        compared += 1;
        if golden.get(name.as_str()) != Some(&found.as_str()) {
            moved.push(format!("{name} {found}"));
        }
    }
    assert!(moved.is_empty(), "{}\n{} of {compared} results have moved", moved.join("\n"), moved.len());
    let unknown: Vec<&&str> = golden.keys().filter(|key| all.iter().all(|setting| setting.name() != **key)).collect();
    assert!(unknown.is_empty() && golden.len() == all.len(), "golden.txt has {} lines, {unknown:?}", golden.len());
}
