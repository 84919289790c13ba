//! Models whose weights are codes, on a device that launches kernels: the logits of unpacked weights, the planned memory, and the same bits in every
//! chunk.

use std::sync::Arc;

use attention_kernels::{Dtype, KernelChoice, Needs, select};
use device::{Device, Options};
use linear::Quantization;
use models::decoder::{Decoder, Form};
use models::{Model, ModelConfig, ModelFiles, StepLimits, Weights, in_stored_forms, weight_bytes};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::json;
use simd::small_float::f32_to_e4m3;

use crate::common::{self, Copy, Opened, assert_allocated, ids, last_logits, list, needs, text};
use crate::support::opened;

const LIMITS: StepLimits = StepLimits { max_rows: 80, max_seqs: 2, max_model_len: 256, block_size: 8, num_blocks: 64 };

fn device(deterministic: bool) -> Option<Arc<dyn Device>> {
    opened::open(Options { seed: 3, deterministic, ..Options::default() })
}

/// The logits behind each prompt, and the bytes of the weights. The device has what was planned, and chunks change no bit.
fn run(
    decoder: &Decoder,
    weights: &Weights,
    dtype: Dtype,
    linear: &str,
    prompts: &[Vec<u32>],
) -> Option<(Vec<Vec<f32>>, u64)> {
    let device = device(true)?;
    let choice = KernelChoice { linear: linear.into(), ..Default::default() };
    let needs = Needs { dtype, row_invariant: true, ..needs(&*device, decoder) };
    let kernels = select(&choice, &needs).unwrap();
    let nothing = |_, _| Ok(());
    let mut model = Model::load(decoder, weights, device.clone(), kernels, LIMITS.max_rows, &nothing).unwrap();
    model.reserve(&LIMITS).unwrap();
    let bytes = weight_bytes(decoder, weights, device.features(), &kernels).unwrap();
    assert_eq!(bytes.codes > 0, linear != "cuda.product", "{bytes:?}");
    let planned = bytes.all + Model::step_bytes(&*device, decoder, &kernels, &LIMITS);
    assert_allocated(&*device, planned, &format!("{linear} in {dtype}"));
    let mut caches = model.new_cache(LIMITS.num_blocks, LIMITS.block_size).unwrap();
    let mut logits = Vec::new();
    for prompt in prompts {
        let mut in_chunks =
            |chunk| last_logits(&mut model, &mut caches, (LIMITS.block_size, LIMITS.num_blocks), prompt, chunk);
        let whole = in_chunks(prompt.len());
        // One row, as in decode, then fewer and more rows than a block of the smaller kernel has.
        for chunk in [1, 7, 9] {
            assert!(in_chunks(chunk) == whole, "{linear} in {dtype}: chunks of {chunk} change a bit");
        }
        logits.push(whole);
    }
    Some((logits, bytes.all))
}

fn mean_error(found: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    let pairs = found.iter().flatten().zip(want.iter().flatten());
    pairs.map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / want.iter().flatten().count() as f64
}

