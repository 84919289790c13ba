//! Every way to keep keys and values: how far the reference cases move, that preemption and swap change no token, and the
//! scales that a checkpoint brings. That blocks, chunks, batch and threads change no bit is in `reference.rs`.

#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::cases::{CASES, Prompt, folder, prompts};
use common::{TOKEN_BYTES, config, request, tokens};
use engine::{
    AsyncEngine, EngineConfig, Event, GenerationParams, GenerationRequest, KvCacheDtype, Llm, ModelSource,
    PreemptionMode, plan,
};
use serde_json::Value;

fn kept(kv_cache_dtype: KvCacheDtype, model: &Path) -> EngineConfig {
    EngineConfig {
        model: ModelSource::Folder(model.into()),
        kv_cache_dtype,
        max_num_seqs: 8,
        kv_cache_memory_bytes: Some(16 << 20),
        threads: Some(1),
        ..Default::default()
    }
}

/// Of the reference's own continuations, computed as parts of prompts: the log-probability of each token, and whether it is the
/// likeliest.
fn teacher_forced(config: EngineConfig, prompts: &[Prompt]) -> Vec<(f32, bool)> {
    let mut llm = Llm::new(config).unwrap();
    let request = |p: &Prompt| GenerationRequest {
        prompt: [&p.ids[..], &p.greedy].concat(),
        params: GenerationParams { prompt_logprobs: Some(1), max_tokens: Some(0), ..Default::default() },
        ..Default::default()
    };
    let done = llm.run_with_events(prompts.iter().map(request).collect()).unwrap();
    let mut all = Vec::new();
    for ((_, events), prompt) in done.into_iter().zip(prompts) {
        let scored = events.into_iter().find_map(|e| if let Event::PromptLogprobs(s) = e { Some(s) } else { None });
        for scores in &scored.unwrap()[prompt.ids.len()..] {
            let scores = scores.as_ref().unwrap();
            all.push((scores.logprob, scores.top.iter().all(|top| top.1 <= scores.logprob)));
        }
    }
    all
}

/// Per type: greatest and mean difference of a log-probability from the float32 reference, and the least share of positions
/// whose likeliest token is the reference's. About a third more than measured; the checkpoints are random weights whose logits
/// spread by 7, so that a relative error e of the last hidden state moves a log-probability by about 10 e.
const BOUNDS: [(KvCacheDtype, f64, f64, f64); 7] = [
    (KvCacheDtype::Auto, 1e-3, 1e-4, 1.0),
    (KvCacheDtype::Float32, 1e-3, 1e-4, 1.0),
    (KvCacheDtype::Float16, 0.02, 0.0025, 0.98),
    (KvCacheDtype::Bfloat16, 0.17, 0.02, 0.98),
    (KvCacheDtype::Int8, 0.55, 0.065, 0.96),
    (KvCacheDtype::Fp8E4m3, 4.5, 0.28, 0.82),
    (KvCacheDtype::Fp8E5m2, 14.0, 0.75, 0.65),
];

#[test]
fn log_probabilities_stay_within_the_bounds_of_their_type() {
    for (dtype, greatest_allowed, mean_allowed, agreement_allowed) in BOUNDS {
        for case in CASES {
            let prompts = prompts(case);
            let found = teacher_forced(kept(dtype, &folder(case)), &prompts);
            let want = prompts.iter().flat_map(|p| &p.logprobs);
            let errors: Vec<f64> =
                found.iter().zip(want).map(|((found, _), w)| (f64::from(*found) - w).abs()).collect();
            let greatest = errors.iter().fold(0.0f64, |m, e| m.max(*e));
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            let agreement = found.iter().filter(|(_, likeliest)| *likeliest).count() as f64 / found.len() as f64;
            println!(
                "{:<10} {case:<16} greatest {greatest:.5}, mean {mean:.5}, same token {:.1} % of {}",
                dtype.name(),
                100.0 * agreement,
                found.len()
            );
            let within = greatest < greatest_allowed && mean < mean_allowed && agreement >= agreement_allowed;
            assert!(within, "{dtype}, {case}: greatest {greatest}, mean {mean}, agreement {agreement}");
            let exact = matches!(dtype, KvCacheDtype::Auto | KvCacheDtype::Float32);
            assert!(exact || mean > 1e-5, "{dtype}, {case}: that is the error of float32: nothing was narrowed");
        }
    }
}

