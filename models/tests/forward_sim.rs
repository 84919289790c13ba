//! The forward pass on `cuda-sim`, or on `cuda` where `QUIRE_TEST_DEVICE` says so, against the reference's last-position logits, in every type; its memory is what was planned.

use std::sync::Arc;

use crate::common::Opened;
use crate::common::{CASES, assert_allocated, expected, files, folder, ids, last_logits, list, needs, text};
use crate::support::opened;
use attention_kernels::{Dtype, KernelChoice, KernelSet, KvDtype, Needs, select};
use device::{Device, Options};
use models::{Decoder, Model, ModelConfig, PageLayout, StepLimits, Weights, kv_scale_bytes, weight_bytes};
use safetensors::SafeTensors;
use testkit::kernels::host::device_for_tests;
use testkit::reference::context;

const LIMITS: StepLimits = StepLimits { max_rows: 80, max_seqs: 2, max_model_len: 256, block_size: 8, num_blocks: 64 };

/// Greatest difference of a float32 logit from the reference (its README).
const TOLERANCE: f32 = 2e-3;

/// Greatest mean difference of a case's logits in a type: twice what transformers is off by in that type (the reference's README).
pub fn mean_tolerance(case: &str, dtype: Dtype) -> f64 {
    let noise = match dtype {
        Dtype::F32 => return f64::from(TOLERANCE),
        Dtype::F16 => "float16_compute",
        Dtype::Bf16 => "bfloat16_compute",
    };
    2.0 * expected(case)["noise"][noise]["mean_abs"].as_f64().unwrap()
}

struct Loaded {
    device: Arc<dyn Device>,
    decoder: Decoder,
    kernels: KernelSet,
    model: Model,
    /// [`LIMITS`], with larger blocks where the states of recurrent layers need them.
    limits: StepLimits,
}

fn load(case: &str, dtype: Dtype, choice: &KernelChoice) -> Option<Loaded> {
    load_keeping(case, dtype, KvDtype::Same, choice)
}

/// Scales of a cache that takes some are made in the first step.
fn load_keeping(case: &str, dtype: Dtype, kv_dtype: KvDtype, choice: &KernelChoice) -> Option<Loaded> {
    let device = opened::open(Options { seed: 7, deterministic: true, ..Options::default() })?;
    let files = files(case);
    let config = ModelConfig::load(&files).unwrap();
    // The prompts here are short.
    let decoder = config.decoder.for_context(context(case, 1).unwrap_or(config.max_position_embeddings));
    let needs = Needs { dtype, kv_dtype, row_invariant: true, ..needs(&*device, &decoder) };
    let (kernels, weights) = (select(choice, &needs).unwrap(), Weights::open(&files).unwrap());
    let mut model = Model::load(&decoder, &weights, device.clone(), kernels, LIMITS.max_rows, &|_, _| Ok(())).unwrap();
    model.calculate_kv_scales().unwrap();
    let block_size = PageLayout::least_block_size(&decoder, &kernels.format).max(LIMITS.block_size);
    let limits = StepLimits { block_size, ..LIMITS };
    model.reserve(&limits).unwrap();
    Some(Loaded { device, decoder, kernels, model, limits })
}

