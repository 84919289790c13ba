//! Products of quantised weights against the plain meaning of them: the weights as the numbers that they stand for, the
//! activations rounded by their definition and turned back, multiplied in double precision. It is a kernel variant of this
//! test alone, so the rest of the model is the same.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use attention_kernels::{
    Capabilities, Dtype, Kernel, KernelError, KvDtype, Layout, LinearArgs, Operation, Sizes, Variant,
};
use device::Device;
use engine::{EngineConfig, Event, GenerationParams, GenerationRequest, Llm, ModelSource, Quantization};
use serde_json::Value;

const BLOCK: usize = 32;

attention_kernels::inventory::submit! { Variant {
    name: "test.dequantised",
    operation: Operation::Linear,
    capabilities: Capabilities {
        devices: &["cpu"],
        dtypes: &[Dtype::F32],
        kv_dtypes: &[KvDtype::Same],
        layouts: &[Layout::Hnd],
        head_sizes: Sizes::ANY,
        block_sizes: Sizes::ANY,
        ..Capabilities::NONE
    },
    kernel: Kernel::Linear(linear),
} }

fn linear(_: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let weights = args.weights.host()?;
    let (n, k) = (weights.n(), weights.k());
    let dense: Vec<f64> = (0..n * k).map(|i| f64::from(weights.get(i / k, i % k))).collect();
    let bias: Option<&[f32]> = args.bias.map(|bias| bias.host()).transpose()?;
    let x = &args.x.host::<f32>()?[..args.rows * k];
    for (x, y) in x.chunks(k).zip(args.y.host_mut::<f32>()?.chunks_mut(n)) {
        let x: Vec<f64> = x.chunks(BLOCK).flat_map(rounded).collect();
        for (column, y) in y.iter_mut().enumerate() {
            let sum: f64 = x.iter().zip(&dense[column * k..][..k]).map(|(x, w)| x * w).sum();
            *y = (sum + bias.map_or(0.0, |bias| f64::from(bias[column]))) as f32;
        }
    }
    Ok(())
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

/// The log-probability of every token of the vocabulary at every place but the first, sorted by token.
fn scores(case: &str, form: Quantization, linear: &str) -> Vec<Vec<(u32, f32)>> {
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
    let sorted = |mut top: Vec<(u32, f32)>| {
        top.sort_unstable_by_key(|(token, _)| *token);
        top
    };
    rows.flatten().flatten().map(|score| sorted(score.top)).collect()
}

/// The likeliest token and how far the second is behind.
fn likeliest(scores: &[(u32, f32)]) -> (u32, f32) {
    let mut sorted = scores.to_vec();
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
    (sorted[0].0, sorted[0].1 - sorted[1].1)
}

#[test]
fn log_probabilities_and_tokens_are_those_of_the_dequantised_weights() {
    for (case, form) in ["llama", "mistral-sliding", "qwen2", "qwen3"]
        .into_iter()
        .flat_map(|case| [(case, Quantization::Q8), (case, Quantization::Q4)])
    {
        let (ours, want) = (scores(case, form, "auto"), scores(case, form, "test.dequantised"));
        assert_eq!(ours.len(), want.len());
        let rows = || ours.iter().zip(&want);
        let off = |(a, b): (&Vec<(u32, f32)>, &Vec<(u32, f32)>)| {
            assert!(a.len() > 500 && a.iter().map(|s| s.0).eq(b.iter().map(|s| s.0)), "the whole vocabulary");
            a.iter().zip(b).map(|(a, b)| (a.1 - b.1).abs()).fold(0.0, f32::max)
        };
        let mut offs: Vec<f32> = rows().map(off).collect();
        offs.sort_by(f32::total_cmp);
        let greatest = offs[offs.len() - 1];
        println!("{case} {form}: {} places, median {:.1e}, greatest {greatest:.1e}", offs.len(), offs[offs.len() / 2]);
        assert!(greatest <= 1e-3, "{case} {form}: {greatest}");
        for (ours, want) in rows() {
            let (token, margin) = likeliest(want);
            assert!(margin <= 2.0 * greatest || likeliest(ours).0 == token, "{case} {form}");
        }
    }
}