#[test]
fn preemption_and_swap_change_no_token_in_any_type() {
    let requests: Vec<GenerationRequest> = (0..8).map(|i| request(i, 5 + 7 * (i as usize % 5), 40, 1)).collect();
    for dtype in KvCacheDtype::ALL {
        let of_blocks = |blocks: u64| {
            let token = plan(&EngineConfig { kv_cache_dtype: dtype, ..config(256) }).unwrap().kv_bytes_per_token;
            EngineConfig { kv_cache_dtype: dtype, kv_cache_memory_bytes: Some(blocks * 8 * token), ..config(256) }
        };
        let mut alone = Llm::new(of_blocks(256)).unwrap();
        let want: Vec<_> = requests.iter().map(|request| tokens(&mut alone, vec![request.clone()]).remove(0)).collect();
        for preemption_mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
            let swap_space_bytes = if preemption_mode == PreemptionMode::Swap { 60 * 8 * TOKEN_BYTES } else { 0 };
            let mut llm = Llm::new(EngineConfig { swap_space_bytes, preemption_mode, ..of_blocks(20) }).unwrap();
            assert_eq!(tokens(&mut llm, requests.clone()), want, "{dtype}, {preemption_mode:?}");
            let stats = llm.stats();
            assert!(stats.num_preemptions > 0, "{dtype}: nothing was preempted: the test shows nothing");
            assert_eq!(stats.num_swap_preemptions > 0, preemption_mode == PreemptionMode::Swap, "{dtype}");
        }
    }
}

#[test]
fn a_plan_counts_the_bytes_of_the_type() {
    let of = |kv_cache_dtype| plan(&EngineConfig { kv_cache_dtype, ..config(64) }).unwrap();
    let bytes = KvCacheDtype::ALL.map(|dtype| of(dtype).kv_bytes_per_token);
    let quarter = TOKEN_BYTES / 4;
    // int8: 4 bytes more for each of keys and values, 3 layers, 2 heads.
    let want = [4 * quarter, 4 * quarter, 2 * quarter, 2 * quarter, quarter, quarter, quarter + 2 * 3 * 2 * 4];
    assert_eq!(bytes, want);
    assert_eq!(of(KvCacheDtype::Fp8E4m3).num_blocks, 4 * 64);
    assert!(of(KvCacheDtype::Fp8E5m2).cache_line().contains(" in fp8_e5m2 ("));
    assert!(of(KvCacheDtype::Int8).cache_line().contains(" in int8, a scale for each token and head ("));
}

#[test]
fn types_that_the_cuda_kernels_do_not_have_are_refused_in_one_line() {
    let Some(kernels_dir) = xtask::kernels::host::folder_for_tests() else { return };
    let on_sim = |dtype| EngineConfig {
        device: "cuda-sim".into(),
        kernels_dir: Some(kernels_dir.clone()),
        ..kept(dtype, &folder("llama"))
    };
    for dtype in [KvCacheDtype::Float16, KvCacheDtype::Bfloat16] {
        let config = EngineConfig { dtype: Some(engine::Dtype::F32), ..on_sim(dtype) };
        let said = plan(&config).unwrap_err().to_string();
        assert!(said.starts_with(&format!("--kv-cache-dtype: found {dtype}, expected auto, fp8_e4m3, fp8_e5m2 or int8")), "{said}");
        assert!(!said.contains('\n'), "{said}");
    }
    for dtype in [KvCacheDtype::Fp8E4m3, KvCacheDtype::Fp8E5m2] {
        assert!(plan(&on_sim(dtype)).unwrap().cache_line().contains(dtype.name()));
    }
}