/// The prompts of fewer than 80 tokens, and the logits of their last positions.
fn prompts(case: &str) -> Vec<(Vec<u32>, Vec<f32>)> {
    let bytes = std::fs::read(folder(case).join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let expected = expected(case);
    let all = list(&expected["prompts"]).iter().map(|p| {
        let logits = tensors.tensor(text(&p["logits"])).unwrap();
        (ids(&p["ids"]), logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
    });
    all.filter(|(ids, _): &(Vec<u32>, _)| ids.len() < LIMITS.max_rows).collect()
}

/// Mixtures with a single expert for each row that, rounded to this type, choose another one in the last row of a prompt.
const OTHER_EXPERTS: [(&str, Dtype); 1] = [("llama4", Dtype::Bf16)];

/// Checks the logits of a case and the bits of chunks, in an ordinary run on the simulator those of the longest prompt.
fn check(case: &str, dtype: Dtype) {
    let Some(Loaded { mut model, limits, .. }) = load(case, dtype, &KernelChoice::default()) else { return };
    let mut caches = model.new_cache(limits.num_blocks, limits.block_size).unwrap();
    let (mut means, prompts) = (Vec::new(), prompts(case));
    let longest = prompts.iter().map(|(prompt, _)| prompt.len()).max();
    for (prompt, want) in prompts {
        let size = (limits.block_size, limits.num_blocks);
        let whole = last_logits(&mut model, &mut caches, size, &prompt, prompt.len());
        assert_eq!(whole.len(), want.len(), "{case} in {dtype}");
        let errors: Vec<f32> = whole.iter().zip(&want).map(|(a, b)| (a - b).abs()).collect();
        let greatest = errors.iter().copied().max_by(f32::total_cmp).unwrap();
        let what = format!("{case} in {dtype}, {} tokens: errors up to {greatest}", prompt.len());
        assert!(dtype != Dtype::F32 || greatest < TOLERANCE, "{what}");
        means.push(errors.iter().map(|error| f64::from(*error)).sum::<f64>() / errors.len() as f64);
        if Some(prompt.len()) == longest || testkit::everything() || device_for_tests() == "cuda" {
            let chunked = last_logits(&mut model, &mut caches, size, &prompt, 7);
            assert!(chunked == whole, "{what}: chunks of 7 change a bit");
        }
    }
    let mean = means.iter().sum::<f64>() / means.len() as f64;
    println!("{case} in {dtype}: {mean} in the mean");
    let is_near = mean < mean_tolerance(case, dtype);
    assert!(is_near || OTHER_EXPERTS.contains(&(case, dtype)), "{case} in {dtype}: {mean} in the mean");
}

#[test]
fn logits_are_the_reference_s_in_float32_and_chunks_change_no_bit() {
    CASES.into_iter().for_each(|case| check(case, Dtype::F32));
}

#[test]
fn logits_are_as_near_to_the_reference_as_those_of_transformers_in_halves() {
    // Where launches are simulated, the cases take turns with the two types, and with the engine's test of the same.
    let all = testkit::everything() || device_for_tests() == "cuda";
    for (at, case) in CASES.into_iter().enumerate() {
        for (turn, dtype) in [(0, Dtype::F16), (3, Dtype::Bf16)] {
            if all || case == "qwen3-next" && dtype == Dtype::Bf16 || at % 4 == turn {
                check(case, dtype);
            }
        }
    }
}

#[test]
fn a_cache_write_by_name_gives_the_bits_of_the_fused_one() {
    let by_name = KernelChoice { cache_write: "cuda.reshape_and_cache".into(), ..Default::default() };
    let (prompt, _) = prompts("qwen3").swap_remove(1);
    let run = |choice: &KernelChoice| {
        let mut model = load("qwen3", Dtype::Bf16, choice)?.model;
        let mut caches = model.new_cache(LIMITS.num_blocks, LIMITS.block_size).unwrap();
        Some(last_logits(&mut model, &mut caches, (LIMITS.block_size, LIMITS.num_blocks), &prompt, 9))
    };
    // Loading has reported why there is no device.
    let Some(fused) = run(&KernelChoice::default()) else { return };
    assert!(run(&by_name).unwrap() == fused);
}

#[test]
fn a_model_takes_the_planned_memory_and_no_step_allocates_any() {
    for (case, dtype, kv_dtype) in [
        ("llama", Dtype::F32, KvDtype::Same),
        ("llama", Dtype::F32, KvDtype::Fp8E5m2),
        ("qwen2", Dtype::Bf16, KvDtype::Fp8E4m3),
        ("qwen2", Dtype::Bf16, KvDtype::Int8PerToken),
        ("qwen3", Dtype::F16, KvDtype::Same),
        ("qwen3-next", Dtype::Bf16, KvDtype::Same),
    ] {
        let loaded = load_keeping(case, dtype, kv_dtype, &KernelChoice::default());
        let Some(Loaded { device, decoder, kernels, mut model, limits }) = loaded else { return };
        assert_eq!(model.is_calibrating(), kv_dtype.takes_scales());
        let weights = Weights::open(&files(case)).unwrap();
        let scales = kv_scale_bytes(&decoder, &weights, true).unwrap();
        let scales = if kv_dtype.takes_scales() { scales } else { 0 };
        assert_eq!(scales == 0, !kv_dtype.takes_scales());
        let step = Model::step_bytes(&*device, &decoder, &kernels, &limits);
        let planned = weight_bytes(&decoder, &weights, device.features(), &kernels).unwrap().all + step + scales;
        assert_allocated(&*device, planned, &format!("{case} in {dtype}"));
        let mut caches = model.new_cache(limits.num_blocks, limits.block_size).unwrap();
        let cache = caches.iter().map(|cache| 2 * cache.shape.num_blocks * cache.block_bytes()).sum::<usize>() as u64;
        last_logits(&mut model, &mut caches, (limits.block_size, limits.num_blocks), &(1..60).collect::<Vec<_>>(), 50);
        model.copy_blocks(&[(31, 2), (2, 3)], &mut caches).unwrap();
        assert!(!model.is_calibrating());
        assert_allocated(&*device, planned + cache, &format!("{case} in {dtype}"));
    }
}

#[test]
fn a_warm_up_of_the_greatest_size_leaves_every_slot_as_it_was() {
    let loaded = load_keeping("mistral-sliding", Dtype::F16, KvDtype::Fp8E4m3, &KernelChoice::default());
    let Some(Loaded { device, mut model, .. }) = loaded else {
        return;
    };
    let mut caches = model.new_cache(LIMITS.num_blocks, LIMITS.block_size).unwrap();
    model.warm_up(&mut caches).unwrap();
    assert!(model.is_calibrating(), "it has no tokens of a request to make scales of");
    for cache in &caches {
        let mut bytes = vec![1; cache.keys.len_bytes()];
        device.download(&cache.keys, 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn recurrent_heads_that_the_kernel_does_not_compute_are_refused_by_their_sizes_while_loading() {
    let Some(device) = opened::open(Options::default()) else { return };
    let weights = Weights::open(&files("qwen3-next")).unwrap();
    for (key_dim, value_dim, kernel) in [(257, 32, 4), (32, 129, 4), (256, 65, 4), (32, 32, 9)] {
        let keys = serde_json::json!({"linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim,
            "linear_conv_kernel_dim": kernel});
        let copy = crate::common::Copy::of("qwen3-next").set("config.json", keys);
        let decoder = ModelConfig::load(&copy.files()).unwrap().decoder;
        let kernels = select(&KernelChoice::default(), &needs(&*device, &decoder)).unwrap();
        let refused = Model::load(&decoder, &weights, device.clone(), kernels, 8, &|_, _| Ok(()));
        let sizes = format!("heads of {key_dim} and {value_dim} and a convolution over {kernel} tokens");
        crate::common::message(refused.map(|_| ()), &[&sizes, "--device cpu"]);
    }
}
