//! Every way to keep keys and values: how far the reference cases move, that preemption and swap change no token, and the
//! scales that a checkpoint brings. That blocks, chunks, batch and threads change no bit is in `reference.rs`.

use std::path::Path;

use testkit::reference::FIRST;

use crate::common::cases::{Prompt, folder, prompts};
use crate::common::{TOKEN_BYTES, config, opened, request, shared, tokens};
use engine::{
    AsyncEngine, EngineConfig, Event, GenerationParams, GenerationRequest, KvCacheDtype, ModelSource, PreemptionMode,
    plan,
};
use serde_json::Value;

fn kept(kv_cache_dtype: KvCacheDtype, model: &Path) -> EngineConfig {
    EngineConfig {
        dtype: Some(engine::Dtype::F32),
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
    let mut llm = shared::llm(config).unwrap();
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

/// A way to keep keys and values, and how far a number moves by it: half a step of its last digit relative to the number; of int8
/// relative to the row's root mean square, of which the greatest of 32 normal numbers is about three times.
struct Kept {
    dtype: KvCacheDtype,
    calculate_kv_scales: bool,
    error: f64,
}

const KEPT: [Kept; 9] = [
    Kept::of(KvCacheDtype::Auto, F32),
    Kept::of(KvCacheDtype::Float32, F32),
    Kept::of(KvCacheDtype::Float16, 1.0 / 2048.0),
    Kept::of(KvCacheDtype::Bfloat16, 1.0 / 256.0),
    Kept::of(KvCacheDtype::Int8, 3.0 / 254.0),
    Kept::of(KvCacheDtype::Fp8E4m3, 1.0 / 16.0),
    Kept::of(KvCacheDtype::Fp8E4m3, 1.0 / 16.0).calibrated(),
    Kept::of(KvCacheDtype::Fp8E5m2, 1.0 / 8.0),
    Kept::of(KvCacheDtype::Fp8E5m2, 1.0 / 8.0).calibrated(),
];
/// Of the whole computation in float32, sums included.
const F32: f64 = 1e-5;

impl Kept {
    const fn of(dtype: KvCacheDtype, error: f64) -> Kept {
        Kept { dtype, calculate_kv_scales: false, error }
    }

    const fn calibrated(self) -> Kept {
        Kept { calculate_kv_scales: true, ..self }
    }

    fn config(&self, model: &Path) -> EngineConfig {
        EngineConfig { calculate_kv_scales: self.calculate_kv_scales, ..kept(self.dtype, model) }
    }

    fn name(&self) -> String {
        let scales = match self.dtype {
            KvCacheDtype::Fp8E4m3 | KvCacheDtype::Fp8E5m2 if self.calculate_kv_scales => ", calibrated",
            KvCacheDtype::Fp8E4m3 | KvCacheDtype::Fp8E5m2 => ", scale 1",
            _ => "",
        };
        format!("{}{scales}", self.dtype)
    }
}

/// Distances of log-probabilities from the float32 reference, and how often the likeliest token is the reference's.
#[derive(Default)]
struct Moved {
    distances: Vec<f64>,
    same: usize,
}

impl Moved {
    fn of(config: EngineConfig, prompts: &[Prompt]) -> Moved {
        let found = teacher_forced(config, prompts);
        let want: Vec<f64> = prompts.iter().flat_map(|p| p.logprobs.iter().copied()).collect();
        assert_eq!(found.len(), want.len());
        let distances = found.iter().zip(want).map(|((found, _), want)| (f64::from(*found) - want).abs()).collect();
        Moved { distances, same: found.iter().filter(|(_, likeliest)| *likeliest).count() }
    }

    fn greatest(&self) -> f64 {
        self.distances.iter().copied().max_by(f64::total_cmp).unwrap()
    }

    fn median(&self) -> f64 {
        let mut sorted = self.distances.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }

    fn share(&self) -> f64 {
        self.same as f64 / self.distances.len() as f64
    }

    /// The checkpoints are random weights whose logits spread by 7. Errors of up to e, evenly spread, have a root mean square of
    /// e / √3; about half of a hidden state comes from attention, and a mean over tokens halves what they do not share. A
    /// log-probability is the difference of a logit and a mean of others: 7 × √2 × e / √3 / 4 or 1.4 e, of which the bound of
    /// the median leaves less than twice. The greatest of 192 is some tens of medians, since errors add up along a sequence;
    /// where e is no longer small, an attention's weights move from one token to another, and twice that is allowed. A token
    /// changes where the margin of the likeliest, which is below x at about a share x / 2 of positions, is less than that.
    fn check(&self, what: &str, error: f64) {
        let most = if error < 0.02 { 50.0 } else { 100.0 };
        let within = self.median() < 2.5 * error && self.greatest() < most * error;
        let within = within && 1.0 - self.share() < 0.02 + 4.0 * error;
        let (greatest, median, share) = (self.greatest(), self.median(), self.share());
        assert!(within, "{what}: greatest {greatest}, median {median}, same token {share}");
        assert!(error == F32 || median > 0.05 * error, "{what}: a median of {median} is too little for that type");
    }
}

/// With `--nocapture`: the table of `docs/benchmarks/kv-cache.md`.
#[test]
fn log_probabilities_stay_within_the_bounds_of_their_type() {
    println!(
        "\n| `--kv-cache-dtype` | greatest | median | same token | same token in the worst case |\n|---|---|---|---|---|"
    );
    for kept in KEPT {
        let (mut all, mut worst) = (Moved::default(), 1.0f64);
        for case in FIRST {
            let moved = Moved::of(kept.config(&folder(case)), &prompts(case));
            moved.check(&format!("{}, {case}", kept.name()), kept.error);
            worst = worst.min(moved.share());
            all.same += moved.same;
            all.distances.extend(moved.distances);
        }
        let (greatest, median, share) = (all.greatest(), all.median(), 100.0 * all.share());
        println!("| {} | {greatest:.5} | {median:.5} | {share:.1} % | {:.1} % |", kept.name(), 100.0 * worst);
    }
}

/// The shortest prompts of a case, for `cuda-sim`.
fn short(case: &str) -> Vec<Prompt> {
    let mut prompts = prompts(case);
    prompts.retain(|prompt| prompt.ids.len() < 40);
    assert!(!prompts.is_empty());
    prompts
}

/// An engine on a device that launches kernels; `None`, reported, where there is no compiler.
fn on_sim(config: EngineConfig) -> Option<EngineConfig> {
    let kernels_dir = Some(opened::kernels()?);
    let dtype = config.dtype.or(Some(engine::Dtype::F32));
    let device = testkit::kernels::host::device_for_tests().into();
    Some(EngineConfig { device, kernels_dir, dtype, max_num_batched_tokens: 128, ..config })
}

#[test]
fn the_cuda_kernels_change_log_probabilities_as_little() {
    for kept in KEPT.iter().filter(|kept| kept.calculate_kv_scales || kept.dtype == KvCacheDtype::Int8) {
        for dtype in [engine::Dtype::F32, engine::Dtype::F16] {
            // Heads of 32: in halves the kernels that read pages in vectors.
            let config = EngineConfig { dtype: Some(dtype), ..kept.config(&folder("llama")) };
            let Some(config) = on_sim(config) else { return };
            Moved::of(config, &short("llama")).check(&format!("{} in {dtype}", kept.name()), kept.error);
        }
    }
}

/// Latents have one scale, as keys and as values.
#[test]
fn latents_in_fp8_change_log_probabilities_as_little() {
    let (case, fp8) = ("deepseek-v2-lite", Kept::of(KvCacheDtype::Fp8E4m3, 1.0 / 16.0));
    let (on_cpu, prompts) = (fp8.config(&folder(case)), short(case));
    Moved::of(on_cpu.clone(), &prompts).check(&fp8.name(), fp8.error);
    let Some(on_sim) = on_sim(EngineConfig { dtype: Some(engine::Dtype::F16), ..on_cpu }) else { return };
    Moved::of(on_sim, &prompts).check(&format!("{}, in f16", fp8.name()), fp8.error);
}

/// The bits of the log-probabilities of requests, one after the other, in one engine.
fn scored_in_turn(config: EngineConfig, requests: &[&GenerationRequest]) -> Vec<Vec<u32>> {
    let mut llm = shared::llm(config).unwrap();
    let score = |request: &&GenerationRequest| {
        let (_, events) = llm.run_with_events(vec![(*request).clone()]).unwrap().remove(0);
        let deltas = events.into_iter().filter_map(|e| if let Event::Delta(delta) = e { Some(delta) } else { None });
        deltas.flat_map(|delta| delta.tokens).map(|token| token.logprobs.unwrap().logprob.to_bits()).collect()
    };
    requests.iter().map(score).collect()
}

#[test]
fn scales_of_the_first_step_stay_and_the_prefix_cache_holds_none_of_others() {
    let base = EngineConfig { kv_cache_dtype: KvCacheDtype::Fp8E4m3, calculate_kv_scales: true, ..config(256) };
    let [first, second] = [request(1, 40, 8, 1), request(2, 40, 8, 1)];
    let run = |enable_prefix_caching, sim: bool, requests: &[&GenerationRequest]| {
        // Rows that are read from the cache are then those of no step: products must not depend on their number.
        let config = EngineConfig { enable_prefix_caching, deterministic: true, ..base.clone() };
        Some(scored_in_turn(if sim { on_sim(config)? } else { config }, requests))
    };
    for sim in [false, true] {
        let Some(cached) = run(true, sim, &[&first, &second, &first, &second]) else { return };
        assert_eq!(run(false, sim, &[&first, &second, &first, &second]).unwrap(), cached, "on a simulator: {sim}");
        assert_eq!((&cached[0], &cached[1]), (&cached[2], &cached[3]), "what was cached was of other scales");
        let other_way = run(true, sim, &[&second, &first]).unwrap();
        assert_ne!(other_way[0], cached[1], "what is calibrated on counts");
        let plain = EngineConfig { calculate_kv_scales: false, ..base.clone() };
        let plain = if sim { on_sim(plain).unwrap() } else { plain };
        assert_ne!(scored_in_turn(plain, &[&first])[0], cached[0], "no scales were made");
    }
}

/// A copy of the `llama` case that computes the same function: values are scaled by 4096, and the matrix after attention by exactly
/// the inverse.
fn with_great_values() -> tempfile::TempDir {
    let copy = with_scales(&[]);
    let file = copy.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let start = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    for (name, tensor) in header.as_object().unwrap() {
        let factor = match name {
            name if name.ends_with("v_proj.weight") => 4096.0,
            name if name.ends_with("o_proj.weight") => 1.0 / 4096.0,
            _ => continue,
        };
        assert_eq!(tensor["dtype"], "F32");
        let [from, to] = [0, 1].map(|i| start + tensor["data_offsets"][i].as_u64().unwrap() as usize);
        for number in bytes[from..to].as_chunks_mut::<4>().0 {
            *number = (f32::from_le_bytes(*number) * factor).to_le_bytes();
        }
    }
    std::fs::write(file, bytes).unwrap();
    copy
}

#[test]
fn calibrated_scales_hold_values_that_the_type_alone_would_cut() {
    let (great, prompts) = (with_great_values(), prompts("llama"));
    let run = |folder: &Path, calculate_kv_scales| {
        teacher_forced(EngineConfig { calculate_kv_scales, ..kept(KvCacheDtype::Fp8E4m3, folder) }, &prompts)
    };
    assert!(
        run(great.path(), true) == run(&folder("llama"), true),
        "a power of two changes no bit of what is made of it"
    );
    let cut = Moved::of(kept(KvCacheDtype::Fp8E4m3, great.path()), &prompts);
    assert!(cut.median() > 2.5 / 16.0, "values up to 448 were enough: the test shows nothing, {}", cut.median());
}

#[test]
fn scales_are_calibrated_only_for_8_bit_floats() {
    for dtype in [KvCacheDtype::Auto, KvCacheDtype::Int8, KvCacheDtype::Float16] {
        let config = EngineConfig { calculate_kv_scales: true, ..kept(dtype, &folder("llama")) };
        let said = plan(&config).unwrap_err().to_string();
        assert!(
            said.starts_with(&format!("--calculate-kv-scales: found --kv-cache-dtype {dtype}, expected")),
            "{said}"
        );
        assert!(!said.contains('\n'), "{said}");
    }
    let latents = kept(KvCacheDtype::Fp8E4m3, &folder("deepseek-v2-lite"));
    let said = plan(&EngineConfig { calculate_kv_scales: true, ..latents }).unwrap_err().to_string();
    assert!(said.starts_with("--calculate-kv-scales: found a model with latent attention, expected"), "{said}");
}

#[test]
fn preemption_and_swap_change_no_token_in_any_type() {
    let requests: Vec<GenerationRequest> = (0..8).map(|i| request(i, 5 + 7 * (i as usize % 5), 40, 1)).collect();
    for dtype in KvCacheDtype::ALL {
        let of_blocks = |blocks: u64| {
            let token = plan(&EngineConfig { kv_cache_dtype: dtype, ..config(256) }).unwrap().kv_bytes_per_token;
            EngineConfig { kv_cache_dtype: dtype, kv_cache_memory_bytes: Some(blocks * 8 * token), ..config(256) }
        };
        let mut alone = shared::llm(of_blocks(256)).unwrap();
        let want: Vec<_> = requests.iter().map(|request| tokens(&mut alone, vec![request.clone()]).remove(0)).collect();
        for preemption_mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
            let swap_space_bytes = if preemption_mode == PreemptionMode::Swap { 60 * 8 * TOKEN_BYTES } else { 0 };
            let mut llm = shared::llm(EngineConfig { swap_space_bytes, preemption_mode, ..of_blocks(20) }).unwrap();
            assert_eq!(tokens(&mut llm, requests.clone()), want, "{dtype}, {preemption_mode:?}");
            let stats = llm.stats();
            assert!(stats.scheduler.preemptions > 0, "{dtype}: nothing was preempted: the test shows nothing");
            assert_eq!(stats.scheduler.swap_preemptions > 0, preemption_mode == PreemptionMode::Swap, "{dtype}");
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
    if opened::kernels().is_none() {
        return;
    }
    let on = |dtype| on_sim(kept(dtype, &folder("llama"))).unwrap();
    for dtype in [KvCacheDtype::Float16, KvCacheDtype::Bfloat16] {
        let said = plan(&on(dtype)).unwrap_err().to_string();
        let start = format!("--kv-cache-dtype: found {dtype}, expected auto, fp8_e4m3, fp8_e5m2 or int8");
        assert!(said.starts_with(&start), "{said}");
        assert!(!said.contains('\n'), "{said}");
    }
    for dtype in [KvCacheDtype::Fp8E4m3, KvCacheDtype::Fp8E5m2, KvCacheDtype::Int8] {
        assert!(plan(&on(dtype)).unwrap().cache_line().contains(dtype.name()));
    }
}

/// A copy of the `llama` case with these float32 tensors beside its own.
fn with_scales(scales: &[(&str, &[usize], &[f32])]) -> tempfile::TempDir {
    with_scales_of("llama", scales)
}

fn with_scales_of(case: &str, scales: &[(&str, &[usize], &[f32])]) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder(case)).unwrap() {
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
    let notes = |folder: &Path, calculate_kv_scales| {
        let config = EngineConfig { calculate_kv_scales, ..kept(KvCacheDtype::Fp8E4m3, folder) };
        AsyncEngine::start(config, &|_, _| {}).unwrap().info().notes.join("\n")
    };
    assert!(notes(&folder("llama"), false).contains("scales of the cache: 1, the checkpoint has none"));
    let made = notes(&folder("llama"), true);
    assert!(made.contains("scales of the cache: calibrated in the first step, the checkpoint has none"), "{made}");
    let one = [name(0, "k_scale"), name(0, "v_scale")];
    let copy = with_scales(&[(&one[0], &[], &[0.5]), (&one[1], &[], &[0.5])]);
    assert!(notes(copy.path(), false).contains("those of the checkpoint in 1 of 3 layers, else 1"));
    let else_made = notes(copy.path(), true);
    assert!(else_made.contains("those of the checkpoint in 1 of 3 layers, else calibrated"), "{else_made}");
    let bytes = |calculate_kv_scales| {
        let config = EngineConfig { calculate_kv_scales, ..kept(KvCacheDtype::Fp8E4m3, copy.path()) };
        plan(&config).unwrap().kv_scale_bytes
    };
    assert_eq!([bytes(false), bytes(true)], [2 * 4, 2 * 4 + 2 * 2 * 2 * 4], "two layers, keys and values, two heads");
    // Where the checkpoint has all, there is nothing to make.
    let names: Vec<String> = (0..3).flat_map(|layer| ["k_scale", "v_scale"].map(|rest| name(layer, rest))).collect();
    let tensors: Vec<(&str, &[usize], &[f32])> = names.iter().map(|n| (n.as_str(), &[][..], &[0.03][..])).collect();
    let copy = with_scales(&tensors);
    assert!(notes(copy.path(), true).contains("scales of the cache: those of the checkpoint"));
    let calibrating = EngineConfig { calculate_kv_scales: true, ..kept(KvCacheDtype::Fp8E4m3, copy.path()) };
    assert!(teacher_forced(calibrating, &prompts) == of_each, "the checkpoint's scales win");
}

/// A latent is a key and a value, so it has one scale: that of keys.
#[test]
fn latents_have_the_scale_that_a_checkpoint_has_for_keys() {
    let case = "deepseek-v2-lite";
    let score = |folder: &Path| teacher_forced(kept(KvCacheDtype::Fp8E4m3, folder), &short(case));
    let of = |keys: f32, values: f32| {
        let (k, v) = ("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale");
        score(with_scales_of(case, &[(k, &[], &[keys]), (v, &[], &[values])]).path())
    };
    let (want, without) = (of(0.03, 0.03), score(&folder(case)));
    assert!(want != without, "the scale was not used");
    assert!(of(0.03, 0.5) == want, "the scale of values was used");
}

#[test]
fn invalid_scales_are_refused_in_one_line_that_names_the_tensor() {
    let error = |tensors: &[(&str, &[usize], &[f32])]| {
        let copy = with_scales(tensors);
        let config = kept(KvCacheDtype::Fp8E5m2, copy.path());
        let planned = plan(&config).unwrap_err().to_string();
        assert_eq!(shared::llm(config).err().unwrap().to_string(), planned);
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