/// A copy of the `llama` case with these float32 tensors beside its own.
fn with_scales(scales: &[(&str, &[usize], &[f32])]) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder("llama")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    let file = copy.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let header_len = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let mut data = bytes[8 + header_len..].to_vec();
    for (name, shape, values) in scales {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        header[name] = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
    }
    let header = serde_json::to_vec(&header).unwrap();
    std::fs::write(file, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()).unwrap();
    copy
}

#[test]
fn the_scales_of_a_checkpoint_are_found_under_the_names_that_vllm_reads() {
    let prompts = prompts("llama");
    let score = |folder: &Path| teacher_forced(kept(KvCacheDtype::Fp8E4m3, folder), &prompts);
    let without = score(&folder("llama"));
    let name = |layer: usize, rest: &str| format!("model.layers.{layer}.self_attn.{rest}");
    let all = |rests: [&str; 2], shape: &[usize], values: &[f32]| {
        let mut names: Vec<String> = (0..3).flat_map(|layer| rests.map(|rest| name(layer, rest))).collect();
        names.dedup(); // one for keys and values
        let tensors: Vec<(&str, &[usize], &[f32])> = names.iter().map(|n| (n.as_str(), shape, values)).collect();
        score(with_scales(&tensors).path())
    };
    let of_each = all(["k_scale", "v_scale"], &[], &[0.03]);
    assert_ne!(of_each, without, "scales were not used");
    for (rests, shape, values) in [
        (["attn.k_scale", "attn.v_scale"], &[1][..], &[0.03][..]),
        (["k_proj.k_scale", "v_proj.v_scale"], &[], &[0.03]),
        (["kv_scale", "kv_scale"], &[], &[0.03]),
        (["k_scale", "v_scale"], &[2], &[0.03, 0.03]),
    ] {
        assert!(all(rests, shape, values) == of_each, "{rests:?}, {shape:?}");
    }
    let per_head = all(["k_scale", "v_scale"], &[2], &[0.03, 0.011]);
    assert!(per_head != of_each, "the second head has a scale of its own");
    let notes = |folder: &Path| {
        let engine = AsyncEngine::start(kept(KvCacheDtype::Fp8E4m3, folder), &|_, _| {}).unwrap();
        engine.info().notes.join("\n")
    };
    assert!(notes(&folder("llama")).contains("scales of the cache: 1, the checkpoint has none"));
    let one = [name(0, "k_scale"), name(0, "v_scale")];
    let copy = with_scales(&[(&one[0], &[], &[0.5]), (&one[1], &[], &[0.5])]);
    assert!(notes(copy.path()).contains("those of the checkpoint in 1 of 3 layers, else 1"));
}

#[test]
fn scales_that_make_no_sense_are_one_line_that_names_the_tensor() {
    let error = |tensors: &[(&str, &[usize], &[f32])]| {
        let copy = with_scales(tensors);
        let config = kept(KvCacheDtype::Fp8E5m2, copy.path());
        let planned = plan(&config).unwrap_err().to_string();
        assert_eq!(Llm::new(config).err().unwrap().to_string(), planned);
        assert!(!planned.contains('\n'), "{planned}");
        planned
    };
    let (k, v) = ("model.layers.1.self_attn.k_scale", "model.layers.1.self_attn.v_scale");
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let said = error(&[(k, &[], &[bad]), (v, &[], &[1.0])]);
        assert!(said.contains(k) && said.contains("expected a scale: finite and above 0"), "{said}");
    }
    let said = error(&[(k, &[3], &[1.0; 3]), (v, &[3], &[1.0; 3])]);
    assert!(said.contains("has shape [3]; expected [2]"), "{said}");
    let said = error(&[(k, &[], &[1.0])]);
    assert!(said.contains(v) && said.contains("not found"), "{said}");
}
