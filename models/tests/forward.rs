//! The forward pass against the reference's last-position logits: in float32, through pages, in chunks of any size.

use std::path::PathBuf;
use std::sync::Arc;

use attention_kernels::{KernelChoice, KernelError, KvCache, Needs, select};
use models::{ForwardBatch, Model, ModelConfig, ModelFiles, Weights};
use safetensors::SafeTensors;
use serde_json::Value;

/// Greatest absolute difference of a float32 logit (the reference's README).
const TOLERANCE: f32 = 2e-3;

const BLOCK_SIZE: usize = 8;
const NUM_BLOCKS: usize = 64;

struct Case {
    model: Model,
    prompts: Vec<(Vec<u32>, Vec<f32>)>,
}

fn case(name: &str, variant: &str) -> Case {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(name);
    let files = ModelFiles::open(&folder).unwrap();
    let config = ModelConfig::load(&files).unwrap();
    let device = device::open("cpu", Some(2)).unwrap();
    let choice =
        KernelChoice { decode: variant.into(), prefill: variant.into(), linear: variant.into(), ..Default::default() };
    let needs = Needs { head_dim: config.decoder.heads().head_dim, window: true, ..Needs::default() };
    let weights = Weights::open(&files).unwrap();
    let model =
        Model::load(&config.decoder, &weights, Arc::clone(&device), select(&choice, &needs).unwrap(), 256, &|_, _| {})
            .unwrap();
    let expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let prompts = expected["prompts"].as_array().unwrap().iter().map(|p| {
        let ids = p["ids"].as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect();
        let logits = tensors.tensor(p["logits"].as_str().unwrap()).unwrap();
        assert_eq!(logits.shape(), [1, config.decoder.vocab_size()]);
        (ids, logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
    });
    let prompts = prompts.collect();
    Case { model, prompts }
}

/// Computes a prompt in chunks; its blocks are handed out from the back, so that the table is not the identity.
fn last_logits(model: &mut Model, caches: &mut [KvCache], prompt: &[u32], chunk: usize) -> Vec<f32> {
    let table: Vec<i32> = (0..prompt.len().div_ceil(BLOCK_SIZE)).map(|i| (NUM_BLOCKS - 1 - i) as i32).collect();
    let slot = |p: usize| i64::from(table[p / BLOCK_SIZE]) * BLOCK_SIZE as i64 + (p % BLOCK_SIZE) as i64;
    let mut batch = ForwardBatch::default();
    let mut last = 0;
    for (i, tokens) in prompt.chunks(chunk).enumerate() {
        let start = i * chunk;
        let slots: Vec<i64> = (start..start + tokens.len()).map(slot).collect();
        batch.clear(1);
        last = batch.push(start, tokens, [(&slots[..], &table[..])]);
        model.forward(&batch, caches).unwrap();
    }
    model.logits(&[last]).unwrap().to_vec()
}

fn check(name: &str) {
    for variant in ["cpu.reference", "auto"] {
        let mut case = case(name, variant);
        let mut caches = case.model.new_cache(NUM_BLOCKS, BLOCK_SIZE).unwrap();
        for (prompt, want) in &case.prompts {
            let whole = last_logits(&mut case.model, &mut caches, prompt, prompt.len());
            assert_eq!(whole.len(), want.len(), "{name} {variant}");
            // The greatest of them is NaN if one is.
            let error = whole.iter().zip(want).map(|(a, b)| (a - b).abs()).max_by(f32::total_cmp).unwrap();
            assert!(error < TOLERANCE, "{name} {variant}: {} tokens, error {error}", prompt.len());
            for chunk in [1, 7, 16, 64] {
                let chunked = last_logits(&mut case.model, &mut caches, prompt, chunk);
                assert!(chunked == whole, "{name} {variant}: chunks of {chunk} change a bit");
            }
        }
    }
}

#[test]
fn llama_logits_are_the_reference_s() {
    check("llama");
}

#[test]
fn llama31_rope_logits_are_the_reference_s() {
    check("llama31-rope");
}

#[test]
fn mistral_sliding_logits_are_the_reference_s() {
    check("mistral-sliding");
}

#[test]
fn qwen2_logits_are_the_reference_s() {
    check("qwen2");
}

#[test]
fn qwen3_logits_are_the_reference_s() {
    check("qwen3");
}

#[test]
fn a_step_that_is_too_large_is_an_error_value() {
    let mut case = case("llama", "auto");
    let mut caches = case.model.new_cache(NUM_BLOCKS, BLOCK_SIZE).unwrap();
    let mut batch = ForwardBatch::default();
    batch.clear(1);
    let table: Vec<i32> = (0..38).collect();
    batch.push(0, &[1; 300], [(&[-1; 300][..], &table[..])]);
    let error = case.model.forward(&batch, &mut caches).unwrap_err();
    let expected = KernelError::Shape { what: "rows of a step", found: 300, expected: 256 };
    assert_eq!(error.to_string(), expected.to_string());
}

#[test]
fn dropping_unneeded_rows_changes_no_other_row() {
    let mut case = case("qwen2", "auto");
    let mut caches = case.model.new_cache(NUM_BLOCKS, BLOCK_SIZE).unwrap();
    let prompt = case.prompts[1].0.clone();
    let table: Vec<i32> = (0..prompt.len().div_ceil(BLOCK_SIZE) as i32).collect();
    let slots: Vec<i64> = (0..prompt.len() as i64).collect();
    let last = prompt.len() as u32 - 1;
    let mut batch = ForwardBatch::default();
    batch.clear(1);
    batch.push(0, &prompt, [(&slots[..], &table[..])]);
    case.model.forward(&batch, &mut caches).unwrap();
    let want = case.model.logits(&[last, 1]).unwrap().to_vec();
    for needed in [vec![1, last], vec![0, 1, 2, last - 1, last], (0..=last).collect()] {
        batch.needed = Some(needed);
        // Twice, as buffers change places.
        for _ in 0..2 {
            case.model.forward(&batch, &mut caches).unwrap();
            assert!(case.model.logits(&[last, 1]).unwrap() == want, "{:?}", batch.needed);
        }
    }
    batch.needed = Some(vec![last]);
    case.model.forward(&batch, &mut caches).unwrap();
    let error = case.model.logits(&[1]).unwrap_err();
    let expected =
        KernelError::Shape { what: "a row that was not among the needed rows of the step", found: 1, expected: 1 };
    assert_eq!(error.to_string(), expected.to_string());
    batch.needed = Some(Vec::new());
    case.model.forward(&batch, &mut caches).unwrap();
    batch.needed = None;
    case.model.forward(&batch, &mut caches).unwrap();
    assert!(case.model.logits(&[last, 1]).unwrap() == want);
}