#[test]
fn codes_of_a_checkpoint_give_the_logits_of_unpacked_weights_and_chunks_change_no_bit() {
    let folder = testkit::workspace::root().join("models/tests/gguf/reference");
    for (case, dtype) in [("gguf-llama-spm-q2_k", Dtype::F16), ("gguf-qwen2-iq4_nl", Dtype::Bf16)] {
        let case = folder.join(case);
        let bytes = std::fs::read(case.join("expected.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        let files = ModelFiles::open(&case.join(text(&expected["model_file"]))).unwrap();
        let weights = Weights::open(&files).unwrap();
        let config = ModelConfig::load(&files).unwrap();
        let decoder = in_stored_forms(config.decoder.for_context(LIMITS.max_model_len), &weights).unwrap();
        let bytes = std::fs::read(case.join("expected.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let (mut prompts, mut want) = (Vec::new(), Vec::new());
        for prompt in list(&expected["prompts"]).iter().filter(|prompt| ids(&prompt["ids"]).len() < 40).take(2) {
            prompts.push(ids(&prompt["ids"]));
            let logits = tensors.tensor(text(&prompt["logits"])).unwrap();
            let logits: Vec<f32> = logits.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            want.push(logits[logits.len() - decoder.vocab_size()..].to_vec());
        }
        assert!(!prompts.is_empty());
        let Some((codes, small)) = run(&decoder, &weights, dtype, "cuda.linear", &prompts) else { return };
        let (unpacked, large) = run(&decoder, &weights, dtype, "cuda.product", &prompts).unwrap();
        assert!(small < large, "{small} and {large} bytes");
        // Both are the same weights, summed in different orders and rounded between layers.
        let [of_codes, of_unpacked] = [&codes, &unpacked].map(|logits| mean_error(logits, &want));
        println!("{}: mean errors {of_codes} of codes, {of_unpacked} of unpacked weights", case.display());
        assert!(of_codes < 2.0 * of_unpacked, "{}: {of_codes} and {of_unpacked}", case.display());
    }
}

#[test]
fn weights_quantised_while_loading_give_nearly_the_same_logits_also_those_of_experts() {
    for (case, dtype, form) in [("llama", Dtype::Bf16, Quantization::Q4), ("mixtral", Dtype::F16, Quantization::Q8)] {
        let files = common::files(case);
        let weights = Weights::open(&files).unwrap();
        let decoder = ModelConfig::load(&files).unwrap().decoder.for_context(LIMITS.max_model_len);
        let all: Vec<Vec<u32>> = list(&common::expected(case)["prompts"]).iter().map(|p| ids(&p["ids"])).collect();
        let prompts: Vec<_> = all.into_iter().filter(|prompt| (8..40).contains(&prompt.len())).take(1).collect();
        assert!(!prompts.is_empty());
        let quantised = decoder.clone().in_form(Form::Quantized(form));
        let Some((codes, small)) = run(&quantised, &weights, dtype, "cuda.linear", &prompts) else { return };
        let (plain, large) = run(&decoder, &weights, dtype, "cuda.product", &prompts).unwrap();
        assert!(small < large * 4 / 5, "{small} and {large} bytes");
        let mean = |logits: &[Vec<f32>]| {
            mean_error(logits, &logits.iter().map(|row| vec![0.0; row.len()]).collect::<Vec<_>>())
        };
        let share = mean_error(&codes, &plain) / mean(&plain);
        println!("{case} in {form}: {share} of the mean logit");
        let most = if form == Quantization::Q8 { 0.05 } else { 0.3 };
        assert!(share < most, "{case} in {form}: {share} of the mean logit");
        if case == "mixtral" {
            // Gate and up have one tile of inputs, whose sum has the same order.
            let (grouped, bytes) = run(&quantised, &weights, dtype, "cuda.grouped_experts", &prompts).unwrap();
            assert!(grouped == codes && bytes == small, "{bytes} bytes");
        }
    }
}

/// A copy of a checkpoint whose linear layers, without the head, are quantised to 8 bits with a scale for each output; activations are
/// rounded too. `code`: the byte of a weight over its scale, and the greatest number that a byte stands for.
pub fn quantised_copy(case: &str, kind: &str, greatest: f32, code: fn(f32) -> u8) -> Copy {
    let copy = Copy::of(case);
    let file = std::fs::read(copy.path("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut all: Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, tensor) in tensors.tensors() {
        let (shape, data) = (tensor.shape().to_vec(), tensor.data());
        if !name.ends_with("_proj.weight") {
            all.push((name, tensor.dtype(), shape, data.to_vec()));
            continue;
        }
        let weights: Vec<f32> = data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for row in weights.chunks(shape[1]) {
            let scale = row.iter().fold(0.0f32, |most, x| most.max(x.abs())) / greatest;
            codes.extend(row.iter().map(|x| code(x / scale)));
            scales.extend(scale.to_le_bytes());
        }
        let dtype = if kind == "int" { safetensors::Dtype::I8 } else { safetensors::Dtype::F8_E4M3 };
        all.push((format!("{name}_scale"), safetensors::Dtype::F32, vec![shape[0], 1], scales));
        all.push((name, dtype, shape, codes));
    }
    let views = all
        .iter()
        .map(|(name, dtype, shape, data)| (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    let file = safetensors::serialize(views, None).unwrap();
    let scheme = |strategy: &str, dynamic: bool| json!({"num_bits": 8, "type": kind, "symmetric": true, "strategy": strategy, "dynamic": dynamic});
    let group =
        json!({"targets": ["Linear"], "weights": scheme("channel", false), "input_activations": scheme("token", true)});
    let format = if kind == "int" { "int-quantized" } else { "float-quantized" };
    let config = json!({"quantization_config": {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"], "config_groups": {"group_0": group}
    }});
    copy.write("model.safetensors", file).set("config.json", config)
}

#[test]
fn checkpoints_that_round_activations_give_nearly_the_logits_of_plain_ones_and_chunks_change_no_bit() {
    let to_int8 = |x: f32| x.round_ties_even() as i8 as u8;
    let kinds = [("int", 127.0, to_int8 as fn(f32) -> u8), ("float", 448.0, f32_to_e4m3)];
    for (i, (kind, greatest, code)) in kinds.into_iter().enumerate() {
        let dtype = [Dtype::F16, Dtype::Bf16][i];
        let copy = quantised_copy("llama", kind, greatest, code);
        let of = |files: &ModelFiles| {
            let weights = Weights::open(files).unwrap();
            let decoder = ModelConfig::load(files).unwrap().decoder.for_context(LIMITS.max_model_len);
            (in_stored_forms(decoder, &weights).unwrap(), weights)
        };
        let (decoder, weights) = of(&copy.files());
        let rounds = |linear: &&models::decoder::Linear| matches!(linear.form, Form::Stored { rounds: true, .. });
        assert_eq!(decoder.linears().filter(rounds).count(), 3 * 4);
        let prompts = [ids(&list(&common::expected("llama")["prompts"])[0]["ids"])];
        let Some((found, small)) = run(&decoder, &weights, dtype, "cuda.linear", &prompts) else { return };
        let (plain, weights) = of(&common::files("llama"));
        let (want, large) = run(&plain, &weights, dtype, "cuda.product", &prompts).unwrap();
        assert!(small < large, "{small} and {large} bytes");
        let zeros: Vec<_> = want.iter().map(|row| vec![0.0; row.len()]).collect();
        let share = mean_error(&found, &want) / mean_error(&want, &zeros);
        println!("{kind}: {share} of the mean logit");
        assert!(share < 0.1, "{kind}: {share} of the mean logit");
    }
}

#[test]
fn long_chunks_are_multiplied_with_unpacked_weights_in_planned_memory() {
    let limits = StepLimits { max_rows: 270, max_model_len: 512, ..LIMITS };
    let Some(device) = device(false) else { return };
    let files = common::files("llama");
    let weights = Weights::open(&files).unwrap();
    let decoder = ModelConfig::load(&files).unwrap().decoder.for_context(limits.max_model_len);
    let decoder = decoder.in_form(Form::Quantized(Quantization::Q4));
    let kernels = select(&KernelChoice::default(), &Needs { dtype: Dtype::F16, ..needs(&*device, &decoder) }).unwrap();
    assert_eq!(kernels.linear.name, "cuda.linear");
    let nothing = |_, _| Ok(());
    let mut model = Model::load(&decoder, &weights, device.clone(), kernels, limits.max_rows, &nothing).unwrap();
    model.reserve(&limits).unwrap();
    let bytes = weight_bytes(&decoder, &weights, device.features(), &kernels).unwrap();
    let step = |limits: &StepLimits| Model::step_bytes(&*device, &decoder, &kernels, limits);
    assert_allocated(&*device, bytes.all + step(&limits), "long chunks");
    let mut caches = model.new_cache(limits.num_blocks, limits.block_size).unwrap();
    let prompt: Vec<u32> = (0..265).map(|i| i * 7 % 500 + 3).collect();
    let mut in_chunks =
        |chunk| last_logits(&mut model, &mut caches, (limits.block_size, limits.num_blocks), &prompt, chunk);
    let [whole, parts] = [265, 32].map(|chunk| vec![in_chunks(chunk)]);
    // Other sums, rounded to halves in each layer.
    let zeros = vec![vec![0.0; whole[0].len()]];
    let share = mean_error(&whole, &parts) / mean_error(&parts, &zeros);
    assert!(whole != parts && share < 0.01, "{share} of the mean logit");
}
