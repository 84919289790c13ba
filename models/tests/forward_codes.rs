//! Models whose weights are codes, on `cuda-sim`: the logits of unpacked weights, the planned memory, and the same bits in every
//! chunk.

use std::path::Path;
use std::sync::Arc;

use attention_kernels::{Dtype, KernelChoice, Needs, select};
use device::gemm::Quantization;
use device::{Device, Options};
use models::decoder::{Decoder, Form};
use models::{Model, ModelConfig, ModelFiles, StepLimits, Weights, in_stored_forms, weight_bytes};
use safetensors::SafeTensors;

use crate::common::{self, ids, last_logits, list, needs, text};

const LIMITS: StepLimits = StepLimits { max_rows: 80, max_seqs: 2, max_model_len: 256, block_size: 8, num_blocks: 64 };

fn device() -> Option<Arc<dyn Device>> {
    let kernels = Some(testkit::kernels::host::folder_for_tests()?);
    let options = Options { threads: Some(1), kernels, seed: 3, deterministic: true, ..Options::default() };
    Some(device::open_with("cuda-sim", &options).unwrap())
}

/// The logits behind each prompt, and the bytes of the weights. The device has what was planned, and chunks change no bit.
fn run(
    decoder: &Decoder,
    weights: &Weights,
    dtype: Dtype,
    linear: &str,
    prompts: &[Vec<u32>],
) -> Option<(Vec<Vec<f32>>, u64)> {
    let device = device()?;
    let choice = KernelChoice { linear: linear.into(), ..Default::default() };
    let needs = Needs { dtype, row_invariant: true, ..needs(&*device, decoder) };
    let kernels = select(&choice, &needs).unwrap();
    let nothing = |_, _| Ok(());
    let mut model = Model::load(decoder, weights, device.clone(), kernels, LIMITS.max_rows, &nothing).unwrap();
    model.reserve(&LIMITS).unwrap();
    let bytes = weight_bytes(decoder, weights, device.features(), &kernels).unwrap();
    assert_eq!(bytes.codes > 0, linear == "cuda.linear", "{bytes:?}");
    let planned = bytes.all + Model::step_bytes(device.features(), decoder, &kernels, &LIMITS);
    assert_eq!(device.allocated(), Some(planned), "{linear} in {dtype}");
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
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gguf/reference");
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
    }
}
