//! Products of quantised weights against the plain meaning of them: the weights as the numbers that they stand for, the
//! activations rounded by their definition and turned back, multiplied in double precision. Two kernel variants of this test
//! alone do that inside of whole models: one beside our own product, whose result goes on, and one in its place.
//!
//! The second differs from ours by more than its products do: where an activation lies between two integers, the last bit
//! of a float decides which it becomes, and that is a 127th part of a block's greatest. So there the median is held to the
//! bound, and the bound to the product.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use attention_kernels::{
    Capabilities, Dtype, Kernel, KernelError, KvDtype, Layout, LinearArgs, Operation, Sizes, Variant,
};
use device::gemm::{Gemm, gemm};
use device::{Device, Isa};
use engine::{EngineConfig, Event, GenerationParams, GenerationRequest, Llm, ModelSource, Quantization};
use serde_json::Value;

const BLOCK: usize = 32;

const CAPABILITIES: Capabilities = Capabilities {
    devices: &["cpu"],
    dtypes: &[Dtype::F32],
    kv_dtypes: &[KvDtype::Same],
    layouts: &[Layout::Hnd],
    head_sizes: Sizes::ANY,
    block_sizes: Sizes::ANY,
    ..Capabilities::NONE
};

attention_kernels::inventory::submit! { Variant {
    name: "test.instead", operation: Operation::Linear, capabilities: CAPABILITIES, kernel: Kernel::Linear(instead),
} }
attention_kernels::inventory::submit! { Variant {
    name: "test.beside", operation: Operation::Linear, capabilities: CAPABILITIES, kernel: Kernel::Linear(beside),
} }

fn instead(_: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let plain = plain(&args)?;
    args.y.host_mut::<f32>()?[..plain.len()].copy_from_slice(&plain);
    Ok(())
}

/// The bits of the greatest difference that [`beside`] has seen, and how often it was called.
static GREATEST: AtomicU32 = AtomicU32::new(0);
static CALLS: AtomicU32 = AtomicU32::new(0);

fn beside(device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let plain = plain(&args)?;
    let (weights, rows) = (args.weights.host()?, args.rows);
    let y = &mut args.y.host_mut::<f32>()?[..plain.len()];
    let bias: Option<&[f32]> = args.bias.map(|bias| bias.host()).transpose()?;
    let x = &args.x.host::<f32>()?[..rows * weights.k()];
    gemm(Isa::best(), device.pool(), Gemm { x, weights, bias, y });
    let off = y.iter().zip(&plain).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // Floats that are not negative are in the order of their bits.
    GREATEST.fetch_max(off.to_bits(), Ordering::Relaxed);
    CALLS.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

fn plain(args: &LinearArgs<'_>) -> Result<Vec<f32>, KernelError> {
    let weights = args.weights.host()?;
    let (n, k) = (weights.n(), weights.k());
    let dense: Vec<f64> = (0..n * k).map(|i| f64::from(weights.get(i / k, i % k))).collect();
    let bias: Option<&[f32]> = args.bias.map(|bias| bias.host()).transpose()?;
    let mut y = Vec::new();
    for x in args.x.host::<f32>()?[..args.rows * k].chunks(k) {
        let x: Vec<f64> = x.chunks(BLOCK).flat_map(rounded).collect();
        for (column, row) in dense.chunks(k).enumerate() {
            let sum: f64 = x.iter().zip(row).map(|(x, w)| x * w).sum();
            y.push((sum + bias.map_or(0.0, |bias| f64::from(bias[column]))) as f32);
        }
    }
    Ok(y)
}

/// A block of activations as the numbers that its 8 bits stand for.
fn rounded(block: &[f32]) -> Vec<f64> {
    let greatest = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let (scale, inverse) = if greatest < 1e-30 { (0.0, 0.0) } else { (greatest / 127.0, 127.0 / greatest) };
    block.iter().map(|x| f64::from((x * inverse).round_ties_even()) * f64::from(scale)).collect()
}

fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tests/reference").join(case)
}

/// The prompts of a case, each with the reference's own continuation.
fn texts(case: &str) -> Vec<Vec<u32>> {
    let expected: Value = serde_json::from_slice(&std::fs::read(folder(case).join("expected.json")).unwrap()).unwrap();
    let ids = |v: &Value| serde_json::from_value::<Vec<u32>>(v.clone()).unwrap();
    let prompts = expected["prompts"].as_array().unwrap();
    prompts.iter().map(|p| [ids(&p["ids"]), ids(&p["greedy"]["ids"])].concat()).collect()
}

/// The log-probability of every token of the vocabulary, sorted by token.
type Scores = Vec<(u32, f32)>;

/// [`Scores`] at every place but the first.
fn scores(case: &str, form: Quantization, linear: &str) -> Vec<Scores> {
    let mut config = EngineConfig {
        model: ModelSource::Folder(folder(case)),
        quantization: Some(form),
        kv_cache_memory_bytes: Some(16 << 20),
        threads: Some(1),
        ..Default::default()
    };
    config.kernels.linear = linear.into();
    let request = |prompt: Vec<u32>| GenerationRequest {
        prompt,
        params: GenerationParams { prompt_logprobs: Some(1 << 16), max_tokens: Some(0), ..Default::default() },
        ..Default::default()
    };
    let done = Llm::new(config).unwrap().run_with_events(texts(case).into_iter().map(request).collect()).unwrap();
    let rows = done.into_iter().flat_map(|(_, events)| events).filter_map(|event| match event {
        Event::PromptLogprobs(scores) => Some(scores),
        _ => None,
    });
    let sorted = |mut top: Scores| {
        top.sort_unstable_by_key(|(token, _)| *token);
        top
    };
    rows.flatten().flatten().map(|score| sorted(score.top)).collect()
}

#[test]
fn products_and_logits_are_those_of_the_dequantised_weights() {
    for case in ["llama", "mistral-sliding", "qwen2", "qwen3"] {
        for form in [Quantization::Q8, Quantization::Q4] {
            GREATEST.store(0, Ordering::Relaxed);
            let (ours, beside) = (scores(case, form, "auto"), scores(case, form, "test.beside"));
            assert!(ours == beside, "{case} {form}: the product beside the other is ours, bit for bit");
            let greatest = f32::from_bits(GREATEST.load(Ordering::Relaxed));
            let instead = scores(case, form, "test.instead");
            let off = |(a, b): (&Scores, &Scores)| {
                assert!(a.len() > 500 && a.iter().map(|s| s.0).eq(b.iter().map(|s| s.0)), "the whole vocabulary");
                a.iter().zip(b).map(|(a, b)| (a.1 - b.1).abs()).fold(0.0, f32::max)
            };
            let mut offs: Vec<f32> = ours.iter().zip(&instead).map(off).collect();
            offs.sort_by(f32::total_cmp);
            let (median, near) = (offs[offs.len() / 2], offs.iter().filter(|off| **off <= 1e-3).count());
            println!(
                "{case} {form}: every product and logit within {greatest:.1e}; end to end {} places, median {median:.1e}, \
                 {near} within 1e-3, greatest {:.1e}",
                offs.len(),
                offs[offs.len() - 1]
            );
            assert!(greatest > 0.0 && greatest <= 1e-3, "{case} {form}: {greatest}");
            assert!(median <= 1e-3, "{case} {form}: median {median}");
        }
    }
    assert!(CALLS.load(Ordering::Relaxed) > 100);
}
